"""Checks of the knobs in an entry of an engine's file: names and values that the kernel and Triton's launch accept.

A launch refuses a keyword that is neither an argument of the kernel nor an option of Triton's compiler for this vendor;
a null option counts as absent (triton 3.6: `parse_options`, `JITFunction._pack_args`). Kernels:
vLLM 0.25.1 `_w8a8_triton_block_scaled_mm`, `_w8a8_block_int8_matmul`, `fused_moe_kernel`; SGLang 0.5.23
`_w8a8_block_fp8_matmul` and its variant for Hopper, `_w8a8_block_int8_matmul`, `fused_moe_kernel`, `triton_scaled_mm`.
"""

import re
from collections.abc import Iterator, Mapping

from gemmpipe.core.errors import quoted_repr, suggest_or_list
from gemmpipe.engines.launch import DENSE, EXPERTS
from gemmpipe.engines.packages import SGLANG, VLLM
from gemmpipe.formats.engine_filenames import CHANNELWISE, FLYDSL, EngineFileName
from gemmpipe.formats.findings import ERROR, WARNING
from gemmpipe.formats.triton_json import MAX_KNOB_VALUE

_TILES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
_GROUP = "GROUP_SIZE_M"
_OPTIONS: Mapping[str, tuple[int, int]] = {
    "num_warps": (1, 32),
    "num_stages": (0, 32),
    "num_ctas": (1, 16),
    "maxnreg": (1, 255),
}
"""Options of Triton's launch with their lowest and highest value; all are optional."""
_AMD: Mapping[str, tuple[int, int]] = {"waves_per_eu": (0, 32), "matrix_instr_nonkdim": (0, 32), "kpack": (1, 2)}
_HOPPER = re.compile(r"NVIDIA_(GH200|H20|H100|H200|H800)([_-]|$)")
_POWERS = ("num_warps", "num_ctas", "SPLIT_K", *_TILES)
_FLAGS = ("SWAP_AB", "USE_TMA")
_MIN_K = 16

KnobFinding = tuple[str, str, str]
"""(severity, defect, remedy)."""


def accepted_knobs(name: EngineFileName) -> tuple[str, ...]:
    """The knobs that the engine's kernel for such a file accepts; any other makes the launch fail."""
    vendor = tuple(_AMD) if not name.device.startswith("NVIDIA") else ()
    common = (*_TILES, *(() if name.kind == CHANNELWISE else (_GROUP,)), *_OPTIONS, *vendor)
    if name.kind == EXPERTS:
        return (*common, "USE_TMA") if name.engine == SGLANG else (*common, "SPLIT_K")
    if name.kind == DENSE and name.engine == SGLANG and name.dtype.startswith("fp8"):
        return (*common, "SWAP_AB", "SPLIT_K")
    return common


def required_knobs(name: EngineFileName) -> tuple[str, ...]:
    """The knobs without a default in the engine's kernel."""
    return _TILES if name.kind == CHANNELWISE else (*_TILES, _GROUP)


def check_entry(knobs: Mapping[str, object], name: EngineFileName) -> Iterator[KnobFinding]:
    """The defects of the knobs of one entry."""
    if name.kind == FLYDSL:
        return  # no Triton kernel: its knobs are its own
    known = accepted_knobs(name)
    for knob in knobs:
        if knob not in known:
            yield _unknown(knob, name, known)
    for knob in required_knobs(name):
        if knobs.get(knob) is None:
            state = "is null" if knob in knobs else "is missing"
            yield ERROR, f"{knob} {state}: {name.engine}'s kernel has no default for it", "expected a value"
    values: dict[str, int] = {}
    for knob in known:
        if knobs.get(knob) is not None:
            wrong = _wrong_value(knob, knobs[knob], name)
            if wrong is not None:
                yield wrong
            elif isinstance(value := knobs[knob], int):
                values[knob] = value
    yield from _check_k(values, name)
    yield from _check_hopper(knobs, values, name)
    if name.engine == VLLM and values.get("SPLIT_K", 1) != 1:
        yield WARNING, f"SPLIT_K {values['SPLIT_K']}: vLLM sets it to 1", "remove it"


def _unknown(knob: str, name: EngineFileName, known: tuple[str, ...]) -> KnobFinding:
    if knob in _AMD:
        return ERROR, f"{knob} is an option for AMD, which Triton refuses on {name.device}", "remove it"
    text = f"{name.engine} passes all knobs to its kernel, which has no {quoted_repr(knob)}: the launch fails"
    return ERROR, text, f"remove it{suggest_or_list(knob, known)}"


def _wrong_value(knob: str, value: object, name: EngineFileName) -> KnobFinding | None:
    if knob in _FLAGS:
        return None if isinstance(value, bool) else (ERROR, f"{knob}: {quoted_repr(value)}", "expected true or false")
    least, most = _OPTIONS.get(knob) or _AMD.get(knob) or (1, MAX_KNOB_VALUE)
    if type(value) is not int:
        return ERROR, f"{knob}: {quoted_repr(value)}", "expected a whole number"
    if not least <= value <= most:
        return ERROR, f"{knob}: {quoted_repr(value)} is out of range", f"expected {least} to {most}"
    if knob in _POWERS and value & (value - 1):
        return ERROR, f"{knob}: {value} is not a power of two, as Triton requires", "expected for example 64"
    least_k = 2 * _MIN_K if name.dtype.endswith("a8") and name.device.startswith("NVIDIA") else _MIN_K
    if knob == "BLOCK_SIZE_K" and value < least_k:
        return ERROR, f"{knob}: {value} is below the minimum of a tile product", f"expected at least {least_k}"
    return None


def _check_k(values: Mapping[str, int], name: EngineFileName) -> Iterator[KnobFinding]:
    """A K tile must fit into one group of scales: the kernels read one scale of each operand per tile."""
    size = values.get("BLOCK_SIZE_K")
    if size is None or name.block is None or not name.dtype.endswith("w8a8"):
        return
    group = name.block[1]
    if name.kind == EXPERTS and name.engine == VLLM:
        least = min(name.block)
        if size > least:
            yield WARNING, f"BLOCK_SIZE_K {size}: vLLM uses {least}, a group of scales", f"expected {least} at most"
        return
    if name.kind == DENSE and name.sizes[1] <= group and (name.engine == VLLM or name.dtype.startswith("int8")):
        return  # K is one group, and the rest of a tile is masked
    if size <= group and group % size == 0:
        if _uses_whole_group(size, group, name) and name.device.startswith("AMD"):
            yield WARNING, f"BLOCK_SIZE_K {size}: SGLang uses {group} on AMD", f"expected {group}"
        return
    if _uses_whole_group(size, group, name):
        yield WARNING, f"BLOCK_SIZE_K {size} is not a divisor of {group}: SGLang uses {group}", f"expected {group}"
        return
    text = f"BLOCK_SIZE_K {size} does not fit into a group of {group} along K, and one scale is used: wrong results"
    yield ERROR, text, f"expected a divisor of {group}"


def _uses_whole_group(size: int, group: int, name: EngineFileName) -> bool:
    """True if SGLang uses a whole group instead of this size for fp8 products."""
    return name.engine == SGLANG and name.kind == DENSE and name.dtype.startswith("fp8") and size < group


def _check_hopper(
    knobs: Mapping[str, object], values: Mapping[str, int], name: EngineFileName
) -> Iterator[KnobFinding]:
    """SGLang's kernel for Hopper has SWAP_AB and SPLIT_K; its plain one, which runs if both are off, has neither."""
    if name.engine != SGLANG or name.kind != DENSE:
        return
    given = [knob for knob in ("SWAP_AB", "SPLIT_K") if knob in knobs]
    if not given:
        return
    names = " and ".join(given)
    if not _HOPPER.match(name.device):
        text = f"{names}: only SGLang's kernel for sm_90 has it, {name.device} is not sm_90"
        yield ERROR, text, "remove it"
    elif knobs.get("SWAP_AB") is not True and values.get("SPLIT_K", 1) <= 1:
        text = f"{names} is off, and SGLang's plain kernel, which then runs, has no such argument"
        yield ERROR, text, "remove it"
