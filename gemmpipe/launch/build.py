"""Compiling builds without a GPU, loading them on one, and binding arguments to a launch.

Registers and spills of NVIDIA binaries are read from the ELF file, without loading it on a device. `compile_call`
compiles JIT functions that gemmpipe does not launch itself, as a call of them would.
"""

import ast
import importlib
import inspect
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemmpipe.core.data import Build, BuildFacts, Device, Scalar

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SIZED = 0x04  # format of a record of `.nv.info` with the length of its payload in the half-word
_FRAME_SIZE = 0x11
_REGISTERS = 0x2F
_WORD = 4

_TRITON_LOCK = threading.RLock()  # Triton's knobs and hashes are global: two threads would undo each other's
_HASHED: dict[int, Any] = {}
"""By id, the functions that were hashed after those that they call; a key of the function itself would hash it."""
_MAX_LOADED = 2048  # loaded binaries kept per process; one has about 20 to 100 kB


def read_resources(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers per thread, 32-bit words of a thread's stack frame, which are its spills): maxima over the kernels.

    `.nv.info` has a record (symbol, number) for each function. (None, None) for anything but a cubin.
    """
    found: dict[int, list[int]] = {_REGISTERS: [], _FRAME_SIZE: []}
    try:
        for attribute, payload in _records(next(data for name, data in _sections(cubin) if name == b".nv.info")):
            if attribute in found and len(payload) == 8:
                found[attribute].append(struct.unpack("<II", payload)[1])
    except (struct.error, ValueError, StopIteration):
        return None, None
    registers, frames = found[_REGISTERS], found[_FRAME_SIZE]
    return max(registers, default=None), max(frames) // _WORD if frames else None


def read_code(cubin: bytes) -> bytes:
    """The instructions of a cubin's kernels, without names, line information and symbols.

    Raises ValueError or struct.error for anything but a cubin.
    """
    return b"".join(data for name, data in _sections(cubin) if name.startswith(b".text."))


def kernel_names(cubin: bytes) -> tuple[str, ...]:
    """The names of a cubin's kernels. Raises ValueError or struct.error for anything but a cubin."""
    names = (name for name, _ in _sections(cubin))
    return tuple(name.removeprefix(b".text.").decode() for name in names if name.startswith(b".text."))


def _sections(cubin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and content of each section. Raises ValueError or struct.error for an invalid ELF file."""
    header = _HEADER.unpack_from(cubin)
    if header[0][:4] != b"\x7fELF":
        raise ValueError("no ELF")
    offset, size, count, names_at = header[6], header[11], header[12], header[13]
    sections = [_SECTION.unpack_from(cubin, offset + i * size) for i in range(count)]
    if names_at >= count:
        raise ValueError("no names of sections")
    names = cubin[sections[names_at][4] :]
    for section in sections:
        yield names[section[0] : names.index(b"\0", section[0])], cubin[section[4] : section[4] + section[5]]


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of the sized records of a `.nv.info` section."""
    offset = 0
    while offset + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _SIZED:
            yield attribute, info[offset : offset + length]
            offset += length


def compile_build(build: Build, target: Device) -> BuildFacts:
    """Compile for an architecture, present or not, into Triton's disk cache. Raises all errors of the compiler.

    A build may name an object with a `compile_build` of its own instead of a JIT function.
    """
    if (compile_own := getattr(find_kernel(build.kernel), "compile_build", None)) is not None:
        facts: BuildFacts = compile_own(build, target)
        return facts
    begin = time.perf_counter()
    with record_cache_hits() as hits:
        kernel = compile_kernel(build, target)
    seconds = time.perf_counter() - begin
    binary = kernel.asm.get("cubin")
    registers, spills = read_resources(binary) if binary else _amd_registers(kernel.asm.get("amdgcn", ""))
    return BuildFacts(
        compile_s=seconds,
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        spills=spills,
        cached=bool(hits) and all(hits),
    )


@contextmanager
def record_cache_hits() -> Iterator[list[bool]]:
    """One entry per compilation that the block requests from Triton: True for a hit in its disk cache."""
    from triton import knobs

    hits: list[bool] = []
    before, knobs.compilation.listener = knobs.compilation.listener, lambda **info: hits.append(bool(info["cache_hit"]))
    try:
        yield hits
    finally:
        knobs.compilation.listener = before


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedKernel:
    """A build loaded on a device; under Triton's interpreter the Python function itself."""

    build: Build
    kernel: Any
    interpreted: bool

    def cluster_launch(self, grid: tuple[int, int, int], cluster: int) -> tuple[tuple[int, int, int], Any]:
        """The grid and the metadata for Triton's launcher, with `cluster` adjacent programs along x per cluster.

        Triton multiplies the grid by the cluster size; a kernel compiled for cluster size 1 does not depend on it.
        """
        metadata = self.kernel.packed_metadata
        if cluster == 1:
            return grid, metadata
        warps, _, *rest = metadata
        return (grid[0] // cluster, *grid[1:]), (warps, cluster, *rest)

    def triton_launcher(self, *, launch_pdl: bool) -> Any:
        """Triton's launcher; without `launch_pdl` one whose launches begin after the previous kernel's end.

        With programmatic dependent launch a kernel takes longer after a kernel that lets nothing start early: 4 % for
        few rows (H200, 2026-11-26, docs/results.md).
        """
        run = self.kernel.run
        if launch_pdl or not getattr(run, "launch_pdl", False):
            return run
        plain = copy(run)
        plain.launch_pdl = False
        return plain

    def launcher(
        self,
        grid: tuple[int, int, int],
        arguments: Mapping[str, object],
        cluster: int = 1,
        *,
        launch_pdl: bool = True,
    ) -> Callable[[], None]:
        """A launch on the stream that is current at the call, safe to capture in a CUDA graph.

        `arguments` has every parameter that is not a constant; its tensors are kept alive. `cluster`: see
        cluster_launch; `launch_pdl`: see triton_launcher.
        """
        constants = dict(self.build.constants)
        if self.interpreted:
            return lambda: self.kernel[grid](**arguments, **constants)
        from triton.runtime import driver

        values = tuple(constants[p] if t == "constexpr" else arguments[p] for p, t in self.build.signature)
        run, function = self.triton_launcher(launch_pdl=launch_pdl), self.kernel.function
        grid, metadata = self.cluster_launch(grid, cluster)
        current_stream, device = driver.active.get_current_stream, driver.active.get_current_device()

        def launch() -> None:
            run(*grid, current_stream(device), function, metadata, None, None, None, *values)

        return launch


def load_build(build: Build, device: Device) -> LoadedKernel:
    """The build on the current device, compiled unless Triton's disk cache has it.

    Raises all errors of the compiler and the driver, e.g. if it needs more shared memory than the device has.
    """
    return _load(build, device)


@lru_cache(maxsize=_MAX_LOADED)
def _load(build: Build, device: Device) -> LoadedKernel:
    function = find_kernel(build.kernel)
    if is_interpreted(function):
        return LoadedKernel(build=build, kernel=function, interpreted=True)
    kernel = compile_kernel(build, device)
    set_descriptor_boxes(kernel, build)
    kernel.run  # noqa: B018  (this property loads the binary and sets function and registers)
    return LoadedKernel(build=build, kernel=kernel, interpreted=False)


def set_descriptor_boxes(kernel: Any, build: Build) -> None:
    """Set the box shapes of tensor descriptors in the metadata, from which Triton makes its launcher later."""
    described = [name for name, kind in build.signature if kind.startswith("tensordesc")]
    for name, box in build.boxes:
        kernel.metadata.tensordesc_meta[described.index(name)]["block_size"] = list(box)


def loaded_facts(loaded: LoadedKernel, compile_s: float = 0.0) -> BuildFacts:
    """The facts of a loaded build from the driver; without numbers under the interpreter."""
    if loaded.interpreted:
        return BuildFacts(compile_s=compile_s)
    kernel = loaded.kernel
    return BuildFacts(
        compile_s=compile_s, shared_bytes=kernel.metadata.shared, registers=kernel.n_regs, spills=kernel.n_spills
    )


def find_kernel(name: str) -> Any:
    """The JIT function `module:attribute`."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def is_interpreted(function: Any) -> bool:
    """True for a function decorated under TRITON_INTERPRET=1: it runs on the CPU and cannot be compiled."""
    return type(function).__name__ == "InterpretedFunction"


def compile_kernel(build: Build, target: Device) -> Any:
    """Triton's compiled kernel, from its disk cache if possible. Raises all errors of the compiler."""
    import triton
    from triton.compiler import ASTSource

    function = find_kernel(build.kernel)
    hash_callees_first(function)
    names = [name for name, _ in build.signature]
    source_type: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(
        function,
        dict(build.signature),
        constexprs={(names.index(name),): value for name, value in build.constants},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned},
    )
    # Triton 3.9 warns without this option, and 3.10 does not fuse multiply and add: set, so that numerics stay equal.
    options = {"enable_fp_fusion": True, **dict(build.options)}
    with nullcontext() if build.line_info else _without_line_info():
        return triton.compile(source, target=gpu_target(target), options=options)


def hash_callees_first(function: Any) -> None:
    """Make Triton hash the functions that a JIT function calls before itself, so that its key in the disk cache is one.

    In Triton 3.6 the constants of a callee are part of the key only if the callee has been hashed before (3.9 hashes it
    first): the key would depend on what a process did before, and a worker would compile kernels again that a compile
    process has put into the cache. A hash that something else made, such as a dict that has the function as a key, is
    replaced; with Triton 3.6 such a dict may not find the function then.
    """
    with _TRITON_LOCK:
        _hash_after_callees(function, frozenset())


def _hash_after_callees(function: Any, callers: frozenset[int]) -> None:
    if id(function) in _HASHED or id(function) in callers:
        return
    scope = {**function.fn.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
    for node in ast.walk(function.parse()):
        found = _object_of(node, scope)
        for each in (found, *getattr(found, "hash_attrs", ())):
            if hasattr(type(each), "cache_key"):  # of the type: the property of a function would hash it
                _hash_after_callees(each, callers | {id(function)})
    function.hash = None
    function.cache_key  # noqa: B018  (this property hashes)
    _HASHED[id(function)] = function


def _object_of(node: ast.AST, scope: Mapping[str, object]) -> Any:
    """The object of a global name, or of an attribute of one; None for others."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    return getattr(_object_of(node.value, scope), node.attr, None) if isinstance(node, ast.Attribute) else None


def gpu_target(device: Device) -> Any:
    """Triton's target of a device."""
    from triton.backends.compiler import GPUTarget

    arch = device.gfx if device.kind == "hip" else int(device.gfx.removeprefix("sm_"))
    return GPUTarget(device.kind, arch, device.warp_size)


@contextmanager
def _without_line_info() -> Iterator[None]:
    """Compile without line information, unless TRITON_DISABLE_LINE_INFO is set.

    Line information takes a fifth of the compile time (H200, 396 builds: 315 to 256 s), and ptxas generates other code
    with it.
    """
    from triton import knobs

    with _TRITON_LOCK, knobs.compilation.scope():
        if "TRITON_DISABLE_LINE_INFO" not in os.environ:
            knobs.compilation.disable_line_info = True
        yield


def _amd_registers(assembly: str) -> tuple[int | None, int | None]:
    """(vector registers, spilled ones) from AMD assembly; None for a number that is missing."""
    used = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    return (int(used[1]) if used else None), (int(spilled[1]) if spilled else None)


@dataclass(frozen=True)
class CompileOnlyDriver:
    """In place of Triton's driver in processes that use no device: JIT functions compile for `target`."""

    target: Any

    def get_current_device(self) -> int:
        """Any: nothing is launched."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Any: nothing is launched."""
        return 0

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        return self.target


def compile_call(kernel: Any, arguments: Sequence[object], options: Mapping[str, Scalar], device: Device) -> None:
    """Compile what `kernel[grid](*arguments, **options)` would, into Triton's disk cache.

    A dtype as argument means a tensor of it with an address divisible by 16. Raises all errors of the compiler. Only
    for processes that use no device: it replaces Triton's driver.
    """
    from triton.runtime import driver

    driver.set_active(CompileOnlyDriver(gpu_target(device)))
    kernel.warmup(*arguments, grid=(1,), **options)
