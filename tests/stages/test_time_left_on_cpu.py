"""The time left that the screening states on a CPU, on a recorded one (two cores, which other processes used too).

The record has, where it changed: of each problem the trials with a result, those requested, the microseconds of their
launches, how many have a time, whether its search has ended, the fastest time.
"""

import json
import lzma
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_run import H200
from search_setup import EXHAUSTIVE

from gemmpipe.core.data import Problem
from gemmpipe.family import load_family
from gemmpipe.stages.screen.work import ScreenWork, WorkEstimate

RECORD = Path(__file__).parents[1] / "data" / "cpu_screening_16.jsonl.xz"
CPU = replace(H200, kind="cpu", name="AMD EPYC", gfx="cpu_avx2")


class _Screening:
    def __init__(self) -> None:
        head, *self.rows = [json.loads(line) for line in lzma.decompress(RECORD.read_bytes()).decode().splitlines()]
        self.end = float(self.rows[-1]["t"])
        family = load_family(head["kernel"])
        self.problems: list[Problem] = [family.problem(tuple(key.items())) for key in head["problems"]]
        self._states: dict[int, Any] = {}
        self._planned = head["planned"]
        self.estimate = WorkEstimate(self.problems, family, EXHAUSTIVE, CPU, 20)

    def work(self, row: dict[str, Any], now: float | None = None) -> ScreenWork:
        """After a row; `now`: later, without a new result."""
        for place, (results, pending, timed_us, timed, finished, fastest) in row["states"].items():
            self._states[int(place)] = SimpleNamespace(
                problem=self.problems[int(place)],
                summary=SimpleNamespace(ids=range(self._planned)),
                result_count=results,
                pending=pending,
                timed_us=timed_us,
                timed_count=timed,
                finished=bool(finished),
                least_us=fastest,
            )
        states: Any = list(self._states.values())
        return self.estimate.measure(states, searching=True, now=row["t"] if now is None else now)


def test_from_a_third_of_a_screening_on_its_end_is_known() -> None:
    run, checked = _Screening(), 0
    for row in run.rows:
        work = run.work(row)
        if row["t"] > run.end / 3:
            assert work.left_s is not None
            assert row["t"] + work.left_s == pytest.approx(run.end, rel=0.25), row["t"]
            checked += 1
    assert checked > 10


def test_time_without_a_result_changes_nothing() -> None:
    """A long trial runs: the overhead of the others is what it was."""
    run = _Screening()
    for row in run.rows[: len(run.rows) // 2]:
        before = run.work(row)
    later = run.work({"t": row["t"], "states": {}}, now=row["t"] + 60)
    assert later == before


def test_nothing_is_stated_before_a_problem_has_times() -> None:
    run = _Screening()
    first = run.work(run.rows[0])
    assert first.done < 3
    assert first.left_s is None
