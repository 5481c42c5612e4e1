"""Gains of more memory for weights: the rows of a problem."""

import pytest

from gemmpipe.core import schema
from gemmpipe.core.data import Candidate, Problem
from gemmpipe.stages.memory_options import memory_options
from gemmpipe.stages.selection_rules import Finalist

pytestmark = pytest.mark.unit


def _problem(m: int = 1) -> Problem:
    return Problem(family="f", key=(("M", m), ("N", 64), ("K", 32)), weight=80.0)


def _finalist(method: str, us: float, extra: int) -> Finalist:
    return Finalist(
        candidate=Candidate.of("torch", {"method": method}),
        samples_us=(us,),
        extra_weight_bytes=extra,
        err_ratio=0.0,
        kernel_name=method,
    )


PLAIN = _finalist("convert", 100.0, 0)


def test_each_amount_of_memory_has_the_candidate_that_beats_all_with_less() -> None:
    finalists = [
        PLAIN,
        _finalist("slow_copy", 120.0, 2048),
        _finalist("copy", 20.0, 4096),
        _finalist("packed", 25.0, 4096),
        _finalist("larger_and_slower", 30.0, 6144),
        _finalist("fp32", 10.0, 8200),
    ]
    rows = memory_options(_problem(), 2048.0, finalists, PLAIN)
    assert [(row["config"], row["extra_weight_pct"], row["speedup"]) for row in rows] == [
        ('{"method":"copy"}', 200, 5.0),
        ('{"method":"fp32"}', 401, 10.0),  # 400.4: the least whole percentage that allows it
    ]
    assert all(set(row) == set(schema.MEMORY_OPTIONS) for row in rows)


def test_nothing_is_listed_without_a_gain() -> None:
    assert memory_options(_problem(), 2048.0, [PLAIN, _finalist("copy", 100.0, 4096)], PLAIN) == []
