"""The plug-in for vLLM against real vLLMs: their sources, and their layers on a CPU.

`.ci/contract VERSION ...` downloads the versions and names their folder in VLLM_CONTRACT; without it these tests are
skipped, but for those of the checker itself.
"""

from pathlib import Path

import pytest
from contract import EXPECTED, Expected, broken, check
from contract_program import FOLDER, downloaded, results

PROGRAM = "_vllm_program.py"
VERSIONS = downloaded("[0-9]*")
INSTALLED = pytest.mark.skipif(not VERSIONS, reason="VLLM_CONTRACT names no folder: .ci/contract VERSION ...")
BY_VERSION = [
    pytest.param(version, marks=[pytest.mark.contract, pytest.mark.e2e, INSTALLED]) for version in VERSIONS or ["none"]
]
SOURCE = """
from elsewhere import imported
LIST: dict[str, int] = {"CUDA": 1}
class Kernel(Base, ABC):
    field: int = 3
    def apply(self, A, B, *, last=None, **kwargs):
        return self.product(A)
def choose(config, possible, extra=None, *, quantization): ...
"""


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (Expected(module="m.a", name="imported"), ""),
        (Expected(module="m.a", name="LIST", contains="CUDA"), ""),
        (Expected(module="m.a", name="LIST", contains="ROCM"), "m.a.LIST: does not contain ROCM"),
        (Expected(module="m.a", name="Kernel", bases="Base", fields="field apply"), ""),
        (Expected(module="m.a", name="Kernel", bases="Other"), "m.a.Kernel: bases Base ABC, expected Other"),
        (Expected(module="m.a", name="Kernel", fields="other"), "m.a.Kernel: no other"),
        (Expected(module="m.a", name="Kernel.apply", parameters="self A B last kwargs", contains="self.product"), ""),
        (Expected(module="m.a", name="Kernel.apply", parameters="self A"), "m.a.Kernel.apply: parameters self A B"),
        (Expected(module="m.a", name="choose", parameters="config possible *"), ""),
        (Expected(module="m.a", name="choose", parameters="possible *"), "m.a.choose: parameters config, expected"),
        (Expected(module="m.a", name="LIST", parameters=""), "m.a.LIST: no function"),
        (Expected(module="m.a", name="gone"), "m.a.gone: not defined"),
        (Expected(module="m.b", name="gone"), "m.b: no such module"),
    ],
)
def test_the_checker(tmp_path: Path, expected: Expected, reason: str) -> None:
    (tmp_path / "m" / "a").mkdir(parents=True)
    (tmp_path / "m" / "a" / "__init__.py").write_text(SOURCE)
    found = broken(expected, tmp_path)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert len(check(tmp_path)) == len(EXPECTED)


@pytest.mark.parametrize("version", BY_VERSION)
def test_sources(version: str) -> None:
    assert check(Path(FOLDER) / version) == []


STEPS = {"1": "exact", "16": "exact", "9": "padded", "40": "engine"}
"""M -> step: the tables have rows for 1 and 16."""


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize("case", ["block_linear", "row_linear", "bf16_linear"])
def test_linear_layers_dispatch_by_m_and_are_right(version: str, case: str) -> None:
    found = results(PROGRAM, version)[case]
    assert {m: step for m, (_, step) in found["steps"].items()} == STEPS
    for kind in ("steps", "reloaded", "replaced"):
        assert all(error < 0.05 for error, *_ in found.get(kind, {}).values()), kind  # fp8 rounds by up to 6 %
    assert found["name"].startswith("vllm ")


@pytest.mark.parametrize("version", BY_VERSION)
def test_kernels_are_combined_with_vllms_choice(version: str) -> None:
    found = results(PROGRAM, version)
    assert found["block_linear"]["kernel"][:2] == ["GemmpipeTritonFp8BlockScaledMMKernel", "GemmpipeFp8BlockKernel"]
    assert found["row_linear"]["kernel"][1] == "GemmpipeFp8RowKernel"
    ours, none = found["forced_backend"]["auto"]
    assert ours.startswith("Gemmpipe")
    assert none == "TritonFp8BlockScaledMMKernel"  # no rows for its sizes
    assert found["forced_backend"]["triton"] == ["TritonFp8BlockScaledMMKernel"] * 2


@pytest.mark.parametrize("version", BY_VERSION)
def test_a_kernel_that_quantises_activations_itself(version: str) -> None:
    found = results(PROGRAM, version)["quantising_linear"]
    assert found["kernel"][:2] == ["GemmpipeQuantising", "GemmpipeFp8BlockKernel"]
    assert all(error < 0.05 for error, *_ in found["steps"].values())


@pytest.mark.parametrize("version", BY_VERSION)
def test_deepgemms_scales_are_read_by_both(version: str) -> None:
    found = results(PROGRAM, version)["deepgemm_linear"]
    assert found["kernel"][:2] == ["GemmpipeDeepGemmFp8BlockScaledMMKernel", "GemmpipeFp8BlockKernel"]
    assert found["isinstance"]
    assert found["power_of_two"]
    assert {m: step for m, (_, step) in found["steps"].items()} == STEPS
    assert all(error < 0.08 for error, _ in found["steps"].values())  # weights and activations are rounded once more
    assert found["against_library"] < 0.005  # the same operands, rounded to bf16
    assert found["library"] == 2


@pytest.mark.parametrize("version", BY_VERSION)
def test_compiled_layers_have_one_operator(version: str) -> None:
    for found in results(PROGRAM, version)["compiled"].values():
        assert found["operators"] == ["gemmpipe.engine_product"]
        assert found["errors"] == [0, 0, 0]


@pytest.mark.parametrize("version", BY_VERSION)
def test_fusion_passes_put_our_quantisers_into_graphs(version: str) -> None:
    """With the results of vLLM's own, and without its copy of the residual, an input of the graph."""
    found = results(PROGRAM, version)["quantisers"]
    names = ("per_token_group_fp8_quant", "rms_norm_per_block_quant_out", "silu_and_mul_per_block_quant")
    assert found["operators"] == [f"gemmpipe.{name}" for name in names]
    assert found["errors"] == found["engine_errors"]
    assert max(found["errors"]) < 0.05
    assert (found["copies"], found["engine_copies"]) == (0, 1)


@pytest.mark.parametrize("version", BY_VERSION)
def test_experts(version: str) -> None:
    found = results(PROGRAM, version)["experts"]
    for name, limit in (("bf16", 0.01), ("fp8", 0.1)):
        tuned, other = found[f"{name} 4"], found[f"{name} 7"]
        assert (tuned["engine"], tuned["steps"]) == (False, ["exact"])
        assert tuned["error"] < limit
        assert (other["engine"], other["steps"]) == (True, ["engine"])
        assert tuned["deferred"] == other["deferred"] == (name == "fp8")


KINDS = {"bf16": ("column", "merged", "qkv", "row"), "fp8": ("column", "merged", "row")}
LIMITS = {"bf16": 0.005, "fp8": 0.05}
"""The norm of the error over that of the result: bf16 rounds by up to 0.4 %, fp8 by up to 6 %."""


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_ranks_of_tensor_parallelism(version: str, dtype: str) -> None:
    """Tables have rows for a rank's sizes alone; a row-parallel layer is reduced once, with one rank's bias."""
    for kind in KINDS[dtype]:
        found = results(PROGRAM, version)["tensor_parallel"][f"{kind} {dtype}"]
        assert [(rank, m) for rank, m, *_ in found] == [(rank, m) for rank in (0, 1) for m in (16, 9, 40)]
        for _, m, step, wrong, reduced in found:
            assert step == STEPS[str(m)], kind
            assert wrong < LIMITS[dtype], kind
            assert reduced == (kind == "row")


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_lora_over_layers_with_rows(version: str, dtype: str) -> None:
    """vLLM's wrappers: half of the tokens have an adapter, in the steps of a decode and of a prefill."""
    for kind in ("replicated", *KINDS[dtype]):
        found = results(PROGRAM, version)["lora"][f"{kind} {dtype}"]
        assert [step for _, step, _ in found] == [STEPS[str(m)] for m in (16, 16, 9, 40)], kind
        assert all(wrong < LIMITS[dtype] for *_, wrong in found), kind


@pytest.mark.parametrize("version", BY_VERSION)
def test_weights_reloaded_by_vllm(version: str) -> None:
    """Twice, layer by layer, into the same memory: captured graphs stay valid."""
    for name, found in results(PROGRAM, version)["layerwise_reload"].items():
        limit = LIMITS["fp8" if "True" in name else "bf16"]
        assert found["same_memory"], name
        assert all(wrong < limit for wrong in found["errors"]), name


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize("kind", ["blocks", "rows", "bf16"])
def test_weights_that_sleep(version: str, kind: str) -> None:
    """Their memory is released and made again elsewhere: nothing holds a tensor, an address or a form of them."""
    found = results(PROGRAM, version)["sleep"][kind]
    assert found["steps"] == ["exact"]
    assert all(wrong < LIMITS["fp8"] for wrong in found["errors"])
    assert (found["held"], found["alive"], found["forms"]) == (0, 0, 0)
    assert results(PROGRAM, version)["quantisers_hold_nothing"]["alive"] == 0


@pytest.mark.parametrize("version", BY_VERSION)
def test_nothing_is_looked_up_while_weights_are_loaded(version: str) -> None:
    found = results(PROGRAM, version)["loading"]
    assert [steps for steps, _ in found.values()] == [[], ["exact"]]
    assert all(wrong < LIMITS["bf16"] for _, wrong in found.values())


@pytest.mark.parametrize("version", BY_VERSION)
def test_experts_that_sleep_have_lora_or_are_spread(version: str) -> None:
    states = results(PROGRAM, version)["experts_states"]
    for name, limit in (("bf16", 0.01), ("fp8", 0.1)):
        found = states[name]
        assert found["engine"] == [False] * 3
        assert all(wrong < limit for wrong in found["errors"])
        assert (found["held"], found["alive"]) == (0, 0)
        assert found["lora"] == [True] * 3, "vLLM's own kernels add the adapters"
        assert found["spread"] == [True] * 6
    reasons = ("LoRA", "experts are spread over devices")
    assert states["lines"] == [f"gemmpipe: left to the engine: experts: {reason}" for reason in reasons]


@pytest.mark.parametrize("version", BY_VERSION)
def test_the_compile_cache_depends_on_the_plug_in_and_its_tables(version: str) -> None:
    found = results(PROGRAM, version)["cache_key"]
    assert found["installed"] == found["again"]
    for which in (0, 1):  # of pieces, and of models compiled ahead of time
        assert len({found[name][which] for name in ("installed", "changed", "removed")}) == 3


@pytest.mark.parametrize("version", BY_VERSION)
def test_start_lines(version: str) -> None:
    taken, forced = results(PROGRAM, version)["start_lines"]["lines"]
    assert "takes over linear bf16 (4 rows for 2 sizes), linear fp8 by blocks" in taken
    assert "takes over nothing" in forced
    assert "(linear_backend=cutlass), experts (moe_backend=triton)" in forced
