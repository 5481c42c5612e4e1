"""Providers of candidates: libraries, third parties, and a family's own kernels by their label."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.family.space import Space

NO_SPACE = Space(axes={}, when=(), pinned=())


@dataclass(frozen=True, kw_only=True)
class Backend(Implementation):
    """A library that computes products by their GemmSpec alone, whichever family they belong to."""

    reads_strides: ClassVar[bool] = True
    """Whether it takes operands in any strides and at any address; binding copies them otherwise."""

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """What this backend offers for a family."""
        return (self,)

    def configs(self, spec: GemmSpec, device: Device, space: Space) -> Iterable[Knobs]:
        """Every way this library has; a library's ways do not come from the space of knobs."""
        return ({},)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The knobs that its candidates can have."""
        known = {name: None for point in self.configs(spec, device, NO_SPACE) for name in point}
        return tuple(known)
