"""Sources that read products of any family from files of other programs: PyTorch's TunableOp and servers' logs.

TunableOp writes untuned products and results; engines and aiter log the shapes that have no tuned configuration.
"""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.core.files import named_files, read_cells
from gemmpipe.engines.server_log import log_lines
from gemmpipe.family import Family, KernelDefaults, load_family, shipped_families
from gemmpipe.family.dtypes import DTYPES_16BIT, FP8_DTYPES
from gemmpipe.family.problem import check_routing, make_problem, merge_duplicates
from gemmpipe.sources import Source
from gemmpipe.sources.model.source import batch_sizes
from gemmpipe.sources.products import UNSUPPORTED
from gemmpipe.tables.tunableop import OPERATION_PATTERN, SIZES_PATTERN, TORCH_DTYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedProduct:
    """Equal products in a file."""

    family: str
    values: Mapping[str, Scalar]
    """Key columns; without M if the file does not contain it."""
    where: str
    count: float = 1.0
    time_us: float = 0.0
    """Total time of all of them; 0 if the file has no times."""


@dataclass(frozen=True, kw_only=True)
class RecordSource(Source):
    """Products of the kernel's family, or of the family `rows_of`, in the files of `path`."""

    path: str | Sequence[str] | None
    rows_of: str | None
    counts_calls: ClassVar[bool] = True

    _by_family: dict[str, list[RecordedProduct]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @abstractmethod
    def read(self, path: Path) -> list[RecordedProduct]:
        """Every product in one file. Raises UserError: file, line, what was expected."""

    @abstractmethod
    def expected(self) -> str:
        """The kind of file, for messages: `a CSV file`."""

    def sizes(self) -> list[int]:
        """The Ms for products without M in the files. Raises UserError about shapes.nsets."""
        return []

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: file, place in it, what was expected."""
        wanted = self.rows_of or family.name
        found = [
            problem
            for each in self.recorded()
            if each.family == wanted
            for problem in self._made(each, family, defaults, gfx)
        ]
        if not found:
            others = self.left_out(family, defaults, gfx)
            instead = f", but {others}" if others else f", expected {self.expected()}"
            raise UserError(f"shapes.path: no product of {wanted} found{instead}")
        return merge_duplicates(found)

    def recorded_us(self, family: Family, defaults: KernelDefaults, gfx: str) -> Mapping[str, float]:
        """Problem id -> the total time (us) of all its calls."""
        totals: dict[str, float] = {}
        for each in self.recorded():
            if each.family == (self.rows_of or family.name) and each.time_us:
                for problem in self._made(each, family, defaults, gfx):
                    totals[problem.id] = totals.get(problem.id, 0.0) + each.time_us
        return totals

    def left_out(self, family: Family, defaults: KernelDefaults, gfx: str) -> str:
        """The number of products of each other family."""
        counts: Counter[str] = Counter()
        for each in self.recorded():
            if each.family != (self.rows_of or family.name):
                counts[each.family] += int(each.count)
        return ", ".join(f"{count} of {name}" for name, count in counts.most_common())

    def recorded(self) -> list[RecordedProduct]:
        """The products of all files, which are read once."""
        if "all" not in self._by_family:
            files = named_files("shapes.path", self.path, self.expected())
            self._by_family["all"] = [each for path in files for each in self.read(path)]
        return self._by_family["all"]

    def _made(self, each: RecordedProduct, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """The problem of a product, or one per M of `sizes` if the file has no M."""
        known = {name for column in family.key_columns for name in (column.name, *column.aliases)}
        values = {name: value for name, value in each.values.items() if name in known}
        # Readers have one name for M and for each type; families have their own columns for them.
        named = {
            column.name: values[name] for column in family.key_columns for name in column.aliases if name in values
        }
        values = {**named, **values}
        sizes = (values[family.rows_column],) if family.rows_column in values else self.sizes()
        made = [
            make_problem(family, {**values, family.rows_column: m}, defaults, gfx, each.where, each.count)
            for m in sizes
        ]
        for problem in made[:1]:
            check_routing(family, problem, values, defaults, each.where)
        return made


_KINDS = ("Gemm", "GemmAndBias", "GemmStridedBatched", "ScaledGemm")
_SCALINGS = {"0": "tensor", "1": "row", "4": "block", "5": "block"}
"""torch.nn.functional.ScalingType by number."""


@dataclass(frozen=True, kw_only=True)
class TunableopShapes(RecordSource):
    """`tunableop_untuned*.csv` (PYTORCH_TUNABLEOP_RECORD_UNTUNED=1) and results; each row is one product.

    TunableOp has column-major matrices: its m, n, k are our N, M, K.
    """

    def expected(self) -> str:
        """The kind of file, for messages."""
        return "a CSV file of TunableOp"

    def read(self, path: Path) -> list[RecordedProduct]:
        """Every product of one file; `Validator` rows are ignored."""
        found = []
        for line, cells in read_cells(path):
            if cells[0] != "Validator":
                found.append(_row(cells, f"{path}:{line}"))
        return found


def _row(cells: list[str], where: str) -> RecordedProduct:
    if len(cells) < 2:
        raise UserError(
            f"{where}: {quoted_repr(cells[0])}, expected an operator's signature and the signature of its parameters"
        )
    operation, sizes = OPERATION_PATTERN.fullmatch(cells[0]), SIZES_PATTERN.fullmatch(cells[1])
    if operation is None:
        raise UserError(
            f"{where}: {quoted_repr(cells[0])}, expected {' or '.join(_KINDS)} as in GemmTunableOp_BFloat16_TN"
        )
    layout = operation["layout"].lower()
    if sizes is None or "*" in cells[1] or not cells[1].startswith(f"{layout}_"):
        raise UserError(
            f"{where}: {quoted_repr(cells[1])}, expected sizes such as {layout}_6144_7_4096_ld_4096_4096_6144"
        )
    _check_strides(sizes, layout, where)
    if (operation["kind"] == "GemmStridedBatched") != (sizes["batch"] is not None):
        raise UserError(f"{where}: {quoted_repr(cells[1])}, expected _B_ for batched products and only for them")
    values: dict[str, Scalar] = {"M": int(sizes["n"]), "N": int(sizes["m"]), "K": int(sizes["k"])}
    family, more = _product_of_signature(operation, sizes)
    return RecordedProduct(family=family, values={**values, **more}, where=where)


def _check_strides(sizes: "re.Match[str]", layout: str, where: str) -> None:
    """Raises UserError for a leading dimension shorter than a column, which TunableOp never writes."""
    if sizes["lda"] is None:
        return
    first, second = ("k" if layout[0] == "t" else "m"), ("n" if layout[1] == "t" else "k")
    for name, least in (("lda", first), ("ldb", second), ("ldc", "m")):
        if int(sizes[name]) < int(sizes[least]):
            raise UserError(f"{where}: {name} {sizes[name]}, expected at least {sizes[least]}")


def _product_of_signature(operation: "re.Match[str]", sizes: "re.Match[str]") -> tuple[str, dict[str, Scalar]]:
    """(family, key columns) of a signature; family `other` for products that no family computes."""
    kind, dtype = operation["kind"], TORCH_DTYPES.get(operation["a"], "")
    if kind == "ScaledGemm":
        return _scaled(operation, sizes["rest"])
    values: dict[str, Scalar] = {"dtype": dtype, "outdtype": dtype}
    if kind == "GemmStridedBatched":
        return ("batched_bf16" if dtype in DTYPES_16BIT else UNSUPPORTED), {**values, "B": int(sizes["batch"])}
    return ("a16w16" if dtype in DTYPES_16BIT else UNSUPPORTED), {**values, "bias": kind == "GemmAndBias"}


def _scaled(operation: "re.Match[str]", rest: str) -> tuple[str, dict[str, Scalar]]:
    """(family, key columns) of 8-bit operands; ROCm (`_rw_1`) and CUDA (`_ast_1`) name scales differently."""
    a, b, out = (TORCH_DTYPES.get(operation[name] or "", "") for name in "abc")
    rows, numbered = re.search(r"_rw_([01])", rest), re.search(r"_ast_([0-9]+)_bst_([0-9]+)", rest)
    scales = "row" if rows and rows[1] == "1" else "tensor"
    if numbered:
        pair = {_SCALINGS.get(number, "") for number in numbered.groups()}
        scales = pair.pop() if len(pair) == 1 else ""
    bias = re.search(r"_bias_(?!None)", rest) is not None
    values: dict[str, Scalar] = {"q_dtype_w": a, "outdtype": out}
    if a != b or a not in FP8_DTYPES or not out or not scales:
        return UNSUPPORTED, values  # older files have one type for all operands
    if scales == "block":
        return (UNSUPPORTED if bias else "a8w8_blockscale"), values
    return "a8w8", {**values, "granularity": scales, "bias": bias}


_DIGITS = 20
_CONFIG = re.compile(
    r"(?:E=(?P<expert>[0-9]{1,9}),)?N=(?P<N>[0-9]{1,9})(?:,K=(?P<K>[0-9]{1,9}))?,device_name=[^,/\s'\"]{1,200}"
    r"(?P<rest>(?:,[a-z_]{1,40}=(?:\[[0-9, ]{0,40}\]|[^,\[\]\s'\"/]{1,40}?)){0,8})(?:_down)?\.json"
)
"""Bounded repetitions only: unbounded ones would scan a long line to its end from each possible start."""
_STORED = re.compile(r",([a-z_]+)=(\[[^\]]*\]|[^,]+)")
_SHAPE = re.compile(r"shape(?: is)?:? ?")
_MISSED = re.compile(r"not found tuned config in (?P<table>[^\s,]+)")
_PAIR = re.compile(r"\b(\w+)\s*[:=]\s*'?([\w.]+)'?")
_EXPERTS = re.compile(r"\[fused_moe\] using \w+ default for\s*\((?P<key>[^()]*)\)")
_SIZES = re.compile(r"(?:cudagraph_capture_sizes['\"]?\s*[:=]\s*|[Cc]apture cuda graph bs )\[(?P<sizes>[0-9, ]+)\]")
_NAMES = {"otype": "outdtype", "b": "B", "m": "M", "n": "N", "k": "K"}
_EXPERT_KEY = (
    *("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype"),
    *("q_dtype_a", "q_dtype_w", "q_type", "use_g1u1", "doweight_stage1"),
)


@dataclass(frozen=True, kw_only=True)
class LogShapes(RecordSource):
    """Untuned products that vLLM, SGLang and aiter log, each once; a log has no counts.

    Lines of vLLM and SGLang ("Config file not found at ...") have no M, so each product gets every M of `nsets`;
    `nsets=log` are the batch sizes of the server's captured graphs. Lines on experts have neither `model_dim` nor
    `topk`. aiter's lines ("not found tuned config in ...") are complete.
    """

    nsets: Sequence[int] | int | str
    model_dim: int | None
    topk: int | None

    _captured: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def read(self, path: Path) -> list[RecordedProduct]:
        """The untuned products in one log. Raises UserError for a line of these kinds that is malformed."""
        found: dict[object, RecordedProduct] = {}
        tables = {load_family(name).csv_name: name for name in shipped_families()}
        for number, line in log_lines(path):
            if len(line) < 8:
                continue
            where = f"{path}:{number}"
            for seen in (*self._config(line, where), *_shape(line, tables, where), *_experts(line, where)):
                found.setdefault((seen.family, tuple(sorted(seen.values.items(), key=str))), seen)
            for match in _SIZES.finditer(line):
                self._captured.extend(_parse_size(text, where) for text in match["sizes"].split(",") if text.strip())
        return list(found.values())

    def expected(self) -> str:
        """The kind of file, for messages."""
        return "a server's log"

    def sizes(self) -> list[int]:
        """The Ms for lines without one."""
        if self.nsets != "log":
            return batch_sizes(self.nsets)
        if not self._captured:
            raise UserError("shapes.nsets: 'log', but no line contains captured batch sizes; expected numbers or vllm")
        return batch_sizes(sorted(set(self._captured)))

    def _config(self, line: str, where: str) -> Iterator[RecordedProduct]:
        """`Config file not found at .../N=..,K=..,device_name=..,dtype=..,block_shape=[..].json`."""
        if "onfig file not found at" not in line or "device_name=" not in line:
            return
        matches = list(_CONFIG.finditer(line))
        if not matches:
            raise UserError(f"{where}: missing configuration, expected its name to begin with N= or E=")
        match = matches[0]  # of several paths that the engine tried
        stored = dict(_STORED.findall(match["rest"]))
        if match["expert"] is None and match["K"] is not None:
            family, values = _dense(stored)
            yield RecordedProduct(
                family=family, values={"N": int(match["N"]), "K": int(match["K"]), **values}, where=where
            )
        elif match["expert"] is not None:
            sizes = {"expert": int(match["expert"]), "inter_dim": int(match["N"]), **_grouped(stored)}
            more = {"model_dim": self.model_dim, "topk": self.topk}
            missing = " ".join(f"shapes.{name}=" for name, value in more.items() if not value)
            at = f"{where} (set {missing})" if missing else where
            yield RecordedProduct(family="fmoe", values={**sizes, **{k: v for k, v in more.items() if v}}, where=at)


def _parse_size(text: str, where: str) -> int:
    if not (text.isascii() and text.strip().isdecimal()) or len(text) > _DIGITS:
        raise UserError(f"{where}: captured batch sizes: {text.strip()[:40]!r}, expected a whole number")
    return int(text)


def _dense(stored: Mapping[str, str]) -> tuple[str, dict[str, Scalar]]:
    """The family of a file name's `dtype` and `block_shape`."""
    block, dtype = stored.get("block_shape", "").replace(" ", ""), stored.get("dtype", "")
    if block:
        return ("a8w8_blockscale" if block == "[128,128]" and dtype == "fp8_w8a8" else UNSUPPORTED), {}
    if dtype.startswith(("fp8_w8a8", "int8_w8a8")):
        return "a8w8", {"q_dtype_w": "fp8" if dtype.startswith("fp8") else "int8", "granularity": "row"}
    return UNSUPPORTED, {}


def _grouped(stored: Mapping[str, str]) -> dict[str, Scalar]:
    """The key columns of the experts' quantisation in a file name."""
    dtype, block = stored.get("dtype", ""), stored.get("block_shape", "").replace(" ", "")
    if not dtype:
        return {"q_type": "No"}
    if dtype == "fp8_w8a8":
        by_row = "per_Token" if "per_channel_quant" in stored else "per_Tensor"
        return {"q_type": "per_1x128" if block == "[128,128]" else by_row}
    return {"q_type": dtype}


def _shape(line: str, tables: Mapping[str, str], where: str) -> Iterator[RecordedProduct]:
    """`shape is M:.., N:.., K:.. dtype='..' ..., not found tuned config in .../a8w8_blockscale_tuned_gemm.csv`."""
    if "not found tuned config in" not in line:
        return
    missed = _MISSED.search(line)
    begins = _SHAPE.search(line, 0, missed.start()) if missed else None
    pairs = _PAIR.findall(line, begins.end(), missed.start()) if missed and begins else []
    values: dict[str, Scalar] = {_NAMES.get(name, name): value for name, value in pairs}
    if missed is None or not {"M", "N", "K"} <= set(values):
        raise UserError(f"{where}: missing configuration, expected `shape is M:.., N:.., K:..` before it")
    named = missed["table"].rpartition("/")[2]
    ends = [name for name in tables if named.endswith(name)]
    # aiter logs CKGEMM instead of the table for A4W4 and for batched products.
    unnamed = "a4w4_blockscale" if named.startswith("CKGEMM") and "B" not in values else UNSUPPORTED
    family = tables[max(ends, key=len)] if ends else unnamed
    yield RecordedProduct(family=family, values=values, where=where)


def _experts(line: str, where: str) -> Iterator[RecordedProduct]:
    """`[fused_moe] using 2stage default for (gfx, cu_num, token, model_dim, ...)`."""
    match = _EXPERTS.search(line)
    if match is None:
        return
    values = [re.sub(r"[<>']|:.*", "", text).strip() for text in match["key"].split(",")]
    if len(values) not in (len(_EXPERT_KEY) + 1, len(_EXPERT_KEY) + 2):
        raise UserError(f"{where}: {len(values)} values of an untuned fused_moe, expected {len(_EXPERT_KEY) + 2}")
    yield RecordedProduct(
        family="fmoe", values=dict(zip(_EXPERT_KEY, values[-len(_EXPERT_KEY) :], strict=True)), where=where
    )
