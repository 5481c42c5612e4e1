"""PyTorch TunableOp's result files, the winning BLAS solution per product, as rows of a tuned table."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.core.files import lines_of, open_regular_text, open_table
from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family, GemmSpec, KernelDefaults
from gemmpipe.family.problem import make_problem, parse_number
from gemmpipe.tables.merge import Row

TORCH_DTYPES = {
    "BFloat16": "bfloat16",
    "Half": "float16",
    "float": "float32",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e4m3fnuz": "float8_e4m3fnuz",
    "Float8_e5m2": "float8_e5m2",
    "Float8_e5m2fnuz": "float8_e5m2fnuz",
}
"""TunableOp's names of types -> torch's; it also has tf32 and double."""
_TYPE = "|".join(sorted([*TORCH_DTYPES, "tf32", "double"], key=len, reverse=True))
OPERATION_PATTERN = re.compile(
    rf"(?P<kind>Gemm|GemmAndBias|GemmStridedBatched|ScaledGemm)TunableOp_(?P<a>{_TYPE})"
    rf"(?:_(?P<b>{_TYPE})_(?P<c>{_TYPE}))?_(?P<layout>[NT]{{2}})"
)
_INTEGER = r"[0-9]{1,18}"
SIZES_PATTERN = re.compile(
    rf"[nt]{{2}}_(?P<m>{_INTEGER}|\*)_(?P<n>{_INTEGER}|\*)_(?P<k>{_INTEGER}|\*)(?:_B_(?P<batch>{_INTEGER}|\*))?"
    rf"(?:_ld_(?P<lda>{_INTEGER}|\*)_(?P<ldb>{_INTEGER}|\*)_(?P<ldc>{_INTEGER}|\*))?(?P<rest>(?:_.*)?)"
)
"""Sizes as in column-major BLAS; `OPERATION_PATTERN` is the operator's signature."""
_CUBLASLT = re.compile(
    rf"Gemm_Cublaslt_id_(?P<algo_id>{_INTEGER})_tile_(?P<tile_id>{_INTEGER})_stages_(?P<stages_id>{_INTEGER})"
    rf"_splitk_(?P<NUM_KSPLIT>-?{_INTEGER})_red_(?P<reduction_scheme>{_INTEGER})_swizzle_(?P<cta_swizzling>{_INTEGER})"
    rf"_custom_(?P<custom_option>{_INTEGER})_inner_(?P<inner_shape_id>{_INTEGER})_cluster_(?P<cluster_shape_id>{_INTEGER})"
)
_GRANULARITIES = {"0": "tensor", "1": "row"}


class _UnsupportedLine(Exception):
    """The reason why a line gives no row of a family's table."""


@dataclass(frozen=True, kw_only=True)
class ImportedResults:
    """The rows of a file for one family on one device."""

    rows: list[Row] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    """The line of each row in the file."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> number of lines."""


def is_results(path: Path) -> bool:
    """True if a file begins like TunableOp's: with a validator, or a product and its winner."""
    try:
        with open_regular_text(path, "a tuned table", errors="replace") as stream:
            first = stream.readline(1000).strip().split(",")
    except (OSError, UserError):  # the reader that follows reports it
        return False
    return first[0] == "Validator" or (len(first) > 2 and OPERATION_PATTERN.fullmatch(first[0]) is not None)


def read_results(path: Path, family: Family, device: Device) -> ImportedResults:
    """The winners of this family's products on this device, with times (us) where the file has them.

    Raises UserError: `file:line`, what was expected; also if the file's validators name another architecture.
    """
    found = ImportedResults()
    validators: dict[str, str] = {}
    rows: dict[tuple[Scalar, ...], tuple[Row, int]] = {}
    for line, cells in _lines(path):
        where = f"{path}:{line}"
        if cells[0] == "Validator":
            if len(cells) != 3:
                raise UserError(f"{where}: {len(cells)} cells, expected Validator,NAME,VALUE")
            validators[cells[1]] = cells[2]
            continue
        if not 3 <= len(cells) <= 4:
            raise UserError(f"{where}: {len(cells)} cells, expected a product, its sizes, the solution and its time")
        try:
            row = _row(cells, family, device, validators, where)
        except _UnsupportedLine as reason:
            found.left_out[str(reason)] += 1
            continue
        # The last of several lines for a product counts, as in torch.
        rows[tuple(row[column.name] for column in family.key_columns)] = row, line
    gfx = _gfx(validators)
    if gfx and gfx != device.gfx:
        raise UserError(f"{path}: tuned on {gfx}, the device is {device.gfx}; expected a file of this architecture")
    for row, line in rows.values():
        found.rows.append(row)
        found.lines.append(line)
    return found


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells): TunableOp splits at every comma and has no quotes."""
    try:
        with open_table(path) as stream:
            for number, line in enumerate(lines_of(stream, path), 1):
                if line.strip():
                    yield number, [cell.strip() for cell in line.split(",")]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text, expected a result file of TunableOp") from None


def tuned_gfx(path: Path) -> str:
    """The architecture in a file's validators; empty if there is none, as on CUDA."""
    return _gfx({cells[1]: cells[2] for _, cells in _lines(path) if cells[0] == "Validator" and len(cells) == 3})


def _gfx(validators: Mapping[str, str]) -> str:
    return validators.get("GCN_ARCH_NAME", "").split(":")[0]


def _row(cells: list[str], family: Family, device: Device, validators: Mapping[str, str], where: str) -> Row:
    operation, sizes = OPERATION_PATTERN.fullmatch(cells[0]), SIZES_PATTERN.fullmatch(cells[1])
    if operation is None or sizes is None:
        given = quoted_repr(f"{cells[0]},{cells[1]}")
        raise UserError(f"{where}: {given}, expected a product such as GemmTunableOp_Half_TN,tn_1_2_3")
    values = _key_values(operation, sizes)
    try:
        defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
        problem = make_problem(family, values, defaults, device.gfx, where)
        spec = family.spec(problem)
    except UserError:  # a type, or a column such as a batch, that this family has not
        raise _UnsupportedLine(f"no product of {family.name}") from None
    if not _matches_spec(spec, values):
        raise _UnsupportedLine(f"no product of {family.name}")
    libtype, knobs, name = _winner(cells[2], spec, validators)
    row: Row = dict.fromkeys(RESULT)
    row |= {"gfx": device.gfx, "cu_num": device.cu_num, **dict(problem.key), "libtype": libtype, "kernelName": name}
    row |= {"splitK": knobs.get("NUM_KSPLIT", 1), "solidx": knobs.get("solidx", 0), "policy": "tunableop"}
    row["config"] = json.dumps(knobs, sort_keys=True, separators=(",", ":"))
    row["us"] = _time_us(cells[3], where) if len(cells) == 4 else None
    return row


def _key_values(operation: re.Match[str], sizes: re.Match[str]) -> dict[str, Scalar]:
    """The key columns of a signature and its sizes.

    BLAS is column-major: x[M, K] @ w[N, K]^T is its TN with m = N, n = M. Raises _UnsupportedLine for other products.
    """
    numbers = {name: text for name, text in sizes.groupdict().items() if text is not None and name != "rest"}
    if "*" in numbers.values():
        raise _UnsupportedLine("a wildcard for several sizes")
    m, n, k = (int(numbers[name]) for name in "nmk")
    if operation["layout"] != "TN":
        raise _UnsupportedLine(f"operands stored as {operation['layout']}, not x [M, K] and w [N, K]")
    if "lda" in numbers and [int(numbers[name]) for name in ("lda", "ldb", "ldc")] != [k, k, n]:
        raise _UnsupportedLine("rows that are not contiguous")
    dtype = TORCH_DTYPES.get(operation["a"])
    out = TORCH_DTYPES.get(operation["c"] or operation["a"])
    if dtype is None or out is None or operation["b"] not in (None, operation["a"]):
        raise _UnsupportedLine(f"a product of {operation['a']} and {operation['b'] or operation['a']}")
    values: dict[str, Scalar] = {"M": m, "N": n, "K": k, "dtype": dtype, "q_dtype_w": dtype, "outdtype": out}
    values |= {"bias": operation["kind"] == "GemmAndBias", "granularity": "", "scaleAB": False}
    values |= {"B": int(numbers["batch"])} if "batch" in numbers else {}
    if operation["kind"] == "ScaledGemm":
        values |= {"granularity": _granularity(sizes["rest"]), "scaleAB": True}
        values["bias"] = re.search(r"_bias_(?!None)", sizes["rest"]) is not None
    return values


def _granularity(rest: str) -> str:
    """`row` or `tensor`: ROCm has `_rw_1` for scales by row, CUDA torch's numbers of both operands' recipes."""
    both = re.search(r"_ast_([0-9]+)_bst_([0-9]+)", rest)
    rows = re.search(r"_rw_([01])", rest)
    kinds = set(both.groups()) if both else {rows[1]} if rows else set()
    if len(kinds) != 1 or not kinds <= _GRANULARITIES.keys():
        raise _UnsupportedLine("scales neither per tensor nor per row")
    return _GRANULARITIES[kinds.pop()]


def _matches_spec(spec: GemmSpec, values: Mapping[str, Scalar]) -> bool:
    """True if the family's product is the file's: a key does not have all of its properties."""
    scale = spec.x_scale.granularity if spec.x_scale else ""
    other = spec.w_scale.granularity if spec.w_scale else ""
    return (
        (spec.x_dtype, spec.w_dtype, spec.out_dtype) == (values["dtype"], values["dtype"], values["outdtype"])
        and (scale, other) == (values["granularity"], values["granularity"])
        and (spec.bias, spec.batch, spec.w_layout) == (values["bias"], values.get("B", 1), "nk")
    )


def _winner(solution: str, spec: GemmSpec, validators: Mapping[str, str]) -> tuple[str, dict[str, Scalar], str]:
    """(libtype, knobs, kernelName). Raises _UnsupportedLine for a solution that no backend here offers."""
    if solution == "Default":
        scaled = spec.x_scale is not None
        return ("scaled_mm", {"use_fast_accum": False}, "scaled_mm") if scaled else ("torch", {"method": "mm"}, "torch")
    if found := re.fullmatch(rf"Gemm_Hipblaslt_({_INTEGER})", solution):
        version = validators.get("HIPBLASLT_VERSION")
        if version is None:
            raise _UnsupportedLine("hipBLASLt's solution without HIPBLASLT_VERSION, which defines its index")
        return "hipblaslt", {"solidx": int(found[1])}, f"hipblaslt_{found[1]}@{version}"
    if found := _CUBLASLT.fullmatch(solution):
        version = validators.get("CUBLASLT_VERSION")
        if version is None:
            raise _UnsupportedLine("cuBLASLt's algorithm without CUBLASLT_VERSION, which defines it")
        knobs: dict[str, Scalar] = {name: int(text) for name, text in found.groupdict().items()}
        if spec.x_scale is not None:
            knobs["use_fast_accum"] = False
        return "cublaslt", knobs, f"cublaslt_{knobs['algo_id']}@{version}"
    raise _UnsupportedLine(
        f"a solution of {solution.removeprefix('Gemm_').split('_')[0]}, which no backend here offers"
    )


def _time_us(text: str, where: str) -> float:
    try:
        return round(parse_number(text, 0, 1e9) * 1e3, 4)
    except UserError:
        raise UserError(f"{where}: time {quoted_repr(text)}, expected milliseconds") from None
