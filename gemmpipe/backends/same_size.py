"""`same_size`: torch's products of the same size in other formats, and an empty kernel; for comparisons only.

It multiplies operands of its own, so its candidates cannot be selected. `blockwise` is the exception: the block-scaled
product itself, with the rows padded to a multiple of 4 as the operator requires (padding is not timed).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gemmpipe.backends import Backend
from gemmpipe.backends.scaled_mm import ROW_MULTIPLE, ScaledMm, scaled_mm_violation
from gemmpipe.core.data import Candidate, Device, Knobs
from gemmpipe.core.spec import ROW, scale_order
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Weights
from gemmpipe.family.dtypes import native_fp8
from gemmpipe.templates.tiled import ceil_div

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

BLOCKWISE, EMPTY = "blockwise", "empty"
_METHODS = ("mm", "rowwise", "tensorwise", BLOCKWISE, EMPTY)


def computes_another_product(candidate: Candidate) -> bool:
    """True for a candidate that is timed beside others for comparison alone, as it computes something else."""
    return candidate.backend == SameSize.label and candidate.knobs.get("method") != BLOCKWISE


@dataclass(frozen=True, kw_only=True)
class SameSize(Backend):
    """Candidates by `method`: bf16 `mm`, fp8 `rowwise` and `tensorwise`, `blockwise`, and `empty`."""

    label = "same_size"

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """One per method."""
        return tuple({"method": method} for method in _METHODS)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` per rule."""
        method = knobs["method"]
        if method != "mm" and device.kind == "cpu":
            return "no GPU: scaled products and empty launches are measured on a GPU only"
        if method == EMPTY:
            return None
        if spec.experts is not None or spec.batch > 1:
            return "shape: single products only"
        if method == "mm":
            return None
        if method == BLOCKWISE:
            return scaled_mm_violation(_padded(spec), device)

        if spec.n % 16 or spec.k % 16:
            return f"alignment: N={spec.n} and K={spec.k} must be multiples of 16"
        return None

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """Weights of its own: random, since zeros draw less power."""
        import torch

        if knobs["method"] == BLOCKWISE:
            return ScaledMm().prepare(spec, weights, {"use_fast_accum": False})
        if knobs["method"] == EMPTY:
            return Prepared(weights=weights)
        w = torch.randn(spec.n, spec.k, device=weights.w.device, dtype=torch.bfloat16)
        return Prepared(weights=weights, extra=w, extra_bytes=w.numel() * w.element_size())

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call that computes a product of this size."""
        import torch

        method = str(knobs["method"])
        if method == BLOCKWISE:
            return _blockwise(spec, device, inputs, prepared, out)
        if method == EMPTY:
            empty_launch = _empty_launch()
            return lambda: (empty_launch(), out)[1]
        w: Any = prepared.extra
        x = torch.randn(spec.m, spec.k, device=out.device, dtype=torch.bfloat16)
        if method == "mm":
            wide = torch.empty(spec.m, spec.n, device=out.device, dtype=torch.bfloat16)
            return lambda: torch.mm(x, w.t(), out=wide)
        return _scaled(method, x, w, getattr(torch, str(native_fp8(device.gfx))))


def _padded(spec: GemmSpec) -> GemmSpec:
    return replace(spec, m=ceil_div(spec.m, ROW_MULTIPLE) * ROW_MULTIPLE)


def _blockwise(spec: GemmSpec, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Launch:
    import torch

    wide, extra = _padded(spec), -spec.m % ROW_MULTIPLE
    if not extra:
        return ScaledMm().bind(spec, {"use_fast_accum": False}, device, inputs, prepared, out)
    x = torch.cat([inputs.x.view(torch.uint8), inputs.x.view(torch.uint8)[:1].expand(extra, -1)]).view(inputs.x.dtype)
    scales = inputs.x_scale
    if scales is None:
        raise ValueError("block scales are missing")
    rows = torch.cat([scales, scales[:1].expand(extra, -1)])
    # A quantiser would write padded rows (as columns padded to fours), so padding is not timed; reordering scales is.
    by_rows = spec.m > 1 and scale_order(scales) == ROW
    padded = Inputs(x=x, x_scale=rows if by_rows else rows.t().contiguous().t())
    full = torch.empty(wide.m, wide.n, dtype=out.dtype, device=out.device)
    launch = ScaledMm().bind(wide, {"use_fast_accum": False}, device, padded, prepared, full)
    return lambda: launch()[: spec.m]


def _scaled(method: str, x: "torch.Tensor", w: "torch.Tensor", fp8: "torch.dtype") -> Launch:
    import torch

    shapes = ((x.shape[0], 1), (1, w.shape[0])) if method == "rowwise" else ((1,), (1,))
    x_scale, w_scale = (torch.ones(shape, device=x.device) for shape in shapes)
    a, b = x.to(fp8), w.to(fp8).t()
    return lambda: torch._scaled_mm(a, b, x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _empty_launch() -> Callable[[], None]:
    """A launch of an empty kernel."""
    from gemmpipe.launch._empty import empty

    return lambda: empty[(1,)]()
