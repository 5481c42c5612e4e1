"""Line information of a build's binary."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemmpipe.core.data import Build
from gemmpipe.core.device import arch_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import LoadedKernel, compile_kernel, find_kernel, is_interpreted

SM_90 = arch_device("sm_90")
EMPTY = Build(kernel="tests:none", source_hash="0" * 12, signature=(), constants=(), aligned=(), options=())


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A skinny kernel, which compiles fast, and an empty cache."""
    family = load_family("a16w16")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": 1, "N": 256, "K": 512}, defaults, "sm_90", "test"))
    skinny = next(i for i in family.implementations if i.label == "skinny")
    knobs = {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 2, "BLOCK_SIZE_K": 512, "num_warps": 1, "num_stages": 1}
    (build,) = skinny.builds(spec, skinny.normalise(spec, knobs, SM_90), SM_90)
    if is_interpreted(find_kernel(build.kernel)):
        pytest.skip("kernels are decorated for the interpreter in this process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)
    return build


def test_line_information_is_written_only_on_request(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    before = knobs.compilation.disable_line_info
    assert "\t.loc\t" not in compile_kernel(build, SM_90).asm["ptx"]
    assert knobs.compilation.disable_line_info == before
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    assert "\t.loc\t" in compile_kernel(build, SM_90).asm["ptx"]


def test_threads_restore_the_knobs(build: Build) -> None:
    from triton import knobs

    before = dict(vars(knobs.compilation))
    others = [replace(build, options=(*build.options, ("maxnreg", n))) for n in (64, 128, 255)]
    with ThreadPoolExecutor(4) as pool:
        binaries = list(pool.map(lambda each: compile_kernel(each, SM_90).asm["ptx"], [build, *others]))
    assert not any("\t.loc\t" in each for each in binaries)
    assert vars(knobs.compilation) == before
    assert "TRITON_DISABLE_LINE_INFO" not in os.environ


@pytest.mark.parametrize("compiled", [True, False])
def test_programmatic_dependent_launch_is_left_out_on_request(compiled: bool) -> None:
    """Triton's own launcher stays as it is: another caller launches the same binary with it."""
    run = SimpleNamespace(launch_pdl=compiled)
    loaded = LoadedKernel(build=EMPTY, kernel=SimpleNamespace(run=run), interpreted=False)
    assert loaded.triton_launcher(launch_pdl=True) is run
    assert not loaded.triton_launcher(launch_pdl=False).launch_pdl
    assert run.launch_pdl is compiled


def test_a_launcher_without_dependent_launch_is_used_as_it_is() -> None:
    """AMD's."""
    run = SimpleNamespace()
    loaded = LoadedKernel(build=EMPTY, kernel=SimpleNamespace(run=run), interpreted=False)
    assert loaded.triton_launcher(launch_pdl=False) is run
