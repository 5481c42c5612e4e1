"""Problems from the files of PyTorch's TunableOp: what it recorded untuned, and its results."""

import re
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError, quoted
from gemmpipe.files.csvfile import read_cells
from gemmpipe.sources.products import OTHER
from gemmpipe.sources.records import Recorded, Records
from gemmpipe.tables.tunableop import OPERATION, SIZES, TYPES

_KINDS = ("Gemm", "GemmAndBias", "GemmStridedBatched", "ScaledGemm")
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
        raise UserError(f"{where}: {quoted(cells[0])}, expected an operator's signature and its parameters'")
    operation, sizes = OPERATION.fullmatch(cells[0]), SIZES.fullmatch(cells[1])
    if operation is None:
        raise UserError(f"{where}: {quoted(cells[0])}, expected {' or '.join(_KINDS)} as in GemmTunableOp_BFloat16_TN")
    layout = operation["layout"].lower()
    if sizes is None or "*" in cells[1] or not cells[1].startswith(f"{layout}_"):
        raise UserError(f"{where}: {quoted(cells[1])}, expected sizes such as {layout}_6144_7_4096_ld_4096_4096_6144")
    _check_strides(sizes, layout, where)
    if (operation["kind"] == "GemmStridedBatched") != (sizes["batch"] is not None):
        raise UserError(f"{where}: {quoted(cells[1])}, expected _B_ for batched products and for these alone")
    values: dict[str, Scalar] = {"M": int(sizes["n"]), "N": int(sizes["m"]), "K": int(sizes["k"])}
    family, more = _meaning(operation, sizes)
    return Recorded(family=family, values={**values, **more}, where=where)


def _check_strides(sizes: "re.Match[str]", layout: str, where: str) -> None:
    """A leading dimension is at least a column long; what is not was not written by TunableOp."""
    if sizes["lda"] is None:
        return
    first, second = ("k" if layout[0] == "t" else "m"), ("n" if layout[1] == "t" else "k")
    for name, least in (("lda", first), ("ldb", second), ("ldc", "m")):
        if int(sizes[name]) < int(sizes[least]):
            raise UserError(f"{where}: {name} {sizes[name]}, expected at least {sizes[least]}")


def _meaning(operation: "re.Match[str]", sizes: "re.Match[str]") -> tuple[str, dict[str, Scalar]]:
    """The family and what the signature says; `other` for what no family computes."""
    kind, dtype = operation["kind"], TYPES.get(operation["a"], "")
    if kind == "ScaledGemm":
        return _scaled(operation, sizes["rest"])
    values: dict[str, Scalar] = {"dtype": dtype, "outdtype": dtype}
    if kind == "GemmStridedBatched":
        return ("batched_bf16" if dtype in _WIDE else OTHER), {**values, "B": int(sizes["batch"])}
    return ("a16w16" if dtype in _WIDE else OTHER), {**values, "bias": kind == "GemmAndBias"}


def _scaled(operation: "re.Match[str]", rest: str) -> tuple[str, dict[str, Scalar]]:
    """8-bit operands; their scales as ROCm (`_rw_1`) or CUDA (`_ast_1`) says."""
    a, b, out = (TYPES.get(operation[name] or "", "") for name in "abc")
    rows, numbered = re.search(r"_rw_([01])", rest), re.search(r"_ast_([0-9]+)_bst_([0-9]+)", rest)
    scales = "row" if rows and rows[1] == "1" else "tensor"
    if numbered:
        pair = {_SCALINGS.get(number, "") for number in numbered.groups()}
        scales = pair.pop() if len(pair) == 1 else ""
    bias = re.search(r"_bias_(?!None)", rest) is not None
    values: dict[str, Scalar] = {"q_dtype_w": a, "outdtype": out}
    if a != b or a not in ("float8_e4m3fn", "float8_e4m3fnuz") or not out or not scales:
        return OTHER, values  # older files name one type for all
    if scales == "block":
        return (OTHER if bias else "a8w8_blockscale"), values
    return "a8w8", {**values, "granularity": scales, "bias": bias}
