"""The rows of a tuned table: merging of old and new ones with reasons, and the parsers of their cells by column."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gemmpipe.core.data import ARCH_PATTERN, Scalar
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.core.files import is_formula, parse_object
from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family
from gemmpipe.family.problem import MAX_SIZE, parse_bounded_int, parse_int, parse_key_value, parse_name, parse_number

Row = dict[str, Scalar]
"""A row of a tuned table: `gfx`, `cu_num`, the family's key, the result columns."""
RowKey = tuple[Scalar, ...]

SHARED_GPU = "shared_gpu"
"""In the policy of a row that was timed while other work ran on the GPU."""
CUT_SHORT = "cut_short"
"""In the policy of a row from a search that ended early."""


@lru_cache(maxsize=256)  # a table has many rows and few policies
def is_provisional(policy: Scalar) -> bool:
    """True if a row of this policy only fills a gap: a full row replaces it, and it is tuned again."""
    return any(word in str(policy or "").split() for word in (SHARED_GPU, CUT_SHORT))


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConflict:
    """Two rows of one key with different choices."""

    key: RowKey
    kept: str
    """`old` or `new`."""
    reason: str

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.key))}: kept the {self.kept} row: {self.reason}"


def row_key(row: Mapping[str, Scalar], family: Family) -> RowKey:
    """(gfx, cu_num, *the family's key)."""
    values = (row.get(c.name) if c.optional else row[c.name] for c in family.key_columns)
    return (row["gfx"], row["cu_num"], *values)


def merge_rows(
    old: Sequence[Row], new: Sequence[Row], family: Family, *, min_improvement_pct: float
) -> tuple[list[Row], list[MergeConflict]]:
    """One row per key, in the order of first occurrence, and a conflict for every key with different choices.

    A new row that was timed against the old one in its run (`incumbent_us`) replaces it. Otherwise times of one policy
    are compared (a tie, or a gain below `min_improvement_pct`, keeps the old row); a new row of another policy wins.
    """
    merged: dict[RowKey, Row] = {}
    conflicts: list[MergeConflict] = []
    for rows, fresh in ((old, False), (new, True)):
        for row in rows:
            key = row_key(row, family)
            before = merged.get(key)
            if before is None:
                merged[key] = row
                continue
            take, reason = _compare(before, row, fresh, min_improvement_pct)
            if take:
                merged[key] = {**{name: v for name, v in before.items() if name not in row}, **row}
            if _choice(before) != _choice(row):
                conflicts.append(MergeConflict(key=key, kept="new" if take else "old", reason=reason))
    return list(merged.values()), conflicts


def _choice(row: Row) -> tuple[Scalar, ...]:
    # Rows without knobs (aiter's) identify the choice by the kernel's name and index.
    config = row.get("config")
    return (row.get("libtype"), config) if config else (row.get("libtype"), row.get("kernelName"), row.get("solidx"))


def _compare(old: Row, new: Row, fresh: bool, min_improvement_pct: float) -> tuple[bool, str]:
    old_policy, new_policy = str(old.get("policy") or ""), str(new.get("policy") or "")
    before, after = _us(old), _us(new)
    if after is None:
        return False, "the new row has no measured time"
    if before is None:
        return True, "the old row has no measured time"
    if is_provisional(new_policy) != is_provisional(old_policy):
        gap = new_policy if is_provisional(new_policy) else old_policy
        why = "was timed on a shared GPU" if SHARED_GPU in gap else "is from a search that was cut short"
        return not is_provisional(new_policy), f"the {'new' if gap is new_policy else 'old'} row {why}"
    if fresh and new.get("incumbent_us") is not None:
        return True, f"{after:g} us, timed against the old choice at {new['incumbent_us']} us"
    if fresh and _choice(old) == _choice(new):
        return True, "timed again"
    if old_policy != new_policy:
        policies = f"'{old_policy or 'unknown'}' and '{new_policy or 'unknown'}'"
        return fresh, f"timed by different policies ({policies}), {before:g} and {after:g} us cannot be compared"
    needed = before * (1 - min_improvement_pct / 100)
    return after < needed, f"{before:g} us before, {after:g} us now, {min_improvement_pct:g} % required"


def _us(row: Row) -> float | None:
    value = row.get("us")
    return float(value) if isinstance(value, int | float) and value > 0 else None


_FLOATS = {
    "err_ratio": (0.0, 1.0),
    **dict.fromkeys(("tflops", "bw", "ratio_low", "ratio_high"), (0.0, math.inf)),
    **dict.fromkeys(("baseline_us", "p20_us", "p80_us"), (0.0, 1e12)),
}
"""Columns of numbers with their lowest and highest value; times in microseconds."""
_INTS = {"solidx": (-(2**63), 2**63 - 1), "splitK": (0, 2**16), "near_ties": (0, MAX_SIZE)}
_UNTIMED = (-1.0, 0.0)
"""Values of `us` that tuners write for a candidate that they did not time, in addition to nothing, `inf`, `nan`."""


class CellParser(dict[str, Scalar]):
    """The values of one column's cells, each distinct text parsed once: a table has many cells and few texts."""

    def __init__(self, column: str, family: Family) -> None:
        super().__init__({"": None})
        self._column = column
        self._parse = _parser(column, family)

    def __missing__(self, cell: str) -> Scalar:
        try:
            value = self[cell] = self._parse(cell)
        except UserError as error:
            raise UserError(f"column {self._column}: {error}") from None
        return value


def _parser(column: str, family: Family) -> Callable[[str], Scalar]:
    for key in family.key_columns:
        if key.name == column:
            # Tables have full names of dtypes: `fp8` would need the row's gfx to know which one is meant.
            return lambda text: parse_key_value(key, text, "")
    if column == "gfx":
        return _gfx
    if column == "cu_num":
        return parse_int
    if column == "us":
        return _time_us
    if column == "err_ratio":
        return _fraction
    if column in _FLOATS:
        return lambda text: parse_number(text, *_FLOATS[column])
    if column in _INTS:
        return lambda text: parse_bounded_int(text, *_INTS[column])
    if column == "config":
        return _config
    return parse_name if column in RESULT else _comment


def _gfx(text: str) -> str:
    if not ARCH_PATTERN.fullmatch(text):
        raise UserError(f"{quoted_repr(text)}, expected an architecture such as gfx942, sm_90 or cpu_avx2")
    return text


def _time_us(text: str) -> float | None:
    """None for `inf` and `nan`; -1 and 0 stay, `store.is_timed` treats them as not timed."""
    if text.lower() in ("inf", "+inf", "nan"):
        return None
    value = parse_number(text)
    if value < 0 and value not in _UNTIMED:
        raise UserError(
            f"{quoted_repr(text)}, expected microseconds above 0, or -1, 0, inf, nan or nothing for not timed"
        )
    return value


def _fraction(text: str) -> float:
    """aiter writes the errors of fused MoE as `0.3%`."""
    value = parse_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise UserError(f"{quoted_repr(text)}, expected a fraction from 0 to 1, or 0% to 100%")
    return value


def _comment(text: str) -> str | None:
    """The text of a foreign column; None for text that a spreadsheet would run as a formula."""
    return None if is_formula(text) else text


def _config(text: str) -> str:
    expected = f"{quoted_repr(text)}, expected the knobs as a JSON object"
    try:
        value = parse_object(text, "config")
    except UserError:
        raise UserError(expected) from None
    if any(isinstance(knob, dict | list) for knob in value.values()):
        raise UserError(expected)
    return text
