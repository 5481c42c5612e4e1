"""A run or a table as text: the choices of all products, the way through the space, time, and what is not done."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gemmpipe.core.errors import printable
from gemmpipe.core.events import counted, verb
from gemmpipe.core.files import is_number
from gemmpipe.core.text_table import Column, aligned
from gemmpipe.core.units import MIN_SHOWN_S, duration_text, percent_text, time_text
from gemmpipe.report.attention import attention_lines, records
from gemmpipe.report.data import TABLE, RunData
from gemmpipe.report.diff_text import knobs_legend, knobs_text
from gemmpipe.report.lines import wrapped
from gemmpipe.report.remains import missing
from gemmpipe.report.results import RegimeResult, both_clocks_text, derived_rates_text, run_figures
from gemmpipe.report.speedup import library_cell, marked_speedup_text, range_text, speedup_cell
from gemmpipe.report.trial_frame import by_problem

if TYPE_CHECKING:
    from gemmpipe.family import KeyColumn

_MAX_REASONS = 12
_MAX_OF_A_KIND = 3
"""Lines of one kind of what is not done."""


def run_lines(data: RunData, width: int) -> Iterator[str]:
    """A whole run or table in lines of at most `width` characters; sections are separated by empty lines."""
    sections = (
        head_lines(data),
        figure_lines(data, width),
        choice_lines(data, width),
        space_lines(data),
        resource_lines(data),
        not_done_lines(data),
        file_lines(data),
    )
    first = True
    for section in sections:
        lines = [line for text in section for line in _folded(printable(text), width)]
        if lines and not first:
            yield ""
        first = first and not lines
        yield from lines


def _folded(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` characters, all but the first indented by four more."""
    return wrapped(text, width, " " * (len(text) - len(text.lstrip()) + 4))


def head_lines(data: RunData) -> Iterator[str]:
    """The kernel, device, state, origin and command."""
    devices = ", ".join(dict.fromkeys(str(row["device"]) for row in records(data.products) if row["device"]))
    state = "tuned table" if data.state == TABLE else f"run, {data.run_text}"
    total_s = data.total_s or data.wall_s
    wall = f" in {duration_text(total_s)}" if total_s else ""
    code = f", exit code {data.exit_code}" if data.exit_code else ""
    yield f"{data.family.name}  {devices or 'device unknown'}  {state}{wall}{code}"
    started = f", started {data.started[:16].replace('T', ' ')} UTC" if data.started and data.state != TABLE else ""
    yield f"{data.origin}{started}"
    if data.command:
        yield data.command
    for note in data.notes:
        yield f"note: {note}"


def figure_lines(data: RunData, width: int) -> Iterator[str]:
    """The regimes of M, and what deserves attention."""
    if not len(data.products):
        return
    figures = run_figures(data.products)
    yield from aligned(regime_columns_of(figures.regimes), width)
    winners = ", ".join(f"{name} {count:,}" for name, count in figures.winners)
    yield f"chosen: {winners}"
    if figures.stay:
        stay = verb(figures.stay, "stays", "stay")
        yield f"{counted(figures.stay, 'product')} {stay} with the library, whose path is the fastest: not compared"
    if derived := derived_rates_text(data.products):
        yield derived
    for text in attention_lines(data):
        yield f"look at: {text}"


def regime_columns_of(regimes: Sequence[RegimeResult]) -> list[Column]:
    """The columns of the table of regimes: speed-up over the library, share of the floor."""
    means = (marked_speedup_text(r.speedup.mean if r.speedup else None, shared=r.shared > 0) for r in regimes)
    spreads = (range_text(r.speedup, shared=r.shared > 0) for r in regimes)
    shares = (percent_text(each.floor_share.mean if each.floor_share else None) for each in regimes)
    return [
        Column(title="rows", cells=tuple(each.label for each in regimes), is_text=True),
        Column(title="products", cells=tuple(f"{each.products:,}" for each in regimes)),
        Column(
            title="compared",
            cells=tuple(f"{each.speedup.count if each.speedup else 0:,}" for each in regimes),
            importance=1,
        ),
        Column(title="over the best library", cells=tuple(means)),
        Column(title="least to most", cells=tuple(spreads), importance=2),
        Column(title="of the floor", cells=tuple(shares), importance=3),
    ]


def choice_lines(data: RunData, width: int) -> list[str]:
    """All products with their choices, as a table."""
    rows = records(data.products)
    if not rows:
        return ["no product has a choice"]
    return [*aligned(choice_columns(data, rows), width), *legend_lines(rows)]


def legend_lines(rows: Sequence[Mapping[Any, Any]]) -> list[str]:
    """The meaning of the abbreviated knobs of these choices, and of their times, where there is something to say."""
    legend = knobs_legend(str(row["config"] or "") for row in rows)
    return [f"({text})" for text in (legend, both_clocks_text([row["policy"] for row in rows])) if text]


def choice_columns(data: RunData, rows: Sequence[Mapping[Any, Any]]) -> list[Column]:
    """The columns of the table of choices: the key where it differs, the times, the candidate."""

    def texts(title: str, cells: Sequence[str], importance: int = 0) -> Column:
        return Column(title=title, cells=tuple(cells), is_text=True, importance=importance)

    def numbers(title: str, cells: Sequence[str], importance: int = 0) -> Column:
        return Column(title=title, cells=tuple(cells), importance=importance)

    return [
        *(numbers(name, [_cell(row[name]) for row in rows]) for name in _key_columns(data, rows)),
        numbers("time", [time_text(row["us"]) for row in rows]),
        numbers("library", list(map(library_cell, rows)), 5),
        numbers("speed-up", list(map(speedup_cell, rows)), 6),
        numbers("floor", [percent_text(row["share"]) for row in rows], 3),
        numbers("noise", [_noise_text(row["noise_pct"]) for row in rows], 2),
        numbers("ties", [_cell(row["near_ties"]) for row in rows], 1),
        texts("chosen", [f"{row['libtype']} {knobs_text(str(row['config'] or ''))}" for row in rows], 4),
    ]


def _key_columns(data: RunData, rows: Sequence[Mapping[Any, Any]]) -> list[str]:
    """The rows and sizes of a product, and other key columns that differ between products."""
    sizes = [data.family.rows_column, *data.family.sizes]
    others = [column.name for column in data.family.key_columns if column.name not in sizes]
    varied = [name for name in others if len({str(row[name]) for row in rows}) > 1]
    return list(dict.fromkeys([*sizes, *varied]))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).removeprefix("torch.")


def _noise_text(noise_pct: float | None) -> str:
    return "-" if noise_pct is None else percent_text(noise_pct / 100)


def space_lines(data: RunData) -> Iterator[str]:
    """The way from all configurations to the choices."""
    tried = {(each.trial.problem, each.trial.candidate) for each in data.trials}
    excluded = sum(each.count for each in data.excluded)
    if not tried and not excluded:
        return
    left = excluded + len(tried)
    yield f"space: {counted(max(left, data.recorded), 'configuration')} over all products"
    if data.recorded > left:
        yield f"  {data.recorded:,} -> {left:,}  recorded, but not requested by the search"
    for each in data.excluded[:_MAX_REASONS]:
        yield f"  {left:,} -> {left - each.count:,}  {each.backend}: {each.reason or each.status}"
        left -= each.count
    if rest := sum(each.count for each in data.excluded[_MAX_REASONS:]):
        yield f"  {left:,} -> {left - rest:,}  {len(data.excluded) - _MAX_REASONS} other reasons"
    parts = by_problem(data.trials)
    timed = sum(len(part.times_us()) for part in parts.values())
    finals = sum(len({each.trial.candidate for each in part.finals}) for part in parts.values())
    yield f"  {len(tried):,} tried, {timed:,} timed, {finals:,} in the finals, {len(data.products):,} chosen"


def resource_lines(data: RunData) -> Iterator[str]:
    """The wall time of each resource by activity, the longest first."""
    for each in (resource for resource in data.resources if resource.wall_s >= MIN_SHOWN_S):
        busy = sorted(each.busy_s.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in busy if seconds >= MIN_SHOWN_S)
        of_all = f"idle {duration_text(each.idle_s)} of {duration_text(each.wall_s)}"
        yield f"{each.name}: {spent or 'nothing to do'}; {of_all}"


def not_done_lines(data: RunData) -> Iterator[str]:
    """Omissions of the run, and the option that changes each."""
    found = list(missing(data))
    if found:
        yield "not done"
    kinds = Counter(what for what, _, _ in found)
    shown: Counter[str] = Counter()
    for what, which, change in found:
        shown[what] += 1
        if shown[what] <= _MAX_OF_A_KIND:
            yield f"  {what}: {which}{f' ({change})' if change else ''}"
        elif shown[what] == kinds[what]:
            yield f"  {what}: {kinds[what] - _MAX_OF_A_KIND:,} more; json=true lists them"


def file_lines(data: RunData) -> Iterator[str]:
    """The files that the run wrote for engines."""
    for name in data.files if data.state != TABLE else ():
        yield f"file  {name}"


def as_object(data: RunData) -> dict[str, object]:
    """A run or a table for JSON; times in microseconds."""
    return {
        "family": data.family.name,
        "origin": data.origin,
        "state": data.state,
        "exit_code": data.exit_code,
        "started": data.started,
        "wall_s": data.wall_s,
        "command": data.command,
        "notes": list(data.notes),
        "attention": attention_lines(data),
        "products": [product_object(row, data) for row in records(data.products)],
        "excluded": [
            {"backend": e.backend, "reason": e.reason, "status": e.status, "configurations": e.count}
            for e in data.excluded
        ],
        "resources": [
            {"name": r.name, "wall_s": r.wall_s, "idle_s": r.idle_s, "busy_s": dict(r.busy_s)} for r in data.resources
        ],
        "not_done": [{"what": what, "which": which, "change": change} for what, which, change in missing(data)],
        "files": list(data.files),
    }


def product_object(row: Mapping[Any, Any], data: RunData) -> dict[str, object]:
    """One choice for JSON."""
    columns = data.family.key_columns
    results = ("us", "p20_us", "p80_us", "library", "library_us", "speedup", "speedup_low", "speedup_high")
    others = ("floor_us", "share", "near_ties", "runner_up", "runner_up_us", "noise_pct", "policy", "run_id", "device")
    return {
        **{column.name: _key_value(column, row[column.name]) for column in columns if row[column.name] is not None},
        "backend": row["libtype"],
        "config": _knobs(row["config"]),
        **{name: plain(row.get(name)) for name in (*results, *others)},
    }


def _key_value(column: "KeyColumn", value: object) -> object:
    """A key's value as its kind: runs are read as text."""
    text = str(value)
    if column.kind == "int":
        return int(float(text)) if is_number(text) else text
    return text == "True" if column.kind == "bool" else text.removeprefix("torch.")


def _knobs(config: object) -> object:
    try:
        return json.loads(str(config)) if config else None
    except (ValueError, RecursionError):
        return str(config)


def plain(value: object) -> object:
    """A value of a table for JSON: numbers of numpy as those of Python, whole ones without a fraction."""
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, float):
        if item != item:
            return None
        return int(item) if item.is_integer() and abs(item) < 2**53 else item
    return item
