"""The functions that engines call, one per family, on top of `product`.

x is [..., K] and w [N, K] unless stated otherwise; the result is [..., N] in `out_dtype`, where None means x's type, or
bf16 for operands with scales. Operands may have any strides; a kernel that cannot read them gets a copy. All functions
raise UserError for operands that are not a product of the family.

All accept the further arguments of aiter's functions. `y` [..., N] is the output, written and returned (its type is
the result's; one that is not contiguous at an address divisible by 16 costs a copy). `config` holds knobs to run
instead of the tables' choice: knobs of the family's Triton kernel, of the kernel that `kernel_type` names, or of
`backend`; a wrong knob raises UserError, one that cannot run here DoesNotFit. Calls with `y` or `config` record no
gradients. `dtype` is another name of `out_dtype`; `skip_reduce=True` (the parts of a split) is refused.
"""

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from gemmpipe.core.data import Scalar
from gemmpipe.family.layouts import as_matrix
from gemmpipe.runtime.call_options import CallOptions, mixture_with_options, product_with_options
from gemmpipe.runtime.moe import RoutedOperands, mixture
from gemmpipe.runtime.operands import bytes_as, flag, not_a_tensor_error, operand_type_error
from gemmpipe.runtime.product import product

Config = Mapping[str, Scalar]
"""Knob -> value."""
_NO_COLUMNS = -1  # without columns there is no other tiled layout


def gemm_a16w16(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    bpreshuffle: bool = False,
    *,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    skip_reduce: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x @ w^T + bias [N] for bf16 or fp16 operands; or for fp8 ones with fp32 scales [1] each, by default to bf16.

    With `bpreshuffle` w is bf16 in aiter's tiles (`shuffle_weight(w, layout=(16, 16))`, gemmpipe.family.layouts).
    """
    shuffled = bpreshuffle is not False and flag("gemm_a16w16", "bpreshuffle", bpreshuffle)
    family = "a16w16+bpreshuffle" if shuffled else "a16w16"
    if y is not None or config is not None or dtype is not None or skip_reduce is not False:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config, skip_reduce=skip_reduce)
        return product_with_options(family, (x, w, x_scale, w_scale, bias), options)
    return product(family, x, w, x_scale, w_scale, bias, out_dtype)


def gemm_a16w16_atomic(
    x: torch.Tensor,
    w: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x @ w^T for bf16 or fp16 operands; splits of K are added by atomics, so bits may differ from run to run."""
    if y is not None or config is not None or dtype is not None:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config)
        return product_with_options("a16w16_atomic", (x, w, None, None, None), options)
    return product("a16w16_atomic", x, w, None, None, None, out_dtype)


def gemm_a8w8(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (w * w_scale)^T + bias [N], int8 or fp8.

    fp32 scales by row (x_scale of M elements, w_scale of N) or by tensor ([1] each).
    """
    if y is not None or config is not None or dtype is not None:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config)
        return product_with_options("a8w8", (x, w, x_scale, w_scale, bias), options)
    return product("a8w8", x, w, x_scale, w_scale, bias, out_dtype)


def gemm_a8w8_bpreshuffle(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As gemm_a8w8, with w in 16 x 16 tiles, [N, K] or [N/16, K*16] (`shuffle_weight`, gemmpipe.family.layouts)."""
    try:
        w = as_matrix(w, x.shape[-1:].numel() or _NO_COLUMNS)
    except AttributeError:
        raise operand_type_error("gemm_a8w8_bpreshuffle", x, w, x_scale, w_scale, bias) from None
    if y is not None or config is not None or dtype is not None:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config)
        return product_with_options("a8w8_bpreshuffle", (x, w, x_scale, w_scale, bias), options)
    return product("a8w8_bpreshuffle", x, w, x_scale, w_scale, bias, out_dtype)


def gemm_a8w8_blockscale(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    skip_reduce: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (w * w_scale)^T for fp8 operands.

    x_scale is fp32 [..., ceil(K/128)], row-major or M-major; w_scale fp32 [ceil(N/128), ceil(K/128)].
    """
    if y is not None or config is not None or dtype is not None or skip_reduce is not False:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config, skip_reduce=skip_reduce)
        return product_with_options("a8w8_blockscale", (x, w, x_scale, w_scale, None), options)
    return product("a8w8_blockscale", x, w, x_scale, w_scale, None, out_dtype)


def linear_fp8(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x @ (w * w_scale)^T + bias [N] for bf16 or fp16 x and fp8 w; the result has x's type, as `out_dtype` or None.

    w_scale is fp32 [ceil(N/128), ceil(K/128)], or of N elements as [N] or [N, 1]; with the former a bias is one more
    kernel after the product. x may be quantised to fp8, with a scale per row and 128 elements along K or per row, or w
    converted to x's type: the families linear_fp8_blockscale and linear_fp8_row tune which is faster.
    """
    try:
        by_row = w_scale.numel() == w.shape[0] and (w_scale.dim() == 1 or w_scale.shape[-1] == 1)
    except AttributeError:
        operands = {"x": x, "w": w, "w_scale": w_scale, "bias": bias}
        raise not_a_tensor_error("linear_fp8", operands, optional=("bias",)) from None
    family = "linear_fp8_row" if by_row else "linear_fp8_blockscale"
    if y is not None or config is not None or dtype is not None:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config)
        return product_with_options(family, (x, w, None, w_scale, bias), options)
    return product(family, x, w, None, w_scale, bias, out_dtype)


def gemm_a8w8_blockscale_bpreshuffle(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    skip_reduce: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As gemm_a8w8_blockscale, with w in 16 x 16 tiles ([N, K], or [N/16, K*16]).

    An M-major x_scale (stride (1, M)) is read without a copy. aiter's view of one as [M, ceil(K/128)] looks like a
    row-major tensor; here it is `x_scale.view(-1, M).t()`.
    """
    try:
        w = as_matrix(w, x.shape[-1:].numel() or _NO_COLUMNS)
    except AttributeError:
        raise operand_type_error("gemm_a8w8_blockscale_bpreshuffle", x, w, x_scale, w_scale, None) from None
    if y is not None or config is not None or dtype is not None or skip_reduce is not False:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config, skip_reduce=skip_reduce)
        return product_with_options("a8w8_blockscale_bpreshuffle", (x, w, x_scale, w_scale, None), options)
    return product("a8w8_blockscale_bpreshuffle", x, w, x_scale, w_scale, None, out_dtype)


def gemm_a4w4_blockscale(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    skip_reduce: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (w * w_scale)^T for mxfp4 operands, two per byte: x [..., K/2], w [N, K/2].

    Scales are e8m0, x_scale [..., K/32] and w_scale [N, K/32]; uint8 tensors are reinterpreted as these types.
    """
    x, w = bytes_as(x, torch.float4_e2m1fn_x2), bytes_as(w, torch.float4_e2m1fn_x2)
    x_scale, w_scale = bytes_as(x_scale, torch.float8_e8m0fnu), bytes_as(w_scale, torch.float8_e8m0fnu)
    if y is not None or config is not None or dtype is not None or skip_reduce is not False:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config, skip_reduce=skip_reduce)
        return product_with_options("a4w4_blockscale", (x, w, x_scale, w_scale, None), options)
    return product("a4w4_blockscale", x, w, x_scale, w_scale, None, out_dtype)


def batched_gemm_bf16(
    x: torch.Tensor,
    w: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [B, M, K] @ w [B, N, K]^T -> [B, M, N] for bf16 or fp16 operands."""
    if y is not None or config is not None or dtype is not None:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config)
        return product_with_options("batched_bf16", (x, w, None, None, None), options)
    return product("batched_bf16", x, w, None, None, None, out_dtype)


def batched_gemm_a8w8(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype | None = torch.bfloat16,
    *,
    y: torch.Tensor | None = None,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x [B, M, K] * x_scale [B, M, 1]) @ (w [B, N, K] * w_scale [B, 1, N])^T -> [B, M, N], int8 or fp8."""
    if y is not None or config is not None or dtype is not None:
        options = CallOptions(out_dtype=out_dtype, dtype=dtype, y=y, config=config)
        return product_with_options("batched_a8w8", (x, w, x_scale, w_scale, None), options)
    return product("batched_a8w8", x, w, x_scale, w_scale, None, out_dtype)


def fused_moe(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    activation: str = "silu",
    doweight_stage1: bool = False,
    *,
    y: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """The weighted sum over each row's experts of act(x @ w1[e]^T) @ w2[e]^T, in x's type; see kernels/fmoe.

    x [..., K] bf16 or fp16, w1 [E, 2 * I, K] (gate before up; or [E, I, K] without a gate), w2 [E, K, I], both of x's
    type or fp8 with fp32 scales: per token [E, rows, 1], or of 128 x 128 blocks [E, ceil(rows/128), ceil(columns/128)].
    topk_ids [..., topk] are experts from 0 to E - 1; activation is `silu` or `gelu`.
    """
    kind = "cuda" if isinstance(x, torch.Tensor) and x.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind):
        x, w1, w2 = _autocast_experts(x, w1, w2, kind, scaled=w1_scale is not None)
        with torch.autocast(kind, enabled=False):
            given = (x, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, activation, doweight_stage1)
            return fused_moe(*given, y=y, config=config)
    if is_compiling() or type(x) is FakeTensor:  # shape propagation has no memory to multiply
        operands = (x, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale)
        out = _mixture_operator(config, *operands, activation, doweight_stage1)
        return out if y is None else y.copy_(out)
    routed = RoutedOperands(
        x=x,
        w=w1,
        w2=w2,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        w_scale=w1_scale,
        w2_scale=w2_scale,
        activation=activation,
        weight_first=doweight_stage1,
    )
    if y is not None or config is not None:
        return mixture_with_options("fmoe", routed, CallOptions(out_dtype=None, y=y, config=config))
    return mixture("fmoe", routed)


def _mixture_operator(config: Config | None, *operands: object) -> torch.Tensor:
    """The mixture as a torch operator, for torch.compile's shape propagation."""
    from gemmpipe.runtime.torch_ops import (
        config_json,
        register_operators,
    )  # local import: it loads torch's compiler (2 s)

    register_operators()
    text = None if config is None else config_json(config, "fused_moe")
    out: torch.Tensor = torch.ops.gemmpipe.mixture("fmoe", *operands, text)
    return out


def _autocast_experts(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, kind: str, *, scaled: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands cast like those of torch's linear layers; quantised weights and values that are no tensors stay."""
    wide = torch.get_autocast_dtype(kind)

    def cast(tensor: torch.Tensor, *, unchanged: bool = False) -> torch.Tensor:
        quantised = isinstance(tensor, torch.Tensor) and tensor.element_size() == 1
        return tensor if unchanged or quantised or not isinstance(tensor, torch.Tensor) else tensor.to(wide)

    return cast(x), cast(w1, unchanged=scaled), cast(w2, unchanged=scaled)
