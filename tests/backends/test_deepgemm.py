"""`deepgemm` without a GPU: finding the package, its tiles, their source and their builds."""

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from gemmpipe.backends import NO_SPACE, cuda_driver, deepgemm_build, deepgemm_package
from gemmpipe.backends.cuda_driver import aligned_rows, scales_for_copy_engine
from gemmpipe.backends.deepgemm import DeepGemm, _matrices
from gemmpipe.backends.deepgemm_build import toolkit_problem
from gemmpipe.backends.deepgemm_package import cuda_home, find_package, load_module
from gemmpipe.backends.deepgemm_tiles import Tile, header_violation, likely_tiles, ranked_tiles, source
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.family import GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import compile_build

H200 = replace(arch_device("sm_90"), cu_num=132, shared_bytes=232448)
FAMILY = load_family("a8w8_blockscale")
FASTEST = {
    (512, 4608, 7168): (128, 160),
    (4096, 7168, 16384): (256, 128),
    (4096, 1280, 8192): (128, 160),
    (4096, 2112, 7168): (128, 192),
    (1024, 2112, 7168): (256, 64),
    (512, 2112, 7168): (128, 64),
    (128, 4608, 7168): (128, 48),
    (1024, 1536, 7168): (128, 96),
}
"""The fastest of all of DeepGEMM's tiles by (M, N, K) (H200, 2026-11-22)."""
PARAMETERS = (
    "cute::UMMA::Major kMajorSFB, uint32_t SHAPE_M, uint32_t SHAPE_N, uint32_t SHAPE_K, uint32_t kNumGroups, "
    "uint32_t BLOCK_M, uint32_t BLOCK_N, uint32_t BLOCK_K, uint32_t kSwizzleAMode, uint32_t kSwizzleBMode, "
    "uint32_t kSwizzleDMode, uint32_t kNumStages, uint32_t kNumTMAThreads, uint32_t kNumMathThreads, "
    "uint32_t kNumTMAMulticast, bool kIsTMAMulticastOnA, uint32_t kNumSMs, GemmType kGemmType, "
    "typename cd_dtype_t, typename epilogue_type_t"
)
_MAPS = ", ".join(f"const __grid_constant__ cute::TmaDescriptor tensor_map_{name}" for name in ("a", "b", "d", "sfa"))
ARGUMENTS = f"float* sfb, int* grouped_layout, uint32_t shape_m, uint32_t shape_n, uint32_t shape_k, {_MAPS}"


def header(parameters: str = PARAMETERS, arguments: str = ARGUMENTS) -> str:
    """The declaration of the kernel as DeepGEMM 2.5 has it."""
    return (
        "template <uint32_t kEnd, typename func_t>\nCUTLASS_DEVICE void other(uint32_t n, const func_t& func) { }\n\n"
        f"template <{parameters}>\nCUTLASS_GLOBAL __launch_bounds__(kNumTMAThreads + kNumMathThreads, 1) void\n"
        f"sm90_fp8_gemm_1d2d_impl({arguments}) {{\n}}\n"
    )


def spec_of(m: int, n: int, k: int) -> GemmSpec:
    """The product of block-scaled operands."""
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return FAMILY.spec(make_problem(FAMILY, {"M": m, "N": n, "K": k}, defaults, "sm_90", "test"))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on the path, with what was found before forgotten before and after."""
    caches = (
        find_package,
        deepgemm_package.headers_hash,
        deepgemm_package._headers_problem,
        deepgemm_build.nvcc_version,
    )
    for cached in caches:
        cached.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "deep_gemm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for cached in caches:
        cached.cache_clear()
    for name in [name for name in sys.modules if name.startswith("vllm.third_party")]:
        del sys.modules[name]


def install(folder: Path, *, extension: str = f"_C{EXTENSION_SUFFIXES[0]}") -> Path:
    """A vLLM that cannot be imported, with a DeepGEMM that can."""
    package = folder / "vllm" / "third_party" / "deep_gemm"
    kernel = package / "include" / "deep_gemm" / "impls" / "sm90_fp8_gemm_1d2d.cuh"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(header())
    (package / "include" / "cutlass").mkdir()
    (package / "include" / "cutlass" / "cutlass.h").touch()
    (folder / "vllm" / "__init__.py").write_text("raise ImportError('vLLM must not be imported')")
    (folder / "vllm" / "third_party" / "__init__.py").write_text("raise ImportError('nor this')")
    (package / "__init__.py").write_text("from .inner import fp8_gemm_nt\n")
    (package / "inner.py").write_text("def fp8_gemm_nt(x, w, out): out.fill_(7)\n")
    (package / extension).touch()
    return package


def nvcc(folder: Path, body: str, release: str = "13.0") -> Path:
    """A toolkit whose compiler is a script."""
    binary = folder / "cuda" / "bin" / "nvcc"
    binary.parent.mkdir(parents=True)
    binary.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release {release}, V{release}.1" && exit 0\n{body}\n')
    binary.chmod(0o755)
    return folder / "cuda"


def test_the_package_within_vllm_is_used_without_importing_vllm(clean: Path) -> None:
    package = install(clean)
    found = find_package()
    assert found is not None
    assert (found.name, found.folder) == ("vllm.third_party.deep_gemm", package)
    assert found.extension_problem() is None
    out = torch.zeros(2)
    load_module().fp8_gemm_nt(None, None, out)
    assert out.tolist() == [7, 7]
    assert "vllm" not in sys.modules
    assert load_module() is sys.modules["vllm.third_party.deep_gemm"]


def test_a_package_of_its_own_comes_first(clean: Path) -> None:
    install(clean)
    (clean / "deep_gemm").mkdir()
    (clean / "deep_gemm" / "__init__.py").touch()
    found = find_package()
    assert found is not None
    assert found.name == "deep_gemm"
    assert found.extension_problem() == "deep_gemm has no extension"
    assert found.headers_problem() == "this DeepGEMM has no headers"


def test_reasons_why_nothing_can_run(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DeepGemm()
    missing = "the package deep_gemm is not installed, neither alone nor within vLLM: pip install 'gemmpipe[vllm]'"
    no_gpu = "no NVIDIA GPU: DeepGEMM has kernels for NVIDIA only"
    assert backend.unavailable(H200) == missing
    assert backend.unavailable(cpu_device()) == f"{no_gpu}; also, {missing}"
    assert list(backend.configs(spec_of(64, 4608, 7168), H200, NO_SPACE)) == [{}]
    find_package.cache_clear()
    install(clean, extension="_C.cpython-27-x86_64-linux-gnu.so")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr("gemmpipe.backends.deepgemm.toolkit_problem", lambda: "no nvcc")
    assert backend.unavailable(H200) == f"vllm.third_party.deep_gemm has no extension for Python {version}"
    monkeypatch.setattr("gemmpipe.backends.deepgemm.toolkit_problem", lambda: None)
    assert backend.unavailable(H200) is None, "the tiles need no extension"
    assert backend.unavailable(arch_device("gfx942")) == no_gpu


def test_an_import_that_fails_is_one_line(clean: Path) -> None:
    package = install(clean)
    (package / "inner.py").write_text("raise OSError('libcudart.so.13:\\n no such file')")
    with pytest.raises(RuntimeError, match=r"^vllm.third_party.deep_gemm cannot be imported: OSError: libcudart"):
        load_module()
    assert "vllm.third_party.deep_gemm" not in sys.modules


@pytest.mark.parametrize("sizes", FASTEST, ids=lambda sizes: "x".join(map(str, sizes)))
def test_the_fastest_tiles_are_among_the_first(sizes: tuple[int, int, int]) -> None:
    first = [(tile.rows, tile.columns) for tile in likely_tiles(spec_of(*sizes), H200, 6)]
    assert FASTEST[sizes] in first
    assert len(set(first)) == 6


@pytest.mark.parametrize("m", [1, 16, 17, 33, 64, 4096])
def test_tiles_keep_the_kernels_rules(m: int) -> None:
    spec = spec_of(m, 2112, 7168)
    tiles = ranked_tiles(spec, H200)
    assert {tile.rows for tile in tiles} == {64, 128, 256} | ({32} if m <= 32 else set()) | ({16} if m <= 16 else set())
    for tile in tiles:
        stages = tile.stages(spec.k, H200.shared_bytes)
        assert tile.shared_bytes(spec.k, stages) <= H200.shared_bytes
        assert stages == 16 or tile.shared_bytes(spec.k, stages + 1) > H200.shared_bytes
        assert tile.columns not in (176,), "its scales of w are not unrolled"
        assert tile.out_swizzle in (32, 64, 128)
        assert tile.columns * 2 % tile.out_swizzle == 0


def test_a_pair_is_not_chosen_for_one_wave() -> None:
    spec = spec_of(64, 4608, 7168)
    assert Tile(rows=64, columns=64, multicast="x").cycles(spec, H200) == float("inf")
    assert ranked_tiles(spec, H200)[0].multicast == "none"


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (Tile(rows=32, columns=64), "tile: 32 rows are for M <= 32"),
        (Tile(rows=64, columns=20), "tile: 64x20, expected 16 to 256 rows and 16 to 192 columns"),
        (Tile(rows=256, columns=160), "registers: a tile of 256x160 is too large"),
        (Tile(rows=128, columns=176), "tile: its scales of w cannot be unrolled with 176 columns"),
        (Tile(rows=128, columns=64, multicast="y"), "multicast: 'y', expected one of none, x, w"),
    ],
)
def test_violations(tile: Tile, reason: str) -> None:
    assert tile.violation(spec_of(64, 4608, 7168), H200) == reason


def test_the_source_follows_the_headers_parameters() -> None:
    tile = Tile(rows=128, columns=160, multicast="x")
    text = source(header(), tile, n=4608, k=7168, stages=5, programs=132)
    assert (
        "&sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, 4608, 7168, 1, 128, 160, 128, 128, 128, 64, 5, 128, 256, 2, "
        "true, 132, GemmType::Normal, cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity>" in text
    )
    earlier = header(PARAMETERS.replace("cute::UMMA::Major kMajorSFB, ", ""))
    assert "impl<0, 4608, 7168, 1, 128" in source(earlier, tile, n=4608, k=7168, stages=5, programs=132)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int main() {}", "DeepGEMM's headers have no kernel sm90_fp8_gemm_1d2d_impl"),
        (header(PARAMETERS + ", bool kNew"), "DeepGEMM's headers are of another version: template parameter kNew"),
        (
            header(arguments=ARGUMENTS + ", int more"),
            "DeepGEMM's headers are of another version: the kernel",
        ),
    ],
)
def test_headers_of_other_versions(text: str, reason: str) -> None:
    assert (header_violation(text) or "").startswith(reason)


@pytest.mark.e2e
def test_a_tile_is_compiled_once(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(clean)
    body = 'while [ "$1" != -o ]; do shift; done; echo compiled >> "$2"; cp kernel.cu ' + str(clean / "seen.cu")
    monkeypatch.setenv("CUDA_HOME", str(nvcc(clean, body)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(clean / "cache"))
    spec, backend = spec_of(512, 4608, 7168), DeepGemm()
    configs = list(backend.configs(spec, H200, NO_SPACE))
    assert [backend.unsupported_reason(spec, knobs, H200) for knobs in configs] == [None] * 4
    knobs = configs[1]
    assert knobs == {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 160, "multicast": "none", "num_stages": 5}
    (build,) = backend.builds(spec, knobs, H200)
    first, second = compile_build(build, H200), compile_build(build, H200)
    assert (first.cached, second.cached) == (False, True)
    assert first.shared_bytes == 128 * 160 * 2 + 256 + 56 * 2 * 4 + 5 * ((128 + 160) * 128 + 512)
    assert "4608, 7168, 1, 128, 160" in (clean / "seen.cu").read_text()
    (cubin,) = (clean / "cache" / "gemmpipe" / "deepgemm").iterdir()
    assert cubin.name.endswith("-nvcc13.0.cubin")
    assert backend.builds(spec_of(64, 4608, 7168), knobs, H200) == (build,), "one build for all M"
    assert backend.builds(spec, {}, H200) == ()
    assert backend.unsupported_reason(spec, {**knobs, "num_stages": 6}, H200) == "stages: 6, 5 fit"
    assert (backend.unsupported_reason(spec, {"BLOCK_SIZE_M": 64}, H200) or "").startswith("knobs: expected none, or")


@pytest.mark.e2e
def test_errors_of_the_compiler(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(clean)
    monkeypatch.setenv("CUDA_HOME", str(nvcc(clean, "echo 'error: no such thing' >&2; exit 2")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(clean / "cache"))
    spec = spec_of(512, 4608, 7168)
    (build,) = DeepGemm().builds(spec, Tile(rows=64, columns=64).knobs(spec.k, H200.shared_bytes), H200)
    with pytest.raises(RuntimeError, match="nvcc ended with 2: error: no such thing"):
        compile_build(build, H200)
    assert list((clean / "cache" / "gemmpipe" / "deepgemm").iterdir()) == [], "nothing is left behind"


@pytest.mark.e2e
def test_an_old_toolkit(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = nvcc(clean, "exit 1", release="12.1")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert cuda_home() == home
    assert toolkit_problem() == "DeepGEMM's kernels need nvcc 12.3 or later, not 12.1"
    monkeypatch.setenv("CUDA_HOME", str(clean / "nowhere"))
    monkeypatch.setenv("PATH", str(home / "bin") + os.pathsep + os.environ["PATH"])
    assert cuda_home() == home


def test_scales_are_copied_only_in_other_layouts() -> None:
    values = torch.rand(6, 3)
    padded = torch.zeros(3, 8).t()[:6]
    padded.copy_(values)
    kept, copy = scales_for_copy_engine(padded)
    assert kept is padded
    copy()
    wide = torch.zeros(3, 12).t()[:6]
    wide.copy_(values)
    assert scales_for_copy_engine(wide)[0] is wide
    for given in (values, values.t().contiguous().t(), torch.zeros(19)[1:].view(3, 6).t().copy_(values)):
        kept, copy = scales_for_copy_engine(given)
        assert kept.stride() == (1, 8)
        copy()
        assert torch.equal(kept, values)
    kept, copy = scales_for_copy_engine(wide, whole_lines=True)
    copy()
    assert kept.stride() == (1, 8)
    assert torch.equal(kept, values)


def test_rows_for_the_copy_engine_are_aligned() -> None:
    memory = torch.arange(4 * 32 + 1, dtype=torch.uint8)
    whole, shifted = memory[: 4 * 32].view(4, 32), memory[1:].view(4, 32)
    assert aligned_rows(whole) is whole
    for given in (shifted, whole.t()):
        found = aligned_rows(given)
        assert torch.equal(found, given)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0


def test_descriptors_of_a_tile() -> None:
    spec, tile = spec_of(6, 4608, 7168), Tile(rows=64, columns=160)
    x, w = torch.zeros(6, 7168, dtype=torch.uint8), torch.zeros(4608, 7168, dtype=torch.uint8)
    scales, out = torch.zeros(56, 8).t()[:6], torch.zeros(6, 5000, dtype=torch.bfloat16)[:, :4608]
    maps = _matrices(spec, tile, (x, w, scales), out)
    assert [(each.rows, each.columns, each.row_bytes, each.box, each.swizzle) for each in maps] == [
        (6, 7168, 7168, (64, 128), 128),
        (4608, 7168, 7168, (160, 128), 128),
        (6, 4608, 10000, (64, 32), 64),
        (56, 6, 32, (1, 64), 0),
    ]


def test_sizes_of_the_drivers_structures() -> None:
    """cuda.h of CUDA 12 and 13 on 64-bit systems."""
    attribute, config = cuda_driver._Attribute, cuda_driver._LaunchConfig
    assert (ctypes.sizeof(attribute), attribute.value.offset) == (72, 8)
    offsets = [getattr(config, name).offset for name in ("shared_bytes", "stream", "attributes", "count")]
    assert (ctypes.sizeof(config), offsets) == (56, [24, 32, 40, 48])
    assert ctypes.sizeof(cuda_driver.TensorMap) == 128
