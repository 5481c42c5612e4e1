"""The plug-in for SGLang in the layers of a real SGLang, on a CPU.

`.ci/contract sglang==VERSION ...` downloads the versions and names their folder in VLLM_CONTRACT; without it these
tests are skipped. Hooks on functions of both ends of the supported versions: test_sglang.py.
"""

import pytest
from contract_program import downloaded, results

PROGRAM = "_sglang_program.py"
VERSIONS = downloaded("sglang-*")
INSTALLED = pytest.mark.skipif(not VERSIONS, reason="no SGLang in VLLM_CONTRACT: .ci/contract sglang==VERSION ...")
BY_VERSION = [
    pytest.param(version, marks=[pytest.mark.contract, pytest.mark.e2e, INSTALLED]) for version in VERSIONS or ["none"]
]
STEPS = {16: "exact", 9: "padded", 40: "engine"}
LIMITS = {"bf16": 0.005, "blocks": 0.08}
"""The norm of the error over that of the result; SGLang's quantiser cuts digits off in Triton's interpreter."""


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize("dtype", ["bf16", "blocks"])
def test_layers_of_one_rank_and_of_two(version: str, dtype: str) -> None:
    """By a rank's sizes, also after weights were loaded again; a row-parallel layer is reduced once, by SGLang."""
    found = results(PROGRAM, version)[dtype]
    assert set(found) == {"replicated", "column", "merged", "row"}
    for kind, report in found.items():
        assert len(report) == (6 if kind == "replicated" else 12)
        for _, m, step, wrong, reduced in report:
            assert step == STEPS[m], kind
            assert wrong < LIMITS[dtype], kind
            assert reduced == (kind == "row")


@pytest.mark.parametrize("version", BY_VERSION)
def test_scales_are_quantised_in_columns_for_deepgemm_and_read_there(version: str) -> None:
    """Columns are padded to a multiple of four rows; a single row has no gaps."""
    found = results(PROGRAM, version)["columns"]
    strides = {m: report[1] for m, report in found.items()}
    assert strides == {"16": [[1, 16]], "9": [[1, 12]], "1": [[3, 1]]}
    assert {m: report[0] for m, report in found.items()} == {"16": "exact", "9": "padded", "1": "exact"}
    for _, _, wrong, copied in found.values():
        assert wrong < LIMITS["blocks"]
        assert not copied


@pytest.mark.parametrize("version", BY_VERSION)
def test_lora_is_added_to_our_product(version: str) -> None:
    found = results(PROGRAM, version)["lora"]
    assert found["step"] == "exact"
    assert found["error"] < LIMITS["bf16"]


@pytest.mark.parametrize("version", BY_VERSION)
def test_the_benchmark_initialises_the_parallel_state(version: str) -> None:
    assert results(PROGRAM, version)["parallel_state"] == {"said": "1 process, gloo", "size": 1}
