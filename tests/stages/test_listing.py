"""What a listing reports."""

from gemmpipe.stages.listing import SpaceReport


def test_reports_of_problems_add_up() -> None:
    both, one = SpaceReport(points=4, normalised=3), SpaceReport(points=2, normalised=2)
    one.rules["triton: too large"] += 2
    both.add(one)
    assert both.lines() == [
        "space: 6 points over all problems",
        "  6 -> 5  the same once normalised",
        "  5 -> 3  triton: too large",
    ]
