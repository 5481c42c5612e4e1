"""Speed-ups as text: the same digits and marks of one speed-up on every screen, in every table and every report.

A speed-up has three digits. `~` in front of one with two (about) means that its times were taken while other processes
used the device; parentheses, that it is over a conversion of the operands by torch, which is no library's product.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemmpipe.core.events import counted
from gemmpipe.core.units import MISSING, rough_speedup_text, speedup_text, time_text
from gemmpipe.report.results import (
    CONVERTED,
    NO_LIBRARY,
    SHARED,
    Spread,
    has_direct_path,
    is_shared,
    problem_of,
)

if TYPE_CHECKING:
    from gemmpipe.family import Family

Row = Mapping[Hashable, Any]
"""A row of `results.product_results`."""
ABOUT = "~"
_EQUAL = "1.00x"
_UNEVEN = 1.05
"""Quotients that differ by more from a paired speed-up are explained: the machine's speed changed between rounds."""


def marked_speedup_text(speedup: float | None, *, shared: bool) -> str:
    """`1.27x`, or `~1.3x` from times that were taken on a shared device."""
    if not shared:
        return speedup_text(speedup)
    text = rough_speedup_text(speedup)
    return f"{ABOUT}{text}" if text != MISSING else text


def range_text(spread: Spread | None, *, shared: bool) -> str:
    """The least and the largest of several speed-ups: `1.00x to 1.27x`."""
    if spread is None:
        return MISSING
    text = rough_speedup_text if shared else speedup_text
    return f"{text(spread.least)} to {text(spread.most)}"


def spread_text(spread: Spread | None, *, shared: bool = False) -> str:
    """A geometric mean with its range: `1.13x  (1.00x to 1.27x)`; without it where least and most look the same."""
    if spread is None:
        return MISSING
    mean = marked_speedup_text(spread.mean, shared=shared)
    both = range_text(spread, shared=shared)
    least, _, most = both.partition(" to ")
    return mean if least == most else f"{mean}  ({both})"


def speedup_cell(row: Row) -> str:
    """The speed-up of a product over the best library; nothing for a choice that is torch's conversion itself."""
    if is_conversion(row):
        return MISSING
    text = marked_speedup_text(row["speedup"], shared=is_shared(row["policy"]))
    return f"({text})" if row["library"] == CONVERTED else text


def library_cell(row: Row) -> str:
    """The time that the speed-up is over."""
    return MISSING if row["library"] == NO_LIBRARY or is_conversion(row) else time_text(row["library_us"])


def is_conversion(row: Row) -> bool:
    """True for a choice that is torch's conversion itself: it has nothing to be compared with."""
    return bool(row["library"] == CONVERTED) and speedup_text(row["speedup"]) == _EQUAL


def is_equal(spread: Spread) -> bool:
    """True if all of these speed-ups look like 1."""
    return {speedup_text(spread.least), speedup_text(spread.most)} == {_EQUAL}


def shared_text(policies: Iterable[object]) -> str:
    """The meaning of the mark of a speed-up, for the policies of all products; empty if each was timed alone.

    `~ approximate: 2 of 3 products timed while other processes used the device (shared_cpu)`.
    """
    known = [str(policy or "") for policy in policies]
    shared = [policy for policy in known if is_shared(policy)]
    if not shared:
        return ""
    words = [word for word in SHARED if any(word in policy.split() for policy in shared)]
    how_many = f"{len(shared):,} of {counted(len(known), 'product')}"
    return f"{ABOUT} approximate: {how_many} timed while other processes used the device ({', '.join(words)})"


def no_gain_text(rows: Iterable[Row]) -> str:
    """How many choices are slower than the library path in the rounds of both, or not told apart; empty for none.

    `1 choice slower than the best library path, 2 not told apart from it (same rounds)`.
    """
    slower = equal = 0
    for row in rows:
        low, high = row["speedup_low"], row["speedup_high"]
        if not low or not high or low != low or high != high or low == high == 1:
            continue  # not timed in the same rounds, or the library itself
        slower += high < 1
        equal += low <= 1 <= high
    path = "the best library path"
    parts = [f"{counted(slower, 'choice')} slower than {path}"] if slower else []
    if equal:
        parts.append(
            f"{equal:,} not told apart from it" if slower else f"{counted(equal, 'choice')} not told apart from {path}"
        )
    return f"{', '.join(parts)} (same rounds)" if parts else ""


def paired_text(rows: Iterable[Row]) -> str:
    """How many speed-ups differ from the quotient of the times next to them by over 5 %, and why; empty for none."""
    count = 0
    for row in rows:
        us, library_us, speedup = row["us"], row["library_us"], row["speedup"]
        if us and library_us and speedup and us == us and library_us == library_us and speedup == speedup:
            count += row["library"] != NO_LIBRARY and abs(math.log(library_us / us / speedup)) > math.log(_UNEVEN)
    if not count:
        return ""
    differ = "speed-up differs" if count == 1 else "speed-ups differ"
    return f"{count:,} {differ} from library / time by over 5 %: a speed-up compares rounds in which both ran"


def conversion_reasons(rows: Iterable[Row], family: "Family", limit_pct: int | None) -> Iterator[tuple[str, str]]:
    """(why products have no speed-up, what changes it), for products that torch multiplies after a conversion alone.

    `limit_pct`: the percent of more weight memory that a faster converted copy needs; None: no copy was faster.
    """
    from gemmpipe.backends.scaled_mm import ROW_MULTIPLE

    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        spec = family.spec(problem_of(row, family))
        scaled = "" if spec.x_scale is None and spec.w_scale is None else " with scales"
        operands = f"{spec.x_dtype} operands" if spec.x_dtype == spec.w_dtype else f"{spec.x_dtype} by {spec.w_dtype}"
        why, change = f"no library of this device multiplies {operands}{scaled} as stored", "gemmpipe doctor"
        if str(row["gfx"]).startswith("cpu"):
            why, change = f"no library of a CPU multiplies {operands}{scaled} as stored", _on_a_gpu(limit_pct)
        elif has_direct_path(replace(spec, m=-(-spec.m // ROW_MULTIPLE) * ROW_MULTIPLE), str(row["gfx"])):
            why = f"the library multiplies {operands}{scaled} with M a multiple of {ROW_MULTIPLE} only"
            change = "shapes.nsets= with such an M, to compare with the padded product"
        counts[f"{why}; torch converts them first", change] += 1
    for (why, change), count in counts.items():
        yield f"{counted(count, 'product')}: {why}", change


def _on_a_gpu(limit_pct: int | None) -> str:
    """Advice for products that the libraries of a CPU do not multiply."""
    gpu = "tune on a GPU"
    return (
        gpu if limit_pct is None else f"stages.select.max_extra_weight_pct={limit_pct} keeps a converted copy; or {gpu}"
    )
