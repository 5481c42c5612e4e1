"""The operators for torch.compile; eager calls do not use them (3 us per call on the host)."""

import json
from functools import cache

import torch

from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.fixed_config import frozen_config, graph_config_dispatch
from gemmpipe.runtime.moe import RoutedOperands, checked_key, mixture, run_mixture
from gemmpipe.runtime.operands import OptionalTensor
from gemmpipe.runtime.product import function_name

_PRODUCT_SCHEMA = (
    "product(str family, Tensor x, Tensor w, Tensor? x_scale, Tensor? w_scale, Tensor? bias, "
    "ScalarType out_dtype, str? config=None) -> Tensor"
)
_MIXTURE_SCHEMA = (
    "mixture(str family, Tensor x, Tensor w, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? w_scale, "
    "Tensor? w2_scale, str activation, bool weight_first, str? config=None) -> Tensor"
)


@cache
def _library() -> torch.library.Library:
    """The operators with their implementations, registered at the first use and kept for the process."""
    library = torch.library.Library("gemmpipe", "DEF")
    library.define(_PRODUCT_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("product", _run_product, "CompositeExplicitAutograd")
    torch.library.register_fake("gemmpipe::product", _fake_product, lib=library)
    library.define(_MIXTURE_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("mixture", _run_mixture, "CompositeExplicitAutograd")
    torch.library.register_fake("gemmpipe::mixture", _fake_mixture, lib=library)
    return library


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def register_operators() -> bool:
    """Register the operators; torch.compile runs this while it traces and keeps only the result."""
    _library()
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant_function_name(family: str) -> str:
    """The name of the family's function; a constant for torch.compile, since finding a family reads folders."""
    return function_name(family)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def config_json(config: object, name: str) -> str:
    """A configuration as JSON, the form of operators' arguments. Raises UserError as `frozen_config`."""
    return json.dumps(dict(frozen_config(config, name)))


def _run_product(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: OptionalTensor,
    w_scale: OptionalTensor,
    bias: OptionalTensor,
    out_dtype: torch.dtype,
    config: str | None = None,
) -> torch.Tensor:
    dispatch = dispatch_of(family, graph_pool=True) if config is None else graph_config_dispatch(family, config)
    return dispatch(x, w, x_scale, w_scale, bias, out_dtype)


def _fake_product(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: OptionalTensor,
    w_scale: OptionalTensor,
    bias: OptionalTensor,
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
    w_scale: OptionalTensor,
    w2_scale: OptionalTensor,
    activation: str,
    weight_first: bool,
    config: str | None = None,
) -> torch.Tensor:
    given = RoutedOperands(
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
        return mixture(family, given, graph_pool=True)
    return run_mixture(graph_config_dispatch(family, config), checked_key(family, given), given)


def _fake_mixture(family: str, x: torch.Tensor, w: torch.Tensor, w2: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w2.shape[1]))
