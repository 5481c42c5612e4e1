"""Fused experts of few rows on the CUDA cores, without a GPU: knobs, Triton's interpreter, builds."""

import json

import pytest
from interpreter_process import INTERPRETED, Interpreter
from moe_problems import FMOE, QWEN, shipped_space, spec_of
from pairwise import SLOW, few

from gemmpipe.core.data import Scalar
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.kernels.fmoe import aiter_cells
from gemmpipe.kernels.fmoe._skinny import SkinnyExperts
from gemmpipe.launch.build import compile_build

KNOBS: dict[str, Scalar] = {"BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 512, "num_warps": 4, "num_stages": 1}
NAMES = ("token", "model_dim", "inter_dim", "expert", "topk")


def kernel() -> SkinnyExperts:
    found = next(each for each in FMOE.implementations if each.label == "skinny")
    assert isinstance(found, SkinnyExperts)
    return found


def _case(sizes: tuple[int, ...], columns: int, depth: int, **case: object) -> dict[str, object]:
    key = dict(zip(NAMES, sizes, strict=True)) | case.pop("key", {})  # type: ignore[operator]
    return {"family": "fmoe", "label": "skinny", "key": key, "knobs": [1, columns, depth], **case}


CASES = [
    _case((1, 64, 64, 4, 2), 4, 64),
    _case((3, 80, 40, 9, 3), 16, 32),
    _case((3, 72, 40, 3, 3), 16, 128, more={"BLOCK_SIZE_N_2": 32, "BLOCK_SIZE_K_2": 32, "num_stages_2": 1}),
    _case((2, 40, 14, 3, 2), 2, 32, dtype="float16", key={"act_type": "gelu"}),
    _case((3, 80, 40, 5, 1), 8, 32, dtype="float16", key={"use_g1u1": 0}),
    _case((3, 64, 48, 4, 2), 32, 32, key={"doweight_stage1": 1}),
    _case((2, 256, 128, 4, 2), 64, 128, dtype="fp8"),
    _case((2, 200, 192, 3, 2), 32, 128, dtype="fp8"),
    _case((2, 200, 168, 4, 2), 64, 64, dtype="fp8", key={"doweight_stage1": 1}),
    _case((2, 112, 72, 4, 2), 16, 64, dtype="fp8", key={"q_type": "per_token", "act_type": "gelu"}),
]
LONG_CASES = [
    _case((5, 72, 56, 3, 3), 8, 128, more={"BLOCK_SIZE_N_2": 16, "BLOCK_SIZE_K_2": 32, "num_stages_2": 1}),
    _case((4, 80, 40, 5, 2), 2, 32, dtype="float16", key={"act_type": "gelu"}),
    _case((3, 256, 128, 4, 2), 8, 128, dtype="fp8"),
    _case((2, 200, 192, 4, 2), 16, 64, dtype="fp8"),
    _case((2, 240, 168, 4, 2), 4, 64, dtype="fp8", key={"q_type": "per_token", "act_type": "gelu"}),
]
"""The same with many programs: narrow tiles, more rows."""


@INTERPRETED
@pytest.mark.parametrize("case", few([*CASES, *LONG_CASES], 2, 4, 5, 6, 9))
def test_matches_the_reference_under_the_interpreter(interpreter: Interpreter, case: dict[str, object]) -> None:
    result = interpreter.run("kernel", case)
    assert result["reason"] is None
    assert result["error"] < 1e-3
    assert result["same"], "two runs differ"


@INTERPRETED
@pytest.mark.parametrize(
    ("ids", "dtype"),
    few(
        [
            ([[0, 0], [2, 0], [2, 2]], None),  # a row with the same expert twice, experts without rows
            ([[0, 0], [2, 0], [2, 2]], "fp8"),
            ([[5, 1], [-1, 4], [-1, 5]], None),  # experts of another rank: below 0, or from 5 on; a row without any
            ([[5, 1], [-1, 4], [-1, 5]], "fp8"),
        ],
        0,
        3,
    ),
)
def test_any_routing(interpreter: Interpreter, ids: list[list[int]], dtype: str | None) -> None:
    result = interpreter.run("kernel", _case((3, 80, 40, 5, 2), 32, 64, dtype=dtype, ids=ids))
    assert result["error"] < 1e-3


def test_equivalent_knobs_are_one_candidate() -> None:
    spec, device = spec_of((1, *QWEN[1:])), arch_device("sm_90")
    plain = kernel().normalise(spec, KNOBS, device)
    others = {"BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 8, "FUSED_ACT": True, "BLOCK_SIZE_N_2": 4, "num_warps_2": None}
    assert kernel().normalise(spec, {**KNOBS, **others}, device) == plain
    apart = kernel().normalise(spec, {**KNOBS, "BLOCK_SIZE_N_2": 8}, device)
    assert kernel().normalise(spec, apart, device) == apart
    names = [kernel().kernel_name(knobs).split("@")[0] for knobs in (plain, apart)]
    assert names == ["skinny", "skinny_apart"]
    cells = aiter_cells({"config": json.dumps(apart), "kernelName": "skinny_apart@3fa9"})
    assert (cells["block_m"], cells["kernelName1"]) == (1, "skinny1_1x4x512_w4_s1@3fa9")
    assert cells["kernelName2"] == "skinny2_1x8x512_w4_s1@3fa9"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"BLOCK_SIZE_N": 3}, "power of two"),
        ({"BLOCK_SIZE_K_2": 4}, "minimum tile"),
        ({"BLOCK_SIZE_N": 64}, "registers"),
        ({"cache_modifier": ".cs"}, "cache modifier"),
    ],
)
def test_reasons_name_their_rule(changes: dict[str, Scalar], rule: str) -> None:
    spec, device = spec_of((1, *QWEN[1:])), arch_device("sm_90")
    assert kernel().unsupported_reason(spec, kernel().normalise(spec, KNOBS, device), device) is None
    reason = kernel().unsupported_reason(spec, kernel().normalise(spec, {**KNOBS, **changes}, device), device)
    assert str(reason).split(":")[0] == rule
    assert str(kernel().unsupported_reason(spec, kernel().normalise(spec, KNOBS, device), cpu_device())).startswith(
        "no GPU"
    )


@pytest.mark.parametrize(
    ("sizes", "few"), [((4, 2048, 512, 512, 10), True), ((64, 2048, 512, 512, 10), False), ((4, 64, 64, 2, 2), False)]
)
def test_is_for_rows_that_hardly_share_experts(sizes: tuple[int, ...], few: bool) -> None:
    spec, device = spec_of(sizes), arch_device("sm_90")
    reason = kernel().dominated_reason(spec, kernel().normalise(spec, KNOBS, device), device)
    assert (reason is None) == few


@pytest.mark.parametrize(("gfx", "own"), [("sm_90", True), ("gfx942", False)])
def test_untuned_few_rows_run_it_where_it_was_measured(gfx: str, own: bool) -> None:
    device = arch_device(gfx)
    few, many = spec_of((1, *QWEN[1:]), gfx), spec_of(QWEN, gfx)
    plain = FMOE.implementations[0]
    assert (kernel().default_config(few, device) is not None) == own
    assert (plain.default_config(few, device) is None) == own
    assert kernel().default_config(many, device) is None
    assert plain.default_config(many, device) is not None
    knobs = kernel().default_config(few, arch_device("sm_90"))
    assert knobs is not None
    assert kernel().unsupported_reason(few, knobs, device) is None


@pytest.mark.parametrize("gfx", ["sm_90", "sm_100", "gfx942"])
def test_the_space_has_it_for_few_rows(gfx: str) -> None:
    device, counts = arch_device(gfx), []
    for sizes in ((1, 2048, 768, 128, 8), (16, 2048, 512, 512, 10), QWEN):
        spec = spec_of(sizes, gfx)
        points = [kernel().normalise(spec, p, device) for p in kernel().configs(spec, device, shipped_space("fmoe"))]
        fit = {tuple(sorted(p.items())) for p in points if kernel().unsupported_reason(spec, p, device) is None}
        assert all(set(knobs) <= set(kernel().knob_names(spec, device)) for knobs in points)
        counts.append(len(fit))
    assert counts[0] == counts[1]
    assert 20 <= counts[0] < 60
    assert counts[2] == 0


TYPES = ((None, {"act_type": "gelu"}), ("fp8", {}), ("fp8", {"q_type": "per_token"}))


@pytest.mark.parametrize(
    ("gfx", "dtype", "key"),
    [
        pytest.param(gfx, *TYPES[number], marks=() if (gfx, number) in {("sm_90", 2)} else SLOW)
        for gfx in ("sm_90", "gfx942")
        for number in range(len(TYPES))
    ],
)
def test_compiles_without_a_gpu(gfx: str, dtype: str | None, key: dict[str, object]) -> None:
    spec, device = spec_of((1, 2048, 760, 128, 8), gfx, dtype, key), arch_device(gfx)
    knobs = kernel().normalise(spec, {**KNOBS, "BLOCK_SIZE_K_2": 256, "num_stages_2": 2}, device)
    assert kernel().unsupported_reason(spec, knobs, device) is None
    for build in kernel().builds(spec, knobs, device):
        assert dict(build.constants)["OVERLAP"] == (gfx == "sm_90")
        facts = compile_build(build, device)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= device.shared_bytes
        assert not facts.spills
