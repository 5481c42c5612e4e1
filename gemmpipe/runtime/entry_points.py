"""The functions that engines call: one a family, each a line on top of `product`."""

import torch

from gemmpipe.runtime.product import product


def gemm_a16w16(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K] @ w [N, K]^T + bias [N] -> [..., N] in `out_dtype` (None: x's type; bf16 for fp8 operands).

    bf16 or fp16 operands; or fp8 ones with fp32 scales of shape [1] each. Raises UserError for other operands.
    """
    if out_dtype is None and x_scale is not None:
        out_dtype = torch.bfloat16
    return product("a16w16", x, w, x_scale, w_scale, bias, out_dtype)


def gemm_a8w8_blockscale(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """(x [..., K] * x_scale) @ (w [N, K] * w_scale)^T -> [..., N] in `out_dtype`, fp8 operands.

    x_scale is fp32 [..., ceil(K/128)], row-major or M-major; w_scale fp32 [ceil(N/128), ceil(K/128)]. Raises
    UserError for other operands.
    """
    return product("a8w8_blockscale", x, w, x_scale, w_scale, None, out_dtype)
