"""The devices of this machine, and the architectures to compile for."""

import importlib.metadata
import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gemmpipe.core.data import Device
from gemmpipe.core.errors import EnvironmentProblem, UserError, suggest, suggest_or_list
from gemmpipe.core.torch_build import cpu_capability, may_have_gpu, torch_build

DEVICE_KINDS = ("auto", "cuda", "hip", "cpu")
_MIB = 2**20
_ARCH_FACTS = {  # name, CUs or SMs, bytes of shared memory (LDS) per block, bytes of last-level cache, warp size
    "sm_90": ("NVIDIA H200", 132, 232448, 60 * _MIB, 32),
    "sm_100": ("NVIDIA B200", 148, 232448, 126 * _MIB, 32),
    "gfx942": ("AMD Instinct MI300X", 304, 64 * 1024, 256 * _MIB, 64),
    "gfx950": ("AMD Instinct MI355X", 256, 160 * 1024, 256 * _MIB, 64),
    "gfx1201": ("AMD Radeon AI PRO R9700", 64, 64 * 1024, 64 * _MIB, 32),
}

NO_DEVICE = Device(kind="none", index=0, name="", gfx="", cu_num=0, shared_bytes=0, cache_bytes=0, warp_size=1)
"""The device of a run that only handles files."""


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """The devices that the user selects: a kind, indices of GPUs (None: all), and `shared` (others use them too)."""

    kind: str
    index: int | tuple[int, ...] | None
    shared: bool

    def __post_init__(self) -> None:
        if isinstance(self.index, tuple) and len(set(self.index)) != max(1, len(self.index)):
            raise ValueError(f"index={self.index_text}, expected GPUs such as [0,1], each once")

    def find(self) -> tuple[Device, ...]:
        """The selected devices; exactly one for the CPU.

        Raises EnvironmentProblem if a selected device is absent, UserError for an unknown kind, and for a GPU index
        with the CPU.
        """
        if self.kind not in DEVICE_KINDS:
            hint = suggest(self.kind, DEVICE_KINDS)
            raise UserError(f"device.kind: '{self.kind}', expected one of {', '.join(DEVICE_KINDS)}{hint}")
        if self.kind == "cpu" and self.index is not None:
            raise UserError(
                f"device.index: {self.index_text} given, expected none with device.kind=cpu (it selects GPUs)"
            )
        gpu = gpu_kind()
        if self.kind == "auto" and gpu is None and self.index is not None:
            raise EnvironmentProblem(
                f"device.index={self.index_text}: torch sees no GPU; use device=cpu without an index"
            )
        if self.kind == "cpu" or (self.kind == "auto" and gpu is None):
            return (replace(cpu_device(), shared=self.shared),)
        if gpu is None or (self.kind != "auto" and self.kind != gpu):
            found = f"torch sees {gpu} devices only" if gpu else "torch sees no GPU"
            raise EnvironmentProblem(f"device.kind={self.kind}: {found}; use device=auto or device=cpu")
        return tuple(replace(gpu_device(index), shared=self.shared) for index in self._indices())

    @property
    def index_text(self) -> str:
        """The index in the form of the command line."""
        return str(self.index) if isinstance(self.index, int) else f"[{','.join(map(str, self.index or ()))}]"

    def _indices(self) -> tuple[int, ...]:
        import torch

        count = torch.cuda.device_count()
        wanted = range(count) if self.index is None else (self.index,) if isinstance(self.index, int) else self.index
        for index in wanted:
            if not 0 <= index < count:
                raise EnvironmentProblem(f"device.index={index}: this machine has GPUs 0 to {count - 1}")
        return tuple(wanted)


def gpu_kind() -> str | None:
    """`cuda` or `hip`, if torch can use such a GPU on this machine, else None."""
    if "torch" not in sys.modules and not may_have_gpu():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return "hip" if torch.version.hip else "cuda"


def gpu_device(index: int) -> Device:
    """The GPU with this index in torch's numbering."""
    import torch

    props = torch.cuda.get_device_properties(index)
    kind = "hip" if torch.version.hip else "cuda"
    gfx = props.gcnArchName.split(":")[0] if kind == "hip" else f"sm_{props.major}{props.minor}"
    known = _ARCH_FACTS.get(gfx)
    # AMD's L2 is one of several in front of a shared last-level cache, which torch does not report.
    cache = max(props.L2_cache_size, known[3] if known and kind == "hip" else 0)
    shared = getattr(props, "shared_memory_per_block_optin", 0) or (known[2] if known else 64 * 1024)
    return Device(
        kind=kind,
        index=index,
        name=props.name,
        gfx=gfx,
        cu_num=compute_units(gfx, props.multi_processor_count),
        shared_bytes=max(shared, known[2]) if known and kind == "hip" else shared,
        cache_bytes=cache,
        warp_size=getattr(props, "warp_size", 64 if kind == "hip" else 32),
        uuid=str(getattr(props, "uuid", "")),
    )


def get_arch() -> str:
    """The architecture of torch's current GPU, or of the CPU without one: `gfx942`, `sm_90`, `cpu_avx512`.

    This is the value of the tables' column `gfx`; names of JSON files contain it too.
    """
    if gpu_kind() is None:
        return cpu_device().gfx
    import torch

    return gpu_device(torch.cuda.current_device()).gfx


def compute_units(gfx: str, reported: int) -> int:
    """Compute units as in tables and rocminfo; on RDNA, HIP may report pairs of them (work group processors)."""
    known = _ARCH_FACTS.get(gfx)
    pairs = known is not None and gfx.startswith("gfx") and known[4] == 32 and 2 * reported <= known[1]
    return 2 * reported if pairs else reported


def arch_device(gfx: str) -> Device:
    """The device of an architecture in _ARCH_FACTS, for compiling without the hardware. Raises UserError."""
    if gfx not in _ARCH_FACTS:
        raise UserError(f"target: no facts about architecture '{gfx}'{suggest_or_list(gfx, _ARCH_FACTS)}")
    name, units, shared, cache, warp = _ARCH_FACTS[gfx]
    return Device(
        kind="hip" if gfx.startswith("gfx") else "cuda",
        index=0,
        name=name,
        gfx=gfx,
        cu_num=units,
        shared_bytes=shared,
        cache_bytes=cache,
        warp_size=warp,
    )


def target_device(gfx: str) -> Device:
    """A device to compile for: this machine's GPU if it has that architecture, else as `arch_device`."""
    if gpu_kind() is not None:
        here = gpu_device(0)
        if here.gfx == gfx:
            return here
    return arch_device(gfx)


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_device() -> Device:
    """This machine's CPU, with the cores that this process may use."""
    return Device(
        kind="cpu",
        index=0,
        name=_cpu_name(),
        gfx=f"cpu_{cpu_capability()}",
        cu_num=usable_cores(),
        shared_bytes=0,
        cache_bytes=_cpu_cache_bytes(Path("/sys/devices/system/cpu/cpu0/cache")),
        warp_size=1,
    )


def _cpu_name() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _cpu_cache_bytes(folder: Path) -> int:
    """The largest cache listed in a /sys cache folder, else 32 MiB."""
    units = {"K": 1024, "M": _MIB, "G": 1024 * _MIB}
    sizes = [32 * _MIB]
    with suppress(OSError, ValueError):
        texts = [path.read_text().strip() for path in folder.glob("index*/size")]
        sizes = [int(t[:-1]) * units[t[-1]] if t[-1] in units else int(t) for t in texts if t] or sizes
    return max(sizes)


def versions() -> dict[str, str]:
    """Versions that affect a measurement: gemmpipe, python, torch, triton, the vendor's runtime."""
    import gemmpipe

    torch = torch_build()
    found = {"gemmpipe": gemmpipe.__version__, "python": platform.python_version(), "torch": torch.version}
    for package in ("triton", "pytorch-triton-rocm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.setdefault("triton", importlib.metadata.version(package))
    for name, version in (("cuda", torch.cuda), ("hip", torch.hip)):
        if version:
            found[name] = version
    return found
