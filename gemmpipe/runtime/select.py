"""Selection of a candidate for a call, best first: the exact row, rows of a padded M, then fallbacks without a row.

A row counts only if its candidate runs in this installation; `count_usable_rows` reports how many of a table do.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gemmpipe.backends import NO_SPACE, library_implementation
from gemmpipe.core.data import Candidate, Device, Problem, Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.family.dtypes import X_SCALE_COLUMN
from gemmpipe.family.layouts import ROW_MAJOR
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.runtime.tables import TunedTables
from gemmpipe.tables.merge import Row
from gemmpipe.tables.recorded import UnsupportedRow, UnusableRow, candidate_of_row, libtype_of

EXACT_M = 64
"""Largest M tuned by itself: beyond, padding costs little and a padded M serves many Ms."""


def finely_padded(m: int) -> int:
    """M rounded up to a multiple of 16 (M <= 256), 32 (<= 1024), 64 (<= 4096) or 128."""
    step = 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128
    return -(-m // step) * step


def coarsely_padded(m: int, n: int) -> int:
    """The next power of two; 8192 if M > 8192 and N > 4096, since larger Ms are not tuned."""
    if m > 8192 and n > 4096:
        return 8192
    return 1 << (m - 1).bit_length()


def padding_levels(m: int, n: int) -> dict[int, str]:
    """The Ms to look up, each once, with its step: `exact`, then `padded`, finely before coarsely."""
    found = {m: "exact"}
    for padded in (finely_padded(m), coarsely_padded(m, n)):
        found.setdefault(padded, "padded")
    return found


# Knobs of libraries without a measurement: none that needs a copy of the weight.
_PLAIN_KNOBS: Mapping[str, tuple[Mapping[str, Scalar], ...]] = {
    "torch": ({"method": "mm"}, {"method": "bfloat16_convert"}, {"method": "float32_convert"}),
    "scaled_mm": ({"use_fast_accum": False},),
    "hipblaslt": ({"solidx": -1},),  # the library's own heuristic
    "asm": ({"kernelName": "", "NUM_KSPLIT": 0},),  # aiter's own choice
}


@dataclass(frozen=True, kw_only=True)
class RunnableCandidate:
    """A candidate that runs here, with its implementation."""

    implementation: Implementation
    candidate: Candidate
    rows: int | None = None
    """The rows that x is padded to, if the candidate requires it."""


def find_implementation(family: Family, label: str) -> Implementation | None:
    """The implementation with this `libtype`: the family's own kernels first, then the libraries."""
    own = next((found for found in family.implementations if found.label == label), None)
    return own or library_implementation(family, label)


def usable_candidate(family: Family, row: Row, spec: GemmSpec, device: Device) -> RunnableCandidate:
    """The row's candidate for this product; x is padded to the row's M if the candidate supports only that.

    Raises UnusableRow.
    """
    try:
        return _runnable_candidate(family, row, spec, device)
    except UnsupportedRow:
        rows = row.get(family.rows_column)
        if not isinstance(rows, int) or rows <= spec.m or spec.batch > 1:
            raise
        return replace(_runnable_candidate(family, row, replace(spec, m=rows), device), rows=rows)


def first_usable(family: Family, rows: Iterable[Row], device: Device) -> tuple[RunnableCandidate, GemmSpec] | None:
    """The candidate and spec of the first of a key's rows that runs here."""
    for row in rows:
        problem = family.problem(tuple((c.name, row[c.name]) for c in family.key_columns))
        try:
            spec = family.spec(problem)
            return usable_candidate(family, row, spec, device), spec
        except (UserError, UnusableRow):
            continue  # a call of this key reports the reason
    return None


def _runnable_candidate(family: Family, row: Row, spec: GemmSpec, device: Device) -> RunnableCandidate:
    label = libtype_of(row, family)
    implementation = find_implementation(family, label)
    if implementation is None:
        raise UnusableRow(f"backend: no '{label}' in this installation")
    if reason := implementation.unavailable(device):
        raise UnusableRow(f"backend: {label}: {reason}")
    candidate = candidate_of_row(implementation, row, spec, device)
    return RunnableCandidate(implementation=implementation, candidate=candidate)


def fallback_candidates(family: Family, spec: GemmSpec, device: Device) -> Iterator[RunnableCandidate]:
    """The candidates without a row, best first.

    The default configs of the family's own kernels (one for few rows has none for many), then the family's library
    paths, which read pre-shuffled weights too, then torch.
    """
    for own in family.implementations:
        knobs = None if own.unavailable(device) else own.default_config(spec, device)
        if knobs is not None and own.unsupported_reason(spec, knobs, device) is None:
            yield RunnableCandidate(implementation=own, candidate=Candidate.of(own.label, knobs))
    for label in dict.fromkeys((*_shuffled_candidates(spec, device), *family.baseline, "torch")):
        implementation = find_implementation(family, label)
        if implementation is None or implementation.unavailable(device):
            continue
        for rows in (None, *_padded_rows(spec)):
            fitting = _first_fitting(implementation, spec if rows is None else replace(spec, m=rows), device)
            if fitting is not None:
                yield RunnableCandidate(implementation=implementation, candidate=fitting, rows=rows)
                break


def _shuffled_candidates(spec: GemmSpec, device: Device) -> tuple[str, ...]:
    """The libraries that read a 16-bit weight in tiles, in aiter's order."""
    if spec.w_layout == ROW_MAJOR or spec.w_scale is not None:
        return ()
    return ("hipblaslt",) if device.gfx == "gfx942" else ("asm", "hipblaslt")


def _padded_rows(spec: GemmSpec) -> tuple[int, ...]:
    """Rows to pad x to, for libraries that require multiples."""
    return () if spec.batch > 1 else (-(-spec.m // 4) * 4, finely_padded(spec.m))


def _first_fitting(implementation: Implementation, spec: GemmSpec, device: Device) -> Candidate | None:
    label = implementation.label
    plain = None if spec.experts else _PLAIN_KNOBS.get(label)
    for config in plain or tuple(implementation.configs(spec, device, NO_SPACE)):
        knobs = implementation.normalise(spec, config, device)
        if implementation.unsupported_reason(spec, knobs, device) is None:
            return Candidate.of(label, knobs)
    return None


@dataclass(frozen=True, kw_only=True)
class LookupResult:
    """A result of a look-up: the step, the source and the candidate."""

    step: str
    """`exact`, `padded` or `fallback`."""
    source: str
    runnable: RunnableCandidate
    gain: float | None = None
    """Time of the row's baseline over its own; None where the row has none."""
    backend_ratios: Mapping[str, float] = field(default_factory=dict)
    """By backend: the time of its fastest other finalist over the row's, where the table has them."""

    @property
    def description(self) -> str:
        """The candidate as text."""
        runnable = self.runnable
        knobs = " ".join(f"{name}={value}" for name, value in runnable.candidate.items)
        rows = "" if runnable.rows is None else f" on {runnable.rows} rows"
        return f"{runnable.candidate.backend} {knobs}".strip() + rows

    def failure_message(self, error: Exception) -> str:
        """The warning if it fails at its first call."""
        text = str(error).strip().splitlines() or [type(error).__name__]
        return f"{self.source}: {self.description} failed and is skipped: {type(error).__name__}: {text[0]}"


def lookup_results(
    tables: TunedTables, problem: Problem, spec: GemmSpec, device: Device, orders: Sequence[str] = ()
) -> Iterator[LookupResult]:
    """The rows that can run, in the order of `padding_levels`, then fallbacks; a row that cannot causes a warning.

    `orders` are the memory orders of x's scales: rows for one of them come before rows for any order.
    """
    for m, step in padding_levels(spec.m, spec.n).items():
        yield from _row_results(tables, problem, m, step, spec, device, orders)
    for runnable in fallback_candidates(tables.family, spec, device):
        yield LookupResult(step="fallback", source="defaults", runnable=runnable)


def _row_results(
    tables: TunedTables, problem: Problem, m: int, step: str, spec: GemmSpec, device: Device, orders: Sequence[str]
) -> Iterator[LookupResult]:
    """The rows of one M."""
    own = {problem.rows_column: m}
    keys = ({**dict(problem.key), **own, **({X_SCALE_COLUMN.name: order} if order else {})} for order in orders)
    plain = {**dict(problem.key), **own, **({X_SCALE_COLUMN.name: None} if orders else {})}
    alternatives = [found for key in (*keys, plain) for found in tables.find(device, key.values())]
    if not alternatives:
        LOG.log_step(f"{problem.id}: {step} M={m}: no row")
    for found in alternatives:
        try:
            runnable = usable_candidate(tables.family, found.row, spec, device)
        except UnusableRow as reason:
            LOG.log_step(f"{problem.id}: {step} M={m}: {found.path}: skipped: {reason}")
            # A row tuned for another M often does not support this one.
            if step == "exact" or not str(reason).startswith("unsupported"):
                LOG.warn(
                    f"{tables.family.name} {found.path} {reason}",
                    f"{found.path}: {problem.id}: the stored candidate is skipped: {reason}",
                )
            continue
        product = found.row.get("device")
        if product not in (None, "", device.name):  # gfx and cu_num are the same on an H100 and an H200
            LOG.warn(
                f"{found.path} of {product}",
                f"{found.path}: rows timed on {product} are used on {device.name}: gfx and cu_num are the same",
            )
        source, gain, ratios = f"M={m} of {found.path}", _gain(found.row), _backend_ratios(found.row)
        yield LookupResult(step=step, source=source, runnable=runnable, gain=gain, backend_ratios=ratios)


def _gain(row: Row) -> float | None:
    us, baseline_us = row.get("us"), row.get("baseline_us")
    timed = isinstance(us, int | float) and isinstance(baseline_us, int | float) and us > 0
    return float(baseline_us) / float(us) if timed else None  # type: ignore[arg-type]


def _backend_ratios(row: Row) -> Mapping[str, float]:
    text = row.get("backend_ratios")
    return {name: float(ratio) for name, ratio in json.loads(text).items()} if isinstance(text, str) and text else {}


def count_usable_rows(family: Family, rows: Iterable[Row], device: Device) -> tuple[int, Counter[str]]:
    """(number of rows that run here, number of other rows by reason)."""
    count, reasons = 0, Counter[str]()
    for row in rows:
        reason = _unusable_reason(family, row, device)
        if reason:
            reasons[reason] += 1
        else:
            count += 1
    return count, reasons


def _unusable_reason(family: Family, row: Row, device: Device) -> str:
    place = (row["gfx"], row["cu_num"])
    if place != (device.gfx, device.cu_num):
        return f"for {place[0]}/{place[1]}, this is {device.gfx}/{device.cu_num}"
    try:
        problem = family.problem(tuple((c.name, row[c.name]) for c in family.key_columns))
        usable_candidate(family, row, family.spec(problem), device)
    except UserError as error:
        return str(error)
    except UnusableRow as reason:
        return str(reason)
    return ""
