"""The operators that torch.compile sees; eager calls never go through it (3 us a call on the host)."""

import json
from functools import cache

import torch

from gemmpipe.runtime.configured import configured_dispatch, frozen
from gemmpipe.runtime.directed import function_name
from gemmpipe.runtime.dispatches import dispatch_of
from gemmpipe.runtime.experts import checked_key, mixed, mixture
from gemmpipe.runtime.operands import Optional
from gemmpipe.runtime.routed import Routed

_SCHEMA = (
    "product(str family, Tensor x, Tensor w, Tensor? x_scale, Tensor? w_scale, Tensor? bias, "
    "ScalarType out_dtype, str? config=None) -> Tensor"
)
_MIXTURE = (
    "mixture(str family, Tensor x, Tensor w, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? w_scale, "
    "Tensor? w2_scale, str activation, bool weight_first, str? config=None) -> Tensor"
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant_function_name(family: str) -> str:
    """The name of the family's function; a compiler keeps the answer, since finding a family reads folders."""
    return function_name(family)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def as_text(config: object, name: str) -> str:
    """A configuration as operators take one, whose arguments are texts. Raises UserError as `frozen`."""
    return json.dumps(dict(frozen(config, name)))


def _run(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: Optional,
    w_scale: Optional,
    bias: Optional,
    out_dtype: torch.dtype,
    config: str | None = None,
) -> torch.Tensor:
    dispatch = dispatch_of(family, borrowed=True) if config is None else configured_dispatch(family, config)
    return dispatch(x, w, x_scale, w_scale, bias, out_dtype)


def _shape(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: Optional,
    w_scale: Optional,
    bias: Optional,
    out_dtype: torch.dtype,
    config: str | None = None,
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
    config: str | None = None,
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
    if config is None:
        return mixture(family, given, borrowed=True)
    return mixed(configured_dispatch(family, config), checked_key(family, given), given)


def _mixture_shape(family: str, x: torch.Tensor, w: torch.Tensor, w2: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w2.shape[1]))
