"""The one operator that torch.compile sees; eager calls never go through it (3 us a call on the host)."""

from functools import cache

import torch

from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.operands import Optional

_SCHEMA = (
    "product(str family, Tensor x, Tensor w, Tensor? x_scale, Tensor? w_scale, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor"
)


@cache
def _library() -> torch.library.Library:
    """The operator with its two implementations, registered when first needed and kept for the process."""
    library = torch.library.Library("gemmpipe", "DEF")
    library.define(_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("product", _run, "CompositeExplicitAutograd")
    torch.library.register_fake("gemmpipe::product", _shape, lib=library)
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
