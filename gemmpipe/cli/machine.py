"""Facts of this machine for `gemmpipe doctor`: cores, memory, free disk, Triton's cache, the GPU driver."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gemmpipe.core.data import Device
from gemmpipe.core.device import usable_cores
from gemmpipe.core.events import counted
from gemmpipe.core.nvml import conditions
from gemmpipe.core.units import bytes_text

LEAST_FREE_BYTES = 2**30
"""Free disk below which a run is at risk: a large run's journal and Triton's cache need hundreds of MiB."""
CORES_PER_GPU = 8
"""Cores that keep a GPU busy: compiling is done on them while the GPU times."""


def machine_lines(devices: Sequence[Device], output: Path) -> Iterator[str]:
    """Cores, memory, free disk where a run writes, Triton's cache folder, and the driver of a GPU."""
    yield "machine"
    total = os.cpu_count() or 1
    yield f"  {usable_cores()} of {total} cores may be used, {bytes_text(_memory_bytes())} memory"
    for title, folder in (("output", output), ("Triton's cache", triton_cache())):
        free = free_bytes(folder)
        yield f"  {title}: {folder}, {'free space unknown' if free is None else f'{bytes_text(free)} free'}"
    drivers = {str(driver) for device in devices if (driver := conditions(device)["driver"])}
    if drivers:
        yield f"  NVIDIA driver {', '.join(sorted(drivers))}"


def warnings_of(devices: Sequence[Device], output: Path) -> Iterator[str]:
    """Causes of failing or slow runs on this machine."""
    for folder in dict.fromkeys((output, triton_cache())):
        free = free_bytes(folder)
        if free is not None and free < LEAST_FREE_BYTES:
            yield f"{folder}: {bytes_text(free)} free; a run needs about {bytes_text(LEAST_FREE_BYTES)}"
    gpus = sum(device.kind != "cpu" for device in devices)
    if gpus and usable_cores() < CORES_PER_GPU * gpus:
        wanted = f"about {CORES_PER_GPU} per GPU keep {'it' if gpus == 1 else 'them'} busy"
        yield f"{usable_cores()} cores compile for {counted(gpus, 'GPU')}; {wanted}"
    with suppress(OSError):
        load = os.getloadavg()[0]
        if any(device.kind == "cpu" for device in devices) and load > usable_cores() / 2:
            yield f"other work runs on this CPU (load {load:.1f}): times will be noisy"


def triton_cache() -> Path:
    """The folder of Triton's compiled kernels."""
    given = os.environ.get("TRITON_CACHE_DIR", "").strip()
    return Path(given).expanduser() if given else Path.home() / ".triton" / "cache"


def free_bytes(folder: Path) -> int | None:
    """Free space for this user on the file system of a folder, which need not exist yet; None if it is unknown."""
    try:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free
    except (OSError, StopIteration):
        return None


def _memory_bytes() -> int | None:
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
