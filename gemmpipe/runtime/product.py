"""The common path of all products: gradients to torch, autocast's types, torch.compile's operator, else dispatch.

Also the preparation of weights before their first call, and the release of prepared forms.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import is_autocast_enabled, is_grad_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.nn.functional import linear

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import PACKAGE
from gemmpipe.family import Family, GemmSpec, Implementation, Weights, load_family
from gemmpipe.runtime.binding import cached_form, device_context
from gemmpipe.runtime.cache import device_by_index
from gemmpipe.runtime.dispatch import EAGER, dispatch_of
from gemmpipe.runtime.operands import (
    CallOperands,
    OptionalTensor,
    bytes_as,
    dtype_name,
    inner_size,
    not_a_tensor_error,
    operand_type_error,
    scale_fits,
    weights_of,
)
from gemmpipe.runtime.select import RunnableCandidate, first_usable
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.runtime.weight_cache import WEIGHT_CACHE, is_form_of

_NO_SHUFFLED_GRADIENTS = "products of a weight in tiles record no gradients: call them under torch.no_grad()"
_NO_GRADIENTS = "products of scaled operands record no gradients: call them under torch.no_grad()"


def product(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: OptionalTensor,
    w_scale: OptionalTensor,
    bias: OptionalTensor,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """x [..., K] times w [N, K]^T by the family's tuned candidate; out_dtype None: x's type, or bf16 with scales.

    If gradients are recorded, a product without scales is torch's own. Raises UserError for operands that are not a
    product of the family, and if a product with scales would record gradients.
    """
    try:
        autocast = is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        records_gradients = is_grad_enabled() and (
            x.requires_grad
            or w.requires_grad
            or _requires_grad(x_scale)
            or _requires_grad(w_scale)
            or _requires_grad(bias)
        )
    except AttributeError:
        raise operand_type_error(
            load_family(family.partition("+")[0]).entry_point, x, w, x_scale, w_scale, bias
        ) from None
    if autocast:
        return _autocast_product(family, x, w, x_scale, w_scale, bias, out_dtype)
    if out_dtype is None:
        out_dtype = x.dtype if x_scale is None else torch.bfloat16
    if records_gradients:
        if x_scale is not None or w_scale is not None:
            raise UserError(f"{traceable_function_name(family)}: {_NO_GRADIENTS}")
        if "+" in family:  # torch's own product would misread a weight in tiles
            flag = family.partition("+")[2]
            raise UserError(f"{traceable_function_name(family)} with {flag}: {_NO_SHUFFLED_GRADIENTS}")
        return _torch_product(family, x, w, bias, out_dtype)
    if is_compiling() or type(x) is FakeTensor:  # shape propagation has no memory to multiply
        from gemmpipe.runtime.torch_ops import register_operators  # local import: it loads torch's compiler (2 s)

        register_operators()
        out: torch.Tensor = torch.ops.gemmpipe.product(family, x, w, x_scale, w_scale, bias, out_dtype)
        return out
    dispatch = EAGER.get(family) or dispatch_of(family)
    return dispatch(x, w, x_scale, w_scale, bias, out_dtype)


@cache
def function_name(family: str) -> str:
    """The name of the family's function."""
    return load_family(family.partition("+")[0]).entry_point


def traceable_function_name(family: str) -> str:
    """As `function_name`; a constant for torch.compile, since finding a family reads folders."""
    if is_compiling():
        from gemmpipe.runtime.torch_ops import constant_function_name  # local import: it loads torch's compiler (2 s)

        name: str = constant_function_name(family)
        return name
    return function_name(family)


def _requires_grad(tensor: OptionalTensor) -> bool:
    return tensor is not None and tensor.requires_grad


def _torch_product(
    family: str, x: torch.Tensor, w: torch.Tensor, bias: OptionalTensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """torch's own product, with gradients."""

    def compute() -> torch.Tensor:
        full = linear(x, w, bias) if w.dim() == 2 else torch.matmul(x, w.mT)
        return full.to(out_dtype)

    if is_compiling():
        return compute()
    dispatch, given = (
        dispatch_of(family),
        CallOperands(x=x, w=w, x_scale=None, w_scale=None, bias=bias, out_dtype=out_dtype),
    )
    dispatch.checked_product(given)
    LOG.warn(
        "gradients",
        "products of operands that record gradients are torch's own: tuned ones run under torch.no_grad() or "
        "torch.inference_mode()",
    )
    return dispatch.run_torch(given, compute)


def _autocast_product(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: OptionalTensor,
    w_scale: OptionalTensor,
    bias: OptionalTensor,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """As F.linear: operands without scales in autocast's type; autocast is off inside."""
    x, w, bias = autocast_operands(family, x, w, x_scale, w_scale, bias)
    with torch.autocast(x.device.type, enabled=False):
        return product(family, x, w, x_scale, w_scale, bias, out_dtype)


def autocast_operands(
    family: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: OptionalTensor,
    w_scale: OptionalTensor,
    bias: OptionalTensor,
) -> tuple[torch.Tensor, torch.Tensor, OptionalTensor]:
    """x, w and bias in the types of F.linear under autocast; quantised operands are unchanged."""
    wide = torch.get_autocast_dtype(x.device.type)
    try:
        if x_scale is None:  # a quantised operand lacks its scales, which is reported later
            x, w = (each.to(wide) if each.element_size() > 1 else each for each in (x, w))
            bias = None if bias is None else bias.to(wide)
    except AttributeError:
        raise operand_type_error(
            load_family(family.partition("+")[0]).entry_point, x, w, x_scale, w_scale, bias
        ) from None
    return x, w, bias


def prepare_weight(weight: torch.Tensor, w_scale: torch.Tensor | None = None) -> int:
    """Make and keep all prepared forms of a weight [N, K] for its tuned rows; returns the number of kept forms.

    0 if no row needs one. `w_scale`: its scales, or None. Raises UserError for an argument that is not a tensor.

    Call it before a CUDA graph is captured, and after weights were reloaded in a way that torch does not count (see
    `release_prepared`). Forms are kept as long as the weight's memory.
    """
    _check("prepare_weight", {"weight": weight, "w_scale": w_scale})
    scale = None if w_scale is None else bytes_as(w_scale, torch.float8_e8m0fnu)
    given = Weights(w=bytes_as(weight.detach(), torch.float4_e2m1fn_x2), w_scale=scale)
    device = device_by_index(weight.get_device())
    for family in _families():
        for runnable, spec, weights in _tuned_candidates(family, given):
            if type(runnable.implementation).prepare is not Implementation.prepare:
                with torch.no_grad(), device_context(device):
                    cached_form(runnable, spec, weights, device)
    storage = weight.untyped_storage()
    return sum(is_form_of(entry, storage) for entry in list(WEIGHT_CACHE.entries.values()))


def release_prepared(weight: torch.Tensor) -> int:
    """Drop the prepared forms of this weight; the next call prepares again. Returns the number of dropped forms.

    Needed after an in-place reload that torch does not count: through `.data`, into inference tensors, or by another
    library. A CUDA graph captured before still reads the dropped form: capture it again.
    Raises UserError for an argument that is not a tensor.
    """
    _check("release_prepared", {"weight": weight})
    return WEIGHT_CACHE.release(weight)


def _check(name: str, operands: Mapping[str, object]) -> None:
    known = (torch.Tensor, type(None))
    if operands["weight"] is None or not all(isinstance(value, known) for value in operands.values()):
        raise not_a_tensor_error(name, operands, optional=("w_scale",))


def _families() -> Iterator[Family]:
    for path in sorted((PACKAGE / "kernels").glob("*/__init__.py")):
        yield load_family(path.parent.name)


def _tuned_candidates(family: Family, given: Weights) -> Iterator[tuple[RunnableCandidate, GemmSpec, Weights]]:
    """(candidate, spec, weights as in calls) for each distinct candidate in rows of this weight, type and device."""
    device = device_by_index(given.w.get_device())
    names = {column.name for column in family.key_columns}
    if not {"N", "K"} <= names or given.w.dim() < 2:  # a family with several weights, or not a weight
        return
    wanted: dict[str, Scalar] = {"N": given.w.shape[-2], "K": inner_size(given.w), "dtype": dtype_name(given.w.dtype)}
    wanted["bpreshuffle"] = False  # a 16-bit weight in tiles needs no preparation
    seen = set()
    for rows in dispatch_of(family.name).tables().rows_with(device, {k: v for k, v in wanted.items() if k in names}):
        runnable, spec = first_usable(family, rows, device) or (None, None)
        weights = None if spec is None else _weights_as_called(given, spec)
        if runnable is not None and spec is not None and weights is not None and runnable.candidate not in seen:
            seen.add(runnable.candidate)
            yield runnable, spec, weights


def _weights_as_called(given: Weights, spec: GemmSpec) -> Weights | None:
    """The weights as a call of this product passes them, which is the cache's key; None if they do not match it.

    Rows of several families can have the same N and K, and not all keys contain the kind of scales.
    """
    if dtype_name(given.w.dtype) != spec.w_dtype or given.w.shape[:-2].numel() != spec.batch:
        return None
    if (spec.w_scale is None) != (given.w_scale is None):
        return None
    if spec.w_scale is not None and not scale_fits(given.w_scale, spec.w_scale, (spec.batch, spec.n, spec.k)):
        return None
    out_dtype = getattr(torch, spec.out_dtype)
    return weights_of(
        CallOperands(x=given.w, w=given.w, x_scale=None, w_scale=given.w_scale, bias=None, out_dtype=out_dtype), spec
    )
