"""The section about one product, chosen in the page: its candidates, its finals by round, why others left."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from gemmpipe.charts.axes import Axis, linear_ticks, short_time, value_axis
from gemmpipe.charts.colours import Colours, legend
from gemmpipe.charts.lines import Series, line_chart, scatter_chart
from gemmpipe.charts.markup import html_table, join, tag, text_line
from gemmpipe.charts.page import Data, Section, figure
from gemmpipe.core.data import Candidate, canonical_json
from gemmpipe.core.events import counted
from gemmpipe.core.units import percent_text, time_text
from gemmpipe.report.attention import product_name, records
from gemmpipe.report.data import RunData, TimedTrial
from gemmpipe.report.diff_text import knobs_text
from gemmpipe.report.product_table import knob_text
from gemmpipe.report.results import COMPARABLE
from gemmpipe.report.speedup import speedup_cell
from gemmpipe.report.trial_frame import ProblemTrials, memory_reason, memory_text, ranked, statuses

Row = Mapping[Hashable, Any]
_MAX_FINALISTS = 5
_MAX_ROUNDS = 200


def targets(data: RunData, parts: Mapping[str, ProblemTrials], most: int) -> dict[str, str]:
    """By problem id: the id of the element with its candidates, for the first `most` problems with trials.

    Where there are more, the products with the lowest share of the floor, or the least speed-up, come first.
    """
    rows = [row for row in records(data.products) if str(row["problem"]) in parts]
    if len(rows) > most:
        rows = sorted(rows, key=lambda r: (r["share"] or 9.0, r["speedup"] or 9.0))[:most]
    kept = {str(row["problem"]) for row in rows}
    names = [str(row["problem"]) for row in records(data.products) if str(row["problem"]) in kept]
    return {name: f"product-{index}" for index, name in enumerate(names)}


def candidates_section(
    data: RunData,
    parts: Mapping[str, ProblemTrials],
    shown: Mapping[str, str],
    colours: Colours,
    most_points: int,
    csv_limit: int,
) -> Section | None:
    """A panel per product, of which the page shows one at a time."""
    rows = {str(row["problem"]): row for row in records(data.products)}
    if not shown:
        return None
    options = [
        tag("option", product_name(rows[name]) + _option_note(rows[name]), value=target)
        for name, target in shown.items()
    ]
    label = f"Product (M, {data.shape_title}): "
    chooser = tag("p", tag("label", label, tag("select", join(options), id="product")), class_="chooser")
    panels = [
        _panel(rows[name], parts[name], target, colours, most_points, hidden=index > 0)
        for index, (name, target) in enumerate(shown.items())
    ]
    left_out = len(parts) - len(shown)
    note = f"{counted(left_out, 'product')} left out here: nearest to the floor or farthest ahead of the library."
    body = join(
        [chooser, *panels, tag("p", note, class_="note") if left_out > 0 else None, _all_data(parts, shown, csv_limit)]
    )
    lead = (
        "Every timed candidate of one product, the fastest first, and the rounds of its finals. Points name knobs in "
        "short: tile 64x128x128 (M x N x K), g group, k/ splits of K, w warps, s stages."
    )
    return Section(id="candidates", title="One product", body=body, lead=lead)


def _option_note(row: Row) -> str:
    return f" ({percent_text(row['share'])} of the floor)" if row["share"] else ""


def _panel(row: Row, part: ProblemTrials, target: str, colours: Colours, most_points: int, *, hidden: bool) -> Markup:
    times = sorted(part.times_us().items(), key=lambda item: (item[1], item[0].id))
    backends = list(dict.fromkeys(candidate.backend for candidate, _ in times))
    charts = [_candidate_chart(row, times, _memory(part), most_points, colours)]
    if finals := _finals_chart(row, part, colours):
        charts.append(finals)
    if search := _search_chart(row, part, colours):
        charts.append(search)
    reason = memory_reason(ranked(part.finals), row)
    content = [
        tag("h3", product_name(row)),
        tag("p", _choice_text(row), tag("br"), tag("code", knob_text(row["config"]))),
        tag("p", f"{reason[:1].upper()}{reason[1:]}.") if reason else None,
        legend(backends, colours, lines=False),
        tag("div", join(charts), class_="charts"),
        _left_table(part),
    ]
    return tag("div", join(content), id=target, data_product=True, hidden=hidden)


def _choice_text(row: Row) -> str:
    parts = [f"Choice: {row['libtype']}, {time_text(row['us'])}"]
    if row["p20_us"] and row["p80_us"]:
        parts.append(f"(80 % of the samples under {time_text(row['p80_us'])})")
    if row["library"] in COMPARABLE and row["speedup"]:
        parts.append(f"{speedup_cell(row)} over the best library ({time_text(row['library_us'])})")
    if row["share"]:
        parts.append(f"{percent_text(row['share'])} of the floor ({time_text(row['floor_us'])})")
    return (
        "; ".join(
            [
                " ".join(parts[:2]) if parts[1:] and parts[1].startswith("(") else parts[0],
                *[p for p in parts[1:] if not p.startswith("(")],
            ]
        )
        + "."
    )


def _memory(part: ProblemTrials) -> dict[Candidate, str]:
    """Memory of candidates in addition to the stored weight, as text; those without any are left out."""
    last = {each.trial.candidate: each.trial for each in (*part.search, *part.finals)}
    return {candidate: text for candidate, trial in last.items() if (text := memory_text(trial))}


def _candidate_chart(
    row: Row,
    times: Sequence[tuple[Candidate, float]],
    memory: Mapping[Candidate, str],
    most_points: int,
    colours: Colours,
) -> Markup:
    """Rank over time; of many candidates the fastest half of the points, then evenly spaced ones."""
    ranks = list(range(len(times)))
    if len(ranks) > most_points:
        first = most_points // 2
        step = (len(ranks) - first) / (most_points - first)
        ranks = [*range(first), *(first + int(i * step) for i in range(most_points - first))]
    groups: dict[str, list[tuple[float, float, str]]] = {}
    for rank in dict.fromkeys(ranks):
        candidate, us = times[rank]
        more = f", {memory[candidate]} for the weight" if candidate in memory else ""
        tip = f"{rank + 1}. {_what_runs(candidate)}: {time_text(us)}{more}"
        groups.setdefault(candidate.backend, []).append((rank + 1, us, tip))
    lines = [
        Series(name=name, points=[(a, b) for a, b, _ in points], tips=[tip for _, _, tip in points])
        for name, points in groups.items()
    ]
    x = value_axis([1, len(times)], label="rank by time", text="{:g}".format, log=len(times) > 40)
    y = value_axis([us for _, us in times], label="time of one call", text=short_time, log=True)
    return figure(
        f"{len(times):,} timed candidates", scatter_chart(lines, x, y, colours, title=f"candidates of {row['problem']}")
    )


def _finals_chart(row: Row, part: ProblemTrials, colours: Colours) -> Markup | None:
    """The samples of the fastest finalists by round."""
    timed = [trial for trial in ranked(part.finals) if len(trial.samples_us) > 1]
    fastest = sorted(timed, key=lambda trial: trial.time_us or 0.0)[:_MAX_FINALISTS]
    if not fastest:
        return None
    counts: dict[str, int] = {}
    labels: dict[str, str] = {}
    lines = []
    for trial in fastest:
        backend = trial.candidate.backend
        counts[backend] = counts.get(backend, 0) + 1
        # The backend's colour, with a pattern per place: the same few patterns differ in the chart of every product.
        name = backend if counts[backend] == 1 else f"{backend} {counts[backend]}"
        more = f" ({memory_text(trial)} for the weight)" if trial.extra_weight_bytes else ""
        labels[name] = f"{_what_runs(trial.candidate)}{more}"
        lines.append(Series(name=name, points=list(enumerate(trial.samples_us[:_MAX_ROUNDS], 1))))
    rounds = max(len(line.points) for line in lines)
    x = Axis(
        low=1, high=max(2, rounds), label="round", ticks=tuple(t for t in linear_ticks(1, rounds) if t >= 1) or (1,)
    )
    y = value_axis(
        [us for line in lines for _, us in line.points], label="time of one call", text=short_time, log=True, zoom=1.1
    )
    chart = line_chart(lines, x, y, colours, title=f"finals of {row['problem']} by round", dots=False)
    names = legend([line.name for line in lines], colours, labels=labels)
    return figure(f"Finals by round: the fastest {len(lines)} of {len(timed)}", join([chart, names]))


def _what_runs(candidate: Candidate) -> str:
    """A candidate by what it runs: `torch float32_copy`, `gluon 64x128x128 g16 s5`."""
    knobs = knobs_text(canonical_json(candidate.knobs))
    return f"{candidate.backend} {knobs}".rstrip().removesuffix(f" {candidate.backend}")  # a kernel type of its name


def _search_chart(row: Row, part: ProblemTrials, colours: Colours) -> Markup | None:
    """The best time of the search so far over its trials."""
    steps = part.best_so_far()
    if len(part.search) < 2 or not steps:
        return None
    line = Series(name="tuned", points=[(n, us) for n, _, us in steps], stepped=True)
    x = value_axis([1, len(part.search)], label="trials", text="{:g}".format, log=len(part.search) > 40)
    y = value_axis([us for _, us in line.points], label="best time so far", text=short_time, log=True)
    return figure("Search", line_chart([line], x, y, colours, title=f"best so far of {row['problem']}", dots=False))


def _left_table(part: ProblemTrials) -> Markup:
    """How many candidates ended in which way, with an error of each kind."""
    rows = [(stage, status, f"{count:,}", text_line(error, 200)) for stage, status, count, error in statuses(part)]
    table = html_table(("stage", "status", "candidates", "for example"), rows, text_columns=(0, 1, 3))
    return tag("details", tag("summary", "How its candidates ended"), table)


def _all_data(parts: Mapping[str, ProblemTrials], shown: Mapping[str, str], limit: int) -> Markup:
    """The data of all panels as one file."""
    rows = [
        [name, stage, each.trial.candidate.backend, canonical_json(each.trial.candidate.knobs), *_cells(each)]
        for name in shown
        for stage, trials in (("search", parts[name].search), ("finals", parts[name].finals))
        for each in trials
    ]
    header = ("problem", "stage", "backend", "knobs", "status", "us", "launches", "err_ratio", "t_s", "error")
    return figure("The trials of these products", None, Data(name="candidates", header=header, rows=rows), limit=limit)


def _cells(each: TimedTrial) -> list[object]:
    trial = each.trial
    return [str(trial.status), trial.time_us, trial.launches, trial.err_ratio, each.t_s, text_line(trial.error, 100)]
