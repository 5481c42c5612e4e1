"""What a comparison compiles before its finals: builds by the time of their kernel, and engines' Triton functions."""

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage_contexts import stage_context

from gemmpipe.backends import engine_functions
from gemmpipe.backends.engine_compile import CompileCalls
from gemmpipe.backends.engine_function import SglangFunction
from gemmpipe.backends.engine_pair import SglangPair
from gemmpipe.cli.main import main
from gemmpipe.core.data import Build, BuildFacts, Candidate, Problem
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.executors import BuildResult
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages.compare.ahead import BuildsWork, engine_tasks

FAMILY = load_family("linear_fp8_blockscale")
H200 = arch_device("sm_90")
TRITON, DEEPGEMM = (Candidate.of("sglang", {"product": name}) for name in ("triton", "deepgemm"))
MODELLED = Path(__file__).parents[1] / "modelled"
QUANTISER = """
def sglang_per_token_group_quant_fp8(*args, **kwargs):
    raise AssertionError("nothing is launched")
"""
PRODUCT = """
import torch
import triton
import triton.language as tl


@triton.jit
def scaled_product(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, out_ptr, M, N, K, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    scale = tl.load(x_scale_ptr) * tl.load(w_scale_ptr)
    total = tl.load(x_ptr + at).to(tl.float32) * tl.load(w_ptr + at).to(tl.float32) * scale
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < M * N * K)


def get_w8a8_block_fp8_configs(N, K, block_n, block_k):
    return {16: {"BLOCK": 16}, 64: {"BLOCK": 64}}


def w8a8_block_fp8_matmul_triton(x, w, x_scale, w_scale, block, dtype):
    assert list(block) == [128, 128]
    assert (w.shape[1], x_scale.shape[1], w_scale.shape[1]) == (x.shape[1], x.shape[1] // 128, x.shape[1] // 128)
    configs = get_w8a8_block_fp8_configs(*w.shape, *block)
    config = configs[min(configs, key=lambda m: abs(m - x.shape[0]))]
    out = x.new_empty(x.shape[0], w.shape[0], dtype=dtype)
    scaled_product[(1,)](x, w, x_scale, w_scale, out, *x.shape, w.shape[0], **config)
    return out
"""


def _stand_in(folder: Path, kernel: str) -> None:
    """A package `sglang` with the functions that a pair calls, in a folder; `kernel`: the name of the Triton kernel."""
    for module, source in (
        ("sglang/kernels/ops/gemm/fp8_kernel.py", PRODUCT.replace("scaled_product", kernel)),
        ("sglang/kernels/ops/quantization/fp8_kernel.py", QUANTISER),
    ):
        path = folder / module
        path.parent.mkdir(parents=True)
        path.write_text(source)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of the stand-in is left for other tests, also where a command adds its folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    engine_functions._import_module.cache_clear()


@pytest.fixture
def sglang_like(tmp_path: Path, no_trace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in in this process."""
    _stand_in(tmp_path, "scaled_product")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


def _problems(*items: tuple[int, int, int], family: Family = FAMILY) -> list[Problem]:
    words = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return InlineShapes(items=[[*item] for item in items]).problems(family, words, H200.gfx)


def _build(kernel: str, number: int) -> Build:
    return Build(kernel=kernel, source_hash="", signature=(), constants=(("number", number),), aligned=(), options=())


def test_a_kernel_of_nvcc_is_more_work_than_one_of_triton() -> None:
    """In a comparison 336 kernels of DeepGEMM took 1,171 s of 31 compilers, before its first result."""
    builds = [_build("triton", i) for i in range(10)] + [_build("nvcc", i) for i in range(10)]
    work = BuildsWork(builds)
    assert (work.share, work.left) == (0, 20)
    for build in builds[:10]:
        work.receive(BuildResult(build=build, facts=BuildFacts(compile_s=1.0)))
    work.receive(BuildResult(build=builds[10], facts=BuildFacts(compile_s=9.0)))
    assert work.share == pytest.approx((10 * 1 + 9) / (10 * 1 + 10 * 9))
    work.receive(BuildResult(build=_build("another stage's", 0), facts=BuildFacts(compile_s=9.0)))
    assert work.left == 9
    for build in builds[11:]:
        work.receive(BuildResult(build=build, facts=BuildFacts(compile_s=9.0)))
    assert (work.share, work.left) == (1, 0)


def test_the_calls_of_one_product_are_in_one_process(tmp_path: Path, no_words: KernelDefaults) -> None:
    problems = _problems((1, 256, 512), (64, 256, 512), (1, 512, 256))
    entries = {problem: [TRITON, DEEPGEMM] for problem in problems}
    pool = type("Pool", (), {"compile_slots": 15})()
    given = {"implementations": (SglangPair(),), "pool_or_none": pool}
    tasks = engine_tasks(entries, stage_context(tmp_path, FAMILY, no_words, H200, **given))
    assert sorted([(spec.m, spec.n, knobs["product"]) for spec, knobs in task.calls] for task in tasks) == [
        [(1, 256, "triton"), (64, 256, "triton")],
        [(1, 512, "triton")],
    ]
    assert engine_tasks(entries, stage_context(tmp_path / "cpu", FAMILY, no_words, cpu_device(), **given)) == []


def test_an_engines_function_is_compiled_with_the_configuration_that_it_looks_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang_like: None
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    calls = [
        (FAMILY.spec(problem), TRITON.knobs) for problem in _problems((1, 256, 512), (16, 256, 512), (64, 256, 512))
    ]
    failing = (calls[0][0], DEEPGEMM.knobs)
    assert CompileCalls(implementation=SglangPair(), device=H200, calls=[failing, *calls])() == 3
    assert len(list((tmp_path / "cache").glob("*/scaled_product.cubin"))) == 3, "M = 1, 16 and 64"
    family = load_family("a8w8_blockscale")
    (problem,) = _problems((64, 128, 1024), family=family)
    task = CompileCalls(implementation=SglangFunction(), device=H200, calls=[(family.spec(problem), {})])
    assert task() == 1
    assert SglangFunction().compiles_when_called(family.spec(problem), {})


@pytest.mark.e2e
def test_a_comparison_compiles_engines_functions_before_its_finals(
    folder: Path, own_locks: None, no_trace: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """And says what of it is done, and how long the finals take."""
    shutil.copytree(MODELLED, folder / "config")
    _stand_in(folder / "config", "compared_product")
    cache = Path(os.environ["TRITON_CACHE_DIR"])  # that of the session, which the compile processes have
    words = (
        f"--config-dir={folder / 'config'}",
        "kernel=linear_fp8_blockscale",
        "shapes=list",
        "shapes.items=[{M: [16, 64], N: 256, K: 512}]",
        "executor=modelled",
        "backend=[triton,weight_only,engine_pairs]",
        "events=json",
        "hydra.run.dir=run",
    )
    assert main(["compare", *words]) == 0
    assert len(list(cache.glob("*/compared_product.cubin"))) == 2, "modelled workers launch nothing"
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    finals = next(i for i, event in enumerate(events) if event["event"] == "step" and event["text"] == "bench")
    before = [event for event in events[:finals] if event.get("stage") == "lineup"]
    assert (before[-1]["done"], before[-1]["total"]) == (3, 3), "two builds, and the calls of one product"
    assert before[-1]["left_s"] > 10, "the finals, in which a worker imports the engine"
    stated = [event["left_s"] for event in events if event.get("stage") == "bench" and event.get("left_s")]
    assert stated[0] > 10, "as the finals expect it"
    trials = [json.loads(line) for line in Path("run/trials.jsonl").read_text().splitlines()]
    timed = {row["candidate"] for row in trials if row["row"] == "trial" and row["status"] == "ok"}
    assert TRITON.id in timed
