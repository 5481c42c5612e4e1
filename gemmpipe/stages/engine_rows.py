"""Selections for the formats of engines' own functions, from the trials of these functions."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gemmpipe.data import Candidate, Problem, Status
from gemmpipe.events import counted
from gemmpipe.problem import siblings
from gemmpipe.stages import Context, Form
from gemmpipe.stages.choice import Finalist
from gemmpipe.stages.engine_choice import Entry, Point, choose_entries
from gemmpipe.stages.engine_files import Product, at, product_of
from gemmpipe.stages.rows import config_text
from gemmpipe.stages.selections import base_row, finalists_of
from gemmpipe.stages.unsolved import tell_unsolved

if TYPE_CHECKING:
    import pandas as pd

_TAKEN = "the engine's own"
_CARRIED = "of the published file, not timed"


def engine_rows(problems: Sequence[Problem], trials: "pd.DataFrame", context: Context) -> list[dict[str, object]]:
    """A row for each entry of each file; a product whose Ms are not all timed yet has none."""
    rows: list[dict[str, object]] = []
    for form in context.forms:
        mine = trials[trials["stage"] == form.finals]
        finalists, timed = finalists_of(mine, form.finals), set(mine["problem"].tolist())
        entries: list[Entry] = []
        for group in siblings(problems):
            product = product_of(form, group, context)
            these = {m: at(context.family, group[0], m) for m in product.grid.points}
            these |= {p.rows: p for p in group}
            if not all(p.id in timed for p in these.values()):
                _tell_nothing(form, group, trials, context)
                continue
            points = {m: _point(p, product, finalists, mine) for m, p in these.items()}
            chosen = choose_entries(product.grid, points, form.further_pct)
            entries += chosen
            rows += [_row(form, these[e.m], e, product, context) for e in chosen]
            rows += [_carried(form, group[0], m, product.published[m], context) for m in product.grid.carried]
            for problem in group:
                if not points[problem.rows].finalists:
                    tell_unsolved(problem, mine, 0, 0.0, context)
        _tell(form, entries, context)
    return rows


def _tell_nothing(form: Form, group: Sequence[Problem], trials: "pd.DataFrame", context: Context) -> None:
    """Where candidates were tried and none came to the finals; an interrupted run has not tried all.

    Where no configuration fits the product on this device, nothing failed: the problems have their choices for the
    other formats, and merge tells that this one has nothing to store. Where there is no other format they are unsolved.
    """
    ids = {p.id for p in group}
    own = trials[(trials["libtype"] == form.implementation.label) & trials["problem"].isin(ids)]
    if context.races and (own["status"] == str(Status.UNFIT)).all():
        return
    tried = set(own["problem"].tolist())
    for problem in group if ids <= tried else ():
        tell_unsolved(problem, own, 0, 0.0, context)


def _point(
    problem: Problem, product: Product, finalists: Mapping[str, Sequence[Finalist]], trials: "pd.DataFrame"
) -> Point:
    tried = set(trials.loc[trials["problem"] == problem.id, "candidate"].tolist())
    taken = product.taken(problem.rows)
    return Point(
        m=problem.rows,
        finalists=tuple(finalists.get(problem.id, ())),
        taken=taken,
        untried=frozenset(c for c in taken if c.id not in tried),
    )


def _row(form: Form, problem: Problem, entry: Entry, product: Product, context: Context) -> dict[str, object]:
    if entry.finalist is None:  # the engine's own, which cannot run here
        return _carried(form, problem, entry.m, entry.candidate, context)
    ratio, reference = entry.ratio, entry.reference
    stays = entry.candidate in product.taken(entry.m)
    return {
        **base_row(problem, context.family.spec(problem), entry.finalist, context),
        **_place(form, entry.m, context),
        "baseline": None if reference is None else config_text(reference.candidate),
        "baseline_us": None if reference is None else round(reference.time_us, 4),
        "ratio": None if ratio is None else round(ratio.median, 4),
        "ratio_low": None if ratio is None else round(ratio.low, 4),
        "ratio_high": None if ratio is None else round(ratio.high, 4),
        "reason": _TAKEN if stays else "",
    }


def _carried(form: Form, problem: Problem, m: int, candidate: Candidate, context: Context) -> dict[str, object]:
    """An entry that is taken over as it is."""
    return {
        **dict(problem.key),
        **_place(form, m, context),
        "problem": at(context.family, problem, m).id,
        "gfx": context.device.gfx,
        "cu_num": context.device.cu_num,
        "libtype": candidate.backend,
        "config": config_text(candidate),
        "candidate": candidate.id,
        "run_id": context.run_id,
        "device": context.device.name,
        "weight": 0.0,
        "reason": _CARRIED,
    }


def _place(form: Form, m: int, context: Context) -> dict[str, object]:
    bucket = {"format": form.name, "bucket": str(m), "bucket_low": m - 1, "bucket_high": m}
    return {**bucket, context.family.rows_column: None}


def _tell(form: Form, entries: Sequence[Entry], context: Context) -> None:
    """How many entries are new, and what they gain over what the engine takes without them."""
    timed = [(e, ratio.median) for e in entries if (ratio := e.ratio) is not None]
    if not entries:
        return
    new = [ratio for e, ratio in timed if e.reference is not None and e.candidate != e.reference.candidate]
    own = len(entries) - len(new)
    gain = math.exp(sum(math.log(ratio) for _, ratio in timed) / len(timed)) if timed else 1.0
    context.events.emit(
        "line",
        f"select: {form.name}: {counted(len(entries), 'entry', 'entries')}, {len(new):,} new, {own:,} as the engine "
        f"has them; {gain:.3f} of the time that it takes now (geometric mean)",
    )
