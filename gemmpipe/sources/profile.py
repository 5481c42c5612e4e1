"""Problems from traces of torch's profiler with recorded shapes.

Each product counts once, at any nesting of operators, with its time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.core.jsonstream import objects_in
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.problem import merge_duplicates, shape_groups
from gemmpipe.sources.model.source import batch_sizes
from gemmpipe.sources.products import (
    COMPOSITE_OPERATORS,
    READERS,
    Argument,
    ObservedProduct,
    Operand,
    foreign_product_of,
    product_of,
    reader_name,
)
from gemmpipe.sources.records import RecordedProduct, RecordSource

_TYPES = {
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "float": "float32",
    "double": "float64",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2": "float8_e5m2",
    "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
    "signed char": "int8",
    "unsigned char": "uint8",
    "int": "int32",
    "long int": "int64",
    "long": "int64",
}
"""C++ names of element types -> torch's."""
_LISTS = ("TensorList", "GenericList")
_NUMBERS = {"5": "float16", "6": "float32", "15": "bfloat16"}
"""Torch's numbers of result types in a recorded `out_dtype`."""
_OUT_DTYPE_AT = {"_scaled_mm": 6, "_scaled_mm_v2": 9, "mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}
_MAX_NESTING = 1_000
"""Operators within each other: above any program's; the cost of a trace grows with the nesting."""
_OPERATORS = ("cpu_op", "Operator")
_KERNELS = ("kernel", "gpu_memset", "Kernel")


@dataclass(slots=True)
class _Operator:
    """An operator's event: a product, or with `product` None an operator that may contain one."""

    thread: tuple[object, object]
    start: float
    end: float
    order: int
    name: str
    correlation: int | str | None
    product: ObservedProduct | None
    calls_product: bool = False


def products_in_trace(path: Path) -> list[RecordedProduct]:
    """The products of a trace. Raises UserError: no trace, an event that contradicts itself, no shapes recorded."""
    operators: list[_Operator] = []
    kernels: dict[int | str | None, float] = {}
    for order, event in enumerate(objects_in(path, "traceEvents")):
        where = f"{path}: event {order + 1}"
        kind = event.get("cat")
        if kind in _OPERATORS and event.get("ph") == "X":
            operators.append(_operator(event, order, where))
        elif kind in _KERNELS:
            external = _external(_arguments(event, where), where)
            if external is not None:
                kernels[external] = kernels.get(external, 0.0) + _number(event, "dur", where)
    times = _count(operators, kernels, path)
    groups: dict[tuple[str, tuple[tuple[str, Scalar], ...]], tuple[int, float, str]] = {}
    for operator, time_us in times:
        assert operator.product is not None
        family, values = operator.product
        key = (family, tuple(values.items()))
        count, sum_us, where = groups.get(key, (0, 0.0, f"{path}: event {operator.order + 1} ({operator.name})"))
        groups[key] = (count + 1, sum_us + time_us, where)
    return [
        RecordedProduct(family=family, values=dict(items), count=float(count), time_us=time_us, where=where)
        for (family, items), (count, time_us, where) in groups.items()
    ]


def _operator(event: Mapping[str, object], order: int, where: str) -> _Operator:
    name, start = str(event.get("name")), _number(event, "ts", where)
    plain = reader_name(name.removeprefix("aten::"))
    own = name.startswith("aten::")
    found = None
    arguments = _arguments(event, where)
    if (own and plain in READERS) or (not own and "::" in name and "Input Dims" in arguments):
        operands = _operands(arguments, f"{where} ({name})")
        out = _result(plain, operands, arguments)
        read = product_of if own else foreign_product_of
        found = read(plain.rpartition("::")[2], operands, out)
        if found is not None and arguments.get("Input Strides") is None:
            found[1].pop("x_scale", None)  # the memory order of scales is unknown
    return _Operator(
        thread=(event.get("pid"), event.get("tid")),
        start=start,
        end=start + _number(event, "dur", where),
        order=order,
        name=name,
        correlation=_external(arguments, where),
        product=found,
    )


def _arguments(event: Mapping[str, object], where: str) -> Mapping[str, object]:
    found = event.get("args", {})
    if not isinstance(found, Mapping):
        raise UserError(f"{where}: args: {str(found)[:40]!r}, expected an object")
    return found


def _external(arguments: Mapping[str, object], where: str) -> int | str | None:
    """The id that a kernel shares with the operator that launched it."""
    found = arguments.get("External id")
    if found is not None and not isinstance(found, int | str):
        raise UserError(f"{where}: External id: {str(found)[:40]!r}, expected a number")
    return found


def _number(event: Mapping[str, object], name: str, where: str) -> float:
    value = event.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise UserError(f"{where}: {name}: {str(value)[:40]!r}, expected a number of microseconds")
    return float(value)


def _operands(arguments: Mapping[str, object], where: str) -> list[Argument]:
    """An operator's arguments, from the profiler's parallel lists."""
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if dims is None or types is None:
        raise UserError(f"{where}: no 'Input Dims' and 'Input type', expected a trace with record_shapes=True")
    strides = arguments.get("Input Strides")
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        raise UserError(f"{where}: Input Dims and Input type, expected two lists of one length")
    if strides is not None and (not isinstance(strides, list) or len(strides) != len(dims)):
        raise UserError(f"{where}: Input Strides, expected a list as long as Input Dims")
    return [
        _argument(kind, size, strides[index] if strides else None, where)
        for index, (kind, size) in enumerate(zip(types, dims, strict=True))
    ]


def _argument(kind: object, sizes: object, strides: object, where: str) -> Argument:
    if kind in _LISTS and isinstance(sizes, list) and sizes and all(isinstance(each, list) for each in sizes):
        # The profiler records neither the type (lists in products are scales) nor the strides of lists.
        return tuple(replace(_tensor("float32", each, None, where), strides=(0,) * len(each)) for each in sizes)
    dtype = _TYPES.get(str(kind))
    return None if dtype is None else _tensor(dtype, sizes, strides, where)


def _tensor(dtype: str, sizes: object, strides: object, where: str) -> Operand:
    shape = _integers(sizes, where)
    contiguous = []
    step = 1
    for size in reversed(shape):
        contiguous.append(step)
        step *= max(1, size)
    given = _integers(strides, where) if strides else ()
    if given and len(given) != len(shape):
        raise UserError(f"{where}: Input Strides {list(given)}, expected one for each of {list(shape)}")
    return Operand(dtype=dtype, shape=shape, strides=given or tuple(reversed(contiguous)))


def _integers(values: object, where: str) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(each) is not int or not 0 <= each < 2**40 for each in values):
        raise UserError(f"{where}: {str(values)[:60]}, expected a list of whole numbers")
    return tuple(values)


def _result(name: str, operands: Sequence[Argument], arguments: Mapping[str, object]) -> str:
    """The result's type: the requested one; else the first operand's; for custom operators the output argument's."""
    tensors = [each for each in operands if isinstance(each, Operand)]
    concrete = arguments.get("Concrete Inputs")
    given = [str(each) for each in concrete] if isinstance(concrete, list) else []
    if name == "_int_mm":
        return "int32"
    if name in READERS:
        at = _OUT_DTYPE_AT.get(name, len(given))
        requested = _NUMBERS.get(given[at]) if at < len(given) else None
        return requested or (tensors[0].dtype if tensors else "")
    if tensors and tensors[0].dtype in _NUMBERS.values():
        return tensors[0].dtype
    return next((_NUMBERS[word] for word in given if word in _NUMBERS), "bfloat16")


def _count(
    operators: Iterable[_Operator], kernels: Mapping[int | str | None, float], path: Path
) -> Iterator[tuple[_Operator, float]]:
    """Each product once with its time, without operators inside a product and operators that only call one."""
    ordered = sorted(operators, key=lambda o: (str(o.thread), o.start, -o.end, o.order))
    open_: list[_Operator] = []
    products: dict[int, float] = {}
    found: list[_Operator] = []

    def close(operator: _Operator) -> None:
        if (
            operator.product is not None
            and operator.name.removeprefix("aten::") in COMPOSITE_OPERATORS
            and not operator.calls_product
        ):
            found.append(operator)
            for outer in open_:
                outer.calls_product = True

    for operator in ordered:
        while open_ and (open_[-1].end <= operator.start or open_[-1].thread != operator.thread):
            close(open_.pop())
        holds = operator.name.removeprefix("aten::") in COMPOSITE_OPERATORS
        inside = any(o.product is not None and o.name.removeprefix("aten::") not in COMPOSITE_OPERATORS for o in open_)
        if operator.product is not None and inside:
            operator.product = None
        elif operator.product is not None and not holds:
            found.append(operator)
            for outer in open_:
                outer.calls_product = True
        open_.append(operator)
        if len(open_) > _MAX_NESTING:
            raise UserError(f"{path}: event {operator.order + 1}: within {_MAX_NESTING:,} others, expected fewer")
        for outer in open_:  # a kernel is attributed to the innermost operator
            products[id(outer)] = products.get(id(outer), 0.0) + kernels.get(operator.correlation, 0.0)
    while open_:
        close(open_.pop())
    for operator in sorted(found, key=lambda o: o.order):
        yield operator, products[id(operator)] if kernels else operator.end - operator.start


@dataclass(frozen=True, kw_only=True)
class TraceShapes(RecordSource):
    """The products of Chrome traces (`torch.profiler` with record_shapes, .json or .json.gz), counted and timed.

    `nsets` adds these Ms to every product: a replayed CUDA graph leaves no operators in a trace, so decode is missing.
    Each added M gets the weight of the product's most frequent M.
    """

    nsets: Sequence[int] | int | str | None

    def read(self, path: Path) -> list[RecordedProduct]:
        """Every product of one trace."""
        return products_in_trace(path)

    def expected(self) -> str:
        """The kind of file, for messages."""
        return "a trace of torch's profiler (.json or .json.gz)"

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, its weight the number of calls. Raises UserError: file and event."""
        found = super().problems(family, defaults, gfx)
        if self.nsets is None:
            return found
        rows, made = family.rows_column, list(found)
        for group in shape_groups(found):
            most, seen = max(group, key=lambda p: p.weight), {p.rows for p in group}
            for m in batch_sizes(self.nsets):
                if m not in seen:
                    key = tuple((name, m if name == rows else value) for name, value in most.key)
                    made.append(replace(most, key=key))
        return merge_duplicates(made)
