"""What more memory for weights would gain: rows of a problem, and lines over all of them."""

import pandas as pd
import pytest

from gemmpipe.core import schema
from gemmpipe.core.data import Candidate, Problem
from gemmpipe.stages.memory_options import memory_options, option_lines
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
    assert option_lines(None, 1) == []


def test_the_lines_have_the_gain_of_each_limit() -> None:
    one = [PLAIN, _finalist("copy", 50.0, 4096), _finalist("fp32", 10.0, 8192)]
    two = [PLAIN, _finalist("copy", 12.5, 4096)]
    rows = [*memory_options(_problem(1), 2048.0, one, PLAIN), *memory_options(_problem(8), 2048.0, two, PLAIN)]
    title, head, *lines = option_lines(pd.DataFrame(rows), 3)
    assert title == "faster with more memory for weights (stages.select.max_extra_weight_pct=LIMIT): 2 of 3 problems"
    assert head.split()[0] == "LIMIT"
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    # 200 %: 2x and 8x; 400 %: 10x, and 8x as before.
    assert cells == [
        ["200", "2 problems", "4.00x (2.00x to 8.00x)", "100 us -> 25.0 us", "+4.00 KiB"],
        ["400", "2 problems", "8.94x (8.00x to 10.0x)", "100 us -> 11.2 us", "+4.00 KiB to +8.00 KiB"],
    ]
