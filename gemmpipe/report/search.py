"""The sections about the search: its progress, the knobs that matter, and the configurations that were not tried."""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from gemmpipe.charts.axes import Axis, linear_ticks, value_axis
from gemmpipe.charts.colours import TUNED, Colours, legend
from gemmpipe.charts.lines import Frame, Series, line_chart
from gemmpipe.charts.markup import html_table, join, tag, text_line
from gemmpipe.charts.page import Data, Section, figure
from gemmpipe.charts.table_charts import bar, funnel
from gemmpipe.core.data import median
from gemmpipe.core.events import counted
from gemmpipe.core.units import percent_text
from gemmpipe.report.data import RunData
from gemmpipe.report.knob_importance import Importances, forest_importances, ranked
from gemmpipe.report.trial_frame import KnobValue, ProblemTrials, importance, knob_effects

_WITHIN = (1.01, 1.05, 1.2)
_WIDE = Frame(width=560.0, least_px=480)
_MAX_KNOBS = 24
_MAX_VALUES = 16
_MEANINGS: Mapping[str, str] = {
    "backend": "the provider of the kernel",
    "BLOCK_SIZE_M": "rows of the output per tile",
    "BLOCK_SIZE_N": "columns of the output per tile",
    "BLOCK_SIZE_K": "depth of one step of the inner loop",
    "GROUP_SIZE_M": "tiles in a column that run together, for reuse in the cache",
    "NUM_KSPLIT": "parts into which K is divided, summed afterwards",
    "SWAP_AB": "the transposed product, so that N fills the instruction's rows",
    "CLUSTER_SIZE": "blocks that share operands",
    "num_warps": "warps per block",
    "num_stages": "stages of the pipeline of loads",
    "kernel_type": "the variant of the kernel",
    "cache_modifier": "how loads use the caches",
    "method": "the function of the library",
    "waves_per_eu": "waves per execution unit",
    "matrix_instr_nonkdim": "the size of the matrix instruction",
    "kpack": "elements of K per matrix instruction's operand",
}


def search_section(data: RunData, parts: Mapping[str, ProblemTrials], colours: Colours) -> Section | None:
    """The best time so far over trials, and the share of problems near their best over seconds."""
    curves = {name: part.best_so_far() for name, part in parts.items()}
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return None
    charts = [_over_trials(curves, colours)]
    if data.has_times:
        charts.append(_over_seconds(curves, colours))
    trials = [len(part.search) for part in parts.values() if part.search]
    lead = (
        f"{counted(sum(trials), 'trial')} of {counted(len(trials), 'product')}, {median(trials):,.0f} per product "
        "(median). A time is compared with the best that the search of the same product found in the end."
    )
    note = None if data.has_times else tag("p", "Over seconds: not recorded in this journal.", class_="note")
    return Section(id="search", title="Search", body=join([tag("div", join(charts), class_="two"), note]), lead=lead)


Curves = Mapping[str, Sequence[tuple[int, float | None, float]]]
"""By problem: (trial, seconds, best time in us) at each improvement."""


def _over_trials(curves: Curves, colours: Colours) -> Markup:
    """The median and the worst tenth over products of best so far over best of all."""
    most = max(curve[-1][0] for curve in curves.values())
    numbers = sorted({round(most ** (i / 60)) for i in range(61)} | {1, most})
    rows = []
    for number in numbers:
        ratios = sorted(r for curve in curves.values() if (r := _ratio_at(curve, number)) is not None)
        if ratios:
            rows.append((number, median(ratios), ratios[min(len(ratios) - 1, int(0.9 * len(ratios)))]))
    line = Series(
        name=TUNED,
        points=[(n, middle) for n, middle, _ in rows],
        band=[(n, middle, high) for n, middle, high in rows],
        stepped=True,
    )
    high = max((high for _, _, high in rows), default=2.0)
    x = value_axis([1, most], label="trials of a product", text="{:g}".format, log=True)
    y = Axis(
        low=1.0,
        high=max(1.1, min(high, 8.0)),
        log=True,
        label="best so far / best",
        text="{:.3g}x".format,
        ticks=_ratio_ticks(high),
    )
    table = Data(name="search_over_trials", header=("trials", "median_ratio", "ninety_percent_ratio"), rows=rows)
    chart = line_chart([line], x, y, colours, title="best so far over trials", frame=_WIDE, dots=False)
    note = tag("p", "Line: median over products; band: up to the worst tenth.", class_="note")
    return figure("Best so far over trials", join([chart, note]), table)


def _ratio_ticks(high: float) -> tuple[float, ...]:
    high = max(1.1, min(high, 8.0))
    ticks = [t for t in (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0) if t <= high]
    return tuple(ticks if len(ticks) <= 6 else [t for t in ticks if t not in (1.02, 1.05)])


def _ratio_at(curve: Sequence[tuple[int, float | None, float]], number: int) -> float | None:
    done = [us for n, _, us in curve if n <= number]
    return done[-1] / curve[-1][2] if done else None


def _over_seconds(curves: Curves, colours: Colours) -> Markup:
    """The share of products whose search is within some percent of its best, over the run's seconds."""
    end = max((t for curve in curves.values() for _, t, _ in curve if t is not None), default=0.0)
    lines = []
    rows: list[list[object]] = []
    for within in _WITHIN:
        name = f"{100 * (within - 1):.0f} %"
        reached = sorted(
            next((t for _, t, us in curve if t is not None and us <= within * curve[-1][2]), math.inf)
            for curve in curves.values()
        )
        points = [(0.0, 0.0)] + [(t, (i + 1) / len(curves)) for i, t in enumerate(reached) if t < math.inf]
        lines.append(Series(name=name, points=[*points, (end, points[-1][1])], stepped=True))
        rows += [[name, t, share] for t, share in points]
    x = Axis(
        low=0.0, high=end or 1.0, label="seconds of the run", text="{:g}".format, ticks=linear_ticks(0.0, end or 1.0)
    )
    y = Axis(low=0.0, high=1.02, label="products", text=lambda v: f"{100 * v:.0f} %", ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    chart = line_chart(lines, x, y, colours, title="products near their best over seconds", frame=_WIDE, dots=False)
    data = Data(name="search_over_seconds", header=("within", "t_s", "share_of_products"), rows=rows)
    return figure(
        "Products near their best, over seconds",
        join(
            [
                chart,
                legend(
                    [line.name for line in lines], colours, labels={line.name: f"within {line.name}" for line in lines}
                ),
            ]
        ),
        data,
    )


def knobs_section(data: RunData, parts: Mapping[str, ProblemTrials]) -> Section | None:
    """A table per knob: its importance, and for each value the best time with it over the best of all.

    Where own kernels were timed, these are their knobs: a library's methods are compared in the other sections.
    """
    own = {implementation.label for implementation in data.family.implementations}
    kernels = [kept for part in parts.values() if (kept := part.of_backends(own)) is not None]
    used = kernels or list(parts.values())
    effects = dict(knob_effects(used))
    if not effects:
        return None
    forest = forest_importances(used)
    names = ranked(list(effects), forest)
    tables = [_knob_table(name, effects[name], forest) for name in names[:_MAX_KNOBS]]
    rows = [
        [name, forest.share.get(name, 0.0) if forest else None, *_knob_cells(each)]
        for name in names
        for each in effects[name]
    ]
    header = ("knob", "importance", "value", "best_with_value_over_best", "products", "candidates", "wins")
    body = figure(
        "Best time with a value over the best time of all",
        tag("div", join(tables), class_="charts knobs"),
        Data(name="knobs", header=header, rows=rows),
    )
    loss = (
        "Loss: what a product loses if a knob is fixed at a value and all others are free, geometric mean over the "
        "products where the value was timed; 1.00 loses nothing."
    )
    lead = f"{_order_text(names, effects, forest)} {loss}"
    return Section(id="knobs", title="Which knobs matter", body=body, lead=lead)


def _knob_cells(each: KnobValue) -> list[object]:
    return [each.value, each.slowdown, each.problems, each.candidates, each.wins]


def _order_text(names: Sequence[str], effects: Mapping[str, Sequence[KnobValue]], forest: Importances | None) -> str:
    """The criterion that orders the knobs, and the first of them."""
    if forest is None:
        first = ", ".join(f"{name} (x{importance(effects[name]):.2f})" for name in names[:3])
        return f"Ordered by mean loss (too few candidates, or times that a forest cannot predict): {first}."
    first = ", ".join(f"{name} ({percent_text(forest.share.get(name, 0.0))})" for name in names[:3])
    return (
        f"The knobs that matter most: {first}. Importance: how much a random forest, which explains "
        f"{percent_text(forest.explained)} of the differences between times that it has not seen, errs more if the "
        "values of the knob are exchanged among candidates; all knobs together are 100 %."
    )


def _knob_table(name: str, values: Sequence[KnobValue], forest: Importances | None) -> Markup:
    shown = sorted(values, key=lambda each: each.slowdown)[:_MAX_VALUES]
    shown = [each for each in values if each in shown]
    rows = [
        (
            text_line(each.value, 40),
            f"{each.slowdown:.2f}",
            bar(min(1.0, (each.slowdown - 1) / 1.0)),
            f"{each.wins:,}",
            f"{each.problems:,}",
        )
        for each in shown
    ]
    meaning = _MEANINGS.get(name)
    weight = f" importance {percent_text(forest.share.get(name, 0.0))}" if forest else ""
    more = len(values) - len(shown)
    parts = [
        tag("h3", text_line(name, 60), tag("span", weight, class_="note") if weight else None),
        tag("p", meaning, class_="note") if meaning else None,
        html_table(("value", "loss", "", "wins", "products"), rows, text_columns=(0,)),
        tag("p", f"{more} more values lose more.", class_="note") if more > 0 else None,
    ]
    return tag("div", join(parts))


def space_section(data: RunData, parts: Mapping[str, ProblemTrials]) -> Section | None:
    """The way from all configurations to the choices: rules that excluded some, trials, finals, choices."""
    tried = {(t.trial.problem, t.trial.candidate) for t in data.trials}
    if not tried and not data.excluded:
        return None
    timed = sum(len(part.times_us()) for part in parts.values())
    finals = sum(len({t.trial.candidate for t in part.finals}) for part in parts.values())
    excluded = sum(each.count for each in data.excluded)
    steps = []
    remaining = excluded + len(tried)
    if data.recorded > remaining:
        steps.append(("recorded configurations, over all products", data.recorded, ""))
    if data.excluded:
        steps.append(("distinct configurations, over all products", remaining, ""))
        for each in data.excluded[:12]:
            remaining -= each.count
            steps.append(
                (
                    f"without {each.backend}: {text_line(each.reason, 80)}",
                    remaining,
                    f"{each.count:,} {each.status}: {text_line(each.example, 120)}",
                )
            )
        if rest := sum(each.count for each in data.excluded[12:]):
            remaining -= rest
            steps.append(("without those of other reasons", remaining, f"{rest:,} in {len(data.excluded) - 12} kinds"))
    steps += [
        ("tried", len(tried), "requested by the search" if data.recorded > remaining else ""),
        ("timed", timed, "the others failed or were stopped" if timed < len(tried) else ""),
        ("in the finals", finals, ""),
        ("chosen", len(data.products), ""),
    ]
    rows = [[e.backend, e.reason, e.status, e.count, e.example] for e in data.excluded]
    table = Data(name="space", header=("backend", "reason", "status", "configurations", "example"), rows=rows)
    body = figure("From all configurations to the choices", funnel(steps), table if rows else None)
    return Section(id="space", title="The space", body=join([body, _failures(data)]))


def _failures(data: RunData) -> Markup | None:
    """The failures of candidates that were tried, by status."""
    counts: dict[tuple[str, str], tuple[int, str]] = {}
    for each in data.trials:
        if str(each.trial.status) not in ("ok", "pruned"):
            key = (each.trial.candidate.backend, str(each.trial.status))
            count, error = counts.get(key, (0, each.trial.error))
            counts[key] = (count + 1, error)
    if not counts:
        return None
    rows = [
        (backend, status, f"{count:,}", text_line(error, 200))
        for (backend, status), (count, error) in sorted(counts.items())
    ]
    table = html_table(("backend", "status", "trials", "for example"), rows, text_columns=(0, 1, 3))
    return join([tag("h3", "Trials that failed"), table])
