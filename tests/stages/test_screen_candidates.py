"""Listing candidates: the same result in another process, and the counts of excluded ones."""

from functools import partial

import pytest
from moe_problems import shipped_space

from gemmpipe.backends import Backend
from gemmpipe.backends.aten import Torch
from gemmpipe.backends.cublaslt import CublasLt
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.engine_function import VllmFunction
from gemmpipe.backends.engine_pair import SglangPair, VllmPair
from gemmpipe.backends.flashinfer import FlashInfer
from gemmpipe.backends.hipblaslt import HipblasLt
from gemmpipe.backends.own import Own
from gemmpipe.backends.quack import Quack
from gemmpipe.backends.vllm_cutlass import VllmCutlass
from gemmpipe.core.data import Device
from gemmpipe.core.device import cpu_device
from gemmpipe.executors.compile_pool import CompilePool
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.space import Space
from gemmpipe.runtime.select import fallback_candidates
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages.screen.candidates import SpaceReport, list_by_family_name, list_candidates

AXES = {
    "BLOCK_SIZE_M": (16, 64),
    "BLOCK_SIZE_N": (64,),
    "BLOCK_SIZE_K": (128,),
    "GROUP_SIZE_M": (1,),
    "NUM_KSPLIT": (1, 4),
    "num_warps": (4,),
    "num_stages": (3,),
    "waves_per_eu": (0,),
    "matrix_instr_nonkdim": (16,),
    "kpack": (1,),
    "cache_modifier": ("",),
    "kernel_type": ("plain", "warp_specialised"),
    "SWAP_AB": (False,),
}


@pytest.mark.e2e
def test_another_process_lists_the_same(h200: Device, no_words: KernelDefaults) -> None:
    family = load_family("a8w8_blockscale")
    [problem] = InlineShapes(items=[[16, 1280, 8192]]).problems(family, no_words, h200.gfx)
    known = [i for b in (Own(label="triton"), Own(label="gluon"), Torch()) for i in b.implementations(family)]
    rest = (known, h200, Space(axes=AXES, when=(), pinned=()), ())
    local = list_candidates(problem, family, *rest)
    compilers = CompilePool(h200, 1, 60.0, ())
    try:
        remote = compilers.submit_task(partial(list_by_family_name, problem, family.name, *rest)).result(timeout=600)
    finally:
        compilers.close(kill=True)
    assert remote == local
    assert {b.id for builds in remote.builds.values() for b in builds} == {
        b.id for builds in local.builds.values() for b in builds
    }
    assert len(local.candidates) > 2
    assert local.summary.excluded["candidate"]


@pytest.mark.parametrize(("m", "own"), [(1, True), (16, False)])
def test_the_own_kernel_that_runs_without_a_row_is_always_timed(
    m: int, own: bool, h200: Device, no_words: KernelDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row must not be slower than none; from three rows on a library runs then, and libraries are always timed."""
    family = load_family("a16w16")
    for implementation in family.implementations:
        monkeypatch.setattr(type(implementation), "unavailable", lambda self, device: None)  # as on the GPU
    [problem] = InlineShapes(items=[[m, 1280, 8192]]).problems(family, no_words, h200.gfx)
    found = next(fallback_candidates(family, family.spec(problem), h200)).candidate
    listed = [i for label in ("triton", "streamed", "skinny") for i in Own(label=label).implementations(family)]
    summary = list_candidates(problem, family, listed, h200, shipped_space("a16w16"), ()).summary
    assert summary.default == (found if own else None)
    assert (found in summary.required) == own


def test_an_unavailable_backend_is_reported_once(no_words: KernelDefaults) -> None:
    family, device = load_family("a16w16"), cpu_device()
    problems = InlineShapes(items=[[16, 64, 64], [32, 64, 64]]).problems(family, no_words, device.gfx)
    backends = (CublasLt(), HipblasLt(), Torch())
    report = SpaceReport()
    space = Space(axes={}, when=(), pinned=())
    for problem in problems:
        report.add(list_candidates(problem, family, backends, device, space, ()).summary.report)
    assert [line.partition("; also, ")[0] for line in report.lines()[-2:]] == [
        "  none of cublaslt: no NVIDIA GPU: cuBLASLt computes on NVIDIA GPUs only",
        "  none of hipblaslt: no AMD GPU: hipBLASLt computes on AMD GPUs only",
    ]


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        (DeepGemm(), "a16w16"),
        (FlashInfer(), "a16w16"),
        (VllmCutlass(), "a16w16"),
        (VllmFunction(), "a16w16"),
        (VllmPair(), "a16w16"),
        (SglangPair(), "a8w8_blockscale"),
        (Quack(), "a8w8_blockscale"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_a_form_that_a_backend_never_computes_is_its_reason(
    backend: Backend, family: str, no_words: KernelDefaults
) -> None:
    """Neither a device nor a package changes it, and installing one is work for nothing."""
    loaded, device = load_family(family), cpu_device()
    [problem] = InlineShapes(items=[[16, 128, 256]]).problems(loaded, no_words, device.gfx)
    space = Space(axes={}, when=(), pinned=())
    report = list_candidates(problem, loaded, (backend,), device, space, ()).summary.report
    form = backend.form_violation(loaded.spec(problem))
    assert form
    assert report.missing == {backend.label: f"not for this product: {form}"}
    assert report.fitting == set()


def test_reports_of_problems_add_up() -> None:
    both, one = SpaceReport(configs=4, normalised=3), SpaceReport(configs=2, normalised=2)
    one.excluded_by["triton: too large"] += 2
    both.add(one)
    assert both.lines() == [
        "space: 6 configurations over all problems",
        "  6 -> 5  duplicates after normalisation",
        "  5 -> 3  triton: too large",
    ]
