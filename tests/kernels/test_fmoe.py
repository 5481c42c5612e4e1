"""Fused experts without a GPU: keys, knobs, kernels under Triton's interpreter, library candidates, builds."""

import itertools

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from interpreter_process import INTERPRETED, Interpreter
from moe_problems import FMOE, NAMES, QWEN, shipped_space, spec_of
from pairwise import few

from gemmpipe.backends import library_backends
from gemmpipe.backends.aten import Torch
from gemmpipe.core.data import Candidate, Scalar
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family, moe
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.family.space import Space
from gemmpipe.kernels.fmoe._launch_plan import max_blocks
from gemmpipe.kernels.fmoe._triton import FusedExperts
from gemmpipe.launch.build import compile_build

ARCHES = ("sm_90", "sm_100", "gfx942", "gfx950")
KNOBS: dict[str, Scalar] = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 3}
NO_SPACE = Space(axes={}, when=(), pinned=())


def kernel() -> FusedExperts:
    found = FMOE.implementations[0]
    assert isinstance(found, FusedExperts)
    return found


def _case(sizes: tuple[int, ...], knobs: list[int], **case: object) -> dict[str, object]:
    key = dict(zip(NAMES, sizes, strict=True)) | case.pop("key", {})  # type: ignore[operator]
    return {"family": "fmoe", "key": key, "knobs": knobs, **case}


FUSED = {"FUSED_ACT": True}
OVERLAPPED = {"OVERLAP": True}
CASES = [
    _case((16, 64, 64, 4, 2), [16, 32, 32]),
    _case((5, 64, 48, 4, 2), [16, 32, 32], more=FUSED),
    _case((5, 64, 48, 4, 2), [16, 32, 32], more={"OVERLAP": True}),
    _case((1, 80, 40, 9, 3), [16, 32, 32], more={"BLOCK_SIZE_N_2": 64, "GROUP_SIZE_M_2": 1}),
    _case((17, 80, 40, 5, 2), [16, 32, 32], dtype="float16", key={"act_type": "gelu"}),
    _case((33, 80, 40, 5, 3), [32, 32, 32], dtype="float16", key={"use_g1u1": 0}, more=FUSED),
    _case((40, 64, 48, 3, 2), [16, 32, 32], key={"use_g1u1": 0, "act_type": "gelu"}),
    _case((9, 64, 48, 4, 1), [16, 32, 32], key={"doweight_stage1": 1}),
    _case((9, 64, 48, 4, 2), [16, 32, 32], key={"doweight_stage1": 1}, more=FUSED),
    _case((9, 256, 128, 4, 2), [16, 64, 64], dtype="fp8"),
    _case((7, 200, 192, 4, 2), [16, 64, 64], dtype="fp8", more=FUSED),
    _case((9, 256, 128, 4, 2), [16, 128, 128], dtype="fp8", more={**FUSED, "BLOCK_SIZE_K_2": 64}),
    _case((9, 256, 128, 4, 2), [16, 64, 64], dtype="fp8", gfx="gfx942"),
    _case((9, 256, 128, 4, 2), [16, 64, 64], dtype="fp8", key={"q_type": "per_token"}),
    _case((9, 240, 168, 4, 2), [16, 64, 64], dtype="fp8", key={"q_type": "per_token", "act_type": "gelu"}, more=FUSED),
]


@INTERPRETED
@pytest.mark.parametrize("case", few(CASES, 2, 3, 4, 5, 8, 11, 13))
def test_matches_the_reference_under_the_interpreter(interpreter: Interpreter, case: dict[str, object]) -> None:
    if case.get("gfx") == "gfx942" and tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        pytest.skip("before triton 3.9 the interpreter cannot make e4m3fnuz, gfx942's fp8")
    result = interpreter.run("kernel", case)
    assert result["reason"] is None
    assert result["error"] < (0.04 if case.get("dtype") == "fp8" else 1e-3)
    assert result["same"], "two runs differ"


@pytest.mark.parametrize(
    ("dtype", "key"),
    [
        (None, {}),
        ("float16", {"act_type": "gelu", "use_g1u1": 0}),
        (None, {"doweight_stage1": 1}),
        ("fp8", {}),
        ("fp8", {"q_type": "per_token"}),
    ],
)
@pytest.mark.parametrize("sizes", [(33, 128, 256, 6, 2), (7, 96, 144, 5, 3)])
def test_library_candidates_match_the_reference(
    sizes: tuple[int, ...], dtype: str | None, key: dict[str, object]
) -> None:
    device, backend = cpu_device(), Torch()
    spec = spec_of(sizes, device.gfx, dtype, key)
    generator = torch.Generator().manual_seed(5)
    weights, inputs = FMOE.make_weights(spec, generator), FMOE.make_inputs(spec, generator)
    reference, ran = FMOE.reference(spec, inputs, weights), []
    for knobs in backend.configs(spec, device, NO_SPACE):
        if backend.unsupported_reason(spec, knobs, device) is not None:
            continue
        out = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype))
        prepared = backend.prepare(spec, weights, knobs)
        assert (prepared.extra_bytes > 0) == str(knobs["method"]).endswith("_copy")
        backend.bind(spec, knobs, device, inputs, prepared, out)()
        assert error_ratio(out, reference.clone(), *FMOE.tolerance(spec)) < 1e-3, knobs
        ran.append(knobs["method"])
    assert {"expert_loop", "expert_loop_float32", "expert_loop_float32_copy"} <= set(ran)
    assert ("grouped_mm_convert" in ran) == (dtype == "fp8")
    assert ("grouped_mm" in ran) == (dtype != "fp8")


@pytest.mark.parametrize(
    ("options", "row", "expected"),
    [
        ({}, {}, ("bfloat16", "bfloat16", "QuantType.No")),
        ({"dtype": "float16"}, {}, ("float16", "float16", "QuantType.No")),
        ({"dtype": "fp8"}, {}, ("bfloat16", "float8_e4m3fn", "QuantType.per_1x128")),
        ({"dtype": "fp8", "out_dtype": "float16"}, {}, ("float16", "float8_e4m3fn", "QuantType.per_1x128")),
        ({"key": {"q_type": "per_token"}}, {}, ("bfloat16", "float8_e4m3fn", "QuantType.per_Token")),
        ({}, {"q_type": "QuantType.per_128x128"}, ("bfloat16", "float8_e4m3fn", "QuantType.per_1x128")),
        ({}, {"q_type": "block", "dtype": "float16"}, ("float16", "float8_e4m3fn", "QuantType.per_1x128")),
    ],
)
def test_defaults_of_the_key(
    options: dict[str, object], row: dict[str, object], expected: tuple[str, str, str]
) -> None:
    defaults = KernelDefaults(**{"dtype": None, "out_dtype": None, "bias": None, **options})  # type: ignore[arg-type]
    problem = make_problem(FMOE, {**dict(zip(NAMES, QWEN, strict=True)), **row}, defaults, "sm_90", "test")
    assert (problem["dtype"], problem["q_dtype_w"], problem["q_type"]) == expected
    assert (problem["act_type"], problem["use_g1u1"], problem["doweight_stage1"]) == ("ActivationType.Silu", 1, 0)
    assert problem.rows == 64
    assert "token" not in dict(problem.shape_group)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"topk": 200}, "topk 200, expected at most the 128 experts"),
        ({"act_type": "selu"}, r"column act_type: 'selu', expected one of silu, gelu; did you mean 'silu'\?$"),
        (
            {"act_type": "swiglu"},
            "fmoe: act_type: 'ActivationType.Swiglu' is not computed, expected ActivationType.Silu or .*Gelu$",
        ),
        (
            {"q_type": "per_1x32", "q_dtype_w": "fp4x2"},
            "fmoe: q_type: 'QuantType.per_1x32' is not computed, expected QuantType.No, .* or QuantType.per_1x128$",
        ),
        ({"q_dtype_w": "int8"}, "q_dtype_w: 'int8', expected bfloat16"),
        ({"use_g1u1": 2}, "column use_g1u1: 2, expected True or False"),
        ({"dtype": "float32"}, "dtype: 'float32', expected bfloat16 or float16"),
    ],
)
def test_errors_in_a_key(row: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec_of(QWEN, key=row)


def test_equivalent_knobs_are_one_candidate() -> None:
    spec, device = spec_of(QWEN), arch_device("sm_90")
    plain = kernel().normalise(spec, KNOBS, device)
    same = {"BLOCK_SIZE_N_2": 64, "num_warps_2": None, "FUSED_ACT": False, "kpack": 2, "GROUP_SIZE_M": 1}
    same |= {"OVERLAP": False}
    assert kernel().normalise(spec, {**KNOBS, **same}, device) == plain
    others = dict.fromkeys(("GATHER_ROWS", "PINGPONG", "FUSED_SUM"), True)
    assert kernel().normalise(spec, {**KNOBS, **others}, device) == plain
    apart = kernel().normalise(spec, {**KNOBS, "BLOCK_SIZE_N_2": 128}, device)
    assert apart["BLOCK_SIZE_N_2"] == 128
    assert kernel().normalise(spec, apart, device) == apart
    forms = (plain, apart, {**apart, **FUSED}, {**apart, **FUSED, **OVERLAPPED})
    names = [kernel().kernel_name(knobs).split("@")[0] for knobs in forms]
    assert names == ["experts", "experts_apart", "experts_fused_apart", "experts_overlapped_fused_apart"]


@pytest.mark.parametrize(("gfx", "has"), [("sm_90", True), ("sm_100", True), ("gfx942", False)])
def test_launches_overlap_from_sm_90_on(gfx: str, has: bool) -> None:
    spec, device = spec_of(QWEN, gfx), arch_device(gfx)
    knobs = kernel().normalise(spec, {**KNOBS, **OVERLAPPED}, device)
    reason = kernel().unsupported_reason(spec, knobs, device)
    assert (reason is None) == has
    if has:
        builds = kernel().builds(spec, knobs, device)
        assert all(dict(build.options)["launch_pdl"] for build in builds)
        plain = kernel().builds(spec, kernel().normalise(spec, KNOBS, device), device)
        assert [b.signature for b in builds] == [b.signature for b in plain]
        assert not any("launch_pdl" in dict(build.options) for build in plain)
    else:
        assert str(reason).startswith("overlap: ")


@pytest.mark.parametrize(
    ("dtype", "changes", "rule"),
    [
        (None, {"BLOCK_SIZE_N": 48}, "power of two"),
        (None, {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256}, "registers"),
        (None, {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 256}, "shared memory"),
        (None, {"BLOCK_SIZE_K_2": 8}, "minimum tile"),
        ("fp8", {"BLOCK_SIZE_K": 256}, "scale group"),
        ("fp8", {"BLOCK_SIZE_K_2": 256}, "scale group"),
        ("fp8", {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "FUSED_ACT": True}, "registers"),
    ],
)
def test_reasons_name_their_rule_and_stage(dtype: str | None, changes: dict[str, Scalar], rule: str) -> None:
    spec, device = spec_of(QWEN, dtype=dtype), arch_device("sm_90")
    assert kernel().unsupported_reason(spec, kernel().normalise(spec, KNOBS, device), device) is None
    reason = kernel().unsupported_reason(spec, kernel().normalise(spec, {**KNOBS, **changes}, device), device)
    assert reason is not None
    assert reason.split(":")[0] == rule
    assert reason.endswith(f"(stage {2 if any(name.endswith('_2') for name in changes) else 1})")


def test_is_unsupported_on_a_cpu_and_for_a_plain_product() -> None:
    assert str(
        kernel().unsupported_reason(spec_of(QWEN), {**KNOBS, "GROUP_SIZE_M": 1, "cache_modifier": ""}, cpu_device())
    ).startswith("no GPU")
    plain = load_family("a16w16")
    options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = plain.spec(make_problem(plain, {"M": 1, "N": 64, "K": 64}, options, "sm_90", "test"))
    assert str(kernel().unsupported_reason(spec, KNOBS, arch_device("sm_90"))).startswith("experts")
    for library in plain.implementations:
        knobs = {**KNOBS, "NUM_KSPLIT": 1, "cache_modifier": "", "GROUP_SIZE_M": 1}
        assert library.unsupported_reason(spec_of(QWEN), knobs, arch_device("sm_90")) is not None


@pytest.mark.parametrize("gfx", ["sm_90", "gfx942", "cpu"])
def test_no_library_takes_experts_for_a_plain_product(gfx: str) -> None:
    device = cpu_device() if gfx == "cpu" else arch_device(gfx)
    spec = spec_of(QWEN, gfx)
    for label, backend in library_backends().items():
        fit = [
            k for k in backend.configs(spec, device, NO_SPACE) if backend.unsupported_reason(spec, k, device) is None
        ]
        alike = [k for k in fit if k != {"method": "empty"}]  # a launch of nothing is compared with any family
        # These have functions for experts, which a test of theirs calls.
        assert label in ("torch", "flashinfer", "vllm_function") or not alike, label


@pytest.mark.parametrize(("gfx", "token"), few([*itertools.product(ARCHES, (1, 256, 4096))], 6))
def test_the_space_has_both_stages_together_and_apart(gfx: str, token: int) -> None:
    spec, device = spec_of((token, *QWEN[1:]), gfx), arch_device(gfx)
    found = {
        Candidate.of("triton", kernel().normalise(spec, point, device))
        for point in kernel().configs(spec, device, shipped_space("fmoe"))
    }
    fit = [c for c in found if kernel().unsupported_reason(spec, c.knobs, device) is None]
    apart = [c for c in fit if any(name.endswith("_2") for name in c.knobs)]
    assert len(fit) > 300
    assert 0 < len(fit) - len(apart) < len(apart)
    assert {bool(c.knobs.get("FUSED_ACT")) for c in fit} == {False, True}
    builds = {build.id for c in fit for build in kernel().builds(spec, c.knobs, device)}
    assert len(builds) < len(fit)  # stages are compiled once, whomever they are combined with
    assert ({"waves_per_eu", "kpack"} <= set(fit[0].knobs)) == gfx.startswith("gfx")


def test_vllms_space_has_its_count() -> None:
    assert len(list(kernel().configs(spec_of(QWEN), arch_device("sm_90"), shipped_space("fmoe_vllm")))) == 1920


TYPES = ((None, {"act_type": "gelu"}), ("fp8", {}), ("fp8", {"q_type": "per_token"}))


FUSED_APART: dict[str, Scalar] = {"FUSED_ACT": True, "BLOCK_SIZE_N_2": 128, "num_stages": 2}
COMPILED = [
    (gfx, *of_types, changes)
    for gfx in ARCHES
    for of_types in TYPES
    for changes in ({}, FUSED_APART, *([OVERLAPPED] if gfx == "sm_90" else []))
]


@pytest.mark.parametrize(("gfx", "dtype", "key", "changes"), few(COMPILED, 5, 20))  # sm_90 overlapped, gfx942 fused
def test_compiles_without_a_gpu(
    gfx: str, dtype: str | None, key: dict[str, object], changes: dict[str, Scalar]
) -> None:
    spec, device = spec_of((64, 2048, 760, 128, 8), gfx, dtype, key), arch_device(gfx)
    knobs = kernel().normalise(spec, {**KNOBS, "kpack": 1, **changes}, device)
    assert kernel().unsupported_reason(spec, knobs, device) is None
    for build in kernel().builds(spec, knobs, device):
        facts = compile_build(build, device)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= device.shared_bytes
        assert not facts.spills


@given(
    tokens=st.integers(1, 200),
    experts_held=st.integers(1, 40),
    topk=st.integers(1, 8),
    block_m=st.sampled_from([16, 32, 64, 128]),
    seed=st.integers(0, 99),
)
def test_no_routing_needs_more_blocks(tokens: int, experts_held: int, topk: int, block_m: int, seed: int) -> None:
    topk = min(topk, experts_held)
    spec = spec_of((tokens, 64, 64, experts_held, topk))
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(tokens, experts_held, generator=generator).topk(topk).indices
    crowded = torch.arange(topk).expand(tokens, topk)
    for ids in (spread, crowded):
        counts = torch.bincount(ids.flatten(), minlength=experts_held)
        assert int((-(-counts // block_m)).sum()) <= max_blocks(spec, block_m)


def test_the_routing_is_as_uneven_as_documented() -> None:
    shares = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        inputs = moe.make_inputs(spec_of((4096, 16, 16, 128, 8)), generator)
        ids, weights = moe.routing(inputs)
        assert torch.equal(weights.sum(1), torch.ones(4096)) or torch.allclose(weights.sum(1), torch.ones(4096))
        assert all(len(set(row)) == 8 for row in ids[:50].tolist())
        counts = torch.bincount(ids.flatten(), minlength=128).float()
        shares.append((float(counts.max() / counts.mean()), float(counts.min() / counts.mean())))
    busiest, idlest = (sum(s[i] for s in shares) / len(shares) for i in (0, 1))
    assert 2.2 < busiest < 3.4
    assert 0.1 < idlest < 0.35


def test_what_it_costs() -> None:
    spec = spec_of((1, 2048, 768, 128, 8))
    weights = 3 * 2048 * 768 * 2  # of one expert, in bytes
    assert FMOE.flops(spec) == 2 * 8 * 3 * 2048 * 768
    assert FMOE.bytes_moved(spec) == pytest.approx(8 * weights + 2 * 2048 * 2 + 64)
    many = FMOE.bytes_moved(spec_of((4096, 2048, 768, 128, 8)))
    assert many == pytest.approx(128 * weights + 4096 * (2 * 2048 * 2 + 64))
    assert spec.weight_elements == 128 * 3 * 2048 * 768
