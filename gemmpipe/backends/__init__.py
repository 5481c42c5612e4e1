"""Providers of candidates: libraries, packages of others, and a family's own kernels by their label."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.family.space import Space

NO_SPACE = Space(axes={}, when=(), pinned=())


NOT_THIS_PRODUCT = "not for this product"
"""How a reason begins that holds on every device."""


@dataclass(frozen=True, kw_only=True)
class Backend(Implementation):
    """A library that computes products of any family, by their GemmSpec alone."""

    reads_strides: ClassVar[bool] = True
    """True if it takes operands with any strides and address; else the run time copies others, and reports it."""

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """The implementations for a family: the backend itself."""
        return (self,)

    def form_violation(self, spec: GemmSpec) -> str | None:
        """`rule: detail` if it computes no product of this form on any device, or None; named before what is missing.

        A part of `unsupported_reason`, which has all rules.
        """
        return None

    def configs(self, spec: GemmSpec, device: Device, space: Space) -> Iterable[Knobs]:
        """All configurations of this library, which do not come from `space`."""
        return ({},)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The knobs that its candidates can have."""
        known = {name: None for point in self.configs(spec, device, NO_SPACE) for name in point}
        return tuple(known)


def missing_reason(implementation: Implementation, spec: GemmSpec, device: Device) -> str | None:
    """Why nothing of it can run: that it has no product of this form, which nothing changes, else what is missing."""
    form = implementation.form_violation(spec) if isinstance(implementation, Backend) else None
    return f"{NOT_THIS_PRODUCT}: {form}" if form else implementation.unavailable(device)


@cache
def library_backends() -> Mapping[str, Backend]:
    """The libraries of gemmpipe.backends by label, without those with a missing package."""
    found: dict[str, Backend] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        if module.name.rpartition(".")[2].startswith("_"):
            continue  # device code, which imports Triton
        try:
            members = vars(importlib.import_module(module.name)).values()
        except ImportError:
            continue
        for member in members:
            if inspect.isclass(member) and issubclass(member, Backend) and not inspect.isabstract(member):
                found[member.label] = member()
    return found


def library_implementation(family: Family, label: str) -> Implementation | None:
    """The implementation of a library with this label for a family, or None if it is not known."""
    backend = library_backends().get(label)
    return None if backend is None else next(iter(backend.implementations(family)), None)
