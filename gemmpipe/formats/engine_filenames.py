"""Names and folders of the configuration files that vLLM and SGLang load, with checks of both.

Sources: vLLM 0.25.1 (`get_w8a8_block_fp8_configs`, `get_w8a8_block_int8_configs`, fused_moe's `get_config_file_name`
and `get_moe_configs`, fused_flydsl_moe's `try_get_optimal_config`) and SGLang 0.5.23 (the functions of the same names,
`get_w8a8_channelwise_fp8_configs`). No engine is imported.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.errors import quoted_repr
from gemmpipe.engines.launch import DENSE, EXPERTS
from gemmpipe.engines.packages import ENGINES, PLACES, SGLANG, VLLM
from gemmpipe.formats.findings import ERROR, NOTE, WARNING, Finding

CHANNELWISE, FLYDSL = "channelwise", "flydsl"
_NAME = re.compile(r"(?P<one>[NE])=(?P<first>[0-9]+),(?P<two>[KN])=(?P<second>[0-9]+),device_name=(?P<device>[^,]*)")
_REST = re.compile(
    r"(?:,dtype=(?P<dtype>\w+))?(?:,block_shape=\[(?P<rows>[0-9]+),(?P<blank> *)(?P<columns>[0-9]+)\])?"
    r"(?P<channel>,per_channel_quant=True)?(?P<flydsl>,backend=flydsl)?"
)
_SIMILAR = re.compile(r"[NE]=.*|.*device_name.*", re.IGNORECASE)
_OWN = re.compile(r"[NE]=", re.IGNORECASE)
_TRITON = re.compile(r"triton_[0-9]+(_[0-9]+)*")
_DENSE_DTYPES = ("fp8_w8a8", "int8_w8a8")
_CHANNELWISE = "fp8_w8a8_channelwise"
_EXPERTS_DTYPES: Mapping[str, tuple[str, ...]] = {
    VLLM: ("", "fp8_w8a8", "fp8_w8a16", "int8_w8a16", "int4_w4a16", "float32"),
    SGLANG: ("", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16", "float32"),
}
_FORMS: Mapping[str, str] = {
    VLLM: "N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128,128].json or "
    "E=..,N=..,device_name=..[,dtype=..][,block_shape=[128,128]].json",
    SGLANG: "N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128, 128].json or "
    "E=..,N=..,device_name=..[,dtype=..][,block_shape=[128, 128]][,per_channel_quant=True][_down].json",
}
_H200 = "NVIDIA_H200"


@dataclass(frozen=True, kw_only=True)
class EngineFileName:
    """The parts of a file's name."""

    engine: str
    kind: str
    """The kernel that reads it: `dense`, `experts`, `channelwise` (SGLang) or `flydsl` (vLLM)."""
    sizes: tuple[int, int]
    """(N, K) of a dense product, (E, N) of experts."""
    device: str
    dtype: str
    block: tuple[int, int] | None
    """Rows and columns of the weight that share a scale."""
    per_channel: bool = False
    down: bool = False
    """True if it is only for the second product of experts (SGLang)."""

    @property
    def expected(self) -> str:
        """The name that the engine looks for, for the same product and device."""
        two = (f"N={self.sizes[0]}", f"K={self.sizes[1]}")
        if self.kind in (EXPERTS, FLYDSL):
            two = (f"E={self.sizes[0]}", f"N={self.sizes[1]}")
        device = re.sub(r"\s", "_", self.device)
        if self.engine == VLLM and self.kind == EXPERTS and "H200" in device.split("_"):
            device = _H200
        # vLLM's function for int8 products looks for a name with a blank, its other functions without.
        blank = " " if self.engine == SGLANG or (self.kind == DENSE and self.dtype.startswith("int8")) else ""
        block = f",block_shape=[{self.block[0]},{blank}{self.block[1]}]" if self.block else ""
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        more = ",per_channel_quant=True" * self.per_channel + ",backend=flydsl" * (self.kind == FLYDSL)
        return f"{','.join(two)},device_name={device}{dtype}{block}{more}{'_down' * self.down}.json"


def looks_like_engine_file(name: str) -> bool:
    """True if a file's name resembles those of the engines."""
    return _SIMILAR.fullmatch(name) is not None


def is_of_another_function(path: Path) -> bool:
    """True for a file in an engine's package whose name begins with neither N= nor E=.

    Engines name configurations of Mamba, LoRA and collectives in the same form: `headdim=64,dstate=128,...`.
    """
    packages = (folder for folder in path.absolute().parents if folder.name in ENGINES)
    in_package = any((folder / "__init__.py").is_file() for folder in packages)
    return in_package and _OWN.match(path.name) is None


def engine_of_file(path: Path) -> str | None:
    """The engine of a file, by its folders, then by its name; None if neither determines it."""
    parts = path.absolute().parts[:-1]
    engine = next((part for part in reversed(parts) if part in ENGINES), None)
    if engine is not None:
        return engine
    if _TRITON.fullmatch(parts[-1]) or re.search(r"_down\.json|per_channel_quant|channelwise", path.name):
        return SGLANG
    if "backend=flydsl" in path.name:
        return VLLM
    block = re.search(r"block_shape=\[[0-9]+,( *)[0-9]+\]", path.name)
    return None if block is None else SGLANG if block[1] else VLLM


def parse_file_name(name: str, engine: str) -> EngineFileName | None:
    """The parts of a file's name, also of one that the engine does not look for; None for any other name."""
    stem = name.removesuffix(".json")
    down = stem.endswith("_down")
    found = _NAME.match(stem.removesuffix("_down"))
    rest = _REST.fullmatch(stem.removesuffix("_down"), found.end()) if found else None
    if stem == name or found is None or rest is None or (found["one"], found["two"]) not in (("N", "K"), ("E", "N")):
        return None
    dtype = rest["dtype"] or ""
    kind = EXPERTS if found["one"] == "E" else CHANNELWISE if dtype == _CHANNELWISE else DENSE
    return EngineFileName(
        engine=engine,
        kind=FLYDSL if rest["flydsl"] else kind,
        sizes=(int(found["first"]), int(found["second"])),
        device=found["device"],
        dtype=dtype,
        block=(int(rest["rows"]), int(rest["columns"])) if rest["rows"] else None,
        per_channel=bool(rest["channel"]),
        down=down,
    )


def kinds_of_files(engine: str, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by the kind of products that they configure: `dense` or `experts`."""
    found: dict[str, list[Path]] = {}
    for path in files:
        name = parse_file_name(path.name, engine)
        if name is not None:
            found.setdefault(EXPERTS if name.kind == EXPERTS else DENSE, []).append(path)
    return found


def check_file_name(
    path: Path, name: EngineFileName | None, engine: str, present: Sequence[str] = ()
) -> Iterator[Finding]:
    """Reasons why the engine does not look for this file; `present`: the names of this machine's devices."""
    if name is None:
        remedy = f"expected {_FORMS[engine]}"
        yield Finding(path=path, severity=ERROR, text=f"{engine} does not look for such a name", remedy=remedy)
        return
    invalid = _invalid_part(name)
    if invalid is not None:
        yield Finding(path=path, severity=ERROR, text=invalid[0], remedy=invalid[1])
    elif name.expected != path.name:
        text = f"{engine} does not look for this name and never reads the file"
        yield Finding(path=path, severity=ERROR, text=text, remedy=f"rename it to '{name.expected}'")
    if name.kind == EXPERTS and name.block and not name.dtype:
        text = "block scales without a dtype: 16-bit products have no scales"
        yield Finding(path=path, severity=WARNING, text=text, remedy="expected dtype=fp8_w8a8 in the name")
    yield from _device_findings(path, name, present)


def _invalid_part(name: EngineFileName) -> tuple[str, str] | None:
    """(defect of the parts of a name, remedy); None if they are valid."""
    if 0 in name.sizes or (name.block and 0 in name.block):
        return "a size of 0", "expected the product's own sizes in the name"
    if name.engine == VLLM and (name.down or name.per_channel or name.kind == CHANNELWISE):
        return "a name of SGLang's, which vLLM does not look for", "engine=sglang checks it as SGLang's"
    if name.kind == FLYDSL:
        return None if name.engine == VLLM else ("SGLang does not look for backend=flydsl", "use it with vLLM only")
    if name.kind == EXPERTS:
        known = _EXPERTS_DTYPES[name.engine]
        if name.dtype in known:
            return None
        text = f"{name.engine} does not look for experts of dtype={name.dtype}"
        return text, f"expected one of {', '.join(known[1:])}, or no dtype for 16 bits"
    if name.kind == CHANNELWISE:
        return ("block_shape in a file of per-channel scales", "remove block_shape") if name.block else None
    if name.dtype not in _DENSE_DTYPES:
        given = f"dtype={name.dtype}" if name.dtype else "no dtype"
        return f"{given}: {name.engine} looks for {' or '.join(_DENSE_DTYPES)}", "add it to the name"
    if name.block is None:
        return (
            f"no block_shape, which {name.engine} looks for",
            "expected ,block_shape=[128,128] of the weight's scales",
        )
    if name.down or name.per_channel:
        return "a part that only names of experts' files have", "remove it"
    return None


def _device_findings(path: Path, name: EngineFileName, present: Sequence[str]) -> Iterator[Finding]:
    device = name.device
    if not device:
        text = "no device name"
        yield Finding(path=path, severity=ERROR, text=text, remedy="expected the device's name, blanks as underscores")
        return
    own = [re.sub(r"\s", "_", each) for each in present]
    if device in own:
        return
    experts = name.engine == VLLM and name.kind == EXPERTS and device == _H200
    if any("H200" in each.split("_") for each in own) and device == _H200 and not experts:
        real = next(each for each in own if "H200" in each.split("_"))
        text = f"this machine's device is {real}: {name.engine} looks for NVIDIA_H200 only for vLLM's experts"
        yield Finding(path=path, severity=WARNING, text=text, remedy=f"expected device_name={real} here")
    similar = next((each for each in own if _normalised(each) == _normalised(device)), None)
    if similar is not None:
        text = f"device_name={device}: this machine's device is {similar}"
        yield Finding(path=path, severity=ERROR, text=text, remedy=f"rename it to device_name={similar}")


def _normalised(text: str) -> str:
    """A device's name without case, separators and the vendor's name."""
    return re.sub(r"[^a-z0-9]", "", text.lower()).removeprefix("nvidia").removeprefix("amd")


def check_location(path: Path, name: EngineFileName) -> Iterator[Finding]:
    """Reasons why the engine does not find the file in its folder, or through its environment variable."""
    folder = path.absolute().parent
    if name.engine == SGLANG and name.kind == EXPERTS:
        if not (_TRITON.fullmatch(folder.name) and folder.parent.name == "configs"):
            yield Finding(
                path=path,
                severity=ERROR,
                text=f"SGLang reads experts' files only from configs/triton_X_Y_Z, not from {quoted_repr(folder.name)}",
                remedy="move it, for example to configs/triton_3_6_0; SGLANG_MOE_CONFIG_DIR is the parent of configs",
            )
    elif name.kind in (DENSE, CHANNELWISE) and not folder.as_posix().endswith(PLACES[name.engine]):
        also = " (VLLM_TUNED_CONFIG_FOLDER is only for experts)" if name.engine == VLLM else ""
        yield Finding(
            path=path.parent,  # one line for all files there
            severity=NOTE,
            text=f"{name.engine} reads files of dense products only from its own package{also}",
            remedy=f"copy them to {PLACES[name.engine]}",
        )
