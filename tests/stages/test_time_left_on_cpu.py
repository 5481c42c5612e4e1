"""The time left that a run states on a CPU: its screening on a recorded one, its finals on a set clock.

The record (two cores, which other processes used too) has, where it changed: of each problem the trials with a result,
those requested, the microseconds of their launches, how many have a time, whether its search has ended, the fastest
time.
"""

import json
import lzma
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_run import H200
from search_setup import EXHAUSTIVE

from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Candidate, Problem
from gemmpipe.family import load_family
from gemmpipe.stages.cpu_budget import CpuBudget
from gemmpipe.stages.finals_cost import FinalsCost
from gemmpipe.stages.finals_work import BudgetFit, FinalsWork
from gemmpipe.stages.screen.stage import run_end
from gemmpipe.stages.screen.work import ScreenWork, WorkEstimate

RECORD = Path(__file__).parents[1] / "data" / "cpu_screening_16.jsonl.xz"
TIMER = Timer(warmup=5, iters=101, rounds=30, budget_ms=250)
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


def test_before_a_problem_has_times_the_products_tell() -> None:
    run = _Screening()
    expected_s = run.estimate.expected_s
    assert expected_s == pytest.approx(run.end, rel=0.6)
    began = float(run.rows[0]["t"])
    first = {"states": {"0": [1, 4, 0.0, 0, 0, 0.0]}}  # a result that failed
    assert run.work(first | {"t": began}).left_s == pytest.approx(expected_s), "no time has passed"
    assert run.work(first | {"t": began + 4}).left_s == pytest.approx(expected_s - 4)
    assert run.work(first | {"t": began + 60}).left_s == pytest.approx(0.3 * expected_s), "more than nothing"


@pytest.mark.parametrize("pace", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("begins", [20.0, 28.0, 34.0, 38.0])
def test_the_end_of_a_run_lies_between_the_ends_that_finals_state(
    pace: float, begins: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five problems are in the finals, 67 are left: another pass follows if these end early enough."""
    now = [begins]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    finals = _Finals(CpuBudget(limit_s=60.0, began=0.0))
    moments, total_s = [], finals.work.total_s
    while finals.pending:
        for _ in range(5):
            now[0] += pace * finals.next_s / 5
            moments.append((now[0], len(finals.pending), finals.fit.run_end(finals.pending)))
        finals.pending.popitem()
    finals.fit.run_end(finals.pending)
    assert now[0] == pytest.approx(begins + pace * total_s)
    end_s, wide = 61.0 if finals.budget.allows_pass else now[0], 0
    for at, left, end in moments:
        assert end is not None
        assert end.range_s is not None
        least, most = end.range_s
        assert least <= end.left_s <= most, at
        wide += most > 3 * least
        if end_s - at < 3 or (left > 3 and pace != 1):  # the pace is not known at first
            continue
        assert least - 1 <= end_s - at <= most, at
        if most <= 1.75 * least:
            assert end.left_s == pytest.approx(end_s - at, rel=0.3), at
    assert wide <= 11, "of 25: at most where these finals end soon"


def test_finals_end_with_their_last_job_where_no_problem_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    finals = _Finals(CpuBudget(limit_s=60.0, began=0.0))
    finals.budget.left.clear()
    assert finals.fit.run_end(finals.pending) is None, "the work decides"
    assert finals.fit.most_s(finals.pending) == 10.0, "or the budget"


def test_a_screening_states_the_end_of_its_pass_or_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the budget's rest was stated in a second pass with much to do."""
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget = CpuBudget(limit_s=60.0, began=0.0, passes=2)
    budget.begin_screening()
    scheduler: Any = SimpleNamespace(expected_s=99.0, finals_s=lambda: 99.0, screened_finals_s=lambda: 1.0)
    first = run_end(ScreenWork(done=0, expected=80, share=0.0), scheduler, budget)
    assert first is not None
    assert 5 < first.left_s < 10, "no result: a pass that is usual"
    now[0] = 52.0
    half = ScreenWork(done=40, expected=80, share=0.5, left_s=50.0)
    end = run_end(half, scheduler, budget)
    assert end is not None
    assert end.left_s == pytest.approx(2 + 2), "half of the screening, and finals of twice the problems"
    scheduler.screened_finals_s = lambda: 30.0
    late = run_end(half, scheduler, budget)
    assert late is not None
    assert late.left_s == pytest.approx(8 + 1.5), "no more than the budget"
    scheduler.finals_s = lambda: 1.0
    assert run_end(replace(half, left_s=2.0), scheduler, budget) is None, "all work ends before"
    now[0] = 70.0
    budget.begin_screening()
    over = run_end(half, scheduler, budget)
    assert over is not None
    assert over.left_s == pytest.approx(1.5), "the budget is spent before a screening begins"


class _Finals:
    """Five problems of 1, 2, ... rows, each with three finalists of which one takes a second."""

    def __init__(self, budget: CpuBudget) -> None:
        family = load_family("a8w8_blockscale")
        key = {"N": 8192, "K": 8192, "dtype": "float8_e4m3fn", "outdtype": "bfloat16", "x_scale": None}
        problems = [family.problem(tuple(({"M": m} | key).items())) for m in range(1, 6)]
        candidates = [Candidate.of("torch", {"place": place}) for place in range(3)]
        rows: Any = [{"candidate": c.id, "us": us} for c, us in zip(candidates, (2e4, 1e5, 4e5), strict=True)]
        costs = {p.id: FinalsCost(family=family, spec=family.spec(p), timer=TIMER, device=CPU) for p in problems}
        self.pending = {p.id: list(candidates) for p in problems}
        self.work = FinalsWork(dict.fromkeys(self.pending, rows), self.pending, costs)
        self.budget = budget
        budget.passes = 1
        budget.left.update(f"problem {i}" for i in range(67))
        context: Any = SimpleNamespace(problems=[*problems, *budget.left])
        self.fit = BudgetFit(budget, self.work, {}, context)

    @property
    def next_s(self) -> float:
        return self.work.left_s(dict([next(reversed(self.pending.items()))]))
