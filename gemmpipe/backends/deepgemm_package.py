"""The installed DeepGEMM, alone or within vLLM: its extension and its headers, found without importing vLLM."""

import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from gemmpipe.backends.deepgemm_tiles import header_violation
from gemmpipe.backends.packages import not_installed
from gemmpipe.core.errors import one_line

_PLACES = (("deep_gemm", ()), ("vllm", ("third_party", "deep_gemm")))
"""Top-level packages and the folders within: DeepGEMM's own wheel and SGLang's, then vLLM's."""
_KERNEL = Path("include/deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh")


@dataclass(frozen=True, kw_only=True)
class DeepGemmPackage:
    """An installed package."""

    name: str
    """`deep_gemm` or `vllm.third_party.deep_gemm`."""
    folder: Path

    @property
    def include(self) -> Path:
        """The headers, with CUTLASS's."""
        return self.folder / "include"

    def extension_problem(self) -> str | None:
        """Why the extension cannot be imported, as far as its files show, or None."""
        names = {path.name for path in self.folder.glob("_C*.so")}
        if names.intersection(f"_C{suffix}" for suffix in EXTENSION_SUFFIXES):
            return None
        if names:
            return f"{self.name} has no extension for Python {sys.version_info.major}.{sys.version_info.minor}"
        # Earlier versions have it next to the package
        next_to = next(self.folder.parent.glob("deep_gemm_cpp*"), None)
        return None if next_to is not None else f"{self.name} has no extension"

    def headers_problem(self) -> str | None:
        """Why its kernel cannot be instantiated from the headers, or None."""
        return _headers_problem(self.include.parent)


@cache
def find_package() -> DeepGemmPackage | None:
    """The first package found. Imports nothing."""
    for top, within in _PLACES:
        try:
            found = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            continue
        for root in (found.submodule_search_locations or ()) if found is not None else ():
            folder = Path(root, *within)
            if (folder / "__init__.py").is_file():
                return DeepGemmPackage(name=".".join((top, *within)), folder=folder)
    return None


def no_package_reason() -> str:
    """The package to install."""
    return not_installed("deep_gemm", ", neither alone nor within vLLM")


def cuda_home() -> Path | None:
    """The folder of the CUDA toolkit with `bin/nvcc`, as torch and DeepGEMM look for it."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if (value := os.environ.get(variable)) and (Path(value) / "bin" / "nvcc").is_file():
            return Path(value)
    nvcc = shutil.which("nvcc")
    homes = ([Path(nvcc).resolve().parent.parent] if nvcc else []) + [Path("/usr/local/cuda")]
    return next((home for home in homes if (home / "bin" / "nvcc").is_file()), None)


@lru_cache(maxsize=8)
def headers_hash(include: Path) -> str:
    """A hash of DeepGEMM's headers, which determine the kernels; CUTLASS's come with them."""
    hashed = hashlib.sha256()
    for path in sorted((include / "deep_gemm").rglob("*.cuh")):
        hashed.update(path.relative_to(include).as_posix().encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:12]


@lru_cache(maxsize=8)
def _headers_problem(folder: Path) -> str | None:
    kernel = folder / _KERNEL
    if not kernel.is_file() or not (folder / "include" / "cutlass" / "cutlass.h").is_file():
        return "this DeepGEMM has no headers"
    return header_violation(kernel.read_text())


def load_module() -> ModuleType:
    """The module, imported under its name without its parent packages. Raises RuntimeError in one line."""
    for top, within in _PLACES:
        if (loaded := sys.modules.get(".".join((top, *within)))) is not None:
            return loaded
    package = find_package()
    if package is None:
        raise RuntimeError(no_package_reason())
    try:
        return importlib.import_module(package.name) if "." not in package.name else _load_alone(package)
    except Exception as error:
        raise RuntimeError(f"{package.name} cannot be imported: {one_line(error)}") from error


def _load_alone(package: DeepGemmPackage) -> ModuleType:
    """A package within another, whose own `__init__` would import gigabytes; imports of it find this module."""
    spec = importlib.util.spec_from_file_location(
        package.name, package.folder / "__init__.py", submodule_search_locations=[str(package.folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {package.folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[package.name]
        raise
    return module
