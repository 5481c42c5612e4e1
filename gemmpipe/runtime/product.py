"""The way of every call: gradients to torch, autocast's types, a compiler to the operator, the rest to dispatch."""

import torch
from torch import is_autocast_enabled, is_grad_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.nn.functional import linear

from gemmpipe.errors import UserError
from gemmpipe.family import load_family
from gemmpipe.runtime.dispatches import EAGER, dispatch_of
from gemmpipe.runtime.operands import Given, Optional, not_tensors
from gemmpipe.runtime.selection import LOG

_NO_SHUFFLED_GRADIENTS = "products of a weight in tiles record no gradients: call them under torch.no_grad()"
_NO_GRADIENTS = "products of scaled operands record no gradients: call them under torch.no_grad()"


def product(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: Optional,
    w_scale: Optional,
    bias: Optional,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """x [..., K] times w [N, K]^T by the family's tuned candidate; out_dtype None: x's type, or bf16 beside scales.

    Where gradients are recorded, a product without scales is torch's own. Raises UserError for operands that are no
    product of the family, and where gradients of one with scales are asked for.
    """
    try:
        autocast = is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        learns = is_grad_enabled() and (
            x.requires_grad or w.requires_grad or _learns(x_scale) or _learns(w_scale) or _learns(bias)
        )
    except AttributeError:
        raise not_tensors(load_family(family.partition("+")[0]).entry_point, x, w, x_scale, w_scale, bias) from None
    if autocast:
        return _under_autocast(family, x, w, x_scale, w_scale, bias, out_dtype)
    if out_dtype is None:
        out_dtype = x.dtype if x_scale is None else torch.bfloat16
    if learns:
        if x_scale is not None or w_scale is not None:
            raise UserError(f"{family}: {_NO_GRADIENTS}")
        if "+" in family:  # torch's own product would read the weight as it does not lie
            raise UserError(f"{family.replace('+', ' with ')}: {_NO_SHUFFLED_GRADIENTS}")
        return _with_gradients(family, x, w, bias, out_dtype)
    if is_compiling() or type(x) is FakeTensor:  # who looks for sizes alone has no memory to multiply
        from gemmpipe.runtime.compiled import registered  # not above: it loads torch's compiler (2 s)

        registered()
        out: torch.Tensor = torch.ops.gemmpipe.product(family, x, w, x_scale, w_scale, bias, out_dtype)
        return out
    dispatch = EAGER.get(family) or dispatch_of(family)
    return dispatch(x, w, x_scale, w_scale, bias, out_dtype)


def _learns(tensor: Optional) -> bool:
    return tensor is not None and tensor.requires_grad


def _with_gradients(
    family: str, x: torch.Tensor, w: torch.Tensor, bias: Optional, out_dtype: torch.dtype
) -> torch.Tensor:
    """torch's own product, which knows its gradients."""

    def compute() -> torch.Tensor:
        full = linear(x, w, bias) if w.dim() == 2 else torch.matmul(x, w.mT)
        return full.to(out_dtype)

    if is_compiling():
        return compute()
    dispatch, given = dispatch_of(family), Given(x=x, w=w, x_scale=None, w_scale=None, bias=bias, out_dtype=out_dtype)
    dispatch.checked(given)
    LOG.warn(
        "gradients",
        "products whose operands record gradients are torch's own: tuned ones run under torch.no_grad() or "
        "torch.inference_mode()",
    )
    return dispatch.torchs_own(given, compute)


def _under_autocast(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: Optional,
    w_scale: Optional,
    bias: Optional,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """As F.linear: operands without scales in autocast's type; nothing inside is cast once more."""
    x, w, bias = in_autocasts_type(family, x, w, x_scale, w_scale, bias)
    with torch.autocast(x.device.type, enabled=False):
        return product(family, x, w, x_scale, w_scale, bias, out_dtype)


def in_autocasts_type(
    family: str, x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional
) -> tuple[torch.Tensor, torch.Tensor, Optional]:
    """x, w and bias as F.linear takes them under autocast; what is quantised stays what it is."""
    wide = torch.get_autocast_dtype(x.device.type)
    try:
        if x_scale is None:  # what is quantised lacks its scales, which is said inside
            x, w = (each.to(wide) if each.element_size() > 1 else each for each in (x, w))
            bias = None if bias is None else bias.to(wide)
    except AttributeError:
        raise not_tensors(load_family(family.partition("+")[0]).entry_point, x, w, x_scale, w_scale, bias) from None
    return x, w, bias
