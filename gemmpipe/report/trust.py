"""The sections about the measurement: near-ties and noise, wall time by resource, builds, the state of the devices."""

import re
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from gemmpipe.bench.timer import PairedRatio, paired_ratio
from gemmpipe.charts.axes import value_axis
from gemmpipe.charts.bars import horizontal_stacks, vertical_stacks
from gemmpipe.charts.colours import IDLE, TUNED, Colours, legend
from gemmpipe.charts.lines import Interval, Series, interval_chart, line_chart
from gemmpipe.charts.markup import html_table, join, tag, text_line
from gemmpipe.charts.page import Data, Section, figure
from gemmpipe.core.data import Status, canonical_json, median
from gemmpipe.core.events import counted, verb
from gemmpipe.core.units import bytes_text, duration_text, speedup_text, time_text
from gemmpipe.report.attention import Row, product_name, records
from gemmpipe.report.data import Resource, RunData, TimedBuild
from gemmpipe.report.product_table import knob_text
from gemmpipe.report.results import COMPARABLE
from gemmpipe.report.speedup import speedup_cell
from gemmpipe.report.trial_frame import ProblemTrials

_MAX_ROWS = 30
_SMALL = 0.02
"""Activities below this share of a resource's wall time are drawn as one."""
_OTHER = "other"


def near_ties_section(data: RunData, parts: Mapping[str, ProblemTrials], colours: Colours) -> Section | None:
    """Intervals of the products with near-ties: runner-up over choice where known, else speed-up over the library."""
    rows = records(data.products)
    ties = sorted((r for r in rows if r["near_ties"]), key=lambda r: -r["near_ties"])
    noisy = [r for r in rows if r["noisy"]]
    if not ties and not noisy and all(r["near_ties"] is None for r in rows):
        return None
    lead = (
        "A near-tie is a candidate within 0.5 % of the fastest that the paired times of the finals cannot tell "
        f"apart from it. {len(ties)} of {counted(len(rows), 'product')} {verb(len(ties), 'has', 'have')} one."
    )
    shown = [_runner_up_figure(ties, parts, colours) or _speedup_figure(ties, colours), _noisy_table(noisy)]
    return Section(id="ties", title="Near-ties and noise", body=join(shown), lead=lead)


def _runner_up_figure(rows: Sequence[Row], parts: Mapping[str, ProblemTrials], colours: Colours) -> Markup | None:
    """Runner-up over choice by rounds of the finals; a journal without their samples leaves the noise of the run."""
    known = [r for r in rows if r["runner_up_us"] and r["us"]]
    if not known:
        return None
    intervals = []
    for row in known[:_MAX_ROWS]:
        ratio, name = runner_up_ratio(row, parts.get(str(row["problem"])))
        low, high = max(ratio.low, 0.5), min(ratio.high, 2.0)
        middle = min(2.0, max(0.5, ratio.median))
        times = f"medians {row['libtype']} {time_text(row['us'])}, {name} {time_text(row['runner_up_us'])}"
        tip = f"runner-up over choice {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f}); {times}"
        label = f"{product_name(row)}: {name}"
        intervals.append(Interval(label=label, name=TUNED, value=middle, low=low, high=high, tip=tip))
    return _interval_figure(
        "Runner-up over choice, paired by round, 95 % interval",
        "time of the runner-up / time of the choice",
        intervals,
        known,
        colours,
    )


def runner_up_ratio(row: Row, part: ProblemTrials | None) -> tuple[PairedRatio, str]:
    """(ratio of the runner-up to the choice, its name): from the same rounds of the finals, where both have them."""
    finals = {each.trial.candidate: each.trial for each in part.finals} if part is not None else {}
    raced = [t for t in finals.values() if t.status is Status.OK and len(t.samples_us) > 1]
    knobs = knob_text(row["config"])
    chosen = next(
        (
            t
            for t in raced
            if t.candidate.backend == row["libtype"] and knob_text(canonical_json(t.candidate.knobs)) == knobs
        ),
        None,
    )
    others = [t for t in raced if t is not chosen]
    if chosen is not None and others:
        pairs = [(paired_ratio(other.samples_us, chosen.samples_us), other.candidate.backend) for other in others]
        return min(pairs, key=lambda pair: pair[0].median)
    ratio, noise = row["runner_up_us"] / row["us"], (row["noise_pct"] or 0.0) / 100
    return PairedRatio(median=ratio, low=ratio - noise, high=ratio + noise), str(row["runner_up"]).partition("@")[0]


def _speedup_figure(rows: Sequence[Row], colours: Colours) -> Markup | None:
    known = [r for r in rows if r["library"] in COMPARABLE and r["speedup_low"] and r["speedup_high"]]
    if not known:
        return None
    intervals = []
    for row in known[:_MAX_ROWS]:
        low, high = row["speedup_low"], row["speedup_high"]
        ties_text = counted(int(row["near_ties"]), "near-tie")
        interval = f"{speedup_text(low)} to {speedup_text(high)}"
        tip = f"{ties_text}; {speedup_cell(row)}, 95 % interval {interval}"
        label = f"{product_name(row)}: {ties_text}"
        intervals.append(Interval(label=label, name=TUNED, value=row["speedup"], low=low, high=high, tip=tip))
    return _interval_figure(
        "Products with the most near-ties: paired speed-up over the best library, 95 % interval",
        "speed-up",
        intervals,
        known,
        colours,
    )


def _interval_figure(
    title: str, label: str, intervals: Sequence[Interval], rows: Sequence[Row], colours: Colours
) -> Markup:
    values = [v for each in intervals for v in (each.low, each.high, each.value) if v is not None]
    axis = value_axis([*values, 1.0], label=label, text="{:.4g}".format, log=max(values) > 2 * min(values), zoom=1.01)
    chart = interval_chart(intervals, axis, colours, title=title, mark=1.0)
    header = (
        "problem",
        "near_ties",
        "runner_up",
        "runner_up_us",
        "us",
        "noise_pct",
        "speedup",
        "speedup_low",
        "speedup_high",
    )
    names = header
    table = Data(name="near_ties", header=header, rows=[[r[n] for n in names] for r in rows])
    more = len(rows) - len(intervals)
    note = tag("p", f"{more} more are in the CSV.", class_="note") if more > 0 else None
    return figure(title, join([chart, note]), table)


def _noisy_table(rows: Sequence[Row]) -> Markup | None:
    if not rows:
        return None
    worst = sorted(rows, key=lambda r: -r["p80_us"] / r["p20_us"])
    body = [
        (product_name(r), r["libtype"], time_text(r["p20_us"]), time_text(r["us"]), time_text(r["p80_us"]))
        for r in worst[:_MAX_ROWS]
    ]
    table = html_table(("product", "choice", "20 % quantile", "median", "80 % quantile"), body, text_columns=(0, 1))
    return join([tag("h3", f"Choices with noisy times: {len(rows)}"), table])


def wall_section(data: RunData, colours: Colours) -> Section | None:
    """The wall time of each resource by activity, and the builds."""
    worked = [each for each in data.resources if each.wall_s >= 0.05]
    if not worked and not data.builds:
        return None
    parts: list[Markup | None] = []
    if worked:
        parts.append(_wall_figure(worked, colours))
    if data.builds:
        parts.append(_builds_figure(data.builds, colours))
    session = "last session" if data.sessions > 1 else "run"
    lead = f"The {session} took {duration_text(data.wall_s)}." if data.wall_s else ""
    return Section(id="wall", title="Wall time", body=join(parts), lead=lead)


def _wall_figure(resources: Sequence[Resource], colours: Colours) -> Markup:
    """A bar per resource; of several alike, such as compile slots, the mean of one of them."""
    names: dict[str, None] = {}
    stacks = []
    for each in resources:
        shown: dict[str, float] = {}
        alike = _alike(each.name)
        for activity, spent_s in sorted(each.busy_s.items(), key=lambda item: -item[1]):
            key = activity if spent_s >= _SMALL * each.wall_s else _OTHER
            shown[key] = shown.get(key, 0.0) + spent_s / alike
        shown = {key: spent_s for key, spent_s in sorted(shown.items(), key=lambda item: item[0] == _OTHER) if spent_s}
        names |= dict.fromkeys(shown)
        stacks.append((each.name, {**shown, IDLE: each.idle_s / alike}))
    several = any(_alike(each.name) > 1 for each in resources)
    label = "seconds" + ("; of several alike (their number in brackets) the mean of one" if several else "")
    chart = horizontal_stacks(stacks, colours, title="wall time by resource", label=label, unit="s")
    rows = [
        [each.name, activity, spent_s]
        for each in resources
        for activity, spent_s in (*each.busy_s.items(), (IDLE, each.idle_s))
    ]
    table = Data(name="wall_time", header=("resource", "activity", "seconds"), rows=rows)
    ordered = sorted(names, key=lambda name: name == _OTHER)
    return figure("Wall time by resource", join([legend([*ordered, IDLE], colours, lines=False), chart]), table)


def _alike(name: str) -> int:
    """How many processes or slots a resource stands for: 15 in `compile slots (15)`."""
    found = re.search(r"\((\d{1,4})\)$", name)
    return max(1, int(found[1])) if found else 1


_COMPILE_BINS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


def _builds_figure(builds: Sequence[TimedBuild], colours: Colours) -> Markup:
    """A histogram of compile times, and counts of failures and of spills."""
    bins = [0] * (len(_COMPILE_BINS) + 1)
    for build in builds:
        bins[sum(build.compile_s >= edge for edge in _COMPILE_BINS)] += 1
    edges = ["0", *(f"{edge:g}" for edge in _COMPILE_BINS)]
    labels = [f"{edge}+" for edge in edges]
    used = [i for i, count in enumerate(bins) if count]
    stacks = [(labels[i], {"compile": float(bins[i])}) for i in range(used[0], used[-1] + 1)]
    chart = vertical_stacks(
        stacks,
        colours,
        title="compile times",
        label="builds",
        x_label="compile time in seconds, at least",
        height=200.0,
    )
    spent = [build.compile_s for build in builds]
    facts = [
        f"{counted(len(builds), 'build')}, {duration_text(sum(spent))} in all, {median(spent):.2f} s each (median)",
        counted(sum(bool(b.error) for b in builds), "failure"),
        f"{counted(sum(bool(b.spills) for b in builds), 'build')} with register spills",
    ]
    if registers := [b.registers for b in builds if b.registers]:
        facts.append(f"{min(registers)} to {max(registers)} registers")
    if shared := [b.shared_bytes for b in builds if b.shared_bytes]:
        facts.append(f"at most {bytes_text(max(shared))} of shared memory")
    rows = [[b.t_s, b.compile_s, b.registers, b.spills, b.shared_bytes, text_line(b.error, 100)] for b in builds]
    table = Data(name="builds", header=("t_s", "compile_s", "registers", "spills", "shared_bytes", "error"), rows=rows)
    return figure("Builds", join([chart, tag("p", "; ".join(facts) + ".", class_="note")]), table)


_STATES = (
    ("sm_mhz", "clock of the cores", "MHz"),
    ("memory_mhz", "clock of the memory", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "C"),
)


def conditions_section(data: RunData, colours: Colours) -> Section | None:
    """Clocks, power and temperature of each device over the run."""
    if not data.conditions:
        return None
    devices = list(dict.fromkeys(str(each["device"]) for each in data.conditions))
    names = {device: f"device {index}" for index, device in enumerate(devices)}
    charts = [chart for key, title, unit in _STATES if (chart := _state_chart(data, names, key, title, unit, colours))]
    if not charts:
        return None
    header = ("t_s", "device", *(key for key, _, _ in _STATES), "processes")
    rows = [[each.get(name) for name in header] for each in data.conditions]
    body = [
        legend([*names.values()], colours),
        figure(
            "State of the devices",
            tag("div", join(charts), class_="charts"),
            Data(name="conditions", header=header, rows=rows),
        ),
    ]
    lead = "Sampled at most every 5 s during the finals." + (
        "" if data.has_times else " This journal has no times: the axis counts samples."
    )
    return Section(id="conditions", title="Device conditions", body=join(body), lead=lead)


def _state_chart(
    data: RunData, names: Mapping[str, str], key: str, title: str, unit: str, colours: Colours
) -> Markup | None:
    lines = []
    for device, name in names.items():
        samples = [each for each in data.conditions if str(each["device"]) == device and each.get(key) is not None]
        points = [
            (float(i if each["t_s"] is None else each["t_s"]), float(each[key])) for i, each in enumerate(samples)
        ]
        if points:
            lines.append(Series(name=name, points=points))
    if not lines:
        return None
    label = "seconds of the run" if data.has_times else "sample"
    x = value_axis([x for line in lines for x, _ in line.points], label=label, text="{:g}".format)
    y = value_axis([v for line in lines for _, v in line.points], label=f"{title} ({unit})", text="{:g}".format)
    return line_chart(lines, x, y, colours, title=title, dots=len(lines[0].points) < 60)
