"""Findings that deserve attention in a report, as sentences: the worst products first."""

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gemmpipe.core.data import NOISY
from gemmpipe.core.events import counted, verb
from gemmpipe.core.units import percent_text, time_text
from gemmpipe.report.data import RunData
from gemmpipe.report.results import COMPARABLE, LOW_SHARE, both_clocks_text
from gemmpipe.report.speedup import no_gain_text, shared_text, speedup_cell

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[Hashable, Any]
_NEAR = 1.05
"""A library within this ratio of the choice is near."""
_CLOCK_DROP = 0.8
"""A device with clocks below this share of its highest was slowed down."""


def product_name(row: Row) -> str:
    """The name of a product: `M 64, 1280 x 8192`."""
    return f"M {int(row['rows']):,}, {row['shape']}"


def records(frame: "pd.DataFrame") -> list[dict[Hashable, Any]]:
    """The rows of a products table; missing values are None."""
    rows: list[dict[Hashable, Any]] = frame.to_dict("records")
    return [{name: None if value != value else value for name, value in row.items()} for row in rows]


def attention_lines(data: RunData) -> list[str]:
    """One sentence per kind of finding; none where there is nothing to look at."""
    rows = records(data.products)
    return [
        *_incomplete(data),
        *_slower(rows),
        *_far_from_floor(rows),
        *_gated(data, rows),
        *_near_library(rows),
        *_near_ties(rows),
        *_noisy(rows),
        *_shared(rows),
        *_throttled(data),
    ]


def _incomplete(data: RunData) -> Iterator[str]:
    if data.unsolved:
        yield f"{counted(len(data.unsolved), 'product')} without a valid candidate, such as {data.unsolved[0]}."
    if data.undecided:
        yield f"{counted(len(data.undecided), 'product')} left undecided by the search's budget."
    missing = data.problems - len(data.products) - len(data.unsolved) - len(data.undecided)
    if missing > 0 and not data.finished:
        yield f"{counted(missing, 'product')} of {data.problems} without a timed candidate yet."


def _slower(rows: list[dict[Hashable, Any]]) -> Iterator[str]:
    slow = [r for r in rows if r["speedup"] and r["speedup"] < 1 and r["library"] in COMPARABLE]
    if slow:
        worst = min(slow, key=lambda r: r["speedup"])
        text = f"{product_name(worst)} at {speedup_cell(worst)}"
        yield f"{counted(len(slow), 'choice')} slower than the best library; the worst is {text}."
    if text := no_gain_text(rows):
        yield f"{text}; retune=true times them again."


def _far_from_floor(rows: list[dict[Hashable, Any]]) -> Iterator[str]:
    """The lowest share of the floor, and the shape with the most products below the limit."""
    known = [r for r in rows if r["share"]]
    if not known:
        return
    worst = min(known, key=lambda r: r["share"])
    times = f"{time_text(worst['us'])}, floor {time_text(worst['floor_us'])}"
    yield f"The lowest share of the floor: {product_name(worst)} reaches {percent_text(worst['share'])} ({times})."
    low = [r for r in known if r["share"] < LOW_SHARE]
    if len(low) > 1:
        shapes: dict[str, list[dict[Hashable, Any]]] = {}
        for row in low:
            shapes.setdefault(str(row["shape"]), []).append(row)
        shape, part = max(shapes.items(), key=lambda item: len(item[1]))
        ms = [int(r["rows"]) for r in part]
        where = (
            f"{len(part)} of them at {shape}, M {min(ms):,} to {max(ms):,}"
            if len(part) > 1
            else f"in {len(shapes)} shapes"
        )
        part_of = f"{len(low)} of {counted(len(known), 'product')}"  # at least two
        yield f"{part_of} reach less than {percent_text(LOW_SHARE)} of the floor, {where}."


def _gated(data: RunData, rows: list[dict[Hashable, Any]]) -> Iterator[str]:
    faster = [each for each in data.gated if each.chosen_us and each.time_us < each.chosen_us]
    if faster:
        best = faster[0]
        name = next((product_name(row) for row in rows if row["problem"] == best.problem), best.problem)
        times = f"{time_text(best.time_us)} instead of {time_text(best.chosen_us)}"
        yield (
            f"{counted(len(faster), 'product')} with a faster candidate that takes more weight memory than allowed: "
            f"{best.backend} takes {times} for {name}."
        )


def _near_library(rows: list[dict[Hashable, Any]]) -> Iterator[str]:
    near = [r for r in rows if r["own"] and r["library"] in COMPARABLE and r["speedup"] and 1 <= r["speedup"] < _NEAR]
    if near:
        closest = min(near, key=lambda r: r["speedup"])
        text = f"{product_name(closest)} at {speedup_cell(closest)}"
        yield f"The best library is within 5 % of the choice for {counted(len(near), 'product')}; the nearest: {text}."


def _near_ties(rows: list[dict[Hashable, Any]]) -> Iterator[str]:
    ties = [r for r in rows if r["near_ties"]]
    if ties:
        most = max(ties, key=lambda r: r["near_ties"])
        text = f"{product_name(most)} with {int(most['near_ties'])}"
        yield (
            f"{len(ties)} of {counted(len(rows), 'product')} {verb(len(ties), 'has', 'have')} candidates that the "
            f"times cannot tell from the choice; the most: {text}."
        )


def _noisy(rows: list[dict[Hashable, Any]]) -> Iterator[str]:
    noisy = [r for r in rows if r["noisy"]]
    if noisy:
        worst = max(noisy, key=lambda r: r["p80_us"] / r["p20_us"])
        text = f"{time_text(worst['p20_us'])} to {time_text(worst['p80_us'])} for {product_name(worst)}"
        yield (
            f"{counted(len(noisy), 'choice')} with noisy times (80 % quantile over {NOISY:g} times the 20 % quantile), "
            f"at worst {text}: was the machine busy?"
        )


def _shared(rows: list[dict[Hashable, Any]]) -> Iterator[str]:
    if text := shared_text(r["policy"] for r in rows):
        yield f"{text}; retune=true on an idle machine repeats them."


def _throttled(data: RunData) -> Iterator[str]:
    clocks = [float(each["sm_mhz"]) for each in data.conditions if each.get("sm_mhz")]
    busy = [clock for clock in clocks if clock > max(clocks) / 3]  # less is an idle device
    if busy and min(busy) < _CLOCK_DROP * max(busy):
        lowered = bool(both_clocks_text(data.products["policy"]))
        why = ", as products at its power limit are timed under load too" if lowered else ""
        yield f"The clock of the device fell to {min(busy):.0f} MHz from {max(busy):.0f} MHz while it worked{why}."
