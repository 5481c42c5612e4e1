"""Configuration files that vLLM and SGLang load unchanged: their Triton kernels for block-scaled fp8 and fused experts.

`EngineJson` holds what both have in common; `Vllm` and `Sglang` add names, folders and knobs.
"""

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.backends.engine import EngineBackend
from gemmpipe.core.artifact import locked, record_run
from gemmpipe.core.data import Bucket, Device, Knobs, Scalar
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.family import Family, GemmSpec, KernelDefaults
from gemmpipe.family.problem import MAX_SIZE, make_problem
from gemmpipe.formats import BucketSelection, Format, Target, bucket_selections
from gemmpipe.formats.triton_json import Buckets, check_knob, merge_buckets, read_buckets
from gemmpipe.templates.tiled import FUSED_ACT, OVERLAP, STAGE2_KNOBS, stage_knobs

if TYPE_CHECKING:
    import pandas as pd


REQUIRED_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
"""Arguments without a default in the engines' kernel."""
LAUNCH_KNOBS = ("num_warps", "num_stages")
"""Options of Triton's launch; it uses its own default for one that is absent or null."""
AMD_LAUNCH_KNOBS = ("matrix_instr_nonkdim", "kpack", "waves_per_eu")
TMA = "USE_TMA"
"""How SGLang's kernel of experts loads its operands; removed before the launch."""
BOOLEAN_KNOBS = ("SWAP_AB", TMA)
"""Knobs that are true or false."""
_NEUTRAL: Mapping[str, tuple[Scalar, ...]] = {
    "NUM_KSPLIT": (1,),
    "cache_modifier": ("", None),
    "SWAP_AB": (None, False),
}
"""Knobs that the engines' kernel lacks, with the values that mean the same as their absence."""
_NEUTRAL_EXPERTS: Mapping[str, tuple[Scalar, ...]] = {
    "cache_modifier": ("", None),
    FUSED_ACT: (None, False),
    OVERLAP: (None, False),
}
_IGNORED = ("triton_version",)
"""Names in vLLM's newer files of experts that are not Ms."""


@dataclass(frozen=True, kw_only=True)
class EngineJson(Format):
    """One file per (N, K), a configuration for each tuned M; the engine uses that of the nearest M.

    `device_name` defaults to the device's own, blanks and slashes as underscores.
    """

    name: ClassVar[str]
    """The name of the format, its folder and its sidecar."""
    accepted: ClassVar[tuple[str, ...]]
    """The knobs that the engine passes on; any other makes it fail at load."""

    device_name: str | None

    @abstractmethod
    def file_name(self, spec: GemmSpec, device: str) -> str:
        """The name that the engine looks for: by N and K, or by the experts (E) and their inner size (N)."""

    def file_contents(self, choice: BucketSelection, device: str, triton: str) -> dict[str, dict[str, Scalar]]:
        """File name -> the knobs stored there; `triton` is the version that they were timed with."""
        return {self.file_name(choice.spec, device): choice.knobs}

    def engine(self) -> EngineBackend:
        """The engine of this name."""
        return EngineBackend(engine=self.name)

    def entries(self, spec: GemmSpec, device: Device, paths: Sequence[Path]) -> Mapping[int, Knobs]:
        """The configurations of the file that the engine would load for this product on this device.

        For our kernel of the engine's form: with Triton's defaults for absent options, and without `USE_TMA`.
        """
        name = self.file_name(spec, self.device_of(device))
        here = (path / name if path.is_dir() else path for path in paths)
        path = next((path for path in here if path.name == name and path.is_file()), None)
        found = {} if path is None else self.read(path)
        default: Knobs = {"num_warps": 4, "num_stages": 2 if device.vendor == "amd" else 3}  # Triton's own
        return {int(m): {**default, **{k: v for k, v in knobs.items() if k != TMA}} for m, knobs in found.items()}

    def device_of(self, device: Device) -> str:
        """The device's name in the engine's file names."""
        return re.sub(r"[\s/]+", "_", self.device_name or device.name)

    def neutral_knobs(self, spec: GemmSpec) -> Mapping[str, tuple[Scalar, ...]]:
        """Knobs that the engine's kernel for these products lacks, with the values that have no effect."""
        return _NEUTRAL if spec.experts is None else _NEUTRAL_EXPERTS

    def buckets(self, family: Family, ms: Sequence[int]) -> tuple[Bucket, ...]:
        """One per M, for the form of the engine's own kernel; none for a family without such files."""
        sample = _sample_spec(family)
        if sample is None or not _has_engine_kernel(sample):
            return ()
        required = tuple((knob, values[0]) for knob, values in self.neutral_knobs(sample).items())
        return tuple(
            Bucket(format=self.name, name=str(m), low=m - 1, high=m, required_knobs=required, backends=("triton",))
            for m in sorted(set(ms))
        )

    def write(self, family: Family, selections: "pd.DataFrame", target: Target) -> list[Path]:
        """The files of these products, in the engine's folder; Ms that were not tuned this time are kept."""
        device = self.device_of(target.device)
        folder, files = target.folder / self.name, dict[Path, Buckets]()
        holders: dict[tuple[str, str], BucketSelection] = {}
        triton = triton_version(target.provenance)
        for choice in bucket_selections(family, selections, self.name, target.device.gfx):
            if not _has_engine_kernel(choice.spec):
                continue
            for name, knobs in self.file_contents(choice, device, triton).items():
                holder, body = holders.get((name, choice.bucket)), self._body(choice, knobs, target)
                if holder is not None:
                    target.events.emit(
                        "warning", f"{name}: one file for several products; the one with the most calls is stored"
                    )
                if body is not None and (holder is None or choice.weight > holder.weight):
                    holders[name, choice.bucket] = choice
                    files.setdefault(folder / name, {})[choice.bucket] = body
        if not files:
            return []
        meta = folder / f"{self.name}.meta.json"  # the engines' own files are named N=...
        with locked(meta):
            old = {path: self.read(path) if path.exists() else {} for path in files}
            record_run(meta, target.run_id, target.provenance, None, target.warn)
            for path, bodies in files.items():
                order = {m: float(m) for m in (*old[path], *bodies)}
                merge_buckets(path, bodies, old[path], order)
        return list(files)

    def read(self, path: Path) -> Buckets:
        """The configurations of a file by M. Raises UserError: the entry, and why it is invalid."""
        block = re.search(r"block_shape=\[[0-9]+, ?([0-9]+)\]", path.name)
        found = read_buckets(path, _IGNORED, (*LAUNCH_KNOBS, *AMD_LAUNCH_KNOBS))
        for m, knobs in found.items():
            where = f"{path}: {quoted_repr(m)}"
            if not re.fullmatch(r"[1-9][0-9]{0,9}", m) or int(m) > MAX_SIZE:
                raise UserError(f"{where}: expected an M from 1 to {MAX_SIZE}, as every name of this file")
            self._check(knobs, where)
            if block and path.name.startswith("N="):  # the kernel of experts uses at most a group
                check_group(knobs, int(block[1]), where)
        return found

    def _check(self, knobs: Mapping[str, Scalar], where: str) -> None:
        unknown = [knob for knob in knobs if knob not in self.accepted]
        if unknown:
            raise UserError(
                f"{where}: {self.name} passes all knobs to its kernel, which has no {quoted_repr(unknown[0])}"
            )
        missing = [knob for knob in REQUIRED_KNOBS if knob not in knobs]
        if missing:
            raise UserError(f"{where}: no {missing[0]}, which the kernel needs")
        for knob, value in knobs.items():
            if type(value) is not int and not (knob in BOOLEAN_KNOBS and isinstance(value, bool)):
                raise UserError(f"{where}: {knob}: {quoted_repr(value)}, expected a whole number")
            check_knob(knob, value, where)

    def _body(self, choice: BucketSelection, knobs: Mapping[str, Scalar], target: Target) -> dict[str, Scalar] | None:
        """The knobs in the engine's form; None, with a warning, for a candidate that has no such form."""
        where = f"{self.name}: {' '.join(f'{k}={v}' for k, v in choice.key.items())} M={choice.bucket}"
        neutral = self.neutral_knobs(choice.spec)
        unsupported = [k for k, v in knobs.items() if k not in self.accepted and v not in neutral.get(k, (None,))]
        if choice.libtype not in ("triton", self.name) or unsupported:
            reason = f"{unsupported[0]}={knobs[unsupported[0]]}" if unsupported else f"candidate of {choice.libtype}"
            target.events.emit("warning", f"{where}: not stored: the engine's kernel has no {reason}")
            return None
        # A flag that is off is omitted: SGLang's plain kernel, which then runs, has no such argument.
        stored = [knob for knob in self.accepted if knobs.get(knob) is not None and knobs[knob] is not False]
        body: dict[str, Scalar] = {knob: knobs[knob] for knob in stored}
        try:
            self._check(body, where)
            if choice.spec.w_scale is not None and choice.spec.w_scale.granularity == "block":
                check_group(body, choice.spec.w_scale.block[1], where)
        except UserError as error:
            target.events.emit("warning", f"{error}; not stored")
            return None
        return body


def triton_version(provenance: Mapping[str, Scalar | Mapping[str, Scalar]]) -> str:
    """The Triton version of the run that timed the entries, which may be another machine's; else this machine's."""
    versions = provenance.get("versions")
    found = versions.get("triton") if isinstance(versions, Mapping) else None
    return str(found) if found else metadata.version("triton")


def check_group(knobs: Mapping[str, Scalar], group: int, where: str) -> None:
    """Raise UserError if a K tile spans several groups of scales: the kernel reads one scale per tile."""
    size = knobs.get("BLOCK_SIZE_K")
    if isinstance(size, int) and (size < 1 or group % size):
        raise UserError(
            f"{where}: BLOCK_SIZE_K {size} does not fit into a group of {group} along K, and the kernel would "
            f"use one scale: wrong results; expected a divisor of {group}"
        )


def nearest_key(keys: Iterable[int], m: int) -> int:
    """The key that vLLM and SGLang use for M rows: the nearest; of two equally near ones the first in the file.

    Both compute `min(configs.keys(), key=lambda x: abs(x - M))` over the keys in the order of the file. Raises
    ValueError if there is no key.
    """
    return min(keys, key=lambda key: abs(key - m))


def engine_dtype(spec: GemmSpec) -> str:
    """The dtype part of a file name; empty for 16 bits."""
    return ",dtype=fp8_w8a8" if spec.w_dtype.startswith("float8_e4m3") else ""


def block_of(spec: GemmSpec) -> tuple[int, int] | None:
    """(rows, columns) of the weight's scale blocks, or None."""
    return spec.w_scale.block if spec.w_scale is not None and spec.w_scale.granularity == "block" else None


def _has_engine_kernel(spec: GemmSpec) -> bool:
    """True if the engines have a Triton kernel for it: gated experts, or block-scaled fp8 without bias."""
    if spec.experts is not None:
        return spec.experts.gated
    return (
        spec.w_dtype.startswith("float8_e4m3")
        and spec.w_scale is not None
        and spec.w_scale.granularity == "block"
        and spec.w_layout == "nk"
        and spec.batch == 1
        and not spec.bias
    )


def _sample_spec(family: Family) -> GemmSpec | None:
    """The spec of the family's simplest problem, or None if sizes alone do not define one."""
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    sizes = {column.name: 256 for column in family.key_columns if column.kind == "int" and column.default is None}
    try:
        return family.spec(make_problem(family, sizes, defaults, "sm_90", family.name))
    except UserError:
        return None


@dataclass(frozen=True, kw_only=True)
class Vllm(EngineJson):
    """Writes `vllm/N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128,128].json`.

    For experts `vllm/E=..,N=..,device_name=..[,dtype=fp8_w8a8][,block_shape=[128,128]].json`, N a rank's inner size.
    """

    name = "vllm"
    accepted = (*REQUIRED_KNOBS, *LAUNCH_KNOBS, *AMD_LAUNCH_KNOBS)

    def file_name(self, spec: GemmSpec, device: str) -> str:
        """The name for vLLM 0.25: no blank in the block shape; one name for experts on all H200 devices."""
        if spec.experts is not None and "H200" in device.split("_"):
            device = "NVIDIA_H200"
        sizes = f"E={spec.experts.count},N={spec.experts.inner}" if spec.experts else f"N={spec.n},K={spec.k}"
        block = block_of(spec)
        shape = f",block_shape=[{block[0]},{block[1]}]" if block else ""
        return f"{sizes},device_name={device}{engine_dtype(spec)}{shape}.json"

    def neutral_knobs(self, spec: GemmSpec) -> Mapping[str, tuple[Scalar, ...]]:
        """As the base, plus the second stage's own knobs: one configuration serves both stages of the experts."""
        stage2 = {} if spec.experts is None else dict.fromkeys(STAGE2_KNOBS, (None,))
        return {**super().neutral_knobs(spec), **stage2}


@dataclass(frozen=True, kw_only=True)
class Sglang(EngineJson):
    """Writes `sglang/N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128, 128].json`.

    For experts `sglang/configs/triton_X_Y_Z/E=..,N=..,device_name=...json` and a `_down` file for the second stage;
    `SGLANG_MOE_CONFIG_DIR` is the folder `sglang`.
    """

    name = "sglang"
    accepted = (*REQUIRED_KNOBS, *LAUNCH_KNOBS, *AMD_LAUNCH_KNOBS, "SWAP_AB", "SPLIT_K", TMA)

    def file_name(self, spec: GemmSpec, device: str) -> str:
        """The name for SGLang 0.5: a blank in the block shape."""
        block = block_of(spec)
        shape = f",block_shape=[{block[0]}, {block[1]}]" if block else ""
        if spec.experts is None:
            return f"N={spec.n},K={spec.k},device_name={device}{engine_dtype(spec)}{shape}.json"
        by_row = spec.w_scale is not None and block is None
        sizes = f"E={spec.experts.count},N={spec.experts.inner},device_name={device}"
        return f"{sizes}{engine_dtype(spec)}{shape}{',per_channel_quant=True' if by_row else ''}.json"

    def file_contents(self, choice: BucketSelection, device: str, triton: str) -> dict[str, dict[str, Scalar]]:
        """For experts one file per stage, in the folder of the Triton version that they were tuned with."""
        if choice.spec.experts is None:
            return super().file_contents(choice, device, triton)
        folder = f"configs/triton_{triton.split('+')[0].replace('.', '_')}"
        name = self.file_name(choice.spec, device).removesuffix(".json")
        return {
            f"{folder}/{name}.json": stage_knobs(choice.knobs, 1),
            f"{folder}/{name}_down.json": stage_knobs(choice.knobs, 2),
        }
