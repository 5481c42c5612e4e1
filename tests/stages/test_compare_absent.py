"""Backends without a candidate in a comparison: each has a reason, and a GPU is named only where it would help."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gemmpipe.backends import NOT_THIS_PRODUCT, Backend
from gemmpipe.backends.aten import Torch
from gemmpipe.backends.autotune import Autotune
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.engine_function import VllmFunction
from gemmpipe.backends.engine_pair import SglangPair, VllmPair
from gemmpipe.backends.quack import Quack
from gemmpipe.backends.quantised_library import QuantisedLibrary
from gemmpipe.backends.same_size import SameSize
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.core.data import Device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.stages.compare.absent import NO_GPU, pair_violation
from gemmpipe.stages.compare.entries import other_entries
from gemmpipe.stages.screen.candidates import CandidateList, list_candidates

BACKENDS = (
    *(Torch(), ScaledMm(), QuantisedLibrary(), SameSize(), DeepGemm(), VllmFunction(), VllmPair(), SglangPair()),
    *(Quack(), Autotune(limit_s=1.0)),
)
EXPERTS = {"token": 4, "model_dim": 128, "inter_dim": 128, "expert": 8, "topk": 2}


@pytest.fixture
def cpu(h200: Device) -> Device:
    """A CPU without instructions of its own."""
    return replace(h200, kind="cpu", gfx="cpu_avx2", name="a CPU")


def _reasons(
    kernel: str, sizes: dict[str, int], dtype: str | None, device: Device, backends: Sequence[Any] = BACKENDS
) -> dict[str, str]:
    """By name, the reasons against the entries of backends without a candidate."""
    listing, context = _listed(kernel, sizes, dtype, device, backends)
    return {entry.name: entry.reason for entry in other_entries(listing, context) if entry.candidate is None}


def _listed(
    kernel: str, sizes: dict[str, int], dtype: str | None, device: Device, backends: Sequence[Any] = BACKENDS
) -> tuple[CandidateList, Any]:
    family = load_family(kernel)
    chosen = tuple(found for backend in backends for found in backend.implementations(family))
    by_label = {each.label: each for each in chosen}
    context = SimpleNamespace(
        family=family, device=device, implementations=chosen, implementation=by_label.get, space=None
    )
    problem = make_problem(family, sizes, KernelDefaults(dtype=dtype, out_dtype=None, bias=None), device.gfx, "case")
    listing = list_candidates(problem, family, chosen, device, Space(axes={}, when=(), pinned=()), ())
    return listing, context


def test_a_missing_package_is_the_reason_of_experts_that_list_no_candidate(cpu: Device, h200: Device) -> None:
    missing = "the package deep_gemm is not installed"
    assert _reasons("fmoe", EXPERTS, "fp8", cpu)["deepgemm"].startswith(missing)
    tiles = {name: why for name, why in _reasons("fmoe", EXPERTS, "fp8", h200).items() if name.startswith("deepgemm")}
    assert tiles
    assert all(why.startswith(missing) for why in tiles.values())


def test_a_gpu_is_no_reason_for_what_never_computes_experts(cpu: Device) -> None:
    reasons = _reasons("fmoe", EXPERTS, "fp8", cpu)
    for name in ("scaled_mm use_fast_accum=False", "quantised_library use_fast_accum=False", "quack"):
        assert reasons[name].startswith(f"{NOT_THIS_PRODUCT}: experts: one product at a time"), name
    pairs = [name for name in reasons if name.split(" ")[0] in ("vllm", "sglang")]
    assert len(pairs) >= 2
    assert all(reasons[name].startswith(f"{NOT_THIS_PRODUCT}: experts: ") for name in pairs)
    assert reasons["same_size rowwise"] == f"{NOT_THIS_PRODUCT}: shape: single products only"
    assert reasons["same_size empty"].startswith(NO_GPU), "an empty kernel is the floor of experts too"
    assert reasons["vllm_function"].startswith(NO_GPU), "vLLM has experts"
    assert "autotune" not in reasons, "it has an entry of its own"


def test_a_gpu_is_the_reason_for_what_computes_the_product_on_one(cpu: Device) -> None:
    dense = {"M": 4, "N": 128, "K": 256}
    reasons = _reasons("linear_fp8_row", dense, None, cpu)
    assert reasons["vllm cutlass"].startswith(NO_GPU)
    assert reasons["quantised_library use_fast_accum=False"].startswith(NO_GPU)
    assert reasons["sglang"] == f"{NOT_THIS_PRODUCT}: product: sglang has none for these operands"
    assert reasons["scaled_mm use_fast_accum=False"].startswith(f"{NOT_THIS_PRODUCT}: ")
    blocks = _reasons("a8w8_blockscale", dense, None, cpu)
    assert blocks["deepgemm"].startswith(NO_GPU)
    assert blocks["scaled_mm use_fast_accum=False"].startswith(NO_GPU), "sm_90 has such a product, others have none"


def test_an_engines_pair_is_no_candidate_for_experts(h200: Device) -> None:
    """Also where the engine is installed: its functions would be called with the weights of all experts."""
    listing, _ = _listed("fmoe", EXPERTS, "fp8", h200)
    for pair in (VllmPair(), SglangPair()):
        assert pair_violation(pair, listing.spec, h200) == "experts: one product at a time"
    assert pair_violation(DeepGemm(), listing.spec, h200) is None
    linear, _ = _listed("linear_fp8_blockscale", {"M": 4, "N": 128, "K": 256}, None, h200)
    assert pair_violation(SglangPair(), linear.spec, h200) is None


def test_an_error_in_a_backends_own_rules_is_no_rule(cpu: Device) -> None:
    class Raising(Backend):
        label = "raising"

        def unavailable(self, device: Device) -> str | None:
            return "no GPU: on purpose"

        def unsupported_reason(self, spec: Any, knobs: Any, device: Device) -> str | None:
            raise RuntimeError("on purpose")

        def bind(self, *args: Any) -> Any:
            raise NotImplementedError

    reasons = _reasons("a16w16", {"M": 4, "N": 128, "K": 256}, None, cpu, (Raising(),))
    assert reasons == {"raising": "no GPU: on purpose"}
