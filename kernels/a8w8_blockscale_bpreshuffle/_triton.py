"""Launching the kernel on tiles of weights: what differs from the row-major weight's, and what fits where."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.kernels.a8w8_blockscale import _fits
from gemmpipe.kernels.a8w8_blockscale import _triton as row_major
from gemmpipe.layouts import TILES_16X16
from gemmpipe.templates.signature import transposed_scales

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Blockscale(row_major.Blockscale):
    """`triton`: transposed activation scales, one program a tile and split."""

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The row-major kernel's rules, for the other layout."""
        return _fits.misfit(spec, knobs, device, layout=TILES_16X16)

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """As the row-major kernel's, but for the scales' stride."""
        return {**super().integers(spec), "x_scale_stride": spec.m}

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors, and the strides that they really have."""
        return {**super().arguments(inputs, prepared, out), **transposed_scales(inputs)}
