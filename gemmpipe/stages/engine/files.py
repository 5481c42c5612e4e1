"""Selections for the formats of engines' own functions, from the trials of these functions.

They are compared with the engine's current configuration: its published file, its default, and the output's file.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.data import Candidate, Knobs, Problem, Status
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import counted
from gemmpipe.family import Family
from gemmpipe.family.problem import shape_groups
from gemmpipe.formats.engine_json import nearest_key
from gemmpipe.stages import Context, EngineTarget
from gemmpipe.stages.engine.choice import EngineEntry, ExtraKeys, KeyGrid, TimedPoint, choose_entries, key_grid
from gemmpipe.stages.rows import config_text, report_unsolved
from gemmpipe.stages.selection_rules import Finalist
from gemmpipe.stages.selections import base_row, finalists_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class EngineShapeGroup:
    """An engine's configurations for problems that differ in M alone; candidates by M, in the order of a file."""

    grid: KeyGrid
    published: Mapping[int, Candidate]
    existing: Mapping[int, Candidate]
    """From the file in the output, of earlier runs."""
    default_at: Callable[[int], Candidate | None]
    """The engine's configuration of an M without a file: that of experts depends on M."""

    def current(self, m: int) -> tuple[Candidate, ...]:
        """The engine's configurations for this M: without the output's file, and with it."""
        first = self.published[nearest_key(self.published, m)] if self.published else self.default_at(m)
        second = self.existing[nearest_key(self.existing, m)] if self.existing else None
        return tuple(dict.fromkeys(c for c in (first, second) if c is not None))

    def current_and_default(self, m: int) -> tuple[Candidate, ...]:
        """`current`, and the default, which may be faster than either."""
        default = self.default_at(m)
        return tuple(dict.fromkeys((*self.current(m), *([default] if default is not None else []))))


def engine_shape_group(target: EngineTarget, group: Sequence[Problem], context: Context) -> EngineShapeGroup:
    """Reads the engine's configurations for the product of these problems (one at least)."""
    family, device, implementation = context.family, context.device, target.implementation
    spec = family.spec(group[0])

    def candidates(paths: Sequence[Path]) -> dict[int, Candidate]:
        try:
            entries = target.format.entries(spec, device, paths)
        except UserError as error:
            context.events.emit("warning", f"engine: {target.name}: left out: {error}")
            return {}
        return {m: _candidate(knobs) for m, knobs in entries.items()}

    def _candidate(knobs: Knobs) -> Candidate:
        return Candidate.of(implementation.label, implementation.normalise(spec, knobs, device))

    published = candidates(target.published)
    existing = candidates([context.output / implementation.label])

    @cache
    def default_at(m: int) -> Candidate | None:
        knobs = implementation.default(family.spec(problem_at_m(family, group[0], m)), device)
        return None if knobs is None else _candidate(knobs)

    return EngineShapeGroup(
        grid=key_grid([p.rows for p in group], published, existing),
        published=published,
        existing=existing,
        default_at=default_at,
    )


def problem_at_m(family: Family, problem: Problem, m: int) -> Problem:
    """The same product with another M, of weight 0 as it is not part of the workload."""
    key = tuple((name, m if name == family.rows_column else value) for name, value in problem.key)
    return family.problem(key, weight=0.0, layer=problem.layer)


_CURRENT_ENTRY = "the engine's own"
_COPIED_ENTRY = "of the published file, not timed"


def engine_rows(problems: Sequence[Problem], trials: "pd.DataFrame", context: Context) -> list[dict[str, object]]:
    """A row for each entry of each file; a product has none until all its Ms are timed."""
    rows: list[dict[str, object]] = []
    for target in context.engine_targets:
        mine = trials[trials["stage"] == target.finals]
        finalists, timed = finalists_of(mine, target.finals), set(mine["problem"].tolist())
        entries: list[EngineEntry] = []
        for group in shape_groups(problems):
            product = engine_shape_group(target, group, context)
            these = {m: problem_at_m(context.family, group[0], m) for m in product.grid.timed_ms}
            these |= {p.rows: p for p in group}
            if not all(p.id in timed for p in these.values()):
                _report_missing(target, group, trials, context)
                continue
            points = {m: _point(p, product, finalists, mine) for m, p in these.items()}
            chosen = choose_entries(
                product.grid, points, ExtraKeys(pct=target.extra_key_pct, exact_from=target.exact_from)
            )
            entries += chosen
            rows += [_row(target, these[e.m], e, product, context) for e in chosen]
            rows += [_copied_row(target, group[0], m, product.published[m], context) for m in product.grid.copied]
            for problem in group:
                if not points[problem.rows].finalists:
                    report_unsolved(problem, mine, 0, 0.0, context)
        _report(target, entries, context)
    return rows


def _report_missing(target: EngineTarget, group: Sequence[Problem], trials: "pd.DataFrame", context: Context) -> None:
    """Notes the problems of a group as unsolved if all were tried; an interrupted run has not tried all.

    Where no configuration fits the product on this device, nothing failed: the problems have their selections for other
    formats, and merge reports that this one has no rows. Without another format they are unsolved.
    """
    ids = {p.id for p in group}
    own = trials[(trials["libtype"] == target.implementation.label) & trials["problem"].isin(ids)]
    if context.per_problem and (own["status"] == str(Status.UNSUPPORTED)).all():
        return
    tried = set(own["problem"].tolist())
    for problem in group if ids <= tried else ():
        report_unsolved(problem, own, 0, 0.0, context)


def _point(
    problem: Problem, product: EngineShapeGroup, finalists: Mapping[str, Sequence[Finalist]], trials: "pd.DataFrame"
) -> TimedPoint:
    tried = set(trials.loc[trials["problem"] == problem.id, "candidate"].tolist())
    current = product.current(problem.rows)
    return TimedPoint(
        m=problem.rows,
        finalists=tuple(finalists.get(problem.id, ())),
        current=current,
        untried=frozenset(c for c in current if c.id not in tried),
    )


def _row(
    target: EngineTarget, problem: Problem, entry: EngineEntry, product: EngineShapeGroup, context: Context
) -> dict[str, object]:
    if entry.finalist is None:  # the engine's current configuration, which cannot run here
        return _copied_row(target, problem, entry.m, entry.candidate, context)
    ratio, reference = entry.ratio, entry.reference
    is_current = entry.candidate in product.current(entry.m)
    return {
        **base_row(problem, context.family.spec(problem), entry.finalist, context),
        **_bucket_cells(target, entry.m, context),
        "baseline": None if reference is None else config_text(reference.candidate),
        "baseline_us": None if reference is None else round(reference.time_us, 4),
        "ratio": None if ratio is None else round(ratio.median, 4),
        "ratio_low": None if ratio is None else round(ratio.low, 4),
        "ratio_high": None if ratio is None else round(ratio.high, 4),
        "reason": _CURRENT_ENTRY if is_current else "",
    }


def _copied_row(
    target: EngineTarget, problem: Problem, m: int, candidate: Candidate, context: Context
) -> dict[str, object]:
    """The row of an entry that is copied unchanged."""
    return {
        **dict(problem.key),
        **_bucket_cells(target, m, context),
        "problem": problem_at_m(context.family, problem, m).id,
        "gfx": context.device.gfx,
        "cu_num": context.device.cu_num,
        "libtype": candidate.backend,
        "config": config_text(candidate),
        "candidate": candidate.id,
        "run_id": context.run_id,
        "device": context.device.name,
        "weight": 0.0,
        "reason": _COPIED_ENTRY,
    }


def _bucket_cells(target: EngineTarget, m: int, context: Context) -> dict[str, object]:
    bucket = {"format": target.name, "bucket": str(m), "bucket_low": m - 1, "bucket_high": m}
    return {**bucket, context.family.rows_column: None}


def _report(target: EngineTarget, entries: Sequence[EngineEntry], context: Context) -> None:
    """Reports the number of new entries, and the time with them over the engine's current time."""
    timed = [(e, paired.median) for e in entries if (paired := e.ratio) is not None]
    if not entries:
        return
    new = [e for e, _ in timed if e.reference is not None and e.candidate != e.reference.candidate]
    kept = len(entries) - len(new)
    ratio = math.exp(sum(math.log(r) for _, r in timed) / len(timed)) if timed else 1.0
    context.events.emit(
        "line",
        f"select: {target.name}: {counted(len(entries), 'entry', 'entries')}, {len(new):,} new, {kept:,} as the "
        f"engine has them; {ratio:.3f} of its current time (geometric mean)",
    )
