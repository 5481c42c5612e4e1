"""What vLLM's and SGLang's files of block-scaled GEMM configurations have in common."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.data import Bucket, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family, GemmSpec, KernelDefaults
from gemmpipe.files.artifact import locked, record_run
from gemmpipe.formats import Format, Target
from gemmpipe.formats.buckets import Buckets, merge_into, read_buckets
from gemmpipe.formats.chosen import Choice, choices
from gemmpipe.problem import make_problem
from gemmpipe.templates.two_stage import FUSED

if TYPE_CHECKING:
    import pandas as pd

NEEDED = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps")
"""Arguments without a default in the engines' kernel or launch."""
AMD = ("matrix_instr_nonkdim", "kpack", "waves_per_eu")
_INERT: Mapping[str, tuple[Scalar, ...]] = {"NUM_KSPLIT": (1,), "cache_modifier": ("", None), "SWAP_AB": (None, False)}
"""Knobs that the engines' kernel does not have, with the values that mean the same as not having them."""
_INERT_EXPERTS: Mapping[str, tuple[Scalar, ...]] = {"cache_modifier": ("", None), FUSED: (None, False)}
_IGNORED = ("triton_version",)
"""Names beside the Ms in vLLM's newer files of experts."""


@dataclass(frozen=True, kw_only=True)
class EngineJson(Format):
    """One file a (N, K), a configuration for each M tuned; the engine takes that of the nearest M.

    `device_name` defaults to the device's own, blanks and slashes as underscores.
    """

    name: ClassVar[str]
    """Of the format, of its folder, of its sidecar."""
    accepted: ClassVar[tuple[str, ...]]
    """The knobs that the engine passes on; any other makes it fail at load."""

    device_name: str | None

    @abstractmethod
    def file_name(self, spec: GemmSpec, device: str) -> str:
        """The name under which the engine looks: by N and K, or by the experts (E) and their inner size (N)."""

    def bodies(self, choice: Choice, device: str) -> dict[str, dict[str, Scalar]]:
        """File name -> the knobs that go there."""
        return {self.file_name(choice.spec, device): choice.knobs}

    def inert(self, spec: GemmSpec) -> Mapping[str, tuple[Scalar, ...]]:
        """The knobs that the engine's kernel for these products does not have, with the values that do no harm."""
        return _INERT if spec.experts is None else _INERT_EXPERTS

    def buckets(self, family: Family, ms: Sequence[int]) -> tuple[Bucket, ...]:
        """One for each M, of the form that the engine's own kernel has; none for a family it has no such file for."""
        sample = _sample(family)
        if sample is None or not _known(sample):
            return ()
        must = tuple((knob, values[0]) for knob, values in self.inert(sample).items())
        return tuple(
            Bucket(format=self.name, name=str(m), low=m - 1, high=m, must=must, backends=("triton",))
            for m in sorted(set(ms))
        )

    def write(self, family: Family, selections: "pd.DataFrame", target: Target) -> list[Path]:
        """The files of these products, in a folder of the engine's name; Ms that were not tuned this time stay."""
        device = re.sub(r"[\s/]+", "_", self.device_name or target.device.name)
        folder, files = target.folder / self.name, dict[Path, Buckets]()
        holders: dict[tuple[str, str], Choice] = {}
        for choice in choices(family, selections, self.name, target.device.gfx):
            if not _known(choice.spec):
                continue
            for name, knobs in self.bodies(choice, device).items():
                holder, body = holders.get((name, choice.bucket)), self._body(choice, knobs, target)
                if holder is not None:
                    target.events.emit("warning", f"{name}: one file for several products; the one most called stays")
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
                merge_into(path, bodies, old[path], order)
        return list(files)

    def read(self, path: Path) -> Buckets:
        """The configurations of a file by M. Raises UserError: the entry, and why an engine must not load it."""
        block = re.search(r"block_shape=\[\d+, ?(\d+)\]", path.name)
        found = read_buckets(path, _IGNORED)
        for m, knobs in found.items():
            where = f"{path}: '{m}'"
            if not re.fullmatch(r"[1-9]\d*", m):
                raise UserError(f"{where}: expected an M, a whole number from 1, as every name of this file")
            self._check(knobs, where)
            if block and path.name.startswith("N="):  # the kernel of experts takes at most a group
                check_group(knobs, int(block[1]), where)
        return found

    def _check(self, knobs: Mapping[str, Scalar], where: str) -> None:
        unknown = [knob for knob in knobs if knob not in self.accepted]
        if unknown:
            raise UserError(f"{where}: {self.name} passes every knob on and has no '{unknown[0]}'")
        lacking = [knob for knob in NEEDED if knob not in knobs]
        if lacking:
            raise UserError(f"{where}: no {lacking[0]}, which the kernel needs")
        for knob, value in knobs.items():
            if not isinstance(value, int):
                raise UserError(f"{where}: {knob}: {value!r}, expected a whole number")

    def _body(self, choice: Choice, knobs: Mapping[str, Scalar], target: Target) -> dict[str, Scalar] | None:
        """The knobs as the engine takes them; None, with a warning, for a candidate that is not of its form."""
        where = f"{self.name}: {' '.join(f'{k}={v}' for k, v in choice.key.items())} M={choice.bucket}"
        inert = self.inert(choice.spec)
        odd = [k for k, v in knobs.items() if k not in self.accepted and v not in inert.get(k, (None,))]
        if choice.libtype != "triton" or odd:
            reason = f"{odd[0]}={knobs[odd[0]]}" if odd else f"a candidate of {choice.libtype}"
            target.events.emit("warning", f"{where}: not stored: the engine's kernel has no {reason}")
            return None
        body = {knob: knobs[knob] for knob in self.accepted if knobs.get(knob) is not None}
        try:
            self._check(body, where)
            if choice.spec.w_scale is not None and choice.spec.w_scale.granularity == "block":
                check_group(body, choice.spec.w_scale.block[1], where)
        except UserError as error:
            target.events.emit("warning", f"{error}; not stored")
            return None
        return body


def check_group(knobs: Mapping[str, Scalar], group: int, where: str) -> None:
    """Raise UserError where a K tile is not inside one group of scales: the kernel reads one scale a tile."""
    size = knobs.get("BLOCK_SIZE_K")
    if isinstance(size, int) and (size < 1 or group % size):
        raise UserError(
            f"{where}: BLOCK_SIZE_K {size} spans more than a group of {group} along K, of which the kernel would "
            f"use one scale: wrong results; expected a divisor of {group}"
        )


def engine_dtype(spec: GemmSpec) -> str:
    """The part of a file's name that says the type: nothing for 16 bits."""
    return ",dtype=fp8_w8a8" if spec.w_dtype.startswith("float8_e4m3") else ""


def block_of(spec: GemmSpec) -> tuple[int, int] | None:
    """The weight's tiles of one scale each, or None."""
    return spec.w_scale.block if spec.w_scale is not None and spec.w_scale.granularity == "block" else None


def _known(spec: GemmSpec) -> bool:
    """Whether the engines have a Triton kernel for it: gated experts, or a block-scaled fp8 product without bias."""
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


def _sample(family: Family) -> GemmSpec | None:
    """The spec of the family's plainest problem, or None where sizes alone make none."""
    words = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    sizes = {column.name: 256 for column in family.key_columns if column.kind == "int" and column.default is None}
    try:
        return family.spec(make_problem(family, sizes, words, "sm_90", family.name))
    except UserError:
        return None
