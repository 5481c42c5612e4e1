"""The operands of an entry point: the problem and spec that they define, checks, and conversion for kernels.

Operands are checked once per key. Errors name the arguments of the called function, not a table's columns.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.core.errors import UserError, short_repr
from gemmpipe.core.spec import COLUMN, scale_order
from gemmpipe.family import Family, GemmSpec, Inputs, Scaling, Weights, load_family, shipped_families
from gemmpipe.family.dtypes import DTYPES_8BIT, DTYPES_16BIT, OUT_DTYPES, SCALE_ORDERS, X_SCALE_COLUMN
from gemmpipe.runtime.copy_log import log_converted, log_copied

_DEFAULT_OUT_DTYPE = {"outdtype": DTYPES_16BIT[0]}  # an output type of every family


class KeyDiagnosis:
    """The products that an invalid key would mean if some of its values were changed."""

    def __init__(self, family: Family, problem: Problem) -> None:
        self._family, self._problem = family, problem
        self.key = dict(problem.key)

    def spec(self, values: Mapping[str, Scalar]) -> GemmSpec | None:
        """The product with these values in place of the key's own; None if that is invalid too."""
        key = tuple((name, values.get(name, value)) for name, value in self._problem.key)
        try:
            return self._family.spec(replace(self._problem, key=key))
        except UserError:
            return None

    def likely_spec(self) -> GemmSpec | None:
        """The product of these operand types, for any output type, with or without scales."""
        others = {"scaleAB": not self.key["scaleAB"]} if "scaleAB" in self.key else {}
        return self.spec(_DEFAULT_OUT_DTYPE) or self.spec({**_DEFAULT_OUT_DTYPE, **others})

    def dtype_error(self, w: str, out: str) -> str | None:
        """The error in the operands' types or the output type; None if there is none."""
        if self.spec(_DEFAULT_OUT_DTYPE) is not None:
            return f"out_dtype is {out}, expected {or_list([t for t in OUT_DTYPES if self.spec({'outdtype': t})])}"
        known = [
            t for t in (*DTYPES_16BIT, *DTYPES_8BIT) if self.spec({**_DEFAULT_OUT_DTYPE, "dtype": t, "q_dtype_w": t})
        ]
        return f"x and w are {w}, expected {or_list(known)}" if known else None

    def mixed_products(self) -> list[GemmSpec]:
        """The family's products for any operand and output types, if x and w have different types there; else none."""
        types = [
            {"dtype": w, "q_dtype_w": w, "outdtype": out} for w in (*DTYPES_16BIT, *DTYPES_8BIT) for out in OUT_DTYPES
        ]
        products = [spec for values in types if (spec := self.spec(values)) is not None]
        return products if all(spec.x_dtype != spec.w_dtype for spec in products) else []


def spec_or_error(family: Family, problem: Problem, diagnose: Callable[[KeyDiagnosis], str | None]) -> GemmSpec:
    """The product of the key. Raises UserError with `diagnose`'s text, or the family's if that is None.

    The family's text names a table's columns, which the caller of a function does not know.
    """
    try:
        return family.spec(problem)
    except UserError as error:
        found = diagnose(KeyDiagnosis(family, problem)) or str(error).removeprefix(f"{problem.id}: ").removeprefix(
            f"{family.name}: "
        )
        raise UserError(f"{family.entry_point}: {found}") from None


def or_list(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


OptionalTensor = torch.Tensor | None

ALIGNMENT = 15
"""Address bits that are 0 in kernels' operands."""
_PACKED = 2  # elements per byte of a type that ends in `_x2`


@dataclass(frozen=True, kw_only=True, eq=False)
class CallOperands:
    """The operands of one call: scales of any rank, `bias` [N].

    `x` [..., K] with `w` [N, K]; in a batch `x` [B, M, K] with `w` [B, N, K].
    """

    x: torch.Tensor
    w: torch.Tensor
    x_scale: OptionalTensor
    w_scale: OptionalTensor
    bias: OptionalTensor
    out_dtype: torch.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """[..., N]."""
        return (*self.x.shape[:-1], self.w.shape[-2])


def not_a_tensor_error(name: str, operands: Mapping[str, object], *, optional: Collection[str]) -> UserError:
    """The error for an operand that is not a tensor: its name, and what was expected."""
    for argument, value in operands.items():
        if not isinstance(value, torch.Tensor) and not (value is None and argument in optional):
            what = "None" if value is None else f"of type {type(value).__name__}"
            return UserError(
                f"{name}: {argument} is {what}, expected a tensor{' or None' if argument in optional else ''}"
            )
    return UserError(f"{name}: operands of types {[type(v).__name__ for v in operands.values()]}, expected tensors")


def operand_type_error(name: str, x: object, w: object, x_scale: object, w_scale: object, bias: object) -> UserError:
    """`not_a_tensor_error` for a product's operands."""
    operands = {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale, "bias": bias}
    return not_a_tensor_error(name, operands, optional=("x_scale", "w_scale", "bias"))


def flag(name: str, argument: str, value: object) -> bool:
    """The truth of an argument. Raises UserError for a tensor, of which only one with a single element has one."""
    if isinstance(value, torch.Tensor):
        raise UserError(f"{name}: {argument} is {short_repr(value)}, expected True or False")
    return bool(value)


def on_meta(*tensors: OptionalTensor) -> tuple[bool, ...]:
    """True for each tensor on `meta`: get_device() is -1 there as on a CPU."""
    return tuple(t is not None and t.is_meta for t in tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def bytes_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A uint8 tensor viewed as `dtype`; anything else unchanged."""
    return tensor.view(dtype) if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8 else tensor


def inner_size(tensor: torch.Tensor) -> int:
    """K in elements, also for packed types."""
    stored = tensor.shape[-1]
    return stored * _PACKED if dtype_name(tensor.dtype).endswith("_x2") else stored


def problem_of(family: Family, given: CallOperands, flag: str = "") -> Problem:
    """The family's key for these operands; other columns have their defaults, and the column `flag` is true.

    Raises UserError for operands with ranks or inner sizes that do not match.
    """
    x, w = given.x, given.w
    batches = any(column.name == "B" for column in family.key_columns)
    batched = batches and w.dim() == 3 and x.dim() == 3 and x.shape[0] == w.shape[0]
    if not (batched or (w.dim() == 2 and x.dim() >= 1)) or x.shape[-1] != w.shape[-1]:
        shapes = f"x {list(x.shape)} and w {list(w.shape)}"
        expected = "[..., K] and [N, K]" + (", or [B, M, K] and [B, N, K]" if batches else "")
        raise UserError(f"{family.entry_point}: {shapes}, expected {expected}")
    dtype = dtype_name(w.dtype)
    values: dict[str, Scalar] = {
        "B": w.shape[0] if batched else 1,
        "M": x.shape[1] if batched else x.shape[:-1].numel(),
        "N": w.shape[-2],
        "K": inner_size(w),
        "bias": given.bias is not None,
        "dtype": dtype,
        "outdtype": dtype_name(given.out_dtype),
        "q_dtype_w": dtype,
        "scaleAB": given.x_scale is not None,
        "granularity": "tensor" if given.w_scale is not None and given.w_scale.numel() == 1 else "row",
        **({flag: True} if flag else {}),
    }
    key = tuple((column.name, values.get(column.name, column.default)) for column in family.key_columns)
    return family.problem(key)


def memory_orders(scale: OptionalTensor) -> tuple[str, ...]:
    """The memory orders (of SCALE_ORDERS) of block scales [..., blocks]: both for a single row or column."""
    if scale is None or not scale.dim():
        return ()
    blocks = scale.shape[-1]
    rows = scale.numel() // max(1, blocks)
    contiguous = scale.is_contiguous()
    if contiguous and 1 in (rows, blocks):
        return SCALE_ORDERS
    if contiguous:
        return SCALE_ORDERS[:1]
    by_columns = scale.dim() == 2 and scale.stride(0) == 1 and scale.stride(1) >= rows
    return SCALE_ORDERS[1:] if by_columns else ()


def with_order(problem: Problem, orders: Sequence[str]) -> Problem:
    """The same key with this order of x's scales, if the family's key has that column."""
    order = orders[0] if orders else None
    return replace(problem, key=tuple((n, order if n == X_SCALE_COLUMN.name else value) for n, value in problem.key))


def product_spec(family: Family, given: CallOperands, problem: Problem) -> GemmSpec:
    """The spec of these operands. Raises UserError for an operand that does not match it."""
    spec = spec_or_error(family, problem, lambda diagnosis: _operand_error(family, given, diagnosis))
    if spec.x_dtype != spec.w_dtype and (error := _mixed_types_error(given, KeyDiagnosis(family, problem))):
        raise UserError(f"{family.entry_point}: {error}")
    check_operands(family, given, spec)
    return spec


def _mixed_types_error(given: CallOperands, diagnosis: KeyDiagnosis) -> str | None:
    """The error in the types of a product whose x and w have different types; None if there is none."""
    known = diagnosis.mixed_products()
    for name, tensor, types in (
        ("x", given.x, [spec.x_dtype for spec in known]),
        ("w", given.w, [spec.w_dtype for spec in known]),
    ):
        if types and dtype_name(tensor.dtype) not in types:
            return f"{name} is {dtype_name(tensor.dtype)}, expected {or_list(list(dict.fromkeys(types)))}"
    x, out = dtype_name(given.x.dtype), dtype_name(given.out_dtype)
    outs = list(dict.fromkeys(spec.out_dtype for spec in known if spec.x_dtype == x))
    return f"out_dtype is {out}, expected {or_list(outs)} for x in {x}" if outs and out not in outs else None


def _operand_error(family: Family, given: CallOperands, diagnosis: KeyDiagnosis) -> str | None:
    x, w, likely = dtype_name(given.x.dtype), dtype_name(given.w.dtype), diagnosis.likely_spec()
    if mixed := _mixed_types_error(given, diagnosis):
        return mixed
    if x != w:
        return f"x is {x} and w {w}, expected one type"
    if likely is not None:
        check_operands(family, given, likely)  # missing scales are reported first
    return diagnosis.dtype_error(w, dtype_name(given.out_dtype))


def check_operands(family: Family, given: CallOperands, spec: GemmSpec) -> None:
    """Raises UserError for an operand of the wrong type or device, and for wrong scales or bias."""
    name = family.entry_point
    check_device(name, given.x)
    for argument, tensor, dtype in (("x", given.x, spec.x_dtype), ("w", given.w, spec.w_dtype)):
        if dtype_name(tensor.dtype) != dtype:
            raise UserError(f"{name}: {argument} is {dtype_name(tensor.dtype)}, expected {dtype}")
    for argument, scale, scaling, rows in (
        ("x_scale", given.x_scale, spec.x_scale, spec.m),
        ("w_scale", given.w_scale, spec.w_scale, spec.n),
    ):
        if scaling is None and scale is not None:
            raise UserError(f"{name}: {argument}: given, expected none for {spec.w_dtype} operands")
        if scaling is not None and not scale_fits(scale, scaling, (spec.batch, rows, spec.k)):
            error = _scale_error(scale, scaling, (spec.batch, rows, spec.k))
            others = _other_scales(family, given) if argument == "w_scale" and scale is not None else ""
            raise UserError(f"{name}: {argument}: {error}{others}")
    if given.bias is not None and tuple(given.bias.shape) != (spec.n,):
        raise UserError(f"{name}: bias {list(given.bias.shape)}, expected [{spec.n}]")
    for argument, other in (
        ("w", given.w),
        ("x_scale", given.x_scale),
        ("w_scale", given.w_scale),
        ("bias", given.bias),
    ):
        if other is not None and other.device != given.x.device:
            raise UserError(f"{name}: {argument} is on {other.device}, expected {given.x.device} as x")


def check_device(name: str, x: torch.Tensor) -> None:
    """Raises UserError for an unsupported device; `meta` is supported, without computation."""
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise UserError(f"{name}: x is on {x.device}, expected cpu, cuda or meta")


def _scale_error(scale: OptionalTensor, scaling: Scaling, sizes: tuple[int, int, int]) -> str:
    """What is wrong with scales that do not fit (`scale_fits`), and what was expected."""
    expected = list(_scale_shape(scaling, sizes))
    if scale is None:
        return f"none, expected {scaling.dtype} {expected}"
    shape = list(scale.shape)
    if _shape_fits(scale, scaling, sizes):
        expected = shape
    return f"{dtype_name(scale.dtype)} {shape}, expected {scaling.dtype} {expected}"


def _other_scales(family: Family, given: CallOperands) -> str:
    """The clause ", or [N] or [N, 1] by row" with the scales of w that the same function accepts for other families.

    Empty without such families, and for scales that have the right shape.
    """
    found = []
    for each in map(load_family, shipped_families()):
        if each.entry_point != family.entry_point:
            continue
        try:
            spec = each.spec(problem_of(each, given))
        except UserError:
            continue
        if spec.w_scale is None or given.w_scale is None:
            continue
        sizes = (spec.batch, spec.n, spec.k)
        if each.name == family.name:
            if _shape_fits(given.w_scale, spec.w_scale, sizes):
                return ""
            continue
        shape = list(_scale_shape(spec.w_scale, sizes))
        found.append(f", or {shape[:1]} or {shape} by row" if spec.w_scale.granularity == "row" else f", or {shape}")
    return "".join(found)


def scale_fits(scale: OptionalTensor, scaling: Scaling, sizes: tuple[int, int, int]) -> bool:
    """True if these are the scales of one operand's (batch, rows, K)."""
    if scale is None or dtype_name(scale.dtype) not in (scaling.dtype, "uint8"):
        return False
    return _shape_fits(scale, scaling, sizes)


def _shape_fits(scale: torch.Tensor, scaling: Scaling, sizes: tuple[int, int, int]) -> bool:
    expected = _scale_shape(scaling, sizes)
    if scaling.granularity == "block" and scale.shape[-1:] != expected[-1:]:
        return False  # the same number of values transposed is wrong
    return scale.numel() == torch.Size(expected).numel()


def _scale_shape(scaling: Scaling, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    """The shape of the scales of one operand's (batch, rows, K)."""
    batch, rows, k = sizes
    if scaling.granularity == "tensor":
        return (1,)
    if scaling.granularity == "row":
        return (rows, 1) if batch == 1 else (batch, rows, 1)
    block = (-(-rows // scaling.block[0]), -(-k // scaling.block[1]))
    return block if batch == 1 else (batch, *block)


def inputs_of(given: CallOperands, spec: GemmSpec) -> Inputs:
    """The activations as given, [M, K], with scales in the shape of the spec."""
    x = as_rows(given.x, spec.m) if spec.batch == 1 else given.x
    if given.x_scale is None or spec.x_scale is None:
        return Inputs(x=x)
    shape = _scale_shape(spec.x_scale, (spec.batch, spec.m, spec.k))
    return Inputs(x=x, x_scale=_reshaped(given.x_scale, shape, "x_scale"))


def as_rows(x: torch.Tensor, m: int) -> torch.Tensor:
    """[..., K] as [M, K]: a view, or a reported copy if the strides allow no view."""
    return _reshaped(x, (m, -1), "x")


def _reshaped(tensor: torch.Tensor, shape: tuple[int, ...], argument: str) -> torch.Tensor:
    """A view in this shape, or a reported copy if the strides allow no view."""
    shaped = tensor.reshape(shape)
    if not tensor.is_contiguous() and shaped.data_ptr() != tensor.data_ptr():
        log_copied(argument, tensor)
    return shaped


def weights_of(given: CallOperands, spec: GemmSpec) -> Weights:
    """The weights as given, with a bias of the output's type."""
    w, scale, bias = given.w, given.w_scale, given.bias
    if w.requires_grad:
        w = w.detach()
    if spec.batch == 1 and w.dim() == 3:
        w = w[0]
    if scale is not None and spec.w_scale is not None:
        by_row = spec.batch > 1 and spec.w_scale.granularity == "row"
        shape = (spec.batch, 1, spec.n) if by_row else _scale_shape(spec.w_scale, (spec.batch, spec.n, spec.k))
        scale = _reshaped(scale, shape, "w_scale")
    if bias is not None and bias.dtype != given.out_dtype:
        log_converted("bias", bias, given.out_dtype)
        bias = bias.to(given.out_dtype)
    return Weights(w=w, w_scale=scale, bias=bias)


def kernel_inputs(inputs: Inputs, spec: GemmSpec, orders: Collection[str]) -> Inputs:
    """The inputs as a kernel reads them: contiguous rows, block scales in one of `orders` (else rows), and all aligned.

    Others are copied.
    """
    scale = inputs.x_scale
    if scale is not None and not _readable(scale, spec, orders):
        scale = aligned(scale, "x_scale")
    return Inputs(x=aligned(inputs.x, "x"), x_scale=scale)


def library_inputs(inputs: Inputs, spec: GemmSpec) -> Inputs:
    """The inputs for a library that reads contiguous rows alone: others are copied.

    Block scales in rows or M-major (also in lines longer than M) stay: the library's launch orders them as it needs.
    """
    scale = inputs.x_scale
    if scale is not None:
        by_block = spec.x_scale is not None and spec.x_scale.granularity == "block" and scale.dim() == 2
        m_major = by_block and scale_order(scale) == COLUMN and not scale.data_ptr() & ALIGNMENT
        scale = scale if m_major else aligned(scale, "x_scale")
    return Inputs(x=aligned(inputs.x, "x"), x_scale=scale)


def _readable(scale: torch.Tensor, spec: GemmSpec, orders: Collection[str]) -> bool:
    """True if a kernel that reads these orders needs no copy of x's scales; rows or columns may have gaps."""
    by_block = spec.x_scale is not None and spec.x_scale.granularity == "block" and scale.dim() == 2
    return by_block and COLUMN in orders and scale_order(scale) in orders and not scale.data_ptr() & ALIGNMENT


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...], argument: str) -> torch.Tensor:
    """The tensor itself if it has these strides at an address divisible by 16; else a reported copy."""
    if tensor.stride() == strides and not tensor.data_ptr() & ALIGNMENT:
        return tensor
    log_copied(argument, tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def kernel_weights(weights: Weights) -> Weights:
    """The weights as kernels read them: contiguous and aligned, else copied."""
    w, scale, bias = weights.w, weights.w_scale, weights.bias
    return Weights(
        w=aligned(w, "w"),
        w_scale=None if scale is None else aligned(scale, "w_scale"),
        bias=None if bias is None else aligned(bias, "bias"),
    )


def aligned(tensor: torch.Tensor, argument: str = "") -> torch.Tensor:
    """The tensor itself if contiguous at an address divisible by 16, for which kernels are compiled; else a copy.

    The copy of an operand with a name is reported, see copy_log.
    """
    if tensor.is_contiguous() and not tensor.data_ptr() & ALIGNMENT:
        return tensor
    if argument:
        log_copied(argument, tensor)
    return tensor.clone(memory_format=torch.contiguous_format)
