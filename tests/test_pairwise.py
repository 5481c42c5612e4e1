"""The helper that chooses which cases of a product run always."""

import itertools

import pytest
from pairwise import pairwise

AXES = ("abc", (("d", 1), ("e", 2)), "fghi", "jk")


@pytest.mark.parametrize(("once", "most", "together"), [(False, 15, 2), (True, 5, 1)])
def test_few_cases_hold_all_values_together(once: bool, most: int, together: int) -> None:
    cases = pairwise(*AXES, once=once)
    assert [case.values for case in cases] == [(a, *b, c, d) for a, b, c, d in itertools.product(*AXES)]
    always = [case.values for case in cases if not case.marks]
    assert len(always) <= most
    for places in itertools.combinations((0, 1, 3, 4), together):
        held = {tuple(values[place] for place in places) for values in always}
        assert held == {tuple(case.values[place] for place in places) for case in cases}
