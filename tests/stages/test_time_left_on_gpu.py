"""The estimate of a run's end on a GPU, on what the journal of a cold run on an H200 says of its screening and finals.

The record (2026-11-23, 72 problems, empty cache, 16 cores): four times a second, the builds done, the problems listed,
and of each problem with a change the trials with a result, those sent, their launches' microseconds, how many have a
time, and whether its search has ended; then each end of a final. In that run the GPU waited for builds between the two;
the finals follow at once here, as they do now.
"""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from recorded_run import progress_event
from search_setup import default_search

from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.events import Event
from gemmpipe.family import Family
from gemmpipe.report.progress import RunProgress
from gemmpipe.stages.bench import Bench
from gemmpipe.stages.finals_cost import FinalsCost
from gemmpipe.stages.finals_work import FinalsWork
from gemmpipe.stages.screen.work import WorkEstimate
from gemmpipe.stages.select import Select

RECORD = Path(__file__).parents[1] / "data" / "h200_cold_run.jsonl.xz"
TIMER = Timer(warmup=5, iters=101, rounds=30, budget_ms=250)
BENCH = Bench(err_ratio=0.05, max_foreign_pct=10, timer=TIMER)
SELECT = Select(min_improvement_pct=1, max_extra_weight_pct=0, tie_pct=2, prefer={})
CANDIDATES = range(920)  # of each problem, about
SCREEN_BEGINS, SEARCHES_END, FINALS_BEGIN = 5.2, 31.9, 33.9  # seconds since the command
KEY = {"dtype": "float8_e4m3fn", "outdtype": "bfloat16", "x_scale": None}


class _Run:
    """The run's work at the time of the last row."""

    def __init__(self, head: dict[str, Any], family: Family, device: Device) -> None:
        keys = [{"M": m, "N": n, "K": k} | KEY for m, n, k in head["problems"]]
        self.problems: list[Problem] = [family.problem(tuple(key.items())) for key in keys]
        self._listed: list[int] = head["listed"]
        self._states = [
            SimpleNamespace(
                problem=problem,
                summary=SimpleNamespace(ids=CANDIDATES),
                **dict.fromkeys(("result_count", "pending", "timed_us", "timed_count", "finished"), 0),
            )
            for problem in self.problems
        ]
        self._screening = WorkEstimate(self.problems, family, default_search(), device, 20)
        ids = [problem.id for problem in self.problems]
        finalists = [[Candidate.of("triton", {"place": i}) for i in range(len(us))] for us in head["finalists_us"]]
        rows = [
            [{"candidate": c.id, "us": us} for c, us in zip(candidates, times, strict=True)]
            for candidates, times in zip(finalists, head["finalists_us"], strict=True)
        ]
        self._pending: dict[str, list[Candidate]] = dict(zip(ids, finalists, strict=True))
        costs = {
            p.id: FinalsCost(family=family, spec=family.spec(p), timer=TIMER, device=device) for p in self.problems
        }
        self._finals = FinalsWork(cast(Any, dict(zip(ids, rows, strict=True))), self._pending, costs)

    @property
    def expected_s(self) -> float:
        """Of the finals."""
        return self._finals.total_s

    def screening(self, row: dict[str, Any]) -> Event:
        for place, (answered, pending, timed_us, timed_count, finished) in row["states"].items():
            state = self._states[int(place)]
            state.result_count, state.pending, state.finished = answered, pending, bool(finished)
            state.timed_us, state.timed_count = timed_us, timed_count
        states: Any = [self._states[i] for i in self._listed[: row["listed"]]]
        searching, built = row["t"] < SEARCHES_END, row["built"]  # what was requested is not in the journal
        work = self._screening.measure(states, searching=searching, built=built, requested=built, now=row["t"])
        return progress_event(work)

    def final(self, row: dict[str, Any] | None) -> Event:
        if row is not None:
            del self._pending[self.problems[row["done"]].id]
        total = len(self.problems)
        share = self._finals.share(self._pending)
        return Event(kind="progress", done=total - len(self._pending), total=total, share=share)


def _estimates(rows: list[dict[str, Any]], family: Family, device: Device) -> Iterator[tuple[float, float | None]]:
    """(seconds since the command, seconds left)."""
    run, progress, in_finals = _Run(rows[0], family, device), RunProgress(0.0), False
    end_s = 72 * SELECT.usual_s(device)
    finals_s = 72 * BENCH.usual_s(device)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=finals_s + end_s), SCREEN_BEGINS)
    progress.take(Event(kind="stage", text="screen", unit="trials"), SCREEN_BEGINS)
    for row in rows[1:-1]:
        if "states" in row:
            progress.take(run.screening(row), row["t"])
        elif not in_finals:
            in_finals = True
            progress.take(Event(kind="step", text="bench", done=3, total=6, rest_s=end_s), FINALS_BEGIN)
            expected_s = run.expected_s
            stage = Event(kind="stage", text="bench", total=72, unit="problems", expected_s=expected_s)
            progress.take(stage, FINALS_BEGIN)
            progress.take(run.final(None), FINALS_BEGIN)
            yield FINALS_BEGIN, progress.left_s(FINALS_BEGIN)
        if "done" in row:
            progress.take(run.final(row), row["t"])
        yield row["t"], progress.left_s(row["t"])


def test_from_a_quarter_of_a_cold_run_on_the_time_left_is_known(blockscale: Family, h200: Device) -> None:
    rows = [json.loads(line) for line in lzma.decompress(RECORD.read_bytes()).decode().splitlines()]
    end, found = rows[-1]["t"], list(_estimates(rows, blockscale, h200))
    later = [(now, left_s) for now, left_s in found if now >= end / 4]
    assert len(later) > 150
    for now, left_s in later:
        assert left_s is not None, now
        assert now + left_s == pytest.approx(end, rel=0.15), now
        assert left_s == pytest.approx(end - now, rel=0.3, abs=2.5), now


def test_without_builds_the_trials_alone_count(blockscale: Family, h200: Device) -> None:
    """Compilers are not waited for with a full cache, and libraries have no builds."""
    rows = [json.loads(line) for line in lzma.decompress(RECORD.read_bytes()).decode().splitlines()]
    early = [row for row in rows if row.get("t", 16.0) <= 15]
    (*_, with_builds), (*_, without) = (
        [run.screening(row | built) for row in early]
        for run, built in ((_Run(rows[0], blockscale, h200), {}), (_Run(rows[0], blockscale, h200), {"built": 0}))
    )
    assert with_builds.share is not None
    assert without.share is not None
    assert 0 < without.share < with_builds.share
    assert without.total == with_builds.total
