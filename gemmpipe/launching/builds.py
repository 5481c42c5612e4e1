"""Compiling a build without a GPU, loading it on one, and binding its arguments to a launch."""

import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemmpipe.data import Build, BuildFacts, Device
from gemmpipe.launching.cubin import resources

_KNOBS = threading.RLock()  # Triton's knobs are the process's: two threads would put back what the other one set
_KEPT = 2048  # loaded binaries a process keeps; one is some 20 to 100 kB


def compile_build(build: Build, target: Device) -> BuildFacts:
    """Compile for an architecture, present or not, into Triton's disk cache; whatever the compiler raises rises."""
    begin = time.perf_counter()
    with watched() as hits:
        kernel = compiled(build, target)
    seconds = time.perf_counter() - begin
    binary = kernel.asm.get("cubin")
    registers, spills = resources(binary) if binary else _amd_registers(kernel.asm.get("amdgcn", ""))
    return BuildFacts(
        compile_s=seconds,
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        spills=spills,
        cached=bool(hits) and all(hits),
    )


@contextmanager
def watched() -> Iterator[list[bool]]:
    """What Triton is asked to compile within the block: True where its disk cache had it, False where it compiled."""
    from triton import knobs

    hits: list[bool] = []
    before, knobs.compilation.listener = knobs.compilation.listener, lambda **said: hits.append(bool(said["cache_hit"]))
    try:
        yield hits
    finally:
        knobs.compilation.listener = before


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A build on a device, ready to launch; under Triton's interpreter the Python function itself."""

    build: Build
    kernel: Any
    interpreted: bool

    def laid_out(self, grid: tuple[int, int, int], cluster: int) -> tuple[tuple[int, int, int], Any]:
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
        grid, metadata = self.laid_out(grid, cluster)
        current_stream, device = driver.active.get_current_stream, driver.active.get_current_device()

        def launch() -> None:
            run(*grid, current_stream(device), function, metadata, None, None, None, *values)

        return launch


def load_build(build: Build, device: Device) -> Loaded:
    """The build on the current device, compiled first unless Triton's disk cache has it.

    Raises what the compiler or the driver raises, e.g. when it needs more shared memory than there is.
    """
    return _load(build, device)


@lru_cache(maxsize=_KEPT)
def _load(build: Build, device: Device) -> Loaded:
    function = find_kernel(build.kernel)
    if is_interpreted(function):
        return Loaded(build=build, kernel=function, interpreted=True)
    kernel = compiled(build, device)
    say_boxes(kernel, build)
    kernel.run  # noqa: B018  (the property that loads the binary; function and registers are known from here on)
    return Loaded(build=build, kernel=kernel, interpreted=False)


def say_boxes(kernel: Any, build: Build) -> None:
    """What Triton's launcher, made later, is to ask of the copy engine beside what the types say."""
    described = [name for name, kind in build.signature if kind.startswith("tensordesc")]
    for name, box in build.boxes:
        kernel.metadata.tensordesc_meta[described.index(name)]["block_size"] = list(box)


def facts_of(loaded: Loaded, compile_s: float = 0.0) -> BuildFacts:
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


def compiled(build: Build, target: Device) -> Any:
    """Triton's compiled kernel, from its disk cache where it is there; whatever the compiler raises rises."""
    import triton
    from triton.backends.compiler import GPUTarget
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
    arch = target.gfx if target.kind == "hip" else int(target.gfx.removeprefix("sm_"))
    # Triton 3.9 warns unless told, and 3.10 stops fusing multiply and add: say it, so that numerics stay the same.
    options = {"enable_fp_fusion": True, **dict(build.options)}
    with nullcontext() if build.line_info else _without_line_info():
        return triton.compile(source, target=GPUTarget(target.kind, arch, target.warp_size), options=options)


@contextmanager
def _without_line_info() -> Iterator[None]:
    """Binaries do not say which lines they come from, unless TRITON_DISABLE_LINE_INFO=0 asks for it.

    A fifth of the time to compile (H200, 396 builds: 315 to 256 s), and what ptxas makes of a kernel depends on it.
    """
    from triton import knobs

    with _KNOBS, knobs.compilation.scope():
        if "TRITON_DISABLE_LINE_INFO" not in os.environ:
            knobs.compilation.disable_line_info = True
        yield


def _amd_registers(assembly: str) -> tuple[int | None, int | None]:
    """(vector registers, spilled ones) from AMD assembly, which states both; (None, None) elsewhere."""
    used = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    return (int(used[1]) if used else None), (int(spilled[1]) if spilled else None)
