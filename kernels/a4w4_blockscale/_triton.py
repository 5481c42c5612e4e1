"""Launching the MXFP4 kernel: its parameters, in the order of its signature, and what fits where."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.templates.axes import integer
from gemmpipe.templates.fits import tile_misfit
from gemmpipe.templates.signature import TYPES
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
            "parts_ptr": "*fp32",
            "counters_ptr": "*i32",
        }

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides of contiguous operands; the last two are knobs, set when bound."""
        return {
            "M": spec.m,
            "N": spec.n,
            "K": spec.k,
            "x_stride": spec.k // 2,
            "w_stride": spec.k // 2,
            "x_scale_stride": spec.k // _GROUP,
            "w_scale_stride": spec.k // _GROUP,
            "out_stride": spec.n,
            "group_m": 1,
            "splits": 1,
        }

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {
            "BLOCK_SIZE_M": knobs["BLOCK_SIZE_M"],
            "BLOCK_SIZE_N": knobs["BLOCK_SIZE_N"],
            "BLOCK_SIZE_K": knobs["BLOCK_SIZE_K"],
            "SPLIT_K": integer(knobs, "NUM_KSPLIT") != 1,
            "EVEN_K": spec.k % integer(knobs, "BLOCK_SIZE_K") == 0,
            "CACHE": knobs["cache_modifier"],
        }

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors as bytes, and the row strides that they really have."""
        import torch

        weights = prepared.weights
        if inputs.x_scale is None or weights.w_scale is None:
            raise ValueError("this kernel needs x_scale and w_scale")
        return {
            "x_ptr": inputs.x.view(torch.uint8),
            "w_ptr": weights.w.view(torch.uint8),
            "x_scale_ptr": inputs.x_scale.view(torch.uint8),
            "w_scale_ptr": weights.w_scale.view(torch.uint8),
            "out_ptr": out,
            "x_stride": inputs.x.stride(0),
            "w_stride": weights.w.stride(0),
            "x_scale_stride": inputs.x_scale.stride(0),
            "w_scale_stride": weights.w_scale.stride(0),
            "out_stride": out.stride(0),
        }


@cache
def _decodes_for_cdna3() -> bool:
    """Triton 3.6 ends with `Unsupported DotScaleOp` there, 3.9 compiles; between, nobody looked."""
    major, minor = version("triton").split(".")[:2]
    return (int(major), int(minor)) >= (3, 9)
