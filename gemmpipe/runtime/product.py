"""The way of every call: gradients to torch, autocast's types, a compiler to the operator, the rest to dispatch."""

import torch

from gemmpipe.runtime.compiled import registered
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.operands import Optional

_FLAGS = {False: {"bpreshuffle": False}, True: {"bpreshuffle": True}}


def product(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: Optional,
    w_scale: Optional,
    bias: Optional,
    out_dtype: torch.dtype | None,
    *,
    preshuffled: bool = False,
) -> torch.Tensor:
    """x [..., K] times w [N, K]^T by the family's tuned candidate; out_dtype None means x's type.

    Where gradients are recorded, a product without scales is torch's own. Raises UserError for operands that are no
    product of the family.
    """
    if torch.is_autocast_enabled(x.device.type):
        return _under_autocast(family, x, w, x_scale, w_scale, bias, out_dtype, preshuffled)
    if out_dtype is None:
        out_dtype = x.dtype
    if torch.is_grad_enabled() and x_scale is None and (x.requires_grad or w.requires_grad or _learns(bias)):
        return torch.nn.functional.linear(x, w, bias).to(out_dtype)
    if torch.compiler.is_compiling():
        registered()
        out: torch.Tensor = torch.ops.gemmpipe.product(family, x, w, x_scale, w_scale, bias, out_dtype, preshuffled)
        return out
    return dispatch_of(family)(x, w, x_scale, w_scale, bias, out_dtype, _FLAGS[preshuffled])


def _learns(bias: Optional) -> bool:
    return bias is not None and bias.requires_grad


def _under_autocast(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: Optional,
    w_scale: Optional,
    bias: Optional,
    out_dtype: torch.dtype | None,
    preshuffled: bool,
) -> torch.Tensor:
    """As F.linear: operands without scales in autocast's type; nothing inside is cast once more."""
    kind = x.device.type
    if x_scale is None:
        wide = torch.get_autocast_dtype(kind)
        x, w = x.to(wide), w.to(wide)
        bias = None if bias is None else bias.to(wide)
    with torch.autocast(kind, enabled=False):
        return product(family, x, w, x_scale, w_scale, bias, out_dtype, preshuffled=preshuffled)
