"""Facts of the installed torch that need no import of it, which takes 2 to 4 s: versions, GPU driver, CPU kernels.

Each equals the value that torch reports, or is read from torch: a different value would give tables another key.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from gemmpipe.core.errors import UserError
from gemmpipe.core.files import read_regular
from gemmpipe.core.paths import user_cache, write_atomic

_CUDA_DRIVER = "libcuda.so.1"
_AMD_DRIVER_FILES = ("/dev/kfd", "/dev/dxg")
_MAX_NAME_BYTES = 100
_CAPABILITY = re.compile(r"[a-z0-9_]{1,40}")


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The version of the installed torch, and of the runtimes that it is built for."""

    version: str
    cuda: str | None
    hip: str | None
    source: str = ""
    """The commit that it is built from."""


@cache
def torch_build() -> TorchBuild:
    """The installed torch, by its `version.py`. Raises ImportError without torch."""
    module = _version_module()
    return TorchBuild(
        version=str(module.__version__),
        cuda=module.cuda,
        hip=module.hip,
        source=str(getattr(module, "git_version", "")),
    )


def _version_module() -> ModuleType:
    if "torch" not in sys.modules:
        found = importlib.util.find_spec("torch")
        folders = (found.submodule_search_locations if found else None) or ()
        for path in (Path(folder) / "version.py" for folder in folders):
            spec = importlib.util.spec_from_file_location("_gemmpipe_torch_version", path)
            if path.is_file() and spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    import torch.version

    return torch.version


def may_have_gpu() -> bool:
    """False if torch can see no GPU here for certain: it is built for none, or the driver is not installed."""
    build = torch_build()
    if build.hip is not None:
        return platform.system() != "Linux" or any(map(os.path.exists, _AMD_DRIVER_FILES))
    if build.cuda is None:
        return False
    if platform.system() != "Linux":
        return True
    try:
        ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return False
    return True


def cpu_capability() -> str:
    """The instruction set of torch's CPU kernels on this machine: `avx2`, `avx512`, `neon`, `sve256` ...

    torch is imported once per build of torch and kind of CPU; the name is kept in the user's cache folder.
    """
    known = _cache_file()
    if "torch" not in sys.modules and known is not None:
        with contextlib.suppress(OSError, UserError, UnicodeDecodeError):
            name = read_regular(known, "the name of an instruction set", _MAX_NAME_BYTES).decode().strip()
            if _CAPABILITY.fullmatch(name):
                return name
    import torch

    name = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    name = "neon" if name == "default" and platform.machine() in ("aarch64", "arm64") else name
    if known is not None and not known.exists():
        with contextlib.suppress(OSError):  # only a shortcut
            write_atomic(known, f"{name}\n")
    return name


def _cache_file() -> Path | None:
    """The file for the capability; its name is a digest of all that it depends on. None without a home directory."""
    try:
        return user_cache() / "cpu_capability" / _cpu_and_build()
    except RuntimeError:
        return None


def _cpu_and_build() -> str:
    """A digest of the build of torch, the CPU's features, and the variable that limits what torch uses of them."""
    build = torch_build()
    texts = [build.version, build.source, str(build.cuda), str(build.hip), platform.machine()]
    with contextlib.suppress(OSError):
        found = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        texts.append(found[0] if found else "")
    texts.append(os.environ.get("ATEN_CPU_CAPABILITY", ""))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
