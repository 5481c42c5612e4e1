"""The engine stage: a separate search and finals for each engine's function that a format configures."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.backends.engine import KINDS, EngineImplementation
from gemmpipe.backends.engine_compile import CompileCalls
from gemmpipe.core.data import Candidate, Knobs, Problem
from gemmpipe.core.errors import UserError, check_at_least, one_line
from gemmpipe.core.events import IDLE, counted
from gemmpipe.family import Family, GemmSpec
from gemmpipe.family.problem import shape_groups
from gemmpipe.family.space import Space
from gemmpipe.formats import Format
from gemmpipe.search import Search
from gemmpipe.search.history import History
from gemmpipe.stages import POLL_S, Context, EngineTarget, Stage
from gemmpipe.stages.bench import Bench
from gemmpipe.stages.engine.expected import (
    NEIGHBOURS,
    AfterScreening,
    compile_processes,
    compile_seconds,
    compiled_share,
)
from gemmpipe.stages.engine.files import EngineShapeGroup, engine_shape_group, problem_at_m
from gemmpipe.stages.rows import candidate_of, untimed_row
from gemmpipe.stages.screen.stage import Screen

if TYPE_CHECKING:
    import pandas as pd

# Expected, for the estimate of a run's end: Ms in the finals over those of the screening (H200, 2026-11-24: 2.8 for
# dense products, 5 for experts; H100, 2026-11-25: 3.8), and seconds of the screening of an M (H100: 1.1 to 1.3).
_FINALS_PER_PROBLEM, _SCREENING_S = 4, 1.2


@dataclass(frozen=True, kw_only=True)
class Engine(Stage):
    """Screens the whole space of each engine's function, and times its finalists with the current configurations.

    The current ones: the engine's published entry for this M, its default, and the entry of the output's file.
    """

    published: tuple[str, ...]
    screen: Screen
    bench: Bench
    search: Search
    spaces: Mapping[str, Space]
    keep: int
    extra_key_pct: float
    exact_from: int | None

    needs: ClassVar[tuple[str, ...]] = ("problems", "trials")
    gives: ClassVar[tuple[str, ...]] = ("trials",)
    uses_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least(1, keep=self.keep)
        check_at_least(0, extra_key_pct=self.extra_key_pct)
        check_at_least(1, **({} if self.exact_from is None else {"exact_from": self.exact_from}))
        for name in KINDS:
            if name not in self.spaces:
                raise ValueError(f"spaces.{name}: missing; expected the values of an engine's knobs")

    def engine_targets(self, family: Family, formats: Mapping[str, Format]) -> tuple[EngineTarget, ...]:
        """The formats with an engine that has a function for this family. Raises UserError for a missing path."""
        given = tuple(Path(text).expanduser() for text in self.published)
        for path in given:
            if not path.exists():
                raise UserError(f"stages.engine.published: {path}: no such file or folder")
        found: list[EngineTarget] = []
        for name, each in formats.items():
            engine = each.engine()
            for one in engine.implementations(family) if engine is not None else ():
                files = given or one.folders()
                target = EngineTarget(
                    name=name,
                    format=each,
                    implementation=one,
                    published=files,
                    extra_key_pct=self.extra_key_pct,
                    exact_from=self.exact_from,
                )
                found.append(target)
        return tuple(found)

    def expected_s(self, context: Context) -> float:
        """Screening, compiling and finals of every engine's function."""
        each_s = _SCREENING_S + _FINALS_PER_PROBLEM * self.bench.usual_s(context.device)
        devices = context.device_count
        search_s = compile_seconds(calls=0) + len(context.problems) * each_s / devices
        return len(context.engine_targets) * search_s

    def check(self, context: Context) -> None:
        """Raises UserError for an axis or a value that an engine's function cannot have."""
        for target in context.engine_targets:
            target.implementation.check(self.spaces[target.implementation.kind])

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the trials with those of engines' functions, for the problems and for Ms between them."""
        import pandas as pd

        targets = context.engine_targets
        each_s = self.expected_s(context) / max(1, len(targets))
        parts = [tables["trials"]]
        for number, target in enumerate(targets, start=1):
            parts.append(self._search_function(target, context, later_s=each_s * (len(targets) - number)))
        parts = [part for part in parts if len(part)] or parts[:1]
        return {"trials": pd.concat(parts, ignore_index=True)}

    def _search_function(self, target: EngineTarget, context: Context, later_s: float) -> "pd.DataFrame":
        """The trials of an engine's function; `later_s`: the expected seconds of those that follow."""
        started_at = time.monotonic()
        absent = _why_absent(target.implementation, context)
        runs = f"{absent}; a kernel of its form is timed" if absent else "its own function is timed in the finals"
        context.events.emit("line", f"engine: {target.name}: {runs}")
        inner = replace(
            context,
            engine_target=target,
            implementations=(target.implementation,),
            space=self.spaces[target.implementation.kind],
            search=self.search,
            incumbents={},
            history=History(),
            search_pools={},
            assignments={},
            cut_short=set(),
        )
        groups = [(group, engine_shape_group(target, group, inner)) for group in shape_groups(inner.problems)]
        after = AfterScreening(groups, self.bench, keep=self.keep, compiles=absent is None, context=inner)
        inner = replace(inner, finals_s=lambda fastest_us, _: after.seconds(fastest_us) + later_s, later_s=later_s)
        try:
            screen = replace(self.screen, keep=self.keep, bucket_keep=0)
            found = screen.run({}, inner)
        finally:
            inner.close_search_pools()
        problems, shortlist = _finals(found["shortlist"], absent is None, groups, inner)
        inner = replace(inner, problems=problems)
        if absent is None:
            rest_s = after.finals_s(_fastest_us(found["shortlist"])) + later_s
            _compile_ahead(target, shortlist, inner, rest_s)
        trials = self.bench.run({**found, "shortlist": shortlist}, inner)["trials"]
        seconds = time.monotonic() - started_at
        context.stage_seconds[f"engine_{target.name}_s"] = (
            context.stage_seconds.get(f"engine_{target.name}_s", 0.0) + seconds
        )
        context.events.emit("line", f"engine: {target.name}: {counted(len(trials), 'candidate')} in {seconds:.1f} s")
        return trials


def _why_absent(implementation: EngineImplementation, context: Context) -> str | None:
    """The reason why the engine's function cannot run here; checked in another process if possible, as it imports."""
    submitted = context.pool.submit_task(partial(_absent, implementation))
    if submitted is None:
        return implementation.unavailable_reason()
    with context.time_account.timed(IDLE):
        return submitted.result()


def _absent(implementation: EngineImplementation) -> str | None:
    return implementation.unavailable_reason()


def _compile_ahead(target: EngineTarget, shortlist: "pd.DataFrame", context: Context, rest_s: float) -> None:
    """Compiles the engine's kernels for the finals in several processes; otherwise each first call would compile.

    `rest_s`: the expected seconds of what follows.
    """
    specs = {p.id: context.family.spec(p) for p in context.problems}
    by_candidate: dict[Candidate, list[GemmSpec]] = {}
    for problem, libtype, config in shortlist[["problem", "libtype", "config"]].itertuples(index=False):
        by_candidate.setdefault(candidate_of(libtype, config), []).append(specs[problem])
    calls = [[(spec, candidate.knobs) for spec in specs] for candidate, specs in by_candidate.items()]
    processes = compile_processes(context)
    shares = [[call for some in calls[i::processes] for call in some] for i in range(processes)]
    began, expected_s = time.monotonic(), compile_seconds(calls=max(map(len, shares)))
    left = {
        future
        for share in shares
        if share and (future := context.pool.submit_task(_task(target.implementation, share, context))) is not None
    }
    total = len(left)
    context.events.emit("stage", f"compile for {target.name}", total=total, unit="processes", rest_s=rest_s)
    while left:
        context.check()
        with context.time_account.timed(IDLE):
            done, left = wait(left, timeout=POLL_S)
        share = compiled_share(time.monotonic() - began, expected_s, left=len(left) / total)
        context.events.emit("progress", done=total - len(left), total=total, share=share)
        for future in done:
            if (error := future.exception()) is not None:
                context.events.emit("detail", f"engine: {target.name}: {one_line(error)}")


def _task(
    implementation: EngineImplementation, calls: Sequence[tuple[GemmSpec, Knobs]], context: Context
) -> CompileCalls:
    return CompileCalls(implementation=implementation, device=context.device, calls=calls)


def _fastest_us(shortlist: "pd.DataFrame") -> dict[str, float]:
    """By problem id, the time of the fastest finalist of screening."""
    timed = shortlist[shortlist["us"].notna()]
    return {str(name): float(us) for name, us in timed.groupby("problem")["us"].min().items()}


def _finals(
    screened: "pd.DataFrame",
    installed: bool,
    groups: Sequence[tuple[list[Problem], EngineShapeGroup]],
    context: Context,
) -> "tuple[list[Problem], pd.DataFrame]":
    """The problems of the finals, which are more than those that were screened, and the shortlist of each."""
    import pandas as pd

    from gemmpipe.core.schema import SHORTLIST

    assert context.engine_target is not None
    ready = screened[screened["us"].notna()].sort_values("us", kind="stable")
    fastest: dict[str, list[Candidate]] = {}
    for name, libtype, config in ready[["problem", "libtype", "config"]].itertuples(index=False):
        fastest.setdefault(name, []).append(candidate_of(libtype, config))
    wanted: list[Problem] = []
    rows: list[dict[str, object]] = []
    for group, product in groups:
        by_m = {p.rows: fastest.get(p.id, []) for p in group}
        for m in product.grid.timed_ms:
            problem = (
                problem_at_m(context.family, group[0], m) if m not in by_m else next(p for p in group if p.rows == m)
            )
            wanted.append(problem)
            rows += _rows(problem, _candidates_at(m, product, by_m), product, installed, context)
    return wanted, pd.DataFrame(rows, columns=list(SHORTLIST))


def _candidates_at(m: int, product: EngineShapeGroup, by_m: Mapping[int, list[Candidate]]) -> list[Candidate]:
    """The finalists of a key; for another M, those of the key that serves it, and some of the neighbouring key's."""
    if m in by_m:
        return by_m[m]
    own = product.grid.nearest(m)
    others = [c for key in product.grid.adjacent(m) if key != own for c in by_m[key][:NEIGHBOURS]]
    return [*by_m[own], *others]


def _rows(
    problem: Problem, candidates: Sequence[Candidate], product: EngineShapeGroup, installed: bool, context: Context
) -> list[dict[str, object]]:
    """The shortlist rows of one M; the engine's current configurations, if they run, are timed in all rounds."""
    assert context.engine_target is not None
    implementation = context.engine_target.implementation
    spec = context.family.spec(problem)
    known = product.current_and_default(problem.rows)
    runs = [c for c in known if installed or implementation.unsupported_reason(spec, c.knobs, context.device) is None]
    rest = [c for c in dict.fromkeys(candidates) if c not in runs]
    return [untimed_row(problem.id, c, "incumbent" if c in runs else "") for c in (*runs, *rest)]
