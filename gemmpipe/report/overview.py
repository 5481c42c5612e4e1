"""The first sections of a report: summary, where the choices help, time over M, and which backends won."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from gemmpipe.charts.axes import rows_axis, short_time, value_axis
from gemmpipe.charts.bars import vertical_stacks
from gemmpipe.charts.colours import FLOOR, LIBRARY, TUNED, Colours, legend
from gemmpipe.charts.lines import Series, line_chart
from gemmpipe.charts.markup import Content, html_table, join, tag
from gemmpipe.charts.page import Data, Section, attention, cards, figure
from gemmpipe.charts.table_charts import Cell, heat_map, scale_key, share_step, speedup_step
from gemmpipe.core.events import counted, verb
from gemmpipe.core.units import MISSING, count_text, duration_text, percent_text, time_text
from gemmpipe.report.attention import attention_lines, product_name, records
from gemmpipe.report.data import RunData
from gemmpipe.report.product_table import knob_text
from gemmpipe.report.results import (
    COMPARABLE,
    CONVERTED,
    RegimeResult,
    RunFigures,
    both_clocks_text,
    derived_rates_text,
    run_figures,
    spread,
)
from gemmpipe.report.run_folder import RUNNING
from gemmpipe.report.screen import MEMORY_TITLE, MEMORY_TITLES, memory_limits
from gemmpipe.report.speedup import is_conversion, library_cell, marked_speedup_text, range_text, speedup_cell

Rows = Sequence[Mapping[Hashable, Any]]
_FOR_ONE_ORDER = ": +kernel.key.x_scale=column tunes and compares for them"
Targets = Mapping[str, str]
"""By problem id: the id of the element with its candidates."""


def summary(data: RunData) -> Section:
    """The figures of the run and what deserves attention."""
    figures = run_figures(data.products)
    notes = [tag("p", note, class_="note") for note in (*_comparison_notes(data), *data.notes)]
    fine = "Nothing stands out." if figures.products else "Nothing to show yet."
    body = join([cards(_figure_cards(data, figures)), attention(attention_lines(data), fine), *notes])
    lead = (
        "Speed-ups are geometric means over the best library of the same run, paired by round; in brackets the least, "
        "the largest, and the number of products compared."
    )
    compared = any(regime.speedup for regime in figures.regimes)
    return Section(id="summary", title="Summary", body=body, lead=lead if compared else "")


def _figure_cards(data: RunData, figures: RunFigures) -> Iterator[tuple[str, str]]:
    """(value, label) of each known figure."""
    yield data_device(data), "device"
    of = "" if data.problems == figures.products else f" of {data.problems:,}"
    yield f"{figures.products:,}{of}", f"{verb(figures.products, 'product', 'products')} with a choice"
    if data.state == RUNNING:
        yield f"{len(data.trials):,}", f"{verb(len(data.trials), 'trial', 'trials')} so far"
    for regime in figures.regimes:
        if regime.speedup:
            yield marked_speedup_text(regime.speedup.mean, shared=regime.shared > 0), _regime_label(regime)
    if share := spread(row["share"] for row in records(data.products) if row["share"]):
        yield percent_text(share.mean), "share of the floor, geometric mean"
    if figures.products:
        yield f"{figures.own:,}", verb(figures.own, "choice is an own kernel", "choices are own kernels")
        yield f"{figures.near_ties:,}", f"{verb(figures.near_ties, 'product', 'products')} with near-ties"
    if figures.noise_pct is not None:
        yield percent_text(figures.noise_pct / 100), "timing noise, median"
    if data.wall_s:
        yield (
            duration_text(data.total_s or data.wall_s),
            "wall time" + (" of all sessions" if data.sessions > 1 else ""),
        )
    if temperatures := [float(c["temperature_c"]) for c in data.conditions if c.get("temperature_c")]:
        yield f"{min(temperatures):.0f} to {max(temperatures):.0f} C", "temperature of the device"


def data_device(data: RunData) -> str:
    """The devices of the choices, by name; of a run without a choice, the device that it began on."""
    names = [str(n) for n in data.products["device"].dropna().unique() if n]
    known = names or [str(n) for n in data.products["gfx"].dropna().unique()]
    known = known or [str(facts["device"]) for facts in data.provenance.values() if facts.get("device")]
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "") if known else "-"


def _regime_label(regime: RegimeResult) -> str:
    found = regime.speedup
    assert found is not None
    span = range_text(found, shared=regime.shared > 0)
    return f"speed-up, {regime.label} ({span}; {found.count} of {regime.products})"


def _comparison_notes(data: RunData) -> list[str]:
    """How products without a direct library path are compared, and what figures and times are not."""
    kinds = data.products["library"].value_counts()
    notes = [*_mixed_devices(data), *_back_to_back(data)]
    if padded := int(kinds.get("padded", 0)):
        notes.append(
            f"{counted(padded, 'product')} without a library path at this M: compared with the library at the M that "
            "callers pad to."
        )
    if stay := run_figures(data.products).stay:
        notes.append(
            f"{counted(stay, 'product')} {verb(stay, 'stays', 'stay')} with the library, whose path is the fastest: "
            "not in the speed-ups."
        )
    if converted := int(kinds.get(CONVERTED, 0)):
        notes.append(
            f"{counted(converted, 'product')} that libraries compute only after a conversion of the operands: not in "
            "the speed-ups."
        )
    if _copies_scales(data):
        notes.append(
            "Choices and libraries are timed with the block scales of x in both memory orders, and the slower order "
            "counts. A library that reads one order copies the scales of the other: this copy is in its time, about "
            "2 us a call on an H200. Callers that write the scales in the library's order gain less"
            f"{_FOR_ONE_ORDER if any(c.name == 'x_scale' for c in data.family.key_columns) else ''}."
        )
    if not data.products["share"].notna().any() and len(data.products):
        notes.append("No floor: no option of the group roofline has the peak rates of this device.")
    for text in filter(None, (derived_rates_text(data.products), both_clocks_text(data.products["policy"]))):
        notes.append(f"{text[0].upper()}{text[1:]}.")
    return notes


def _mixed_devices(data: RunData) -> Iterator[str]:
    """The note of tables of several devices."""
    names = [str(name) for name in data.products["device"].dropna().unique() if name]
    if len(names) > 1:
        yield f"The figures above are over the products of all {len(names)} devices together."


_SEPARATE = "separate"
"""The part of the policy of times on a GPU with another kernel before each launch."""


def _back_to_back(data: RunData) -> Iterator[str]:
    """The note of times on a GPU from before launches were separate."""
    policies = (str(row["policy"] or "").split() for row in records(data.products))
    if count := sum("graph" in words and _SEPARATE not in words for words in policies):
        yield (
            f"{counted(count, 'product')} timed with launches of one kernel back to back, before launches were "
            "separate. Such launches overlap as they hardly do in a model; retune=true times with another kernel "
            "before each launch."
        )


def _copies_scales(data: RunData) -> bool:
    """True if a compared product has block scales of x that callers may pass in either memory order."""
    products = data.products
    return bool((products["library"].isin(COMPARABLE) & products["either_order"].astype(bool)).any())


def where_it_helps(data: RunData, targets: Targets) -> Section | None:
    """Heat maps of speed-up and of the share of the floor, by shape and M, and what more weight memory would gain."""
    rows = records(data.products)
    speedups = [r for r in rows if r["speedup"]]
    shares = [r for r in rows if r["share"]]
    maps = []
    if not all(is_conversion(row) for row in speedups):
        maps.append(_speedup_map(data.shape_title, speedups, targets))
    if shares:
        maps.append(_share_map(data.shape_title, shares, targets))
    lead = f"One row per {data.shape_title}, one column per M; blue is good, orange is bad." + (
        " A click shows the candidates of a product." if targets else " Point at a cell for the choice and its times."
    )
    body = [*maps, _memory_table(data)] if data.memory_options else maps
    return Section(id="where", title="Where it helps", body=join(body), lead=lead if maps else "") if body else None


def _memory_table(data: RunData) -> Markup:
    """Gains of each limit on the weights' memory, as on the last screen of a run."""
    limits, left_out = memory_limits(data.memory_options)
    gaining = len({row["problem"] for row in data.memory_options})
    title = f"{MEMORY_TITLE[0].upper()}{MEMORY_TITLE[1:]}: {gaining} of {counted(len(data.products), 'product')}"
    note = tag("p", f"{left_out} more limits are in the CSV.", class_="note") if left_out else None
    header = ("problem", "libtype", "config", "us", "chosen_us", "speedup", "extra_weight_bytes", "extra_weight_pct")
    rows = [[row[name] for name in header] for row in data.memory_options]
    table = Data(name="memory_options", header=header, rows=rows)
    return figure(title, join([html_table(MEMORY_TITLES, limits, text_columns=(2, 3, 4)), note]), table)


def _speedup_map(title: str, rows: Rows, targets: Targets) -> Markup:
    cells: dict[str, dict[int, Cell]] = {}
    for row in rows:
        tip = f"{product_name(row)}: {_choice_tip(row)}; best library {time_text(row['library_us'])} ({row['library']})"
        cells.setdefault(str(row["shape"]), {})[int(row["rows"])] = Cell(
            value=row["speedup"],
            text=speedup_cell(row).strip("()").removesuffix("x"),
            tip=tip,
            target=targets.get(str(row["problem"]), ""),
            pale=row["library"] not in COMPARABLE,
        )
    table = heat_map(
        list(cells.items()),
        _columns(rows),
        speedup_step,
        corner=f"{title} \\ M",
        kind="speedup",
        caption="Speed-up over the best library",
    )
    pale = any(row["library"] not in COMPARABLE for row in rows)
    key = [
        scale_key("speedup", "1/3", "1", "3 and more"),
        tag("p", "Grey: over a conversion of the operands, not counted.", class_="note") if pale else None,
    ]
    header = ("problem", "M", "shape", "choice_us", "library_us", "library", "speedup", "speedup_low", "speedup_high")
    table_rows = [
        [
            r["problem"],
            r["rows"],
            r["shape"],
            r["us"],
            r["library_us"],
            r["library"],
            r["speedup"],
            r["speedup_low"],
            r["speedup_high"],
        ]
        for r in rows
    ]
    return figure(
        "Speed-up over the best library", join([table, *key]), Data(name="speedup", header=header, rows=table_rows)
    )


def _share_map(title: str, rows: Rows, targets: Targets) -> Markup:
    cells: dict[str, dict[int, Cell]] = {}
    for row in rows:
        cells.setdefault(str(row["shape"]), {})[int(row["rows"])] = Cell(
            value=row["share"],
            text=f"{100 * row['share']:.0f}",
            tip=f"{product_name(row)}: {_choice_tip(row)}; floor {time_text(row['floor_us'])}",
            target=targets.get(str(row["problem"]), ""),
        )
    table = heat_map(
        list(cells.items()),
        _columns(rows),
        share_step,
        corner=f"{title} \\ M",
        kind="share",
        caption="Share of the floor reached, in %",
    )
    note = tag(
        "p",
        "The floor: bytes or operations at the device's peak rates, whichever takes longer, plus a launch.",
        class_="note",
    )
    data = Data(
        name="share_of_floor",
        header=("problem", "M", "shape", "choice_us", "floor_us", "share"),
        rows=[[r["problem"], r["rows"], r["shape"], r["us"], r["floor_us"], r["share"]] for r in rows],
    )
    return figure(
        "Share of the floor reached, in %", join([table, scale_key("share", "40 %", "70 %", "100 %"), note]), data
    )


def _columns(rows: Rows) -> list[int]:
    return sorted({int(row["rows"]) for row in rows})


def _choice_tip(row: Mapping[Hashable, Any]) -> str:
    spread_text = (
        f" ({time_text(row['p20_us'])} to {time_text(row['p80_us'])})" if row["p20_us"] and row["p80_us"] else ""
    )
    return f"{row['libtype']} {time_text(row['us'])}{spread_text}"


def time_over_m(data: RunData, colours: Colours, most_shapes: int) -> Section | None:
    """A chart per shape: the choice, the best library and the floor over M, with the spread of the choice's samples."""
    rows = records(data.products)
    if not rows:
        return None
    shapes = by_shape(rows)
    drawn = [shape_chart(shape, part, colours) for shape, part in list(shapes.items())[:most_shapes]]
    left_out = len(shapes) - len(drawn)
    note = tag("p", f"{left_out:,} more shapes are left out here.", class_="note") if left_out > 0 else None
    header = (
        "problem",
        "M",
        "shape",
        "backend",
        "config",
        "us",
        "p20_us",
        "p80_us",
        "library_us",
        "library",
        "floor_us",
    )
    names = (
        "problem",
        "rows",
        "shape",
        "libtype",
        "config",
        "us",
        "p20_us",
        "p80_us",
        "library_us",
        "library",
        "floor_us",
    )
    table = Data(name="time_over_m", header=header, rows=[[r[n] for n in names] for r in rows])
    grid = tag("div", join(drawn), class_="charts")
    lead = (
        "Logarithmic axes; ticks at the Ms of the run. The band is from the 20 % to the 80 % quantile of the samples."
    )
    choices = _all_choices(data.shape_title, rows)
    body = join([legend(drawn_names(rows), colours), figure("Time of one call", grid, table), note, choices])
    return Section(id="time", title="Time over M", body=body, lead=lead)


def by_shape(rows: Rows) -> dict[str, list[Mapping[Hashable, Any]]]:
    """The products of each shape, in their order."""
    shapes: dict[str, list[Mapping[Hashable, Any]]] = {}
    for row in rows:
        shapes.setdefault(str(row["shape"]), []).append(row)
    return shapes


def drawn_names(rows: Rows) -> list[str]:
    """The names of the lines of time over M."""
    library, floor = any(r["library"] in COMPARABLE for r in rows), any(r["floor_us"] for r in rows)
    return [TUNED, *([LIBRARY] if library else []), *([FLOOR] if floor else [])]


def shape_chart(shape: str, rows: Rows, colours: Colours) -> Markup:
    """Time over M of one shape: the choice with the spread of its samples, the best library, the floor."""
    rows = sorted(rows, key=lambda r: r["rows"])
    lines = [
        Series(
            name=TUNED,
            points=[(r["rows"], r["us"]) for r in rows],
            band=[(r["rows"], r["p20_us"], r["p80_us"]) for r in rows if r["p20_us"] and r["p80_us"]],
            tips=[f"{product_name(r)}: {_choice_tip(r)}; {r['config']}" for r in rows],
        )
    ]
    library = [r for r in rows if r["library"] in COMPARABLE and r["library_us"]]
    if library:
        tips = [f"{product_name(r)}: best library {time_text(r['library_us'])} ({r['library']})" for r in library]
        lines.insert(0, Series(name=LIBRARY, points=[(r["rows"], r["library_us"]) for r in library], tips=tips))
    if floor := [(r["rows"], r["floor_us"]) for r in rows if r["floor_us"]]:
        lines.append(Series(name=FLOOR, points=floor))
    times = [us for line in lines for _, us in line.points] + [
        us for line in lines for row in line.band for us in row[1:]
    ]
    y = value_axis(times, label="time of one call", text=short_time, log=True)
    chart = line_chart(lines, rows_axis(int(r["rows"]) for r in rows), y, colours, title=f"time over M, {shape}")
    return figure(shape, chart)


_MAX_CHOICES = 400


def _all_choices(title: str, rows: Rows) -> Markup:
    """The table of the choices, folded."""
    shown = rows[:_MAX_CHOICES]
    compared = [r["library"] in COMPARABLE for r in shown]
    columns: list[tuple[str, list[Content]]] = [
        ("M", [count_text(int(r["rows"])) for r in shown]),
        (title, [r["shape"] for r in shown]),
        ("choice", [r["libtype"] for r in shown]),
        ("knobs", [tag("code", knob_text(r["config"])) for r in shown]),
        ("time", [time_text(r["us"]) for r in shown]),
        ("best library", [library_cell(r) if c else MISSING for r, c in zip(shown, compared, strict=True)]),
        ("speed-up", [speedup_cell(r) if c else MISSING for r, c in zip(shown, compared, strict=True)]),
        ("of the floor", [percent_text(r["share"]) for r in shown]),
    ]
    columns = [(name, cells) for name, cells in columns if set(cells) != {MISSING}]
    more = f" (the first {_MAX_CHOICES} of {len(rows):,})" if len(rows) > _MAX_CHOICES else ""
    body = list(zip(*(cells for _, cells in columns), strict=True))
    table = html_table([name for name, _ in columns], body, text_columns=(1, 2, 3))
    return tag("details", tag("summary", f"All choices as a table{more}"), table)


def winners(data: RunData, colours: Colours) -> Section | None:
    """How many products each backend won, by M."""
    counts: dict[int, dict[str, int]] = {}
    for row in records(data.products):
        by_backend = counts.setdefault(int(row["rows"]), {})
        by_backend[str(row["libtype"])] = by_backend.get(str(row["libtype"]), 0) + 1
    if not counts:
        return None
    names = sorted(
        {name for part in counts.values() for name in part},
        key=lambda n: (-sum(p.get(n, 0) for p in counts.values()), n),
    )
    stacks = [(f"{m:,}", {n: float(part[n]) for n in names if n in part}) for m, part in sorted(counts.items())]
    chart = vertical_stacks(stacks, colours, title="products won by backend and M", label="products", x_label="M")
    table = Data(
        name="winners",
        header=("M", *names),
        rows=[[m, *(part.get(n, 0) for n in names)] for m, part in sorted(counts.items())],
    )
    body = join([legend(names, colours, lines=False), figure("Products won, by M", chart, table)])
    return Section(id="winners", title="Which backend won", body=body)
