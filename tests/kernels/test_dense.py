"""Families on the dense kernel: interpreter against reference, offline compilation, constraints, CPU libraries."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from interpreter_process import INTERPRETED, Interpreter
from pairwise import few

from gemmpipe.backends.aten import Torch
from gemmpipe.backends.onednn import OneDnn
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.cli.main import main
from gemmpipe.core.data import Scalar
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, Scaling, Weights, load_family
from gemmpipe.family.operands import quantise_mx, unpack_mx
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import dequantise, error_ratio
from gemmpipe.family.space import Space
from gemmpipe.formats.triton_json import TritonJson
from gemmpipe.kernels.a4w4_blockscale import _decodes_for_cdna3
from gemmpipe.launch.build import compile_build
from gemmpipe.pipeline.plan import Plan
from gemmpipe.templates.constraints import shared_bytes
from gemmpipe.templates.tiled import TiledKernel

NO_SPACE = Space(axes={}, when=(), pinned=())
ERR_RATIO = 0.05  # the shipped limit
TENSOR = {"granularity": "tensor"}
FNUZ = {"gfx": "gfx942", "dtype": "float8_e4m3fnuz"}
CASES = {
    "a8w8": [
        {"mnk": [32, 64, 128], "knobs": [16, 32, 64, 1]},
        {"mnk": [33, 80, 333], "knobs": [16, 32, 64, 4], "bias": True, "out": "float32"},
        {"mnk": [5, 80, 320], "knobs": [16, 64, 64, 2], "swap": True, "out": "float16"},
        {"mnk": [33, 80, 272], "knobs": [32, 32, 64, 2], "key": TENSOR, "bias": True},
        {"mnk": [16, 48, 320], "knobs": [16, 16, 64, 2], **FNUZ},
        {"mnk": [33, 80, 333], "knobs": [16, 32, 32, 3], "dtype": "int8", "bias": True},
        {"mnk": [1, 48, 256], "knobs": [16, 16, 128, 1], "dtype": "int8", "key": TENSOR, "out": "float32"},
        {"mnk": [3, 77, 65], "knobs": [16, 32, 32, 2], "dtype": "int8", "key": TENSOR, "out": "float16"},
        {"mnk": [1, 1, 16], "knobs": [16, 16, 32, 1], "swap": True, "bias": True, "key": TENSOR},
    ],
    "batched_bf16": [
        {"mnk": [16, 32, 128], "knobs": [16, 32, 64, 1], "key": {"B": 3}},
        {"mnk": [17, 48, 333], "knobs": [16, 32, 64, 3], "key": {"B": 2}, "dtype": "float16", "out": "float32"},
        {"mnk": [5, 80, 160], "knobs": [16, 64, 64, 2], "key": {"B": 3}, "swap": True},
        {"mnk": [5, 48, 160], "knobs": [16, 32, 64, 2], "key": {"B": 1}},
        {"mnk": [1, 77, 65], "knobs": [16, 32, 32, 1], "key": {"B": 3}, "dtype": "float16"},
    ],
    "batched_a8w8": [
        {"mnk": [16, 32, 128], "knobs": [16, 32, 64, 1], "key": {"B": 3}},
        {"mnk": [17, 48, 333], "knobs": [16, 32, 64, 3], "key": {"B": 2}, "dtype": "int8", "out": "float32"},
        {"mnk": [17, 48, 160], "knobs": [16, 32, 64, 2], "key": {"B": 3}, "out": "float16", **FNUZ},
        {"mnk": [5, 48, 160], "knobs": [16, 32, 64, 2], "key": {"B": 1}},
        {"mnk": [1, 77, 65], "knobs": [16, 32, 32, 2], "key": {"B": 3}, "dtype": "int8"},
    ],
    "a16w16_atomic": [
        {"mnk": [16, 64, 256], "knobs": [16, 32, 64, 1]},
        {"mnk": [33, 80, 500], "knobs": [16, 32, 64, 8], "out": "float32"},  # 8 blocks of K, the last one short
        {"mnk": [33, 80, 704], "knobs": [32, 32, 64, 4], "dtype": "float16"},  # 11 blocks in 4 splits
        {"mnk": [5, 80, 320], "knobs": [16, 64, 64, 2], "swap": True, "dtype": "float16"},
        {"mnk": [17, 48, 320], "knobs": [16, 16, 64, 2], "out": "float32"},
        {"mnk": [17, 48, 320], "knobs": [16, 16, 64, 1]},  # the interpreter has no bf16 atomics
        {"mnk": [1, 77, 65], "knobs": [16, 32, 32, 3], "dtype": "float16"},
    ],
    "a8w8_bpreshuffle": [
        {"mnk": [32, 64, 128], "knobs": [16, 32, 64, 1]},
        {"mnk": [33, 80, 352], "knobs": [16, 32, 64, 3], "bias": True, "out": "float32"},
        {"mnk": [5, 80, 320], "knobs": [16, 64, 128, 2], "swap": True, "out": "float16"},
        {"mnk": [33, 48, 160], "knobs": [32, 64, 32, 2], "dtype": "int8", "key": TENSOR},
        {"mnk": [16, 48, 320], "knobs": [16, 16, 64, 2], **FNUZ},
        {"mnk": [1, 16, 32], "knobs": [16, 32, 64, 1], "dtype": "int8", "bias": True, "out": "float16"},
    ],
    "a8w8_blockscale_bpreshuffle": [
        {"mnk": [32, 128, 256], "knobs": [16, 64, 128, 1]},
        {"mnk": [33, 160, 416], "knobs": [16, 64, 128, 3]},
        {"mnk": [5, 304, 352], "knobs": [16, 256, 32, 4], "out": "float32"},
        {"mnk": [5, 144, 384], "knobs": [16, 64, 128, 3], "swap": True},
        {"mnk": [33, 320, 256], "knobs": [16, 256, 64, 1], "swap": True},
        {"mnk": [16, 128, 256], "knobs": [16, 128, 128, 2], "gfx": "gfx942", "out": "float16"},
        {"mnk": [1, 16, 160], "knobs": [16, 32, 64, 2]},
    ],
    "a4w4_blockscale": [
        {"mnk": [32, 64, 256], "knobs": [16, 32, 128, 1]},
        {"mnk": [33, 80, 352], "knobs": [16, 32, 64, 3], "out": "float32"},
        {"mnk": [5, 48, 416], "knobs": [16, 32, 128, 4], "out": "float16", "gfx": "gfx950"},
        {"mnk": [1, 7, 32], "knobs": [16, 16, 64, 1], "gfx": "gfx942"},
    ],
}
KNOBS: dict[str, Scalar] = {
    "GROUP_SIZE_M": 8,
    "num_warps": 4,
    "waves_per_eu": 2,
    "matrix_instr_nonkdim": 16,
    "kpack": 2,
    "cache_modifier": ".cg",
}
PRODUCTS = [
    ("a8w8", {}, {}),
    ("a8w8", TENSOR, {"bias": True}),
    ("a8w8", {}, {"dtype": "int8", "bias": True, "out_dtype": "float32"}),
    ("a8w8", TENSOR, {"dtype": "int8"}),
    ("batched_bf16", {"B": 3}, {}),
    ("batched_bf16", {"B": 3}, {"dtype": "float16", "out_dtype": "float32"}),
    ("batched_a8w8", {"B": 3}, {}),
    ("batched_a8w8", {"B": 3}, {"dtype": "int8", "out_dtype": "float32"}),
    ("batched_a8w8", {"B": 1}, {}),
    ("a16w16_atomic", {}, {}),
    ("a16w16_atomic", {}, {"dtype": "float16", "out_dtype": "float32"}),
    ("a8w8_bpreshuffle", {}, {"bias": True}),
    ("a8w8_bpreshuffle", TENSOR, {"dtype": "int8"}),
    ("a8w8_blockscale_bpreshuffle", {}, {}),
    ("a4w4_blockscale", {}, {}),
    ("a4w4_blockscale", {}, {"out_dtype": "float32"}),
]
COMPILED = [PRODUCTS[i] for i in (0, 2, 4, 6, 9, 10, 11, 13, 14)]


def spec_of(
    name: str,
    sizes: tuple[int, int, int],
    key: Mapping[str, object],
    options: Mapping[str, object],
    gfx: str = "cpu_avx2",
) -> tuple[Family, GemmSpec]:
    family = load_family(name)
    defaults = KernelDefaults(**{"dtype": None, "out_dtype": None, "bias": None, **options})  # type: ignore[arg-type]
    values = {**dict(zip("MNK", sizes, strict=True)), **key}
    return family, family.spec(make_problem(family, values, defaults, gfx, "test"))


def operands(family: Family, spec: GemmSpec) -> tuple[Weights, Inputs, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    return weights, inputs, family.reference(spec, inputs, weights)


def nan_output(spec: GemmSpec) -> torch.Tensor:
    shape = (spec.m, spec.n) if spec.batch == 1 else (spec.batch, spec.m, spec.n)
    return torch.full(shape, float("nan"), dtype=getattr(torch, spec.out_dtype))


ALWAYS = {
    "a8w8": (1, 5, 8),
    "batched_bf16": (1, 4),
    "batched_a8w8": (1, 2),
    "a16w16_atomic": (1, 6),
    "a8w8_bpreshuffle": (1, 4),
    "a8w8_blockscale_bpreshuffle": (3, 6),
    "a4w4_blockscale": (1, 2),
}
"""The cases interpreted always: sizes that the tiles do not divide, each flag and dtype; the others are slow."""


@INTERPRETED
@pytest.mark.parametrize(
    ("family", "always"), few([(name, i == 0) for i in (0, 1) for name in CASES], *range(len(CASES)))
)
def test_matches_the_reference_on_odd_and_even_sizes(interpreter: Interpreter, family: str, always: bool) -> None:
    for number, case in enumerate(CASES[family]):
        if (number in ALWAYS[family]) != always:
            continue
        if family == "a4w4_blockscale" and case.get("gfx") == "gfx942" and not _decodes_for_cdna3():
            continue  # before triton 3.9
        result = interpreter.run("kernel", {"family": family, **case})
        assert result["reason"] is None, case
        assert result["error"] < (0.01 if "atomic" in family else 1e-9), case
        assert result["same"], f"two runs differ: {case}"
        assert (result["splits"] > 1) == (case["knobs"][3] > 1), case


def _compiled() -> list[Any]:
    """Of each architecture a family's product with one of the points; the others are slow."""
    cases = [(*product, gfx, point) for product in COMPILED for gfx in ARCHES for point in POINTS]
    each = len(ARCHES) * len(POINTS)
    kept = [number * each + place for number, place in ((0, 0), (3, 11), (4, 3), (7, 7))]
    return few(cases, *kept)


ARCHES = ("sm_90", "sm_100", "gfx942", "gfx950")
POINTS = [[16, 32, 128, 4, 3, False], [64, 64, 64, 1, 2, True], [16, 256, 32, 1, 1, False]]
"""BLOCK_SIZE_M, _N, _K, NUM_KSPLIT, num_stages, SWAP_AB."""


@pytest.mark.parametrize(
    ("name", "key", "options", "gfx", "point"),
    _compiled(),
)
def test_compiles_without_a_gpu_within_the_estimate(
    name: str, key: Mapping[str, object], options: Mapping[str, object], gfx: str, point: list[int]
) -> None:
    if "a4w4" in name and gfx == "gfx942" and not _decodes_for_cdna3():
        pytest.skip("this triton has no MXFP4 product for gfx942")
    (family, spec), device = spec_of(name, (64, 1280, 8224), key, options, gfx), arch_device(gfx)
    kernel = family.implementations[0]
    assert isinstance(kernel, TiledKernel)
    m, n, k, splits, stages, swap = point
    if "float4" in spec.w_dtype:
        k = max(k, 64)  # the least that their matrix instruction takes
    sizes: dict[str, Scalar] = {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "NUM_KSPLIT": splits,
        "num_stages": stages,
    }
    swapped: dict[str, Scalar] = {"SWAP_AB": bool(swap) and gfx.startswith("sm")}
    knobs = dict(kernel.normalise(spec, {**KNOBS, **sizes, **swapped}, device))
    assert kernel.unsupported_reason(spec, knobs, device) is None
    facts = compile_build(kernel.builds(spec, knobs, device)[0], device)
    assert facts.shared_bytes is not None
    assert facts.shared_bytes <= shared_bytes(spec, m, n, k, stages, device)
    assert not facts.spills


@pytest.mark.parametrize(("name", "key", "options"), PRODUCTS)
@pytest.mark.parametrize("backend", [Torch(), OneDnn()], ids=["torch", "onednn"])
def test_every_fit_method_is_right_on_a_cpu(
    backend: Torch | OneDnn, name: str, key: Mapping[str, object], options: Mapping[str, object]
) -> None:
    (family, spec), device = spec_of(name, (5, 144, 416), key, options), cpu_device()
    weights, inputs, reference = operands(family, spec)
    fit = [k for k in backend.configs(spec, device, NO_SPACE) if backend.unsupported_reason(spec, k, device) is None]
    assert fit or (isinstance(backend, OneDnn) and (spec.batch > 1 or spec.w_layout != "nk"))
    for knobs in fit:
        prepared = backend.prepare(spec, weights, knobs)
        result = backend.bind(spec, knobs, device, inputs, prepared, nan_output(spec))()
        assert error_ratio(result, reference, *family.tolerance(spec)) < 0.02, knobs
    if isinstance(backend, Torch):
        methods = {knobs["method"] for knobs in fit}
        assert ("int_mm" in methods) == (spec.x_dtype == "int8" and spec.batch == 1 and spec.w_layout == "nk")


@pytest.mark.parametrize(("name", "key", "options"), PRODUCTS)
def test_a_wrong_product_is_caught(name: str, key: Mapping[str, object], options: Mapping[str, object]) -> None:
    """One error at a time in an otherwise right product, at the shipped limit."""
    family, spec = spec_of(name, (64, 144, 416), key, options)
    weights, inputs, reference = operands(family, spec)
    right, tolerance = reference.to(getattr(torch, spec.out_dtype)), family.tolerance(spec)
    assert error_ratio(right, reference, *tolerance) == 0
    row = right.clone()
    row.view(-1, spec.n)[37] = row.view(-1, spec.n)[36]
    nan = right.clone()
    nan.view(-1)[1234] = float("nan")
    columns = torch.arange(spec.n)
    columns[[3, 4]] = columns[[4, 3]]
    wrong = [row, nan, right[..., columns], nan_output(spec), right * 1.05]
    if inputs.x_scale is not None and inputs.x_scale.numel() > 1:
        shifted = Inputs(x=inputs.x, x_scale=inputs.x_scale.roll(1, -2))
        wrong.append(family.reference(spec, shifted, weights).to(right.dtype))
    if weights.w_scale is not None and weights.w_scale.numel() > 1:
        moved = Weights(w=weights.w, w_scale=weights.w_scale.roll(1, -1 if spec.batch > 1 else 0), bias=weights.bias)
        wrong.append(family.reference(spec, inputs, moved).to(right.dtype))
    if weights.bias is not None:
        wrong.append(right - weights.bias)
    for number, output in enumerate(wrong):
        assert error_ratio(output, reference, *tolerance) >= ERR_RATIO, number


@pytest.mark.usefixtures("scaled_on_cpu")
def test_scaled_mm_takes_both_granularities_of_fp8_alone() -> None:
    """Its CPU fallback computes the same, slowly: enough to check the arguments."""
    device, knobs = arch_device("sm_90"), {"use_fast_accum": False}
    family, spec = spec_of("a8w8", (16, 64, 128), TENSOR, {"bias": True})
    weights, inputs, reference = operands(family, spec)
    out = nan_output(spec)
    ScaledMm().bind(spec, knobs, device, inputs, ScaledMm().prepare(spec, weights, knobs), out)()
    assert error_ratio(out, reference, *family.tolerance(spec)) < 0.01
    assert ScaledMm().unsupported_reason(spec_of("a8w8", (16, 64, 128), {}, {})[1], knobs, device) is None
    integers = spec_of("a8w8", (16, 64, 128), {}, {"dtype": "int8"})[1]
    assert str(ScaledMm().unsupported_reason(integers, knobs, device)).startswith("fp8 only")


def test_a_key_that_contradicts_itself_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"granularity: 'rwo', expected one of row, tensor, .*; did you mean 'row'"):
        spec_of("a8w8", (1, 16, 16), {"granularity": "rwo"}, {})
    with pytest.raises(UserError, match="q_dtype_w: 'bfloat16'"):
        spec_of("a8w8", (1, 16, 16), {"q_dtype_w": "bfloat16"}, {})
    with pytest.raises(UserError, match=r"^kernel.dtype: 'int8', expected float4_e2m1fn_x2$"):
        spec_of("a4w4_blockscale", (1, 16, 64), {}, {"dtype": "int8"})
    assert spec_of("a8w8", (1, 16, 16), {"granularity": "per_token"}, {})[1].x_scale == Scaling(granularity="row")


def test_an_int32_sum_that_can_overflow_is_unsupported() -> None:
    family, spec = spec_of("a8w8", (64, 1280, 140_000), {}, {"dtype": "int8"}, "sm_90")
    kernel = family.implementations[0]
    assert str(kernel.unsupported_reason(spec, {}, arch_device("sm_90"))).startswith("int32 sum")


def test_atomics_have_their_own_buckets_and_no_workspace() -> None:
    form, family = TritonJson(device_name=None, buckets=None), load_family("a16w16_atomic")
    ms = {16: "small", 32: "medium_M32", 64: "medium_M64", 128: "medium_M128", 256: "large", 512: "xlarge"}
    for m, name in ms.items():
        assert [bucket.name for bucket in form.buckets(family, [m])] == [name]
    assert [b.required_knobs for b in form.buckets(family, [64])] == [(("BLOCK_SIZE_M", 64),)]
    assert [b.name for b in form.buckets(load_family("a8w8"), [512])] == ["medium_M"]
    _, spec = spec_of("a16w16_atomic", (64, 1280, 8192), {}, {}, "sm_90")
    kernel = family.implementations[0]
    assert isinstance(kernel, TiledKernel)
    sizes: dict[str, Scalar] = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_stages": 2}
    knobs = kernel.normalise(spec, {**KNOBS, **sizes, "NUM_KSPLIT": 8}, arch_device("sm_90"))
    assert kernel.workspace_bytes(spec, knobs) == 0
    assert "_atomic@" in kernel.kernel_name(knobs)
    assert str(kernel.unsupported_reason(spec, {**knobs, "NUM_KSPLIT": 32}, arch_device("sm_90"))).startswith(
        "rounding"
    )


def test_aiters_options(plans: list[Plan]) -> None:
    assert main(["kernel=a16w16_atomic", "space=a16w16_atomic_aiter", "shapes=a16w16_atomic_aiter"]) == 0
    plan, device = plans[0], arch_device("gfx942")
    problems = plan.source.problems(plan.family, plan.defaults, "gfx942")
    assert len(problems) == 40
    assert {p["M"] for p in problems} == {16, 32, 64, 128, 256, 512, 2048, 4096}
    (kernel,) = plan.backends["triton"].implementations(plan.family)
    assert len(list(kernel.configs(plan.family.spec(problems[0]), device, plan.space))) == 768


def test_mx_values_are_packed_low_nibble_first_and_scaled_by_powers_of_two() -> None:
    values = torch.zeros(1, 64)
    values[0, :4] = torch.tensor([6.0, -1.0, 0.5, 3.0])
    values[0, 32:34] = torch.tensor([48.0, -8.0])
    packed, scales = quantise_mx(values, 32)
    assert packed.view(torch.uint8)[0, :2].tolist() == [0x7 | 0xA << 4, 0x1 | 0x5 << 4]
    assert scales.view(torch.uint8).tolist() == [[127, 130]]
    assert scales.float().tolist() == [[1.0, 8.0]]
    assert torch.equal(unpack_mx(packed)[0, 32:34], torch.tensor([6.0, -1.0]))
    scaling = Scaling(granularity="block", block=(1, 32), dtype="float8_e8m0fnu")
    assert torch.equal(dequantise(packed, scales, scaling, torch.float32), values)


def test_a4w4s_key_and_option(plans: list[Plan]) -> None:
    assert main(["kernel=a4w4_blockscale", "shapes=a4w4_aiter"]) == 0
    (problem,) = plans[0].source.problems(plans[0].family, plans[0].defaults, "gfx950")
    assert [problem[name] for name in ("M", "N", "K")] == [128, 1536, 7168]
    with pytest.raises(UserError, match="K=100, expected a multiple of 32"):
        spec_of("a4w4_blockscale", (1, 16, 100), {}, {})
    spec = plans[0].family.spec(problem)
    assert plans[0].family.bytes_moved(spec) == (128 + 1536) * 7168 * 17 / 32 + 2 * 128 * 1536
