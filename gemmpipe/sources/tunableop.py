"""Problems from the files of PyTorch's TunableOp: what it recorded untuned, and its results."""

import re
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.csvfile import read_cells
from gemmpipe.data import Scalar
from gemmpipe.errors import UserError
from gemmpipe.sources.products import OTHER
from gemmpipe.sources.records import Recorded, Records

_OPERATOR = re.compile(r"(?P<kind>\w*?)TunableOp_(?P<types>\w+)_(?P<layout>[TNC]{2})")
_SIZES = re.compile(
    r"(?P<layout>[tnc]{2})_(?P<m>\d{1,10})_(?P<n>\d{1,10})_(?P<k>\d{1,10})(?:_B_(?P<b>\d{1,10}))?"
    r"(?:_ld_(?P<lda>\d{1,19})_(?P<ldb>\d{1,19})_(?P<ldc>\d{1,19}))?(?P<rest>(?:_.*)?)"
)
_KINDS = ("Gemm", "GemmAndBias", "GemmStridedBatched", "ScaledGemm")
_TYPES = {
    "BFloat16": "bfloat16",
    "Half": "float16",
    "float": "float32",
    "Float": "float32",
    "tf32": "float32",
    "double": "float64",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e4m3fnuz": "float8_e4m3fnuz",
    "Float8_e5m2": "float8_e5m2",
    "Float8_e5m2fnuz": "float8_e5m2fnuz",
}
_WIDE = ("bfloat16", "float16")
_SCALINGS = {"0": "tensor", "1": "row", "4": "block", "5": "block"}
"""torch.nn.functional.ScalingType by number."""


@dataclass(frozen=True, kw_only=True)
class Tunableop(Records):
    """`tunableop_untuned*.csv` (PYTORCH_TUNABLEOP_RECORD_UNTUNED=1) and results; each row is one product.

    TunableOp speaks of column-major matrices: its m, n, k are our N, M, K.
    """

    def expected(self) -> str:
        """What a file is."""
        return "a CSV file of TunableOp"

    def read(self, path: Path) -> list[Recorded]:
        """Every product of one file; `Validator` rows are passed over."""
        found = []
        for line, cells in read_cells(path):
            if cells[0] != "Validator":
                found.append(_row(cells, f"{path}:{line}"))
        return found


def _row(cells: list[str], where: str) -> Recorded:
    if len(cells) < 2:
        raise UserError(f"{where}: {cells[0]!r}, expected an operator's signature and its parameters'")
    operator, sizes = _OPERATOR.fullmatch(cells[0]), _SIZES.fullmatch(cells[1])
    if operator is None or operator["kind"] not in _KINDS:
        raise UserError(f"{where}: {cells[0]!r}, expected {' or '.join(_KINDS)} as in GemmTunableOp_BFloat16_TN")
    if sizes is None or sizes["layout"].upper() != operator["layout"]:
        example = f"{operator['layout'].lower()}_6144_7_4096_ld_4096_4096_6144"
        raise UserError(f"{where}: {cells[1]!r}, expected sizes such as {example}")
    m, n, k = (int(sizes[name]) for name in "mnk")
    _check_strides(sizes, m, n, k, where)
    if (operator["kind"] == "GemmStridedBatched") != (sizes["b"] is not None):
        raise UserError(f"{where}: {cells[1]!r}, expected _B_ for batched products and for these alone")
    values: dict[str, Scalar] = {"M": n, "N": m, "K": k}
    family, more = _meaning(operator["kind"], operator["types"], sizes, where)
    return Recorded(family=family, values={**values, **more}, where=where)


def _check_strides(sizes: "re.Match[str]", m: int, n: int, k: int, where: str) -> None:
    """A leading dimension is at least a column long; what is not was not written by TunableOp."""
    if sizes["lda"] is None:
        return
    first, second = sizes["layout"][0], sizes["layout"][1]
    for name, least in (("lda", k if first != "n" else m), ("ldb", n if second != "n" else k), ("ldc", m)):
        if int(sizes[name]) < least:
            raise UserError(f"{where}: {name} {sizes[name]}, expected at least {least}")


def _meaning(kind: str, types: str, sizes: "re.Match[str]", where: str) -> tuple[str, dict[str, Scalar]]:
    """The family and what the types say; `other` for what no family computes."""
    if kind == "ScaledGemm":
        return _scaled(types, sizes["rest"], where)
    if types not in _TYPES:
        raise UserError(f"{where}: type {types!r}, expected one of {', '.join(_TYPES)}")
    dtype = _TYPES[types]
    values: dict[str, Scalar] = {"dtype": dtype, "outdtype": dtype}
    if kind == "GemmStridedBatched":
        return ("batched_bf16" if dtype in _WIDE else OTHER), {**values, "B": int(sizes["b"])}
    return ("a16w16" if dtype in _WIDE else OTHER), {**values, "bias": kind == "GemmAndBias"}


def _scaled(types: str, rest: str, where: str) -> tuple[str, dict[str, Scalar]]:
    """Types as `A_B_C`, whose names hold underscores themselves; scales as ROCm (`_rw_1`) or CUDA (`_ast_1`) say."""
    known = "|".join(sorted(_TYPES, key=len, reverse=True))
    parts = re.fullmatch(rf"({known})_({known})_({known})", types)
    if types in _TYPES:  # older files name one for all
        return OTHER, {"dtype": _TYPES[types]}
    if parts is None:
        raise UserError(f"{where}: types {types!r}, expected three such as Float8_e4m3fn_Float8_e4m3fn_BFloat16")
    a, b, out = (_TYPES[name] for name in parts.groups())
    rows, numbered = re.search(r"_rw_([01])", rest), re.search(r"_ast_(\d+)_bst_(\d+)", rest)
    scales = "row" if rows and rows[1] == "1" else "tensor"
    if numbered:
        pair = {_SCALINGS.get(number, "") for number in numbered.groups()}
        scales = pair.pop() if len(pair) == 1 else ""
    bias = bool(re.search(r"_bias_(?!None)", rest))
    if a != b or a not in ("float8_e4m3fn", "float8_e4m3fnuz") or not scales or (scales == "block" and bias):
        return OTHER, {"dtype": a, "outdtype": out}
    if scales == "block":
        return "a8w8_blockscale", {"dtype": a, "outdtype": out}
    return "a8w8", {"q_dtype_w": a, "outdtype": out, "granularity": scales, "bias": bias}
