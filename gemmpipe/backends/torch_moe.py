"""Mixtures of experts in torch: grouped products of rows sorted by expert, and on a CPU a loop over experts."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device
from gemmpipe.core.errors import suggest_or_list
from gemmpipe.family import Experts, GemmSpec, Inputs, Launch, Prepared, Weights

if TYPE_CHECKING:
    import torch

METHODS = {
    "expert_loop": "a loop over experts in the activations' type, weights converted in each call",
    "expert_loop_float32": "the same in fp32",
    "expert_loop_float32_copy": "the same with fp32 weights, kept",
    "grouped_mm": "rows sorted by expert, then one grouped product per stage, 16-bit weights as they are stored",
    "grouped_mm_convert": "the same with the weights dequantised to 16 bits in each call",
    "grouped_mm_copy": "the same with dequantised weights, kept",
    "scaled_grouped_mm": "the same with fp8 operands as they are stored, scales by row",
}
_LOOP = "expert_loop"
_VECTOR_BYTES = 16  # grouped products read rows in vectors of this size


def unsupported_reason(spec: GemmSpec, experts: Experts, method: str, device: Device) -> str | None:
    """`rule: detail` of the first rule broken, or None."""
    import torch

    if method not in METHODS:
        return f"method: no '{method}'{suggest_or_list(method, METHODS)}"
    scaled = spec.w_scale is not None
    if method.startswith(_LOOP):
        # On a GPU the host would wait in each launch for the experts that have rows, which no graph can capture.
        return None if device.kind == "cpu" else "expert loop: for CPUs only, a GPU would wait for the host"
    if method == "grouped_mm" and scaled:
        return "scaled operands: a grouped product takes them only after dequantising"
    if method in ("grouped_mm_convert", "grouped_mm_copy") and not scaled:
        return "16-bit operands: they need no conversion"
    if device.kind != "cpu" and spec.x_dtype != "bfloat16":
        return f"grouped product: bf16 only on a GPU, not {spec.x_dtype}"
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"grouped product: torch {torch.__version__} has none"
    step = _VECTOR_BYTES if method == "scaled_grouped_mm" else _VECTOR_BYTES // 2
    if any(size % step for size in (spec.k, spec.n, experts.inner, experts.w1_rows)):
        return f"alignment: sizes must be multiples of {step} for {method}"
    return _scaled_violation(spec, experts, device) if method == "scaled_grouped_mm" else None


def _scaled_violation(spec: GemmSpec, experts: Experts, device: Device) -> str | None:
    if experts.quantised is None or experts.quantised.granularity != "row":
        return "scales: a grouped product of fp8 takes them by row only"
    if device.gfx != "sm_90":
        return f"grouped product of fp8: on sm_90 only, not on {device.gfx}"
    return None


def prepare(spec: GemmSpec, weights: Weights, method: str) -> Prepared:
    """The converted copies if the method keeps them; all their bytes are in addition to the stored weights."""
    if not method.endswith("_copy"):
        return Prepared(weights=weights)
    kept = _convert(spec, weights, _compute_type(spec, method))
    size = sum(w.numel() * w.element_size() for w in kept)
    return Prepared(weights=weights, extra=kept, extra_bytes=size)


def bind(
    spec: GemmSpec, experts: Experts, method: str, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
) -> Launch:
    """A call that sorts rows by expert, multiplies and sums into `out` [M, N]."""
    if method.startswith(_LOOP):
        return _launch_loop(spec, experts, method, inputs, prepared, out)
    if method == "scaled_grouped_mm":
        return _launch_grouped(spec, experts, inputs, lambda: _ScaledGroupedMm(spec, prepared.weights), out)
    kept = prepared.extra if isinstance(prepared.extra, tuple) else None
    plain = spec.w_scale is None

    def pair() -> "_GroupedMm":
        weights = prepared.weights
        if kept is not None:
            return _GroupedMm(kept[0], kept[1])
        if plain and weights.w2 is not None:
            return _GroupedMm(weights.w, weights.w2)
        return _GroupedMm(*_convert(spec, weights, _compute_type(spec, method)))

    return _launch_grouped(spec, experts, inputs, pair, out)


class _GroupedMm:
    """Grouped products with 16-bit weights [E, rows, columns]."""

    def __init__(self, w: "torch.Tensor", w2: "torch.Tensor") -> None:
        self._weights = (w, w2)

    def __call__(self, stage: int, x: "torch.Tensor", ends: "torch.Tensor") -> "torch.Tensor":
        import torch

        return torch.nn.functional.grouped_mm(x, self._weights[stage].mT, offs=ends)


class _ScaledGroupedMm:
    """Grouped products with fp8 weights and one scale per row; x is first quantised likewise."""

    def __init__(self, spec: GemmSpec, weights: Weights) -> None:
        self._weights = _pairs(weights)
        self._spec = spec

    def __call__(self, stage: int, x: "torch.Tensor", ends: "torch.Tensor") -> "torch.Tensor":
        import torch

        from gemmpipe.family.operands import quantise_blockwise, torch_dtype

        w, scale = self._weights[stage]
        if w is None or scale is None:
            raise ValueError("fp8 experts need scales")
        q, x_scale = quantise_blockwise(x.float(), (1, x.shape[1]), w.dtype)
        dtype = torch_dtype(self._spec.out_dtype)
        return torch._scaled_grouped_mm(
            q, w.mT, x_scale.view(-1), scale.view(w.shape[0], -1), offs=ends, out_dtype=dtype, use_fast_accum=True
        )


def _launch_grouped(
    spec: GemmSpec,
    experts: Experts,
    inputs: Inputs,
    weights: Callable[[], _GroupedMm | _ScaledGroupedMm],
    out: "torch.Tensor",
) -> Launch:
    import torch

    from gemmpipe.family.moe import activate, routing

    ids, shares = routing(inputs)
    numbers = torch.arange(experts.count, device=ids.device, dtype=ids.dtype)

    def launch() -> "torch.Tensor":
        owners, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(owners, numbers, right=True, out_int32=True)
        multiply = weights()
        wide = multiply(0, inputs.x[order // experts.topk], ends)
        if experts.weight_first:
            wide = wide * shares.flatten()[order, None]
        parts = multiply(1, activate(spec, wide).to(inputs.x.dtype), ends)
        back = torch.empty_like(parts).index_copy_(0, order, parts).view(spec.m, experts.topk, spec.n)
        if experts.weight_first:
            return torch.sum(back, 1, out=out)
        return torch.bmm(shares[:, None].to(back.dtype), back, out=out[:, None]).view(spec.m, spec.n)

    return launch


def _launch_loop(
    spec: GemmSpec, experts: Experts, method: str, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
) -> Launch:
    import torch

    from gemmpipe.family.moe import activate, dequantise_expert, routing

    ids, shares = routing(inputs)
    compute = _compute_type(spec, method)
    kept = prepared.extra if isinstance(prepared.extra, tuple) else None

    def launch() -> "torch.Tensor":
        x = inputs.x.to(compute)
        total = torch.zeros(spec.m, spec.n, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            w, w2 = (
                (kept[0][expert], kept[1][expert])
                if kept
                else dequantise_expert(spec, prepared.weights, expert, compute)
            )
            share = shares[rows, places, None]
            wide = x[rows] @ w.T
            inner = activate(spec, wide * share if experts.weight_first else wide).to(compute)
            part = (inner @ w2.T).float()
            total.index_add_(0, rows, part if experts.weight_first else part.mul_(share))
        return out.copy_(total)

    return launch


def _compute_type(spec: GemmSpec, method: str) -> "torch.dtype":
    import torch

    from gemmpipe.family.operands import torch_dtype

    return torch.float32 if "float32" in method else torch_dtype(spec.x_dtype)


def _convert(spec: GemmSpec, weights: Weights, dtype: "torch.dtype") -> "tuple[torch.Tensor, torch.Tensor]":
    """Both weights [E, rows, columns] as `dtype`, times their scales."""
    if weights.w2 is None:
        raise ValueError("experts need a second weight")
    first, second = (_dequantise_all(w, s, spec, dtype) for w, s in _pairs(weights))
    return first, second


def _pairs(weights: Weights) -> "tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]":
    return (weights.w, weights.w_scale), (weights.w2, weights.w2_scale)


def _dequantise_all(
    w: "torch.Tensor | None", scale: "torch.Tensor | None", spec: GemmSpec, dtype: "torch.dtype"
) -> "torch.Tensor":
    """In two passes over all experts; expert by expert if the last block of scales along K is partial."""
    import torch

    from gemmpipe.family.reference import dequantise

    if w is None:
        raise ValueError("experts need a second weight")
    full = w.to(dtype)
    if scale is None or spec.w_scale is None:
        return full
    if spec.w_scale.granularity == "row":
        return full.mul_(scale.view(*w.shape[:2], 1))
    (rows, columns), (count, height, width) = spec.w_scale.block, w.shape
    if width % columns:
        return torch.stack([dequantise(w[e], scale[e], spec.w_scale, dtype) for e in range(count)])
    by_row = scale.repeat_interleave(rows, 1)[:, :height, :, None]
    full.view(count, height, width // columns, columns).mul_(by_row)
    return full
