"""One product of a run as text: candidates that need more memory for the weight say so."""

from types import SimpleNamespace
from typing import Any

import pytest

from gemmpipe.core.data import Candidate, Status, Trial, canonical_json
from gemmpipe.report.show_product import ShownProduct, _columns, _memory_lines

CONVERT = Candidate.of("torch", {"method": "float32_convert"})
COPY = Candidate.of("torch", {"method": "bfloat16_copy"})


def trial(candidate: Candidate, us: float, extra_bytes: int) -> Trial:
    return Trial(
        stage="bench",
        problem="k M=1",
        candidate=candidate,
        status=Status.OK,
        samples_us=(us,),
        launches=1,
        extra_weight_bytes=extra_bytes,
    )


def shown(chosen: Candidate) -> ShownProduct:
    row = {"libtype": chosen.backend, "config": canonical_json(chosen.knobs)}
    data: Any = SimpleNamespace()
    return ShownProduct(data=data, problem="k M=1", row=row, trials=None)


@pytest.mark.parametrize(("extra", "said"), [(20 << 20, True), (0, False)])
def test_faster_candidates_with_a_copy_of_the_weight_say_why_they_are_not_chosen(extra: int, said: bool) -> None:
    trials = [trial(COPY, 1.0, extra), trial(CONVERT, 30.0, 0)]
    found = {column.title: column.cells for column in _columns(trials, shown(CONVERT))}
    assert found[""] == ("", "*")
    assert found.get("weight memory") == (("+20.0 MiB", "") if said else None)
    assert bool(list(_memory_lines(trials, shown(CONVERT), 120))) == said
    assert list(_memory_lines(trials, shown(COPY), 120)) == []


def test_why_a_faster_candidate_is_not_the_choice_is_said_whole_at_80_columns() -> None:
    trials = [trial(COPY, 1.0, 20 << 20), trial(CONVERT, 30.0, 0)]
    lines = list(_memory_lines(trials, shown(CONVERT), 80))
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines).split()).endswith("stages.select.max_extra_weight_pct allows")
