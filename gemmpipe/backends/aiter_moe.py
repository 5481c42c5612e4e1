"""Mixtures of experts by aiter's composable kernels: tokens sorted by expert, then one kernel for each of two stages.

Written to the functions of aiter (`moe_sorting`, `ck_moe_stage1_fwd`, `ck_moe_stage2_fwd`), unverified on hardware. x
and the intermediate rows are quantised by aiter's own kernels, which are part of the call.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemmpipe.backends.aiter_package import aiter_function, int_or_default
from gemmpipe.core.data import Knobs, Scalar
from gemmpipe.family import Experts, GemmSpec, Inputs, Launch, Prepared, Weights
from gemmpipe.family.dtypes import DTYPES_16BIT

if TYPE_CHECKING:
    import torch

BLOCK_M, KERNEL_NAME1, KERNEL_NAME2, SHUFFLED = "block_m", "kernelName1", "kernelName2", "shuffled"
KNOBS = (BLOCK_M, KERNEL_NAME1, KERNEL_NAME2, SHUFFLED)
_BLOCKS = (16, 32, 64, 128)
"""Rows of a block of tokens, by which aiter chooses both kernels."""
CONFIGS: tuple[Knobs, ...] = tuple(
    {BLOCK_M: block, KERNEL_NAME1: "", KERNEL_NAME2: "", SHUFFLED: shuffled}
    for shuffled in (False, True)
    for block in _BLOCKS
)
"""All configurations; shuffled weights are a copy."""
_PREFIX = "moe_ck2stages_"
_QUANT_TYPES = {None: "No", "row": "per_Token", "block": "per_1x128"}
_ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu"}


def knobs_from_row(row: Mapping[str, Scalar]) -> Knobs | None:
    """The knobs of a row of aiter's `tuned_fmoe.csv`: both kernels by name, made for shuffled weights."""
    text = str(row.get(BLOCK_M) or "").removesuffix(".0")
    if not text.isdecimal():
        return None
    names = [str(row.get(name) or "") for name in (KERNEL_NAME1, KERNEL_NAME2)]
    if str(row.get("run_1stage") or "0") not in ("0", "False", "0.0"):
        names[0] = names[0].removeprefix(_PREFIX) or "of one stage"  # refused: the row lacks its function's arguments
    return {BLOCK_M: int(text), **dict(zip((KERNEL_NAME1, KERNEL_NAME2), names, strict=True)), SHUFFLED: True}


def kernel_name(knobs: Knobs) -> str:
    """`ck_moe_32`: aiter chooses the kernels by the rows of a block."""
    return f"ck_moe_{knobs.get(BLOCK_M)}{'_shuffled' if knobs.get(SHUFFLED) else ''}"


def prepare_knobs(knobs: Knobs) -> Knobs:
    """The knob that determines the form of the weights."""
    return {SHUFFLED: knobs.get(SHUFFLED)}


def unsupported_reason(spec: GemmSpec, experts: Experts, knobs: Knobs) -> str | None:
    """`rule: detail` of the first rule broken, or None."""
    foreign = [name for name in (str(knobs.get(KERNEL_NAME1) or ""), str(knobs.get(KERNEL_NAME2) or "")) if name]
    if other := next((name for name in foreign if not name.startswith(_PREFIX)), None):
        return f"kernel: {other} is no composable kernel of two stages, expected {_PREFIX}..."
    if int_or_default(knobs.get(BLOCK_M)) not in _BLOCKS:
        return f"block: {knobs.get(BLOCK_M)} rows, expected one of {_BLOCKS}"
    if not experts.gated:
        return "activation: aiter's composable kernels require a gate"
    if spec.x_dtype not in DTYPES_16BIT:
        return f"operand type: bf16 or fp16, not {spec.x_dtype}"
    if experts.activation not in _ACTIVATIONS:
        return f"activation: {experts.activation}, expected one of {', '.join(_ACTIVATIONS)}"
    if knobs.get(SHUFFLED) and any(
        rows % 16 or k % 32 for rows, k in ((spec.n, experts.inner), (experts.w1_rows, spec.k))
    ):
        return "alignment: shuffled weights need rows in multiples of 16 and K in multiples of 32"
    return None


def prepare(weights: Weights, knobs: Knobs) -> Prepared:
    """Both weights in 16 x 16 tiles by aiter's own function, which marks the tensors; a copy of all experts."""
    if not knobs.get(SHUFFLED) or weights.w2 is None:
        return Prepared(weights=weights)
    shuffle = aiter_function("shuffle_weight", "aiter.ops.shuffle")
    form = tuple(shuffle(w, layout=(16, 16)) for w in (weights.w, weights.w2))
    return Prepared(weights=weights, extra=form, extra_bytes=sum(w.numel() * w.element_size() for w in form))


def bind(
    spec: GemmSpec, experts: Experts, knobs: Knobs, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
) -> Launch:
    """A call that sorts, multiplies twice and returns the sum [M, N] in memory that aiter allocates."""
    weights, form = prepared.weights, prepared.extra
    if isinstance(form, tuple):
        weights = replace(weights, w=form[0], w2=form[1])
    stages = _Stages(spec, experts, knobs, weights)
    return lambda: stages(inputs)


class _Stages:
    """The launches of one call, with the arguments that all calls share."""

    def __init__(self, spec: GemmSpec, experts: Experts, knobs: Knobs, weights: Weights) -> None:
        kind = _QUANT_TYPES[experts.quantised.granularity if experts.quantised else None]
        self._spec, self._experts, self._weights = spec, experts, weights
        self._block = int_or_default(knobs[BLOCK_M])
        self._names = tuple(str(knobs.get(name) or "") for name in (KERNEL_NAME1, KERNEL_NAME2))
        self._kind: Any = getattr(aiter_function("QuantType"), kind)
        self._options = {
            "block_m": self._block,
            "quant_type": self._kind,
            "activation": getattr(aiter_function("ActivationType"), _ACTIVATIONS[experts.activation]),
        }
        self._sort = aiter_function("moe_sorting", "aiter.fused_moe")
        self._quantise: Callable[..., Any] = aiter_function("get_hip_quant")(self._kind)
        self._first, self._second = aiter_function("ck_moe_stage1_fwd"), aiter_function("ck_moe_stage2_fwd")

    def __call__(self, inputs: Inputs) -> "torch.Tensor":
        """The mixture of these rows."""
        import torch

        spec, experts, weights = self._spec, self._experts, self._weights
        x, topk = inputs.x.contiguous(), experts.topk
        ids, shares, blocks, count, out = self._sort(
            inputs.topk_ids, inputs.topk_weights, experts.count, spec.n, x.dtype, self._block
        )
        early, late = (shares, None) if experts.weight_first else (None, shares)
        quantised, x_scale = self._quantise(x, quant_dtype=weights.w.dtype)
        middle = torch.empty(spec.m, topk, experts.inner, dtype=x.dtype, device=x.device)
        routed = (weights.w, weights.w2, ids, blocks, count)
        scales = {"w1_scale": weights.w_scale, "a1_scale": x_scale}
        self._first(
            quantised, *routed, middle, topk, self._names[0], **scales, sorted_weights=early, **self._options,
            dst_type=x.dtype,
        )  # fmt: skip
        middle, m_scale = self._quantise(middle, quant_dtype=weights.w.dtype, num_rows_factor=topk)
        scales = {"w2_scale": weights.w2_scale, "a2_scale": m_scale}
        middle = middle.view(spec.m, topk, experts.inner)
        self._second(middle, *routed, out, topk, self._names[1], **scales, sorted_weights=late, **self._options)
        result: torch.Tensor = out
        return result
