"""Operators of plug-ins for compiled graphs: the product of an engine's layer, dispatched per M when it runs.

They are registered when a plug-in is set up: a graph that the engine reads from its cache names them without tracing.
"""

from functools import cache

import torch

from gemmpipe.plugins.engine_dispatch import engine_dispatch
from gemmpipe.runtime.operands import OptionalTensor
from gemmpipe.runtime.torch_ops import register_operators

_PRODUCT_SCHEMA = (
    "engine_product(str family, Tensor x, Tensor w, Tensor? x_scale, Tensor? w_scale, Tensor? bias, "
    "ScalarType out_dtype, str kernel) -> Tensor"
)
_FROM_16BIT_SCHEMA = (
    "engine_product_16bit(str family, Tensor x, Tensor w, Tensor? w_scale, ScalarType out_dtype, str kernel) -> Tensor"
)


def register_plugin_operators() -> None:
    """Register the operators of plug-ins and of the run time; a second call does nothing."""
    register_operators()
    _library()


@cache
def _library() -> torch.library.Library:
    """The operators with their implementations, kept for the process."""
    library = torch.library.Library("gemmpipe", "FRAGMENT")
    library.define(_PRODUCT_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("engine_product", _run_product, "CompositeExplicitAutograd")
    torch.library.register_fake("gemmpipe::engine_product", _fake_product, lib=library)
    library.define(_FROM_16BIT_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("engine_product_16bit", _run_product_16bit, "CompositeExplicitAutograd")
    torch.library.register_fake("gemmpipe::engine_product_16bit", _fake_product_16bit, lib=library)
    return library


def _run_product(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: OptionalTensor,
    w_scale: OptionalTensor,
    bias: OptionalTensor,
    out_dtype: torch.dtype,
    kernel: str,
) -> torch.Tensor:
    return engine_dispatch(family, kernel)(x, w, x_scale, w_scale, bias, out_dtype)


def _fake_product(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: OptionalTensor,
    w_scale: OptionalTensor,
    bias: OptionalTensor,
    out_dtype: torch.dtype,
    kernel: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[-2]), dtype=out_dtype)


def _run_product_16bit(
    family: str, x: torch.Tensor, w: torch.Tensor, w_scale: OptionalTensor, out_dtype: torch.dtype, kernel: str
) -> torch.Tensor:
    return engine_dispatch(family, kernel).product_16bit(x, w, w_scale, out_dtype)


def _fake_product_16bit(
    family: str, x: torch.Tensor, w: torch.Tensor, w_scale: OptionalTensor, out_dtype: torch.dtype, kernel: str
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[-2]), dtype=out_dtype)
