"""Rows of a journal held against what we write: a journal may be a stranger's, or spoilt on its disk.

What is read here ends in tables, and in the names of files. Each reader raises ValueError, TypeError or KeyError.
"""

import math
from collections.abc import Mapping
from typing import cast

from gemmpipe.data import ARCHITECTURE, BuildFacts, Candidate, Device, Scalar, Status, Trial, Tuning, can_be_a_time
from gemmpipe.files.celltext import is_formula

Fields = Mapping[str, object]
_LONGEST = 10_000
"""Characters of a text that goes into a table, whose readers take cells of some 100,000."""
_MOST = 2**31 - 1


def device(values: object) -> Device:
    """The device of a session."""
    found = Device(**cast(dict[str, object], values))  # type: ignore[arg-type]
    for name in (found.kind, found.name, found.gfx, found.uuid):
        name_of(name)
    for number in (found.shared_bytes, found.cache_bytes, found.warp_size, found.index):
        count(number)
    if found.kind != "none" and (count(found.cu_num) not in range(1, _MOST) or not ARCHITECTURE.fullmatch(found.gfx)):
        raise ValueError(f"no device: {found.gfx}, {found.cu_num} units")
    return found


def candidate(row: Fields) -> Candidate:
    """Who a candidate is."""
    knobs = cast(Mapping[str, Scalar], row["knobs"])
    for name, value in knobs.items():
        text(name)
        if isinstance(value, str):
            text(value)
        elif not (value is None or isinstance(value, int) or math.isfinite(value)):
            raise ValueError(f"no knob: {value!r}")
    return Candidate.of(name_of(row["backend"]), knobs)


def problem(row: Fields) -> Fields:
    """A problem's row: its key is held against the family's columns where that is known."""
    text(row["id"]), text(row["layer"])
    for name, value in cast(Mapping[str, Scalar], row["key"]).items():
        text(name), text(str(value))
    if isinstance(row["weight"], bool) or not 0 < float(cast(float, row["weight"])) < math.inf:
        raise ValueError(f"no weight: {row['weight']!r}")
    return row


def facts(row: Fields) -> BuildFacts:
    """What compiling gave."""
    numbers = (None if row[name] is None else count(row[name]) for name in ("shared_bytes", "registers", "spills"))
    shared_bytes, registers, spills = numbers
    return BuildFacts(
        compile_s=_finite(row["compile_s"]),
        shared_bytes=cast(int, shared_bytes),
        registers=registers,
        spills=spills,
        error=str(row["error"]),
    )


def trial(row: Fields, of: Candidate) -> Trial:
    """An attempt on a candidate."""
    samples = tuple(cast(list[float], row["samples_us"]))
    if not all(map(can_be_a_time, samples)):
        raise ValueError(f"no times: {samples[:9]}")
    error = row.get("error", "")
    return Trial(
        stage=str(row["stage"]),
        problem=str(row["problem"]),
        candidate=of,
        status=Status(str(row["status"])),
        launches=count(row["launches"]),
        asked=count(row.get("asked", 0)),
        samples_us=tuple(map(float, samples)),
        err_ratio=None if row.get("err_ratio") is None else _finite(row["err_ratio"]),
        extra_weight_bytes=count(row.get("extra_weight_bytes", 0)),
        shared=row.get("shared") is True,
        error=_encoded(str(error)) if error else "",
        tuning=_tuning(cast(Fields, row["tuning"])) if "tuning" in row else None,
    )


def _tuning(row: Fields) -> Tuning:
    tried, of, compiled = (count(row[name]) for name in ("tried", "of", "compiled"))
    return Tuning(seconds=_finite(row["seconds"]), tried=tried, of=of, compiled=compiled)


def text(value: object) -> str:
    """A line of text that a table and a terminal can take."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise ValueError(f"no line of text: {value!r}")
    return value


def name_of(value: object) -> str:
    """A name that goes into tables: no formula of a spreadsheet's."""
    found = text(value)
    if is_formula(found):
        raise ValueError(f"no name: {found!r}")
    return found


def count(value: object) -> int:
    """A whole number, not below 0."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"no count: {value!r}")
    return value


def _finite(value: object) -> float:
    number = float(cast(float, value))
    if not 0 <= number < math.inf:
        raise ValueError(f"no number: {value!r}")
    return number


def _encoded(value: str) -> str:
    """A text of several lines; half a character is no text, and can be written nowhere."""
    value.encode()
    return value
