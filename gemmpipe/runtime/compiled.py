"""The operators that torch.compile sees; eager calls never go through it (3 us a call on the host)."""

from functools import cache

import torch

from gemmpipe.runtime.dispatches import dispatch_of
from gemmpipe.runtime.experts import mixture
from gemmpipe.runtime.operands import Optional
from gemmpipe.runtime.routed import Routed

_SCHEMA = (
    "product(str family, Tensor x, Tensor w, Tensor? x_scale, Tensor? w_scale, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor"
)
_MIXTURE = (
    "mixture(str family, Tensor x, Tensor w, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? w_scale, "
    "Tensor? w2_scale, str activation, bool weight_first) -> Tensor"
)


@cache
def _library() -> torch.library.Library:
    """The operator with its two implementations, registered when first needed and kept for the process."""
    library = torch.library.Library("gemmpipe", "DEF")
    library.define(_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("product", _run, "CompositeExplicitAutograd")
    torch.library.register_fake("gemmpipe::product", _shape, lib=library)
    library.define(_MIXTURE, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("mixture", _run_mixture, "CompositeExplicitAutograd")
    torch.library.register_fake("gemmpipe::mixture", _mixture_shape, lib=library)
    return library


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def registered() -> bool:
    """Have the operator registered; a compiler runs this while it traces and keeps only the answer."""
    _library()
    return True


def _run(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: Optional,
    w_scale: Optional,
    bias: Optional,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    dispatch = dispatch_of(family, borrowed=True)
    return dispatch(x, w, x_scale, w_scale, bias, out_dtype)


def _shape(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: Optional,
    w_scale: Optional,
    bias: Optional,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[-2]), dtype=out_dtype)


def _run_mixture(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w_scale: Optional,
    w2_scale: Optional,
    activation: str,
    weight_first: bool,
) -> torch.Tensor:
    given = Routed(
        x=x,
        w=w,
        w2=w2,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        w_scale=w_scale,
        w2_scale=w2_scale,
        activation=activation,
        weight_first=weight_first,
    )
    return mixture(family, given, borrowed=True)


def _mixture_shape(family: str, x: torch.Tensor, w: torch.Tensor, w2: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w2.shape[1]))
