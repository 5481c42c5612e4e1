"""The last screen of a run: what was tuned, how much faster it is, what to look at, the files and the next commands.

Also the table of choices, and what more memory for weights would gain. Everything is text with styles; the caller
prints it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gemmpipe.core.events import counted, verb
from gemmpipe.core.shell import shell_join
from gemmpipe.core.text_table import Column, aligned, cut
from gemmpipe.core.units import (
    MISSING,
    bytes_text,
    flops_text,
    key_text,
    percent_text,
    ranges_text,
    three_digits,
    time_text,
)
from gemmpipe.report.lines import BAD, DIM, GOOD, HEAD, KEY, KNOB_NAMES, WARN, Line, marked_knobs, styled
from gemmpipe.report.results import (
    CONVERTED,
    LOW_SHARE,
    PADDED,
    RegimeResult,
    RunFigures,
    both_clocks_text,
    derived_rates_text,
    is_shared,
    spread,
)
from gemmpipe.report.speedup import (
    ABOUT,
    is_conversion,
    is_equal,
    library_cell,
    no_gain_text,
    paired_text,
    shared_text,
    speedup_cell,
    spread_text,
)

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family

_MAX_ROWS, _TOP, _BOTTOM = 30, 5, 10
_BAR = 12
_BETWEEN = "; "
"""Between commands of one line: pasted as a whole, a shell runs one after the other."""
_SPEEDUP_TITLE = "speed-up over the best library (geomean, range, products)"
MEMORY_TITLE = "faster with more memory for weights (stages.select.max_extra_weight_pct=LIMIT)"
MEMORY_TITLES = ("LIMIT", "faster", "speed-up", "a call", "memory per weight")
_MAX_KEY = 24  # characters of a cell of the key: a routing may be the loads of all experts
_MAX_LIMITS = 5


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of the last screen besides the figures of the products."""

    kernel: str
    shapes: str
    """The source of the problems as typed; empty if the default was used."""
    device: str
    problems: int
    """All problems of the run, solved or not."""
    duration: str
    """The end of the run and its time: `done in 47.5 s`."""
    reused: str = ""
    """The table whose rows are shown, if nothing had to be tuned."""
    unsolved: Sequence[str] = field(default=())
    is_stopped: bool = False
    """True if the run ended before its last problem."""


def screen_lines(facts: RunFacts, figures: RunFigures, products: "pd.DataFrame", family: "Family") -> list[Line]:
    """The head, the speed-up by regime of M, and what to look at."""
    head = [part for part in (facts.shapes, facts.device) if part]
    lines = [styled((facts.kernel, HEAD), "  ", "  ".join(head), "  ", (facts.duration, GOOD))]
    lines.append(_solved_line(facts, figures))
    if any(regime.speedup or regime.floor_share for regime in figures.regimes):
        lines += [Line(text=""), *_regime_lines(figures.regimes)]
    for text in filter(None, (derived_rates_text(products), both_clocks_text(products["policy"]))):
        lines.append(styled("  ", (text, DIM)))
    lines += _library_lines(figures, products)
    if no_gain := no_gain_text(products.to_dict("records")):
        lines.append(styled("  ", (f"{no_gain}; retune=true times them again", WARN)))
    if paired := paired_text(products.to_dict("records")):
        lines.append(styled("  ", (paired, DIM)))
    if shared := shared_text(products["policy"]):
        lines.append(styled("  ", (f"{shared}; retune=true repeats them", WARN)))
    return [*lines, *_attention_lines(facts, figures, products, family)]


def _solved_line(facts: RunFacts, figures: RunFigures) -> Line:
    solved, total = figures.products, facts.problems
    if not solved and not facts.unsolved:
        if facts.is_stopped:
            text = f"stopped before all of {counted(total, 'problem')} were timed; the engine's files have the products"
            return styled((f"{text} of which all Ms were", BAD))
        return styled(f"{counted(total, 'problem')}: choices for ranges of M alone, in the engine's files")
    if facts.reused:
        first = f"{solved} of {counted(total, 'problem')} tuned already"
    else:
        first = f"{solved} of {counted(total, 'problem')} tuned, every result checked"
    winners = ", ".join(f"{name} {number}" for name, number in figures.winners)
    parts = [f"{figures.own} by own kernels" + (f"; chosen: {winners}" if winners else "")]
    if figures.noise_pct is not None:
        about = ABOUT if figures.shared else ""  # disturbed rounds predict the next ones badly
        parts.append(f"noise {about}{three_digits(figures.noise_pct)} %")
    style = GOOD if solved == total else BAD if facts.unsolved else WARN  # a budget that ends is no fault
    return styled((first, style), f"; {'; '.join(parts)}")


def _regime_lines(regimes: Sequence[RegimeResult]) -> list[Line]:
    """A row per regime: speed-up with its range, and the share of the floor with a bar where rates are known."""
    label_width = max(len(regime.label) for regime in regimes)
    spreads = [spread_text(regime.speedup, shared=regime.shared > 0) for regime in regimes]
    spread_width = max(map(len, spreads))
    texts = [
        f"{text.ljust(spread_width)}  {regime.speedup.count if regime.speedup else 0:,} of {regime.products:,}"
        for regime, text in zip(regimes, spreads, strict=True)
    ]
    width = max(len(_SPEEDUP_TITLE) - label_width - 4, *(len(text) for text in texts))
    has_floor = any(regime.floor_share for regime in regimes)
    lines = [styled((_SPEEDUP_TITLE, HEAD), *([("  share of the floor", HEAD)] if has_floor else []))]
    for regime, text in zip(regimes, texts, strict=True):
        mean = regime.speedup.mean if regime.speedup is not None else None
        style = "" if mean is None else GOOD if mean >= 1.005 else BAD if mean < 0.995 else DIM
        style = WARN if style and regime.shared else style
        cells: list[str | tuple[str, str]] = ["  ", regime.label.ljust(label_width), "  "]
        shown = text.ljust(width) if regime.floor_share is not None else text
        cells += [(shown, style)] if style else [shown]
        if regime.floor_share is not None:
            share = regime.floor_share.mean
            filled = round(_BAR * min(1.0, share))
            cells += [f"  {percent_text(share):>5} ", ("#" * filled, GOOD), ("." * (_BAR - filled), DIM)]
        lines.append(styled(*cells))
    return lines


def _library_lines(figures: RunFigures, products: "pd.DataFrame") -> list[Line]:
    """Products without a speed-up over a library for the same product."""
    lines = []
    if figures.stay:
        part = products[products["stays"].astype(bool) & (products["library"] != CONVERTED)]
        ms = ranges_text([int(m) for m in part["rows"]])
        stay = verb(figures.stay, "stays", "stay")
        text = f"{counted(figures.stay, 'product')} (M {ms}) {stay} with the library: its path is the fastest"
        lines.append(styled("  ", (text, DIM)))
    padded = products[products["library"] == PADDED]
    if len(padded):
        ms = ranges_text([int(m) for m in padded["rows"]])
        text = f"{counted(len(padded), 'product')} (M {ms}) against the library at the multiple of 4 that it pads M to"
        lines.append(styled("  ", (text, DIM)))
    if figures.converted is not None or figures.stay_converted:
        part = products[products["library"] == CONVERTED]
        lines.append(styled("  ", (_converted_text(figures, part), DIM)))
    if figures.without_library:
        lines.append(styled("  ", (f"{counted(figures.without_library, 'product')} without a library's time", DIM)))
    return lines


def _converted_text(figures: RunFigures, part: "pd.DataFrame") -> str:
    """The products (`part`) that torch alone computes, from copies in a wider type: a choice among its methods."""
    ms = ranges_text([int(m) for m in part["rows"]])
    apart = ", not counted above" if any(regime.speedup for regime in figures.regimes) else ""
    text = f"{counted(len(part), 'product')} (M {ms}) that no library multiplies as stored{apart}"
    if figures.converted is None or is_equal(figures.converted):
        return f"{text}: torch converts the operands"
    gain = spread_text(figures.converted, shared=any(map(is_shared, part["policy"])))
    text = f"{text}: {gain} over torch on converted operands"
    if not figures.stay_converted:
        return text
    stay = verb(figures.stay_converted, "stays", "stay")
    return f"{text} for {figures.converted.count:,}, {figures.stay_converted:,} {stay} with torch's conversion"


def _attention_lines(facts: RunFacts, figures: RunFigures, products: "pd.DataFrame", family: "Family") -> list[Line]:
    parts = []
    if facts.unsolved:
        parts.append(f"{counted(len(facts.unsolved), 'problem')} without a valid candidate")
    if figures.worst is not None and figures.worst[1] < LOW_SHARE:
        row = products[products["problem"] == figures.worst[0]].iloc[0]
        parts.append(f"{_size_text(row, family)} reaches {percent_text(figures.worst[1])} of the floor")
    if figures.near_ties:
        parts.append(f"{counted(figures.near_ties, 'choice')} near a tie")
    if figures.noisy:
        parts.append(f"{counted(figures.noisy, 'choice')} with times that vary by half: is the machine busy?")
    return [styled(("look at", WARN), f"  {'; '.join(parts)}")] if parts else []


def _size_text(row: "pd.Series[Any]", family: "Family") -> str:
    return "x".join(str(row[name]) for name in (family.rows_column, *family.sizes))


def command_lines(run: str, width: int, *, exports: Sequence[str] = (), shipped: bool = False) -> list[Line]:
    """The next commands for a run, in lines of at most `width` characters where they fit.

    `run`: as typed, quoted for a shell; `exports`: targets of `gemmpipe export`; `shipped`: a table for the device is
    shipped.
    """
    commands = [f"gemmpipe show {run}", f"gemmpipe report {run}"]
    commands += [f"gemmpipe diff {run} shipped"] if shipped else []
    return see_lines([*commands, *(f"gemmpipe export {run} {target}" for target in exports)], width)


def see_lines(commands: Sequence[str], width: int) -> list[Line]:
    """Commands to look further, side by side where they fit, each whole."""
    lines: list[list[str | tuple[str, str]]] = []
    room = 0
    for command in commands:
        if lines and len(command) + len(_BETWEEN) <= room:
            lines[-1] += [_BETWEEN, (command, KEY)]
            room -= len(_BETWEEN) + len(command)
        else:
            lead = "      " if lines else "see   "
            lines.append([lead, (command, KEY)])
            room = width - len(lead) - len(command)
    return [replace(styled(*parts), is_whole=True) for parts in lines]


def choice_lines(products: "pd.DataFrame", family: "Family", width: int, *, full: bool = False) -> list[str]:
    """The table of choices, of at most `width` columns: sizes, choice, time, library, speed-up, share of the floor.

    Before the choice is cut, sizes are left out that are the same in all rows.

    All rows up to 30, or with `full`; else the five with the most speed-up and the ten with the least.
    """
    if not len(products):
        return []
    shown, gap = products, None
    if len(products) > _MAX_ROWS and not full:
        ranked = products.sort_values("speedup", ascending=False, na_position="first", kind="stable")
        shown, gap = ranked.iloc[[*range(_TOP), *range(-_BOTTOM, 0)]], _TOP
    lines = aligned(_choice_columns(shown, family), width)
    if gap is not None:
        left = len(products) - len(shown)
        lines.insert(1 + gap, f"... {counted(left, 'row')} between (verbose=true, or gemmpipe show last, has all) ...")
    return lines


def _choice_columns(shown: "pd.DataFrame", family: "Family") -> list[Column]:
    conditions = [c.name for c in family.key_columns if c.condition and c.name in shown]
    differing = [name for name in conditions if shown[name].nunique(dropna=False) > 1]  # such as several routings
    names = (family.rows_column, *family.sizes, *differing)
    rows = shown.to_dict("records")
    same = {name for name in family.sizes if len(shown) > 1 and shown[name].nunique(dropna=False) == 1}
    columns = [
        Column(
            title=name,
            cells=tuple(cut(key_text(row[name]), _MAX_KEY) for row in rows),
            importance=4 if name in same else 0,
        )
        for name in names
    ]
    columns += [
        Column(title="time", cells=tuple(time_text(row["us"]) for row in rows)),
        Column(title="rate", cells=tuple(_rate_text(row["tflops"]) for row in rows), importance=1),
    ]
    if not all(is_conversion(row) for row in rows):
        columns += [
            Column(title="library", cells=tuple(library_cell(row) for row in rows), importance=3),
            Column(title="speed-up", cells=tuple(speedup_cell(row) for row in rows)),
        ]
    if shown["floor_share"].notna().any():
        cells = tuple(percent_text(row["floor_share"]) for row in rows)
        columns.append(Column(title="of floor", cells=cells, importance=2))
    choices = tuple(f"{row['libtype']} {short_config(row['config'])}".rstrip() for row in rows)
    return [*columns, Column(title="choice", cells=choices, is_text=True)]


def _rate_text(tflops: float | None) -> str:
    return MISSING if tflops is None or tflops != tflops else flops_text(tflops * 1e12)


def short_config(config: object) -> str:
    """Knobs for people: `64x128x128 group 1 split 4 warps 4 stages 3`; a library's knobs in full."""
    try:
        knobs = json.loads(str(config))
    except ValueError:
        return ""
    if not isinstance(knobs, dict):
        return ""
    return marked_knobs(knobs, KNOB_NAMES)


def memory_option_lines(options: "pd.DataFrame | None", solved: int, width: int) -> list[str]:
    """Gains of limits on the weights' memory: problems, speed-up, time of a call, memory, in `width` columns.

    `options`: the rows of `gemmpipe.stages.memory_options` of all problems, or None; `solved`: the number of problems
    with a selection.
    """
    if options is None or not len(options):
        return []
    rows: Sequence[Mapping[Any, Any]] = options.to_dict("records")
    table, left_out = memory_limits(rows)
    kept = (0, 1, 0, 2, 0)
    columns = [
        Column(title=title, cells=tuple(column), is_text=True, importance=importance)
        for title, column, importance in zip(MEMORY_TITLES, zip(*table, strict=True), kept, strict=True)
    ]
    gaining = len({row["problem"] for row in rows})
    title = f"{MEMORY_TITLE}: {gaining} of {counted(solved, 'problem')}"
    more = [f"  and {left_out} more limits"] if left_out else []
    return [title, *(f"  {line}" for line in aligned(columns, width - 2)), *more]


def choose_again_line(options: "pd.DataFrame | None", reuse: Sequence[str]) -> str:
    """The command that chooses again with the least limit that gains; empty if none gains.

    `reuse`: the arguments that name the run with the trials.
    """
    if options is None or not len(options):
        return ""
    limit = int(options["extra_weight_pct"].min())
    command = ["gemmpipe", *reuse, "chain=[select,merge]", f"stages.select.max_extra_weight_pct={limit}"]
    return f"  choose with {limit}, without timing: {shell_join(command)}"


def memory_limits(rows: Sequence[Mapping[Any, Any]]) -> tuple[list[tuple[str, ...]], int]:
    """(cells of `MEMORY_TITLES` for the least limits, number of limits left out), of the rows of `memory_options`."""
    by_gain: dict[tuple[str, ...], tuple[str, ...]] = {}
    for limit in sorted({int(row["extra_weight_pct"]) for row in rows}):
        found = _limit_cells(limit, rows)
        by_gain.setdefault(found[1:4], found)  # a larger limit that gains no more to be seen is left out
    limits = list(by_gain.values())
    return limits[:_MAX_LIMITS], max(0, len(limits) - _MAX_LIMITS)


def _limit_cells(limit_pct: int, rows: "Sequence[Mapping[Any, Any]]") -> tuple[str, str, str, str, str]:
    """The cells of one limit: over the fastest allowed option of each problem that has one."""
    best: dict[object, Mapping[Any, Any]] = {}
    for row in rows:
        if row["extra_weight_pct"] <= limit_pct and (
            row["problem"] not in best or row["us"] < best[row["problem"]]["us"]
        ):
            best[row["problem"]] = row
    sizes = [float(row["extra_weight_bytes"]) for row in best.values()]
    before, after = (_geomean([float(row[name]) for row in best.values()]) for name in ("chosen_us", "us"))
    least, most = bytes_text(min(sizes)), bytes_text(max(sizes))
    return (
        str(limit_pct),
        counted(len(best), "problem"),
        spread_text(spread(float(row["speedup"]) for row in best.values()), shared=_any_shared(best.values())),
        f"{time_text(before)} -> {time_text(after)}",
        f"+{least}" if least == most else f"+{least} to +{most}",
    )


def _any_shared(options: Iterable[Mapping[Any, Any]]) -> bool:
    return any(row.get("shared") is True for row in options)


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
