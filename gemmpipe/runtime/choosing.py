"""From a row of a tuned table to a candidate that this installation can run, and the rules where no row helps."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import gemmpipe.backends
from gemmpipe.backends import NO_SPACE, Backend
from gemmpipe.data import Candidate, Device, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.layouts import PLAIN
from gemmpipe.runtime.lookup import finely_padded
from gemmpipe.tables.merging import Row
from gemmpipe.tables.recorded import Misfit, Unusable, library_of, recorded_candidate

# What a library does where nothing was measured: no copy of the weight, which nobody agreed to pay for.
_PLAIN: Mapping[str, tuple[Mapping[str, Scalar], ...]] = {
    "torch": ({"method": "mm"}, {"method": "bfloat16_convert"}, {"method": "float32_convert"}),
    "scaled_mm": ({"use_fast_accum": False},),
    "hipblaslt": ({"solidx": -1},),  # what the library proposes
    "asm": ({"kernelName": "", "NUM_KSPLIT": 0},),  # what aiter chooses
}


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A candidate that fits, with who computes it."""

    implementation: Implementation
    candidate: Candidate
    rows: int | None = None
    """How many rows x is padded to first, where the candidate fits no other way."""


@cache
def library_backends() -> Mapping[str, Backend]:
    """The libraries that gemmpipe.backends wraps, by label; those whose package is missing are left out."""
    found: dict[str, Backend] = {}
    for module in pkgutil.iter_modules(gemmpipe.backends.__path__, "gemmpipe.backends."):
        try:
            members = vars(importlib.import_module(module.name)).values()
        except ImportError:
            continue
        for member in members:
            if inspect.isclass(member) and issubclass(member, Backend) and not inspect.isabstract(member):
                found[member.label] = member()
    return found


def implementation_of(family: Family, label: str) -> Implementation | None:
    """Who computes candidates of this `libtype`: the family's own kernels first, then the libraries."""
    own = next((found for found in family.implementations if found.label == label), None)
    return own or library_backends().get(label)


def usable(family: Family, row: Row, spec: GemmSpec, device: Device) -> Chosen:
    """The row's candidate for this product; where it fits the row's own M alone, x is padded to that.

    Raises Unusable.
    """
    try:
        return _usable(family, row, spec, device)
    except Misfit:
        rows = row.get(family.rows_column)
        if not isinstance(rows, int) or rows <= spec.m or spec.batch > 1:
            raise
        return replace(_usable(family, row, replace(spec, m=rows), device), rows=rows)


def first_usable(family: Family, rows: Iterable[Row], device: Device) -> tuple[Chosen, GemmSpec] | None:
    """The first of a key's rows whose candidate runs here, with the product that it is for."""
    for row in rows:
        problem = family.problem(tuple((c.name, row[c.name]) for c in family.key_columns))
        try:
            spec = family.spec(problem)
            return usable(family, row, spec, device), spec
        except (UserError, Unusable):
            continue  # a call of this key will say why
    return None


def _usable(family: Family, row: Row, spec: GemmSpec, device: Device) -> Chosen:
    label = library_of(row, family)
    implementation = implementation_of(family, label)
    if implementation is None:
        raise Unusable(f"backend: no '{label}' in this installation")
    if reason := implementation.unavailable(device):
        raise Unusable(f"backend: {label}: {reason}")
    plain = _PLAIN[label][0] if label in _PLAIN else None  # other tools' tables do not say how a library is called
    candidate = recorded_candidate(implementation, row, spec, device, plain)
    return Chosen(implementation=implementation, candidate=candidate)


def fallbacks(family: Family, spec: GemmSpec, device: Device) -> Iterator[Chosen]:
    """What the rules say where no row helps, best first.

    What the family's own kernels say of themselves (one made for few rows: that it takes those), then the family's
    library paths, which read pre-shuffled weights too, then torch.
    """
    for own in family.implementations:
        knobs = None if own.unavailable(device) else own.rule(spec, device)
        if knobs is not None and own.misfit(spec, knobs, device) is None:
            yield Chosen(implementation=own, candidate=Candidate.of(own.label, knobs))
    for label in dict.fromkeys((*_of_shuffled(spec, device), *family.baseline, "torch")):
        implementation = implementation_of(family, label)
        if implementation is None or implementation.unavailable(device):
            continue
        for rows in (None, *_more_rows(spec)):
            fitting = _first_fit(implementation, spec if rows is None else replace(spec, m=rows), device)
            if fitting is not None:
                yield Chosen(implementation=implementation, candidate=fitting, rows=rows)
                break


def _of_shuffled(spec: GemmSpec, device: Device) -> tuple[str, ...]:
    """What reads a 16-bit weight in tiles as it lies, in the order in which aiter takes it."""
    if spec.w_layout == PLAIN or spec.w_scale is not None:
        return ()
    return ("hipblaslt",) if device.gfx == "gfx942" else ("asm", "hipblaslt")


def _more_rows(spec: GemmSpec) -> tuple[int, ...]:
    """Rows to pad x to, where libraries take multiples only."""
    return () if spec.batch > 1 else (-(-spec.m // 4) * 4, finely_padded(spec.m))


def _first_fit(implementation: Implementation, spec: GemmSpec, device: Device) -> Candidate | None:
    label = implementation.label
    plain = None if spec.experts else _PLAIN.get(label)
    for point in plain or tuple(implementation.points(spec, device, NO_SPACE)):
        knobs = implementation.normalise(spec, point, device)
        if implementation.misfit(spec, knobs, device) is None:
            return Candidate.of(label, knobs)
    return None
