"""Providers of candidates: libraries, packages of others, and a family's own kernels by their label."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.family.space import Space

NO_SPACE = Space(axes={}, when=(), pinned=())


@dataclass(frozen=True, kw_only=True)
class Backend(Implementation):
    """A library that computes products of any family, by their GemmSpec alone."""

    reads_strides: ClassVar[bool] = True
    """True if it takes operands with any strides and address; binding copies them otherwise."""

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """The implementations for a family: the backend itself."""
        return (self,)

    def configs(self, spec: GemmSpec, device: Device, space: Space) -> Iterable[Knobs]:
        """All configurations of this library, which do not come from `space`."""
        return ({},)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The knobs that its candidates can have."""
        known = {name: None for point in self.configs(spec, device, NO_SPACE) for name in point}
        return tuple(known)
