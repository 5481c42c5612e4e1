"""The product of a torch operator, from its operands' sizes, strides and types: a family and its key columns."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gemmpipe.core.data import Scalar
from gemmpipe.family.dtypes import DTYPES_8BIT, DTYPES_16BIT, OUT_DTYPES

UNSUPPORTED = "other"
"""The family name of products that no family computes."""
_BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """A tensor argument of an operator: torch's dtype name without `torch.`, sizes, strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a scalar."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def transposed(self) -> "Operand":
        """The operand with its last two dimensions exchanged."""
        shape, strides = list(self.shape), list(self.strides)
        shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
        return Operand(dtype=self.dtype, shape=tuple(shape), strides=tuple(strides))

    @property
    def rows(self) -> "Operand":
        """The operand as [M, K]: all dimensions but the last as one."""
        k = self.shape[-1]
        return Operand(dtype=self.dtype, shape=(self.numel // k if k else 0, k), strides=(k, self.strides[-1]))


Argument = Operand | tuple[Operand, ...] | None
"""The relevant part of an operator's argument: a tensor, several of them, or nothing."""
ObservedProduct = tuple[str, dict[str, Scalar]]
"""(family, key columns and `layout`)."""


def product_of(name: str, arguments: Sequence[Argument], out_dtype: str) -> ObservedProduct | None:
    """The product of an operator, arguments in the order of its schema; None if it is none or has a size of 0.

    `out_dtype` is the result's.
    """
    read = READERS.get(name)
    try:
        return read(arguments, out_dtype) if read else None
    except (AttributeError, IndexError, TypeError):  # arguments that this operator does not accept
        return None


def reader_name(name: str) -> str:
    """The name of an operator in READERS: in-place variants compute the same."""
    return name if name in READERS else name.removesuffix("_")


def foreign_product_of(name: str, arguments: Sequence[Argument], out_dtype: str) -> ObservedProduct | None:
    """The product of a custom operator: two 8-bit operands with scales, or two 16-bit ones if its name fits."""
    operands = [each if isinstance(each, Operand) else None for each in arguments]
    for index, (x, w) in enumerate(pairwise(operands)):
        if x is None or w is None or x.dtype != w.dtype or len(w.shape) != 2 or len(x.shape) < 2:
            continue
        straight = x.shape[-1] == w.shape[1]
        if not straight and x.shape[-1] != w.shape[0]:
            continue
        scales = tuple(each for each in operands[index + 2 : index + 4] if each and each.dtype == "float32")
        turned = w.transposed if straight else w
        if x.dtype in DTYPES_8BIT and len(scales) == 2:
            return _scaled(x.rows, turned, (scales[0], scales[1]), False, out_dtype)
        if x.dtype in DTYPES_16BIT and _NAMED.search(name):
            bias = operands[index + 2] if len(operands) > index + 2 else None
            return _product(x.rows, turned, bias is not None and bias.shape == (turned.shape[1],), x.dtype)
    return None


_NAMED = re.compile(r"gemm|matmul|linear|(?:^|_)mm(?:_|$)")


def _product(x: Operand, w: Operand, bias: bool, out_dtype: str) -> ObservedProduct | None:
    """x [M, K] or [B, M, K] times w [K, N] or [B, K, N], in torch's layout."""
    if 0 in x.shape or 0 in w.shape:
        return None
    batched = len(w.shape) == 3
    values: dict[str, Scalar] = {"M": x.shape[-2], "N": w.shape[-1], "K": w.shape[-2]}
    values |= {
        "dtype": w.dtype,
        "outdtype": out_dtype,
        "layout": f"{_memory_layout(x, 'mk')} {_memory_layout(w, 'kn')}",
    }
    values |= {"B": w.shape[0]} if batched else {"bias": bias, "scaleAB": False, "bpreshuffle": False}
    if w.dtype not in DTYPES_16BIT or out_dtype not in OUT_DTYPES or x.dtype != w.dtype or (batched and bias):
        return UNSUPPORTED, values
    return ("batched_bf16" if batched else "a16w16"), values


def _memory_layout(operand: Operand, letters: str) -> str:
    """The letters in memory order, the innermost last; `strided` if no dimension is contiguous."""
    if operand.strides[-1] == 1 and operand.shape[-1] > 1:
        return letters
    return letters[::-1] if operand.strides[-2] == 1 else letters if operand.strides[-1] == 1 else "strided"


def _scaled(
    x: Operand, w: Operand, scales: tuple[Operand, Operand], bias: bool, out_dtype: str
) -> ObservedProduct | None:
    """The product of 8-bit operands with their scales."""
    found = _product(x, w, bias, out_dtype)
    if found is None:
        return None
    _, values = found
    sizes = (scales[0].numel, scales[1].numel)
    m, n, k = x.shape[0], w.shape[1], x.shape[1]
    blocks = -(-k // _BLOCK)
    for key in ("scaleAB", "bpreshuffle"):
        del values[key]
    granularity = "tensor" if sizes == (1, 1) else "row" if sizes == (m, n) else ""
    # cuBLASLt pads the K dimension of the weight's block scales to a multiple of 4.
    by_block = [(m * blocks, -(-n // _BLOCK) * padded) for padded in (blocks, -(-blocks // 4) * 4)]
    if not granularity and sizes in by_block and not bias and out_dtype in OUT_DTYPES:
        return "a8w8_blockscale", {**values, "x_scale": _scale_order(scales[0])}
    values |= {"q_dtype_w": values.pop("dtype"), "granularity": granularity}
    return ("a8w8" if granularity and out_dtype in OUT_DTYPES else UNSUPPORTED), values


def _scale_order(scale: Operand) -> str | None:
    """`row` or `column`, the memory order of block scales [M, blocks]; None: neither, both, or unknown."""
    if len(scale.shape) != 2 or 1 in scale.shape:
        return None
    rows, blocks = scale.shape
    if scale.strides == (blocks, 1):
        return "row"
    return "column" if scale.strides[0] == 1 and scale.strides[1] >= rows else None


def _is_bias(addend: Operand, rows: int) -> bool:
    """True if the addend is one row for all."""
    return len(addend.shape) == 1 or (len(addend.shape) == 2 and addend.shape[0] == 1 and rows != 1)


def _addmm(a: Sequence[Argument], out: str) -> ObservedProduct | None:
    x = _tensor(a[1])
    return _product(x, _tensor(a[2]), _is_bias(_tensor(a[0]), x.shape[0]), out)


def _linear(a: Sequence[Argument], out: str) -> ObservedProduct | None:
    x, w = _tensor(a[0]), _tensor(a[1])
    return _product(x.rows, w.transposed, len(a) > 2 and a[2] is not None, out)


def _matmul(a: Sequence[Argument], out: str) -> ObservedProduct | None:
    """Any ranks: a 2-D weight multiplies all rows; otherwise a batch of products over the leading dimensions."""
    x, w = _tensor(a[0]), _tensor(a[1])
    if len(w.shape) == 1:
        return _vector(w, x.rows, False, out)
    if len(w.shape) == 2:
        return _product(x.rows, w, False, out)
    m = x.shape[-2] if len(x.shape) > 1 else 1
    front = max(x.numel // max(1, m * x.shape[-1]), w.numel // max(1, w.shape[-1] * w.shape[-2]))
    xs = Operand(dtype=x.dtype, shape=(front, m, x.shape[-1]), strides=(0, *(x.strides[-2:] if m > 1 else (1, 1))))
    ws = Operand(dtype=w.dtype, shape=(front, *w.shape[-2:]), strides=(0, *w.strides[-2:]))
    return _product(xs, ws, False, out)


def _vector(x: Operand, w: Operand, bias: bool, out: str) -> ObservedProduct | None:
    """A matrix [N, K] times a vector [K]: a product of one row."""
    row = Operand(dtype=x.dtype, shape=(1, *x.shape), strides=(x.shape[0], *x.strides))
    return _product(row, w.transposed, bias, out)


def _scaled_mm(a: Sequence[Argument], out: str) -> ObservedProduct | None:
    scales = (_tensor(a[2]), _tensor(a[3]))
    return _scaled(_tensor(a[0]), _tensor(a[1]), scales, len(a) > 4 and a[4] is not None, out)


def _scaled_mm_v2(a: Sequence[Argument], out: str) -> ObservedProduct | None:
    first = [each[0] if isinstance(each, tuple) else _tensor(each) for each in (a[2], a[5])]
    return _scaled(_tensor(a[0]), _tensor(a[1]), (first[0], first[1]), len(a) > 8 and a[8] is not None, out)


def _int_mm(a: Sequence[Argument], out: str) -> ObservedProduct | None:
    found = _product(_tensor(a[0]), _tensor(a[1]), False, out)
    if found is None:
        return None
    values = {name: found[1][name] for name in ("M", "N", "K", "layout")}
    return "a8w8", {**values, "q_dtype_w": "int8"}  # its scales follow in another operation


def _grouped(a: Sequence[Argument], out: str) -> ObservedProduct | None:
    x, w = _tensor(a[0]), _tensor(a[1])
    if 0 in x.shape or 0 in w.shape:
        return None
    values: dict[str, Scalar] = {"M": x.shape[-2], "N": w.shape[-1], "K": x.shape[-1], "B": w.shape[0]}
    return UNSUPPORTED, {**values, "dtype": w.dtype, "outdtype": out}


def _tensor(argument: Argument) -> Operand:
    if not isinstance(argument, Operand):
        raise TypeError(argument)
    return argument


READERS: Mapping[str, Callable[[Sequence[Argument], str], ObservedProduct | None]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": lambda a, out: _product(_tensor(a[0]), _tensor(a[1]), False, out),
    "addmm": _addmm,
    "_addmm_activation": _addmm,
    "bmm": lambda a, out: _product(_tensor(a[0]), _tensor(a[1]), False, out),
    "baddbmm": lambda a, out: _product(_tensor(a[1]), _tensor(a[2]), False, out),
    "addbmm": lambda a, out: _product(_tensor(a[1]), _tensor(a[2]), False, out),
    "mv": lambda a, out: _vector(_tensor(a[1]), _tensor(a[0]), False, out),
    "addmv": lambda a, out: _vector(_tensor(a[2]), _tensor(a[1]), True, out),
    "_scaled_mm": _scaled_mm,
    "_scaled_mm_v2": _scaled_mm_v2,
    "_int_mm": _int_mm,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_grouped_mm_v2": _grouped,
}
"""Operator name (of all overloads) -> reader of its arguments."""
COMPOSITE_OPERATORS = ("linear", "matmul")
"""Operators that torch usually runs through another one of READERS."""
