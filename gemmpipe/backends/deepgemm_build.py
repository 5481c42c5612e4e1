"""DeepGEMM's kernel for a tile: compiled by nvcc from the installed headers into the user's cache, loaded, launched."""

import hashlib
import re
import subprocess
import tempfile
import time
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmpipe.backends.cuda_driver import LoadedCubin
from gemmpipe.backends.deepgemm_package import DeepGemmPackage, cuda_home, find_package, headers_hash, no_package_reason
from gemmpipe.backends.deepgemm_tiles import GROUPED, Tile, source
from gemmpipe.core.data import Build, BuildFacts, Device, Scalar
from gemmpipe.core.paths import user_cache
from gemmpipe.launch.build import kernel_names, read_resources

if TYPE_CHECKING:
    from gemmpipe.family import GemmSpec

KERNEL = "gemmpipe.backends.deepgemm_build:HEADERS"
_FLAGS = (
    *("-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--gpu-architecture=sm_90a"),
    *("--diag-suppress=39,161,174,177,186,940", "--ptxas-options=--register-usage-level=10"),
    "--compiler-options=-fPIC,-O3,-fconcepts,-Wno-deprecated-declarations,-Wno-abi",
)
"""Those of DeepGEMM's own compiler class, version 2.5."""
_LAST_LINES = 300  # characters of nvcc's messages in an error


class HeadersKernel:
    """The kernel of the headers, as a build names it."""

    def compile_build(self, build: Build, target: Device) -> BuildFacts:
        """Compile unless the cache has it. Raises RuntimeError with nvcc's last messages."""
        begin = time.perf_counter()
        path, cached = _cubin_path(build), True
        if not path.is_file():
            _compile(build, path)
            cached = False
        registers, spills = read_resources(path.read_bytes())
        return BuildFacts(
            compile_s=time.perf_counter() - begin,
            shared_bytes=int(str(dict(build.options)["shared_bytes"])),
            registers=registers,
            spills=spills,
            cached=cached,
        )


HEADERS = HeadersKernel()


def tile_build(spec: "GemmSpec", tile: Tile, stages: int, device: Device, groups: int = 0) -> Build:
    """The build of a tile for this N and K and any M; `groups` as in `source`."""
    package = _package()
    constants: dict[str, Scalar] = {"rows": tile.rows, "columns": tile.columns, "multicast": tile.multicast}
    sizes: dict[str, Scalar] = {"stages": stages, "n": spec.n, "k": spec.k, "programs": device.cu_num}
    if groups:
        sizes["groups"] = groups
    return Build(
        kernel=KERNEL,
        source_hash=headers_hash(package.include),
        signature=(),
        constants=tuple((constants | sizes).items()),
        aligned=(),
        options=(("shared_bytes", tile.shared_bytes(spec.k, stages)),),
    )


def load_tile(build: Build, device: Device) -> LoadedCubin:
    """The kernel in the current context, compiled if needed. Raises RuntimeError."""
    return _load(build, device.index)


@lru_cache(maxsize=1024)
def _load(build: Build, index: int) -> LoadedCubin:
    path = _cubin_path(build)
    if not path.is_file():
        _compile(build, path)
    binary = path.read_bytes()
    (name,) = [name for name in kernel_names(binary) if "sm90_fp8_gemm_1d2d_impl" in name]
    return LoadedCubin(binary, name)


def toolkit_problem() -> str | None:
    """Why kernels cannot be compiled, or None."""
    home = cuda_home()
    if home is None:
        return "DeepGEMM's kernels need nvcc: set CUDA_HOME to a CUDA toolkit of version 12.3 or later"
    version = nvcc_version(home)
    return None if version >= (12, 3) else f"DeepGEMM's kernels need nvcc 12.3 or later, not {version[0]}.{version[1]}"


@cache
def nvcc_version(home: Path) -> tuple[int, int]:
    """The version of the toolkit; (0, 0) if it does not run."""
    try:
        text = subprocess.run(
            [home / "bin" / "nvcc", "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _package() -> DeepGemmPackage:
    package = find_package()
    if package is None:
        raise RuntimeError(no_package_reason())
    return package


def _source(build: Build) -> str:
    values: dict[str, Any] = dict(build.constants)
    tile = Tile(rows=values["rows"], columns=values["columns"], multicast=values["multicast"])
    header = _kernel_header(_package().include)
    sizes = {name: values[name] for name in ("n", "k", "stages", "programs")}
    return source(header, tile, **sizes, groups=values.get("groups", 0))


def grouped_problem() -> str | None:
    """Why the installed headers have no grouped product as it is launched here, or None."""
    types = _package().include / "deep_gemm" / "common" / "types.cuh"
    known = types.is_file() and GROUPED in types.read_text()
    return None if known else f"DeepGEMM's headers are of another version: no {GROUPED}"


@lru_cache(maxsize=8)
def _kernel_header(include: Path) -> str:
    return (include / "deep_gemm" / "impls" / "sm90_fp8_gemm_1d2d.cuh").read_text()


def _cubin_path(build: Build) -> Path:
    """Named by all that determines it: the source, the headers, the flags and nvcc's version."""
    home = cuda_home()
    major, minor = nvcc_version(home) if home is not None else (0, 0)
    parts = "\0".join((_source(build), build.source_hash, *_FLAGS))
    name = f"sm90_fp8_gemm_1d2d-{hashlib.sha256(parts.encode()).hexdigest()[:20]}-nvcc{major}.{minor}.cubin"
    return user_cache() / "deepgemm" / name


def _compile(build: Build, path: Path) -> None:
    """Compile into `path`."""
    home = cuda_home()
    if home is None:
        raise RuntimeError(toolkit_problem() or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, as files in the current one would hide headers; within the cache, so that moving is atomic
    with tempfile.TemporaryDirectory(prefix="compile-", dir=path.parent) as folder:
        code, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        code.write_text(_source(build))
        command = [
            str(home / "bin" / "nvcc"),
            str(code),
            "-cubin",
            "-o",
            str(cubin),
            f"-I{_package().include}",
            *_FLAGS,
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
        if done.returncode or not cubin.is_file():
            output = " ".join((done.stdout + done.stderr).split())[-_LAST_LINES:]
            raise RuntimeError(f"nvcc ended with {done.returncode}: {output}")
        cubin.replace(path)
