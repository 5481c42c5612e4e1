"""Replays of recorded runs: the time left that a run would state at each moment, from what its journal says.

A record (`tests/data/time_left`, H100, 2026-11-25, and H200, 2026-11-26, two runs at a time on one host) has, twice a
second of the screening, the builds done and requested, and of each problem with a change: trials with a result, those
requested, the microseconds of their launches, how many have a time, whether its search has ended, and the fastest time.
Then follow the ends of the finals. Requests are not in a journal: a trial counts as requested a second before the first
of its builds began. `first_launches` (problem, seconds): those in which a library compiled, from gaps between results.
"""

import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from search_setup import EXHAUSTIVE, default_search

from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.events import Event
from gemmpipe.family import Family, load_family
from gemmpipe.report.progress import RunProgress
from gemmpipe.search import Search
from gemmpipe.stages.bench import Bench
from gemmpipe.stages.engine.expected import compile_seconds, compiled_share
from gemmpipe.stages.finals_cost import ExpectedFinal, FinalsCost, between_us, expected_s
from gemmpipe.stages.finals_work import FinalsWork
from gemmpipe.stages.screen.work import ScreenWork, WorkEstimate
from gemmpipe.stages.select import Select

TIMER = Timer(warmup=5, iters=101, rounds=30, budget_ms=250)
BENCH = Bench(err_ratio=0.05, max_foreign_pct=10, timer=TIMER)
SELECT = Select(min_improvement_pct=1, max_extra_weight_pct=0, tie_pct=2, prefer={})
H100 = Device(
    kind="cuda",
    index=0,
    name="NVIDIA H100 80GB HBM3",
    gfx="sm_90",
    cu_num=132,
    shared_bytes=232448,
    cache_bytes=52428800,
    warp_size=32,
)
H200 = replace(H100, name="NVIDIA H200", cache_bytes=62914560)
KEEP, ENGINE_KEEP = 20, 8


def progress_event(work: ScreenWork) -> Event:
    """What the screening emits with this state of its work."""
    return Event(
        kind="progress",
        done=work.done,
        total=work.expected,
        share=work.share,
        stage_s=work.left_s,
        stage_factor=work.left_factor,
    )


class RecordedRun:
    """A run of its record, and the estimates of its end."""

    def __init__(self, path: Path) -> None:
        rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
        self.head, self._rows, self.end = rows[0], rows[1:-1], float(rows[-1]["t"])
        self._family: Family = load_family(self.head["kernel"])
        self._device = H200 if self.head.get("device") == "H200" else H100
        self._problems = [self._problem(key) for key in self.head["problems"]]
        self._finals = [self._problem(f["problem"]) for f in self.head["finals"]]
        self._fastest: dict[str, float] = {}
        planned = self.head.get("candidates")
        count = planned if planned is not None else 900
        self._states = [
            SimpleNamespace(
                problem=problem,
                summary=SimpleNamespace(ids=range(count[i] if isinstance(count, list) else count)),
                **dict.fromkeys(("result_count", "pending", "timed_us", "timed_count", "finished"), 0),
            )
            for i, problem in enumerate(self._problems)
        ]
        search: Search = EXHAUSTIVE if self.head["engine"] else default_search()
        self._screening = WorkEstimate(self._problems, self._family, search, self._device, KEEP)
        self.progress = RunProgress(0.0)

    def _problem(self, key: dict[str, Any] | int) -> Problem:
        key = self.head["problems"][key] if isinstance(key, int) else key
        return self._family.problem(tuple(key.items()))

    def _costs(self, *, all_rounds: bool) -> list[FinalsCost]:
        device = self._device
        return [
            FinalsCost(
                family=self._family, spec=self._family.spec(p), timer=TIMER, device=device, all_rounds=all_rounds
            )
            for p in self._finals
        ]

    def estimates(self) -> Iterator[tuple[float, float | None]]:
        """(seconds since the start, seconds left as the run states them); `progress` has more of each moment."""
        progress = self.progress
        engine, compare = self.head["engine"], self.head["pipeline"] == "compare"
        end_s = len(self._problems) * SELECT.usual_s(self._device)
        always = engine or compare
        usual_s = len(self._problems) * BENCH.usual_s(H100)
        expected, compile_s = self._expected_finals(always), 0.0
        if engine:
            processes = 16
            compile_s = compile_seconds(sum(f.finalists for f in expected) // processes)
            progress.take(Event(kind="step", text="engine", done=4, total=6, rest_s=end_s), 0.0)
        elif compare:
            progress.take(Event(kind="step", text="lineup", done=2, total=4, rest_s=usual_s + end_s), 0.0)
        else:
            progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=usual_s + end_s), 0.0)
        if not compare:
            rest_s = compile_s + expected_s(expected, {}, BENCH.usual_s(H100)) if engine else 0.0
            progress.take(Event(kind="stage", text="screen", unit="trials", rest_s=rest_s), 0.0)
        finals: _Finals | None = None
        for row in self._rows:
            now = float(row["t"])
            if "states" in row:
                event = self._screen(row)
                rest_s = compile_s + expected_s(expected, self._fastest, BENCH.usual_s(H100))
                progress.take(Event(kind="rest", rest_s=rest_s - (0 if engine else usual_s)), now)
                progress.take(event, now)
                yield now, progress.left_s(now)
                continue
            if finals is None:
                finals = _Finals(self, always)
                begins = self.head["finals_begin"]
                if engine:
                    yield from self._compiling(progress, begins, expected_s(expected, self._fastest, 0.0))
                else:
                    progress.take(Event(kind="step", text="bench", done=3, total=6, rest_s=end_s), begins)
                stage = Event(kind="stage", text="bench", total=len(self._finals), unit="problems")
                # The finals of this comparison compiled kernels, which comparisons do before since then.
                progress.take(replace(stage, expected_s=0.0 if compare else finals.expected_s), begins)
                for second in range(max(1, math.ceil(2 * (now - begins)))):  # the stage looks twice a second
                    progress.take(finals.event(None), begins + second / 2)
                    yield begins + second / 2, progress.left_s(begins + second / 2)
            progress.take(finals.event(row["done"]), now)
            yield now, progress.left_s(now)

    def _compiling(self, progress: RunProgress, ends: float, finals_s: float) -> Iterator[tuple[float, float | None]]:
        calls = sum(len(f["us"]) for f in self.head["finals"]) // 16
        began, expected = float(self.head["screen_end"]), compile_seconds(calls)
        stage = Event(kind="stage", text="compile for vllm", total=16, unit="processes", rest_s=finals_s)
        progress.take(stage, began)
        now = began
        while (now := now + 2.0) < ends:
            left = 1 - max(0.0, (now - began) / (ends - began) - 0.6) / 0.4
            progress.take(Event(kind="progress", total=16, share=compiled_share(now - began, expected, left)), now)
            yield now, progress.left_s(now)

    def _expected_finals(self, always: bool) -> list[ExpectedFinal]:
        by_shape: dict[object, list[Problem]] = {}
        for problem in self._problems:
            by_shape.setdefault(problem.shape_group, []).append(problem)
        found = []
        for problem, cost in zip(self._finals, self._costs(all_rounds=always), strict=True):
            near = min(by_shape[problem.shape_group], key=lambda p: abs(math.log(p.rows / problem.rows)))
            finalists = (ENGINE_KEEP + (1 if near == problem else 3)) if self.head["engine"] else KEEP
            found.append(ExpectedFinal(screened=near.id, finalists=finalists, cost=cost))
        return found

    def _screen(self, row: dict[str, Any]) -> Event:
        for place, (answered, pending, timed_us, timed_count, finished, fastest) in row["states"].items():
            state = self._states[int(place)]
            state.result_count, state.pending, state.finished = answered, pending, bool(finished)
            state.timed_us, state.timed_count = timed_us, timed_count
            if timed_count or finished:
                self._fastest[state.problem.id] = fastest if timed_count else math.inf
        for place, seconds in row.get("first_launches", ()):
            self._screening.take_first_launches(self._problems[place].id, seconds)
        states: Any = [self._states[i] for i in self.head["listed"][: row["listed"]]]
        work = self._screening.measure(
            states,
            searching=bool(row["searching"]),
            built=row["built"],
            requested=row["requested"],
            now=float(row["t"]),
        )
        return progress_event(work)

    def expected_us(self) -> dict[str, float]:
        """As `expected_times_us` has them."""
        by_shape: dict[object, list[tuple[int, float]]] = {}
        for problem in self._problems:
            if self._fastest.get(problem.id, math.inf) < math.inf:
                by_shape.setdefault(problem.shape_group, []).append((problem.rows, self._fastest[problem.id]))
        return {p.id: between_us(by_shape[p.shape_group], p.rows) for p in self._finals if p.shape_group in by_shape}


class _Finals:
    def __init__(self, run: RecordedRun, always: bool) -> None:
        self._names = [p.id for p in run._finals]
        candidates = [[Candidate.of("triton", {"place": i}) for i in range(len(f["us"]))] for f in run.head["finals"]]
        rows = [
            [
                {"candidate": c.id, "us": us if not run.head["engine"] else None}
                for c, us in zip(cs, f["us"], strict=True)
            ]
            for cs, f in zip(candidates, run.head["finals"], strict=True)
        ]
        self._pending = dict(zip(self._names, candidates, strict=True))
        costs = dict(zip(self._names, run._costs(all_rounds=always), strict=True))
        by_name = cast(Any, dict(zip(self._names, rows, strict=True)))
        self._work = FinalsWork(by_name, self._pending, costs, run.expected_us())

    @property
    def expected_s(self) -> float:
        return self._work.total_s

    def event(self, done: int | None) -> Event:
        if done is not None:
            del self._pending[self._names[done]]
        total = len(self._names)
        share = self._work.share(self._pending)
        return Event(kind="progress", done=total - len(self._pending), total=total, share=share)
