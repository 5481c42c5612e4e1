"""Fused experts that find their pairs in the routing, without a GPU: knobs, Triton's interpreter, builds."""

import pytest
from interpreter_process import INTERPRETED, Interpreter
from moe_problems import FMOE, NAMES, QWEN, spec_of

from gemmpipe.core.data import Scalar
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.kernels.fmoe._unsorted import UnsortedExperts
from gemmpipe.launch.build import compile_build

KNOBS: dict[str, Scalar] = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 3}


def kernel() -> UnsortedExperts:
    found = next(each for each in FMOE.implementations if each.label == "unsorted")
    assert isinstance(found, UnsortedExperts)
    return found


def _case(sizes: tuple[int, ...], tile: list[int], **case: object) -> dict[str, object]:
    key = dict(zip(NAMES, sizes, strict=True)) | case.pop("key", {})  # type: ignore[operator]
    return {"family": "fmoe", "label": "unsorted", "key": key, "knobs": tile, **case}


CASES = [
    _case((16, 64, 64, 4, 2), [16, 32, 32]),  # more pairs than experts, and more rows than a block
    _case((5, 64, 48, 20, 2), [16, 32, 32]),  # fewer
    _case((1, 80, 40, 9, 3), [16, 32, 32], more={"BLOCK_SIZE_N_2": 64}),
    _case((17, 80, 40, 5, 2), [16, 32, 32], dtype="float16", key={"act_type": "gelu"}),
    _case((33, 80, 40, 5, 3), [32, 32, 32], dtype="float16", key={"use_g1u1": 0}),
    _case((9, 64, 48, 4, 1), [16, 32, 32], key={"doweight_stage1": 1}),
    _case((9, 256, 128, 4, 2), [16, 64, 64], dtype="fp8"),
    _case((7, 200, 192, 4, 2), [16, 64, 64], dtype="fp8"),
    _case((9, 256, 128, 40, 2), [16, 128, 128], dtype="fp8", more={"BLOCK_SIZE_K_2": 64}),
    _case((9, 240, 168, 4, 2), [16, 64, 64], dtype="fp8", key={"q_type": "per_token", "act_type": "gelu"}),
]


@INTERPRETED
@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference_under_the_interpreter(interpreter: Interpreter, case: dict[str, object]) -> None:
    result = interpreter.run("kernel", case)
    assert result["misfit"] is None
    assert result["error"] < (0.04 if case.get("dtype") == "fp8" else 1e-3)
    assert result["same"], "two runs differ"


@INTERPRETED
@pytest.mark.parametrize(
    "ids",
    [
        [[0, 0], [2, 0], [2, 2]],  # a row with the same expert twice, experts without rows
        [[5, 1], [-1, 4], [-1, 5]],  # experts of another rank: below 0, or from 5 on; a row without any
        [[7, 7]] * 3,  # no expert here at all
        [[1, 1]] * 20,  # one expert with several blocks of rows
    ],
)
@pytest.mark.parametrize("experts", [5, 44])
def test_any_routing(interpreter: Interpreter, ids: list[list[int]], experts: int) -> None:
    result = interpreter.run("kernel", _case((len(ids), 80, 40, experts, 2), [16, 32, 32], ids=ids))
    assert result["error"] < 1e-3


def test_equivalent_knobs_are_one_candidate() -> None:
    spec, device = spec_of(QWEN), arch_device("sm_90")
    plain = kernel().normalise(spec, KNOBS, device)
    others = {"GROUP_SIZE_M": 8, "FUSED_ACT": True, "BLOCK_SIZE_N_2": 64, "num_warps_2": None, "kpack": 2}
    assert kernel().normalise(spec, {**KNOBS, **others}, device) == plain
    apart = kernel().normalise(spec, {**KNOBS, "BLOCK_SIZE_N_2": 128}, device)
    assert kernel().normalise(spec, apart, device) == apart
    assert [kernel().kernel_name(k).split("@")[0] for k in (plain, apart)] == ["unsorted", "unsorted_apart"]


@pytest.mark.parametrize(
    ("token", "dtype", "changes", "rule"),
    [
        (256, None, {}, "pairs"),
        (64, None, {"BLOCK_SIZE_N": 48}, "power of two"),
        (64, None, {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128}, "registers"),
        (64, None, {"BLOCK_SIZE_K_2": 8}, "minimum tile"),
        (64, "fp8", {"BLOCK_SIZE_K": 256}, "scale group"),
        (64, "fp8", {"BLOCK_SIZE_K_2": 256}, "scale group"),
    ],
)
def test_reasons_name_their_rule(token: int, dtype: str | None, changes: dict[str, Scalar], rule: str) -> None:
    spec, device = spec_of((token, *QWEN[1:]), dtype=dtype), arch_device("sm_90")
    reason = kernel().unsupported_reason(spec, kernel().normalise(spec, {**KNOBS, **changes}, device), device)
    assert str(reason).split(":")[0] == rule
    fit = spec_of(QWEN, dtype=dtype)
    assert kernel().unsupported_reason(fit, kernel().normalise(fit, KNOBS, device), device) is None
    assert str(kernel().unsupported_reason(fit, kernel().normalise(fit, KNOBS, device), cpu_device())).startswith(
        "no GPU"
    )


@pytest.mark.parametrize("gfx", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("dtype", "key"), [(None, {"act_type": "gelu"}), ("fp8", {}), ("fp8", {"q_type": "per_token"})]
)
def test_compiles_without_a_gpu(gfx: str, dtype: str | None, key: dict[str, object]) -> None:
    spec, device = spec_of((64, 2048, 768, 128, 8), gfx, dtype, key), arch_device(gfx)
    for changes in ({}, {"BLOCK_SIZE_N_2": 128, "num_stages": 2}):
        knobs = kernel().normalise(spec, {**KNOBS, "kpack": 1, **changes}, device)
        assert kernel().unsupported_reason(spec, knobs, device) is None
        for build in kernel().builds(spec, knobs, device):
            assert dict(build.constants)["OVERLAP"] == (gfx == "sm_90")
            facts = compile_build(build, device)
            assert facts.shared_bytes is not None
            assert facts.shared_bytes <= device.shared_bytes
            assert (facts.spills or 0) <= 8  # words, where ptxas stays at 128 registers
