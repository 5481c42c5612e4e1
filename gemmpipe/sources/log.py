"""Problems from the logs of servers: the lines in which engines and aiter say that something is not tuned."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import load_family, shipped_families
from gemmpipe.files.jsonstream import open_text
from gemmpipe.sources.batch_sizes import batch_sizes
from gemmpipe.sources.products import OTHER
from gemmpipe.sources.records import Recorded, Records

_MOST = 1_000_000_000
"""Bytes of a log."""
_LONGEST = 1 << 16
"""Characters of a line that are looked at together."""
_DIGITS = 20
_CONFIG = re.compile(
    r"(?:E=(?P<expert>[0-9]{1,9}),)?N=(?P<N>[0-9]{1,9})(?:,K=(?P<K>[0-9]{1,9}))?,device_name=[^,/\s'\"]{1,200}"
    r"(?P<rest>(?:,[a-z_]{1,40}=(?:\[[0-9, ]{0,40}\]|[^,\[\]\s'\"/]{1,40}?)){0,8})(?:_down)?\.json"
)
"""Everything in it has an end: else each place of a long line where it may begin is followed to the line's end."""
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
class Log(Records):
    """What vLLM, SGLang and aiter miss, each once; a log does not tell how often.

    Lines of vLLM and SGLang ("Config file not found at ...") say no M, so that each is taken at every M of `nsets`;
    `nsets=log` are the batch sizes that the server says it captures graphs for. Lines on experts say neither
    `model_dim` nor `topk`. aiter's lines ("not found tuned config in ...") say everything.
    """

    nsets: Sequence[int] | int | str
    model_dim: int | None
    topk: int | None

    _captured: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def read(self, path: Path) -> list[Recorded]:
        """What one log misses. Raises UserError for a line that begins like one of these and goes on otherwise."""
        found: dict[object, Recorded] = {}
        tables = {load_family(name).csv_name: name for name in shipped_families()}
        for number, line in _lines(path):
            if len(line) < 8:
                continue
            where = f"{path}:{number}"
            for seen in (*self._config(line, where), *_shape(line, tables, where), *_experts(line, where)):
                found.setdefault((seen.family, tuple(sorted(seen.values.items(), key=str))), seen)
            for match in _SIZES.finditer(line):
                self._captured.extend(_whole(word, where) for word in match["sizes"].split(",") if word.strip())
        return list(found.values())

    def expected(self) -> str:
        """What a file is."""
        return "a server's log"

    def sizes(self) -> list[int]:
        """The Ms of lines without one."""
        if self.nsets != "log":
            return batch_sizes(self.nsets)
        if not self._captured:
            raise UserError("shapes.nsets: 'log', but no line tells captured batch sizes; expected numbers or vllm")
        return batch_sizes(sorted(set(self._captured)))

    def _config(self, line: str, where: str) -> Iterator[Recorded]:
        """`Config file not found at .../N=..,K=..,device_name=..,dtype=..,block_shape=[..].json`."""
        if "onfig file not found at" not in line or "device_name=" not in line:
            return
        matches = list(_CONFIG.finditer(line))
        if not matches:
            raise UserError(f"{where}: a configuration that is not found, expected its name to begin with N= or E=")
        match = matches[0]  # of several places where it was looked for
        stored = dict(_STORED.findall(match["rest"]))
        if match["expert"] is None and match["K"] is not None:
            family, values = _dense(stored)
            yield Recorded(family=family, values={"N": int(match["N"]), "K": int(match["K"]), **values}, where=where)
        elif match["expert"] is not None:
            sizes = {"expert": int(match["expert"]), "inter_dim": int(match["N"]), **_grouped(stored)}
            more = {"model_dim": self.model_dim, "topk": self.topk}
            lacking = " ".join(f"shapes.{name}=" for name, value in more.items() if not value)
            at = f"{where} (say {lacking})" if lacking else where
            yield Recorded(family="fmoe", values={**sizes, **{k: v for k, v in more.items() if v}}, where=at)


def _whole(word: str, where: str) -> int:
    if not (word.isascii() and word.strip().isdecimal()) or len(word) > _DIGITS:
        raise UserError(f"{where}: captured batch sizes: {word.strip()[:40]!r}, expected a whole number")
    return int(word)


def _dense(stored: Mapping[str, str]) -> tuple[str, dict[str, Scalar]]:
    """The family of a file name's `dtype` and `block_shape`."""
    block, dtype = stored.get("block_shape", "").replace(" ", ""), stored.get("dtype", "")
    if block:
        return ("a8w8_blockscale" if block == "[128,128]" and dtype == "fp8_w8a8" else OTHER), {}
    if dtype.startswith(("fp8_w8a8", "int8_w8a8")):
        return "a8w8", {"q_dtype_w": "fp8" if dtype.startswith("fp8") else "int8", "granularity": "row"}
    return OTHER, {}


def _grouped(stored: Mapping[str, str]) -> dict[str, Scalar]:
    """The quantisation of experts that a file name says."""
    dtype, block = stored.get("dtype", ""), stored.get("block_shape", "").replace(" ", "")
    if not dtype:
        return {"q_type": "No"}
    if dtype == "fp8_w8a8":
        by_row = "per_Token" if "per_channel_quant" in stored else "per_Tensor"
        return {"q_type": "per_1x128" if block == "[128,128]" else by_row}
    return {"q_type": dtype}


def _shape(line: str, tables: Mapping[str, str], where: str) -> Iterator[Recorded]:
    """`shape is M:.., N:.., K:.. dtype='..' ..., not found tuned config in .../a8w8_blockscale_tuned_gemm.csv`."""
    if "not found tuned config in" not in line:
        return
    missed = _MISSED.search(line)
    begins = _SHAPE.search(line, 0, missed.start()) if missed else None
    pairs = _PAIR.findall(line, begins.end(), missed.start()) if missed and begins else []
    values: dict[str, Scalar] = {_NAMES.get(name, name): value for name, value in pairs}
    if missed is None or not {"M", "N", "K"} <= set(values):
        raise UserError(f"{where}: a configuration that is not found, expected `shape is M:.., N:.., K:..` before it")
    named = missed["table"].rpartition("/")[2]
    ends = [name for name in tables if named.endswith(name)]
    # A4W4 says CKGEMM instead of its table, and so do batched products.
    unnamed = "a4w4_blockscale" if named.startswith("CKGEMM") and "B" not in values else OTHER
    family = tables[max(ends, key=len)] if ends else unnamed
    yield Recorded(family=family, values=values, where=where)


def _experts(line: str, where: str) -> Iterator[Recorded]:
    """`[fused_moe] using 2stage default for (gfx, cu_num, token, model_dim, ...)`."""
    match = _EXPERTS.search(line)
    if match is None:
        return
    words = [re.sub(r"[<>']|:.*", "", word).strip() for word in match["key"].split(",")]
    if len(words) not in (len(_EXPERT_KEY) + 1, len(_EXPERT_KEY) + 2):
        raise UserError(f"{where}: {len(words)} values of an untuned fused_moe, expected {len(_EXPERT_KEY) + 2}")
    yield Recorded(family="fmoe", values=dict(zip(_EXPERT_KEY, words[-len(_EXPERT_KEY) :], strict=True)), where=where)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a log, packed or not; what is no text in it is passed over."""
    large = UserError(f"{path}: larger than {_MOST:,} bytes, expected a server's log; cut it to what is new")
    try:
        if path.is_file() and path.stat().st_size > _MOST:
            raise large
        with open_text(path, errors="replace") as stream:
            number = total = 0
            while line := stream.readline(_LONGEST):
                number, total = number + 1, total + len(line)
                if total > _MOST:  # of one that was packed
                    raise large
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
