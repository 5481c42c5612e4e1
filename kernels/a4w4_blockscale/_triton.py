"""Launching the MXFP4 kernel: its parameters, in the order of its signature, and what fits where."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.templates.fits import tile_misfit
from gemmpipe.templates.signature import PARTS, SHARES, TYPES, loads, sizes, tile_sizes
from gemmpipe.templates.tiled import Tiled

if TYPE_CHECKING:
    import torch

_GROUP = 32


@dataclass(frozen=True, kw_only=True)
class Microscaled(Tiled):
    """`triton`: row-major scales, one program a tile and split."""

    kernel: str = "gemmpipe.kernels.a4w4_blockscale._kernel:microscaled"

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        scaling = tuple((scale.block, scale.dtype) if scale else None for scale in (spec.x_scale, spec.w_scale))
        if scaling != (((1, _GROUP), "float8_e8m0fnu"),) * 2:
            return f"scales: this kernel reads a power of two for {_GROUP} elements, not {scaling}"
        if device.gfx == "gfx942" and not _decodes_for_cdna3():
            return f"compiler: triton {version('triton')} has no MXFP4 product for gfx942, 3.9 decodes"
        return tile_misfit(spec, knobs, device, accumulators=1)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands and scales as bytes, output and workspace."""
        return {
            "x_ptr": "*u8",
            "w_ptr": "*u8",
            "x_scale_ptr": "*u8",
            "w_scale_ptr": "*u8",
            "out_ptr": f"*{TYPES[spec.out_dtype]}",
            **PARTS,
        }

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes, row strides, and how the work is shared out."""
        return {**sizes(spec, packed=2, scale_group=_GROUP), **SHARES}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {**tile_sizes(knobs), "SPLIT_K": knobs["NUM_KSPLIT"] != 1, **loads(spec, knobs)}

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors as bytes, and the row strides that they really have."""
        import torch

        given = super().arguments(inputs, prepared, out)
        return {
            name: value.view(torch.uint8) if isinstance(value, torch.Tensor) and name != "out_ptr" else value
            for name, value in given.items()
        }


@cache
def _decodes_for_cdna3() -> bool:
    """Triton 3.6 ends with `Unsupported DotScaleOp` there, 3.9 compiles; between, nobody looked."""
    major, minor = version("triton").split(".")[:2]
    return (int(major), int(minor)) >= (3, 9)
