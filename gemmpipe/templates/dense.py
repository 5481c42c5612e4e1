"""Host side of the dense kernels: parameters in the order of their signatures, and constraints.

`Dense` launches dense_kernel.py (Triton), `DenseWarpSpecialised` hopper/dense_kernel.py (Gluon, sm_90).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.family.layouts import ROW_MAJOR
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.hopper.constraints import DENSE_MAX_COLUMNS, MaxColumns
from gemmpipe.templates.hopper.launch import WarpSpecialised
from gemmpipe.templates.params import (
    PREFETCH_PARAMETERS,
    SCHEDULE_PARAMETERS,
    WORKSPACE_PARAMETERS,
    load_constants,
    operand_pointers,
    size_arguments,
    tile_constants,
)
from gemmpipe.templates.tiled import TiledKernel

_MAX_INT8_K = 2**31 // 2**14
"""The longest sum of int8 products (at most 2**14 each) that int32 holds."""


@dataclass(frozen=True, kw_only=True)
class Dense(TiledKernel):
    """`triton`: one program per tile, split and product; builds without bias or scales leave these parameters out."""

    kernel: str = "gemmpipe.templates.dense_kernel:dense"
    supports_swap_ab: bool = True
    supports_pdl: bool = True
    layout: str = ROW_MAJOR
    """The weight layout that it reads (see family/layouts.py)."""
    batched: bool = False
    """True if it computes several products."""

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        return scaling_violation(spec) or tile_violation(
            spec, knobs, device, accumulators=1, layout=self.layout, batched=self.batched
        )

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, scales, output and workspace."""
        return {**operand_pointers(spec), **WORKSPACE_PARAMETERS}

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes, row strides, the schedule of tiles and the prefetch."""
        return {**size_arguments(spec), **SCHEDULE_PARAMETERS, **PREFETCH_PARAMETERS}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and the constants that select branches."""
        return {
            **tile_constants(knobs),
            "SPLIT_K": "parts" if knobs["NUM_KSPLIT"] != 1 else "none",
            "SCALES": spec.x_scale.granularity if spec.x_scale else "none",
            "SHUFFLED": spec.w_layout != ROW_MAJOR,
            "BATCHED": spec.batch > 1,
            **load_constants(spec, knobs),
            "UPCAST": spec.x_dtype == "bfloat16" and self.interpreted(),
            "SWAP_AB": bool(knobs.get("SWAP_AB")),
        }


def scaling_violation(spec: GemmSpec) -> str | None:
    """`rule: detail` if one sum along K, scaled at its end, does not give this product, or None."""
    kinds = [scale.granularity if scale else None for scale in (spec.x_scale, spec.w_scale)]
    if kinds[0] != kinds[1] or kinds[0] not in (None, "row", "tensor"):
        return f"scales: one per operand, one per row of both, or none, not {kinds}"
    if spec.x_dtype != spec.w_dtype:
        return f"operands: both of one type, not {spec.x_dtype} and {spec.w_dtype}"
    return int32_overflow_violation(spec)


def int32_overflow_violation(spec: GemmSpec) -> str | None:
    """`rule: detail` if an int32 sum along K can overflow, or None."""
    if spec.x_dtype == "int8" and spec.k > _MAX_INT8_K:
        return f"int32 sum: K={spec.k} products of 2**14 can exceed 2**31 from {_MAX_INT8_K} on"
    return None


@dataclass(frozen=True, kw_only=True)
class DenseWarpSpecialised(WarpSpecialised):
    """`gluon`: 16 or 8 bits; scales per row, per tensor or none; bias. Sums of fp8 have the tensor core's 14 bits."""

    kernel: str = "gemmpipe.templates.hopper.dense_kernel:dense_warp_specialised"
    max_columns: MaxColumns = DENSE_MAX_COLUMNS

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        return scaling_violation(spec) or super().unsupported_reason(spec, knobs, device)

    def operands(self, spec: GemmSpec) -> Mapping[str, str]:
        """Bias and scales, left out of builds without them."""
        pointers = operand_pointers(spec)
        return {name: pointers[name] for name in ("bias_ptr", "x_scale_ptr", "w_scale_ptr")}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """The granularity of the scales."""
        return {"SCALES": spec.x_scale.granularity if spec.x_scale else "none"}

    def values(self, spec: GemmSpec, inputs: Inputs, prepared: Prepared) -> Mapping[str, object]:
        """The tensors of `operands`."""
        weights = prepared.weights
        return {"bias_ptr": weights.bias, "x_scale_ptr": inputs.x_scale, "w_scale_ptr": weights.w_scale}
