"""The last screen of a run: what was tuned, how much faster it is, what to look at, the files and the next commands.

Also the table of choices. Everything is text with styles; the caller prints it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemmpipe.core.events import counted
from gemmpipe.core.units import MISSING, flops_text, percent_text, ranges_text, speedup_text, three_digits, time_text
from gemmpipe.report.lines import BAD, DIM, GOOD, HEAD, KEY, WARN, Line, styled
from gemmpipe.report.results import (
    CONVERTED,
    NO_LIBRARY,
    PADDED,
    RegimeResult,
    RunFigures,
    Spread,
)
from gemmpipe.report.text_table import Column, aligned

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family

_MAX_ROWS, _TOP, _BOTTOM = 30, 5, 10
_BAR = 12
_LOW_SHARE = 0.6
"""A share of the floor below this is worth a look."""
_SPEEDUP_TITLE = "faster than the best library (geometric mean, least to most)"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the last screen states besides the figures of the products."""

    kernel: str
    shapes: str
    """The source of the problems as typed; empty if the default was used."""
    device: str
    problems: int
    """All problems of the run, solved or not."""
    duration: str
    """What ended and when: `done in 47.5 s`."""
    reused: str = ""
    """The table whose rows are shown, if nothing had to be tuned."""
    unsolved: Sequence[str] = field(default=())


def screen_lines(facts: RunFacts, figures: RunFigures, products: "pd.DataFrame", family: "Family") -> list[Line]:
    """The head, the speed-up by regime of M, and what to look at."""
    head = [part for part in (facts.shapes, facts.device) if part]
    lines = [styled((facts.kernel, HEAD), "  ", "  ".join(head), "  ", (facts.duration, GOOD))]
    lines.append(_solved_line(facts, figures))
    if any(regime.speedup or regime.floor_share for regime in figures.regimes):
        lines += [Line(text=""), *_regime_lines(figures.regimes)]
    lines += _library_lines(figures, products)
    return [*lines, *_attention_lines(facts, figures, products, family)]


def _solved_line(facts: RunFacts, figures: RunFigures) -> Line:
    solved, total = figures.products, facts.problems
    if facts.reused:
        first = f"{solved} of {counted(total, 'problem')} tuned already"
    else:
        first = f"{solved} of {counted(total, 'problem')} tuned, every result checked"
    parts = [f"{figures.own} by own kernels"]
    if figures.noise_pct is not None:
        parts.append(f"noise {three_digits(figures.noise_pct)} %")
    winners = ", ".join(f"{name} {number}" for name, number in figures.winners)
    return styled((first, GOOD if solved == total else BAD), f"; {'; '.join(parts)} ({winners})")


def _regime_lines(regimes: Sequence[RegimeResult]) -> list[Line]:
    """A row per regime: speed-up with its range, and the share of the floor with a bar where rates are known."""
    label_width = max(len(regime.label) for regime in regimes)
    texts = [_spread_text(regime.speedup) for regime in regimes]
    width = max(len(_SPEEDUP_TITLE) - label_width - 4, *(len(text) for text in texts))
    has_floor = any(regime.floor_share for regime in regimes)
    lines = [styled((_SPEEDUP_TITLE, HEAD), *([("  share of the floor", HEAD)] if has_floor else []))]
    for regime, text in zip(regimes, texts, strict=True):
        mean = regime.speedup.mean if regime.speedup is not None else None
        style = "" if mean is None else GOOD if mean >= 1.005 else BAD if mean < 0.995 else DIM
        cells: list[str | tuple[str, str]] = ["  ", regime.label.ljust(label_width), "  "]
        cells += [(text.ljust(width), style)] if style else [text.ljust(width)]
        if regime.floor_share is not None:
            share = regime.floor_share.mean
            filled = round(_BAR * min(1.0, share))
            cells += [f"  {percent_text(share):>5} ", ("#" * filled, GOOD), ("." * (_BAR - filled), DIM)]
        lines.append(styled(*cells))
    return lines


def _spread_text(spread: Spread | None) -> str:
    if spread is None:
        return MISSING
    if spread.count == 1:
        return speedup_text(spread.mean)
    return f"{speedup_text(spread.mean)}  ({speedup_text(spread.least)} to {speedup_text(spread.most)})"


def _library_lines(figures: RunFigures, products: "pd.DataFrame") -> list[Line]:
    """Products that have no time of a library for the same product."""
    lines = []
    padded = products[products["library"] == PADDED]
    if len(padded):
        ms = ranges_text([int(m) for m in padded["rows"]])
        text = f"{counted(len(padded), 'product')} (M {ms}) against the library at the multiple of 4 that it pads M to"
        lines.append(styled("  ", (text, DIM)))
    if figures.converted is not None:
        ms = ranges_text([int(m) for m in products.loc[products["library"] == CONVERTED, "rows"]])
        count = counted(figures.converted.count, "product")
        what = f"no library multiplies {count} (M {ms}) as stored, not counted above"
        lines.append(styled("  ", (f"{what}: {_spread_text(figures.converted)} over torch on converted operands", DIM)))
    if figures.without_library:
        lines.append(styled("  ", (f"{counted(figures.without_library, 'product')} without a library's time", DIM)))
    return lines


def _attention_lines(facts: RunFacts, figures: RunFigures, products: "pd.DataFrame", family: "Family") -> list[Line]:
    parts = []
    if facts.unsolved:
        parts.append(f"{counted(len(facts.unsolved), 'problem')} without a valid candidate")
    if figures.worst is not None and figures.worst[1] < _LOW_SHARE:
        row = products[products["problem"] == figures.worst[0]].iloc[0]
        parts.append(f"{_size_text(row, family)} reaches {percent_text(figures.worst[1])} of the floor")
    if figures.near_ties:
        parts.append(f"{counted(figures.near_ties, 'choice')} near a tie")
    if figures.noisy:
        parts.append(f"{counted(figures.noisy, 'choice')} with times that vary by half: is the machine busy?")
    return [styled(("look at", WARN), f"  {'; '.join(parts)}")] if parts else []


def _size_text(row: "pd.Series[Any]", family: "Family") -> str:
    return "x".join(str(row[name]) for name in (family.rows_column, *family.sizes))


def command_lines(*, exports: Sequence[str] = (), shipped: bool = False) -> list[Line]:
    """The next commands; `exports`: targets of `gemmpipe export`; `shipped`: a table for the device is shipped."""
    commands = ["gemmpipe show last", "gemmpipe report last"]
    commands += ["gemmpipe diff last shipped"] if shipped else []
    commands += [f"gemmpipe export last {target}" for target in exports]
    parts: list[str | tuple[str, str]] = ["see   "]
    for command in commands:
        parts += [(command, KEY), " | "]
    return [styled(*parts[:-1])]


def choice_lines(products: "pd.DataFrame", family: "Family", width: int, *, full: bool = False) -> list[str]:
    """The table of choices, of at most `width` columns: sizes, choice, time, library, speed-up, share of the floor.

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
    names = (family.rows_column, *family.sizes)
    rows = shown.to_dict("records")
    columns = [Column(title=name, cells=tuple(str(row[name]) for row in rows)) for name in names]
    columns += [
        Column(title="time", cells=tuple(time_text(row["us"]) for row in rows)),
        Column(title="rate", cells=tuple(_rate_text(row["tflops"]) for row in rows), importance=1),
        Column(title="library", cells=tuple(_library_text(row) for row in rows), importance=3),
        Column(title="speed-up", cells=tuple(_speedup_cell(row) for row in rows)),
    ]
    if shown["floor_share"].notna().any():
        cells = tuple(percent_text(row["floor_share"]) for row in rows)
        columns.append(Column(title="of floor", cells=cells, importance=2))
    choices = tuple(f"{row['libtype']} {short_config(row['config'])}".rstrip() for row in rows)
    return [*columns, Column(title="choice", cells=choices, is_text=True)]


def _rate_text(tflops: float | None) -> str:
    return MISSING if tflops is None or tflops != tflops else flops_text(tflops * 1e12)


def _library_text(row: "dict[Any, Any]") -> str:
    return MISSING if row["library"] == NO_LIBRARY else time_text(row["library_us"])


def _speedup_cell(row: "dict[Any, Any]") -> str:
    """The speed-up; in parentheses over a conversion by torch, which is no library's product."""
    text = speedup_text(row["speedup"])
    return f"({text})" if row["library"] == CONVERTED else text


_KNOB_MARKS = {
    "BLOCK_SIZE_M": "",
    "BLOCK_SIZE_N": "x",
    "BLOCK_SIZE_K": "x",
    "GROUP_SIZE_M": " group ",
    "NUM_KSPLIT": " split ",
    "num_warps": " warps ",
    "num_stages": " stages ",
}


def short_config(config: object) -> str:
    """Knobs for people: `64x128x128 group 1 split 4 warps 4 stages 3`; a library's knobs in full."""
    try:
        knobs = json.loads(str(config))
    except ValueError:
        return ""
    if not isinstance(knobs, dict):
        return ""
    text = "".join(f"{mark}{knobs[name]}" for name, mark in _KNOB_MARKS.items() if name in knobs).strip()
    rest = {k: v for k, v in knobs.items() if k not in _KNOB_MARKS and v not in ("", None)}
    others = [v if isinstance(v, str) else f"{k}={v}" for k, v in rest.items()]
    return " ".join(part for part in (text, *others) if part)
