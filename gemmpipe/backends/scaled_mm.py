"""`scaled_mm`: torch's scaled matrix product (cuBLASLt, hipBLASLt) of fp8 operands as they are stored.

Also the copy of scales to the memory order that a library requires (`scales_in_order`), a part of the library's call.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.backends.aten import library_violation
from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.core.spec import COLUMN
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Weights
from gemmpipe.family.dtypes import native_fp8

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


def scales_in_order(scales: "torch.Tensor", order: str) -> "tuple[torch.Tensor, Callable[[], object]]":
    """(scales [M, blocks] contiguous in this order, a call to make before each product that reads them).

    Scales in that order are returned unchanged with a call that does nothing; others are copied by the call.
    """
    import torch

    if (scales.mT if order == COLUMN else scales).is_contiguous():
        return scales, no_copy
    rows, blocks = scales.shape
    strides = (1, rows) if order == COLUMN else (blocks, 1)
    kept = torch.empty_strided((rows, blocks), strides, dtype=scales.dtype, device=scales.device)
    return kept, lambda: kept.copy_(scales)


def no_copy() -> object:
    """The call before a product if its scales have the required order: does nothing."""


# The numbers of torch.nn.functional.ScalingType, which the operator takes
_TENSOR, _ROW, _BLOCK_1X128, _BLOCK_128X128 = 0, 1, 4, 5
ROW_MULTIPLE = 4
"""The rows that libraries require in products with block scales."""
_K_BLOCK_MULTIPLE = 4  # cuBLASLt reads the 128x128 scales in fours along K


@dataclass(frozen=True, kw_only=True)
class ScaledMm(Backend):
    """Candidates by one knob, `use_fast_accum`: True keeps sums in the tensor core's 14 bits along all of K."""

    label = "scaled_mm"

    def unavailable(self, device: Device) -> str | None:
        """It needs a GPU, and a torch with `_scaled_mm_v2`, which takes the scales' layout (2.10 on)."""
        import torch

        if device.kind == "cpu":
            return "no GPU: on a CPU the operator is a slow fallback"
        return None if hasattr(torch, "_scaled_mm_v2") else f"torch {torch.__version__} has no _scaled_mm_v2"

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Both ways to accumulate."""
        return ({"use_fast_accum": False}, {"use_fast_accum": True})

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """A row of another program: sums in fp32."""
        return {"use_fast_accum": False}

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """`use_fast_accum` is False with block scales (applied every 128 elements) and on AMD, without such sums."""
        fast = knobs["use_fast_accum"] and device.kind == "cuda" and _recipes(spec) != (_BLOCK_1X128, _BLOCK_128X128)
        return {"use_fast_accum": bool(fast)}

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` per rule; the alignments are the operator's own checks."""
        if device.kind == "cpu":
            return "no GPU: on a CPU the operator is a slow fallback"
        return scaled_mm_violation(spec, device)

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The weight scales in the operator's layout.

        Block scales become [L4, ceil(N/128)] with stride (1, L4), L4 = ceil(K/128) rounded up to 4: transposed, that
        is a row-major [ceil(N/128), L4], which other kernels can read. It replaces the stored scales: no extra bytes.
        """
        import torch

        if weights.w_scale is None or _recipes(spec) != (_BLOCK_1X128, _BLOCK_128X128):
            return Prepared(weights=weights)
        padded = torch.nn.functional.pad(
            weights.w_scale, (0, -weights.w_scale.shape[1] % _K_BLOCK_MULTIPLE)
        ).contiguous()
        return Prepared(weights=weights, extra=padded.t())

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call of the operator that writes `out`."""
        import torch

        recipes, w_scale = _recipes(spec), weight_scales(prepared)
        if recipes is None or inputs.x_scale is None or w_scale is None:
            raise ValueError("scaled_mm needs the scales of both operands")
        copy_scales: Callable[[], object]
        x_scale, copy_scales = inputs.x_scale, no_copy
        if recipes[0] == _BLOCK_1X128:
            x_scale, copy_scales = scales_in_order(x_scale, COLUMN)
        elif recipes[0] == _ROW:
            x_scale, w_scale = x_scale.reshape(-1, 1), w_scale.reshape(1, -1)
        w_t, bias = prepared.weights.w.t(), prepared.weights.bias
        if bias is not None:
            bias = bias.to(out.dtype)
        fast = bool(knobs["use_fast_accum"])
        operator = torch.ops.aten._scaled_mm_v2.out
        x_recipe, w_recipe = [recipes[0]], [recipes[1]]

        def launch() -> "torch.Tensor":
            copy_scales()
            operator(
                inputs.x, w_t, [x_scale], x_recipe, [], [w_scale], w_recipe, [], bias, out.dtype, [], fast, out=out
            )
            return out

        return launch


def weight_scales(prepared: Prepared) -> "torch.Tensor | None":
    """The weight's scales in the operator's layout: block scales as `ScaledMm.prepare` makes them, others as stored."""
    import torch

    return prepared.extra if isinstance(prepared.extra, torch.Tensor) else prepared.weights.w_scale


def scaled_mm_violation(spec: GemmSpec, device: Device) -> str | None:
    """`rule: detail` if cuBLASLt or hipBLASLt does not multiply these scaled operands, or None.

    The alignments are the operator's own checks.
    """
    if problem := library_violation(spec):
        return problem
    kinds = _recipes(spec)
    if kinds is None:
        return "scales: expected tensor x tensor, row x row or 1x128 x 128x128"
    if not spec.x_dtype.startswith("float8") or not spec.w_dtype.startswith("float8"):
        return f"fp8 only: the operands are {spec.x_dtype} and {spec.w_dtype}"
    if spec.x_dtype != native_fp8(device.gfx):
        return f"fp8 format: {device.gfx} does not multiply {spec.x_dtype}"
    if spec.n % 16 or spec.k % 16:
        return f"alignment: N={spec.n} and K={spec.k} must be multiples of 16"
    if kinds == (_BLOCK_1X128, _BLOCK_128X128) and device.gfx != "sm_90":
        return f"block scales: cuBLASLt supports them on sm_90 only, not on {device.gfx}"
    if kinds == (_BLOCK_1X128, _BLOCK_128X128) and spec.m % ROW_MULTIPLE:
        return f"alignment: M={spec.m} must be a multiple of {ROW_MULTIPLE} with block scales"
    if spec.bias and (spec.out_dtype == "float32" or kinds[0] == _BLOCK_1X128):
        return f"bias: none with {spec.out_dtype} output or block scales"
    return None


def _recipes(spec: GemmSpec) -> tuple[int, int] | None:
    """The scaling recipes of both operands in the operator's numbers, or None if it has no such product."""
    if spec.x_scale is None or spec.w_scale is None:
        return None
    kinds = (spec.x_scale.granularity, spec.w_scale.granularity)
    if kinds == ("block", "block") and (spec.x_scale.block, spec.w_scale.block) == ((1, 128), (128, 128)):
        return _BLOCK_1X128, _BLOCK_128X128
    return {("tensor", "tensor"): (_TENSOR, _TENSOR), ("row", "row"): (_ROW, _ROW)}.get(kinds)
