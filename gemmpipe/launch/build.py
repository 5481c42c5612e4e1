"""Compiling a build without a GPU, loading it on one, and binding its arguments to a launch.

What an NVIDIA binary says of itself: registers and spills are in the ELF, so that no device need load it.

From a kernel and its arguments to a call: compiling, loading, binding, and the memory between launches.

Compiling a JIT function as a call of it would, without a device: for functions that are not launched by us.
"""

import importlib
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemmpipe.core.data import Build, BuildFacts, Device, Scalar

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SIZED = 0x04  # a record of `.nv.info` whose half-word is the length of what follows
_FRAME_SIZE = 0x11
_REGISTERS = 0x2F
_WORD = 4


def read_resources(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers a thread, 32-bit words of a thread's stack frame, which are its spills) of the hungriest kernel.

    `.nv.info` holds a record (symbol, number) for each function. (None, None) for what is no such ELF.
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
    """The instructions of its kernels, without names, source lines and symbols. Raises ValueError or struct.error."""
    return b"".join(data for name, data in _sections(cubin) if name.startswith(b".text."))


def _sections(cubin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and contents of each section. Raises ValueError or struct.error for what is no such ELF."""
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
    place = 0
    while place + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == _SIZED:
            yield attribute, info[place : place + length]
            place += length


_KNOBS_LOCK = threading.RLock()  # Triton's knobs are the process's: two threads would put back what the other one set
_MAX_LOADED = 2048  # loaded binaries a process keeps; one is some 20 to 100 kB


def compile_build(build: Build, target: Device) -> BuildFacts:
    """Compile for an architecture, present or not, into Triton's disk cache; whatever the compiler raises rises."""
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
    """What Triton is asked to compile within the block: True where its disk cache had it, False where it compiled."""
    from triton import knobs

    hits: list[bool] = []
    before, knobs.compilation.listener = knobs.compilation.listener, lambda **said: hits.append(bool(said["cache_hit"]))
    try:
        yield hits
    finally:
        knobs.compilation.listener = before


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedKernel:
    """A build on a device, ready to launch; under Triton's interpreter the Python function itself."""

    build: Build
    kernel: Any
    interpreted: bool

    def cluster_launch(self, grid: tuple[int, int, int], cluster: int) -> tuple[tuple[int, int, int], Any]:
        """The grid and the metadata for Triton's launcher: `cluster` neighbours of x run side by side in one GPC.

        Triton launches so many for each of a grid; a kernel compiled for one knows nothing of it.
        """
        metadata = self.kernel.packed_metadata
        if cluster == 1:
            return grid, metadata
        warps, _, *rest = metadata
        return (grid[0] // cluster, *grid[1:]), (warps, cluster, *rest)

    def launcher(
        self, grid: tuple[int, int, int], arguments: Mapping[str, object], cluster: int = 1
    ) -> Callable[[], None]:
        """A launch on whatever stream is current when it is called, safe to capture in a CUDA graph.

        `arguments` names every parameter that is no constant; tensors among them are kept alive. `cluster`: see
        laid_out.
        """
        constants = dict(self.build.constants)
        if self.interpreted:
            return lambda: self.kernel[grid](**arguments, **constants)
        from triton.runtime import driver

        values = tuple(constants[p] if t == "constexpr" else arguments[p] for p, t in self.build.signature)
        run, function = self.kernel.run, self.kernel.function
        grid, metadata = self.cluster_launch(grid, cluster)
        current_stream, device = driver.active.get_current_stream, driver.active.get_current_device()

        def launch() -> None:
            run(*grid, current_stream(device), function, metadata, None, None, None, *values)

        return launch


def load_build(build: Build, device: Device) -> LoadedKernel:
    """The build on the current device, compiled first unless Triton's disk cache has it.

    Raises what the compiler or the driver raises, e.g. when it needs more shared memory than there is.
    """
    return _load(build, device)


@lru_cache(maxsize=_MAX_LOADED)
def _load(build: Build, device: Device) -> LoadedKernel:
    function = find_kernel(build.kernel)
    if is_interpreted(function):
        return LoadedKernel(build=build, kernel=function, interpreted=True)
    kernel = compile_kernel(build, device)
    set_descriptor_boxes(kernel, build)
    kernel.run  # noqa: B018  (the property that loads the binary; function and registers are known from here on)
    return LoadedKernel(build=build, kernel=kernel, interpreted=False)


def set_descriptor_boxes(kernel: Any, build: Build) -> None:
    """What Triton's launcher, made later, is to ask of the copy engine beside what the types say."""
    described = [name for name, kind in build.signature if kind.startswith("tensordesc")]
    for name, box in build.boxes:
        kernel.metadata.tensordesc_meta[described.index(name)]["block_size"] = list(box)


def loaded_facts(loaded: LoadedKernel, compile_s: float = 0.0) -> BuildFacts:
    """What the driver says of a loaded build; the interpreter has nothing to say."""
    if loaded.interpreted:
        return BuildFacts(compile_s=compile_s, shared_bytes=None, registers=None, spills=None)
    kernel = loaded.kernel
    return BuildFacts(
        compile_s=compile_s, shared_bytes=kernel.metadata.shared, registers=kernel.n_regs, spills=kernel.n_spills
    )


def find_kernel(name: str) -> Any:
    """The JIT function `module:attribute`."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def is_interpreted(function: Any) -> bool:
    """Whether it was decorated under TRITON_INTERPRET=1: it then runs on the CPU and cannot be compiled."""
    return type(function).__name__ == "InterpretedFunction"


def compile_kernel(build: Build, target: Device) -> Any:
    """Triton's compiled kernel, from its disk cache where it is there; whatever the compiler raises rises."""
    import triton
    from triton.compiler import ASTSource

    function = find_kernel(build.kernel)
    names = [name for name, _ in build.signature]
    made: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        made = GluonASTSource
    source = made(
        function,
        dict(build.signature),
        constexprs={(names.index(name),): value for name, value in build.constants},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned},
    )
    # Triton 3.9 warns unless told, and 3.10 stops fusing multiply and add: say it, so that numerics stay the same.
    options = {"enable_fp_fusion": True, **dict(build.options)}
    with nullcontext() if build.line_info else _without_line_info():
        return triton.compile(source, target=gpu_target(target), options=options)


def gpu_target(device: Device) -> Any:
    """Triton's target of a device."""
    from triton.backends.compiler import GPUTarget

    arch = device.gfx if device.kind == "hip" else int(device.gfx.removeprefix("sm_"))
    return GPUTarget(device.kind, arch, device.warp_size)


@contextmanager
def _without_line_info() -> Iterator[None]:
    """Binaries do not say which lines they come from, unless TRITON_DISABLE_LINE_INFO=0 asks for it.

    A fifth of the time to compile (H200, 396 builds: 315 to 256 s), and what ptxas makes of a kernel depends on it.
    """
    from triton import knobs

    with _KNOBS_LOCK, knobs.compilation.scope():
        if "TRITON_DISABLE_LINE_INFO" not in os.environ:
            knobs.compilation.disable_line_info = True
        yield


def _amd_registers(assembly: str) -> tuple[int | None, int | None]:
    """(vector registers, spilled ones) from AMD assembly, which states both; (None, None) elsewhere."""
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
    """Compile what `kernel[grid](*arguments, **options)` would, into Triton's disk cache; a dtype stands for a tensor
    of it whose address is a multiple of 16. Raises what the compiler raises.

    Only for processes that use no device: Triton has no driver for one from now on.
    """
    from triton.runtime import driver

    driver.set_active(CompileOnlyDriver(gpu_target(device)))
    kernel.warmup(*arguments, grid=(1,), **options)
