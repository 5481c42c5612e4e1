"""Experts in the form of vLLM's and SGLang's kernel: right under the interpreter, compiled everywhere, limits."""

import itertools
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreter_process import INTERPRETED, Interpreter
from moe_problems import FMOE, QWEN, shipped_space, spec_of
from pairwise import SLOW, few

from gemmpipe.backends.engine_compile import compile_only_for, empty_meta
from gemmpipe.core.data import Scalar
from gemmpipe.core.device import arch_device
from gemmpipe.kernels.fmoe._engine import ENGINES, EngineExperts
from gemmpipe.kernels.fmoe._engine_launch_plan import PRODUCT, VLLM, engine_m_tiles, is_naive
from gemmpipe.kernels.fmoe._launch_plan import max_blocks
from gemmpipe.launch.build import compile_build, compile_kernel, find_kernel, read_code

NAMES = ("token", "model_dim", "inter_dim", "expert", "topk")
KNOBS: dict[str, Scalar] = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


def _engine(label: str) -> EngineExperts:
    return ENGINES[label]


def _case(label: str, sizes: tuple[int, ...], knobs: list[int], dtype: str = "bfloat16", **key: object) -> dict:
    more = key.pop("more", {})
    values = {**dict(zip(NAMES, sizes, strict=True)), **key}
    return {"family": "fmoe", "label": label, "key": values, "knobs": knobs, "dtype": dtype, "more": more}


FP8 = "float8_e4m3fn"
CASES = [
    _case("vllm", (16, 64, 64, 4, 2), [16, 32, 32]),
    _case("vllm", (1, 80, 48, 9, 2), [16, 64, 32]),  # unsorted: a tile per pair
    _case("vllm", (5, 80, 40, 5, 2), [16, 32, 32], "float16", act_type="gelu"),
    _case("vllm", (9, 64, 48, 4, 1), [16, 32, 32], doweight_stage1=1),
    _case("vllm", (9, 256, 128, 4, 2), [16, 64, 64], FP8),  # the weight on the wide side
    _case("vllm", (1, 256, 128, 80, 2), [16, 64, 64], FP8),
    _case("vllm", (70, 256, 64, 4, 1), [64, 64, 64], FP8, q_type="per_token"),
    _case("sglang", (5, 80, 48, 9, 3), [16, 64, 32]),
    _case("sglang", (20, 64, 48, 9, 5), [16, 32, 32]),  # more parts per row than the engines' own sum takes
    _case("sglang", (9, 128, 256, 4, 2), [16, 64, 128], FP8, more={"BLOCK_SIZE_N_2": 32}),
]


@INTERPRETED
@pytest.mark.parametrize("case", few(CASES, 1, 2, 3, 5, 9), ids=range(len(CASES)))
def test_matches_the_reference_under_the_interpreter(interpreter: Interpreter, case: dict) -> None:
    result = interpreter.run("kernel", case)
    assert result["reason"] is None
    assert result["error"] < 0.05
    assert result["same"]


@pytest.mark.parametrize(("arch", "dtype"), few([*itertools.product(["sm_90", "gfx942"], [None, "fp8"])], 0))
def test_every_launch_compiles(arch: str, dtype: str | None) -> None:
    device = arch_device(arch)
    own = dtype and ("float8_e4m3fnuz" if arch == "gfx942" else FP8)
    spec = spec_of((64, 512, 256, 8, 2), arch, own)
    kernel = _engine("vllm")
    knobs = kernel.normalise(spec, KNOBS, device)
    builds = kernel.builds(spec, knobs, device)
    assert len(builds) >= 4
    for build in builds:
        facts = compile_build(build, device)
        assert not facts.error, facts.error


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 8), st.sampled_from([16, 32, 64, 128]))
def test_tiles_hold_every_block_of_any_routing(m: int, experts: int, topk: int, block_m: int) -> None:
    spec = spec_of((m, 256, 128, experts, min(topk, experts)))
    assert engine_m_tiles(spec, block_m) >= max_blocks(spec, block_m)


def test_experts_with_partial_groups_of_scales_are_unsupported() -> None:
    spec = spec_of((4, 4096, 192, 128, 8), dtype=FP8)
    reason = _engine("vllm").unsupported_reason(spec, KNOBS, arch_device("sm_90"))
    assert reason is not None
    assert reason.startswith("quantiser")


def test_few_pairs_stay_unsorted_in_vllm_alone() -> None:
    assert is_naive(VLLM, spec_of((4, 2048, 768, 128, 8)))  # 4 * 8 * 4 = 128
    assert not is_naive(VLLM, spec_of((5, 2048, 768, 128, 8)))
    assert not is_naive(_engine("sglang").form, spec_of((1, 2048, 768, 128, 8)))


def test_knobs_are_what_the_engine_would_run() -> None:
    device, spec = arch_device("sm_90"), spec_of(QWEN, dtype=FP8)
    vllm = _engine("vllm")
    wide = vllm.normalise(spec, {**KNOBS, "BLOCK_SIZE_K": 256, "kpack": 2}, device)
    assert wide == {**KNOBS, "BLOCK_SIZE_K": 128}  # the engine takes at most a group of scales; kpack is AMD's
    assert "BLOCK_SIZE_N_2" not in vllm.knob_names(spec, device)
    assert "BLOCK_SIZE_N_2" in _engine("sglang").knob_names(spec, device)
    reason = vllm.unsupported_reason(spec, {**KNOBS, "BLOCK_SIZE_K": 96}, device)
    assert reason is not None
    assert reason.startswith("scale group")


def test_the_space_of_vllms_script_is_one_of_its_form() -> None:
    device, spec = arch_device("sm_90"), spec_of(QWEN)
    space = shipped_space("fmoe_vllm")
    points = list(_engine("vllm").configs(spec, device, space))
    assert points
    fit = [
        p
        for p in points
        if _engine("vllm").unsupported_reason(spec, _engine("vllm").normalise(spec, p, device), device) is None
    ]
    assert 0 < len(fit) <= len(points)


def test_without_the_engine_the_finals_run_its_exact_form() -> None:
    vllm, sglang = _engine("vllm"), _engine("sglang")
    assert sglang.finals_implementation() == sglang.exact_form()  # its function runs inside a server only
    if find_spec("vllm") is None:
        assert vllm.unavailable_reason() == "the package vllm is not installed: pip install 'gemmpipe[vllm]'"
        assert vllm.finals_implementation() == vllm.exact_form()
        assert vllm.default(spec_of(QWEN), arch_device("sm_90")) is None


@pytest.mark.slow  # tests/kernels/test_engine_form.py has it of a dense product
@pytest.mark.parametrize(("sizes", "dtype"), [pytest.param(QWEN, None, marks=SLOW), ((1, 512, 256, 8, 2), FP8)])
def test_the_exact_products_are_specialised_as_in_tritons_own_call(sizes: tuple[int, ...], dtype: str | None) -> None:
    device, spec = arch_device("sm_90"), spec_of(sizes, dtype=dtype)
    exact, screened = _engine("vllm").exact_form(), _engine("vllm")
    # A call takes the integer 1 as a constant: here it is the height of a group of tiles too.
    products = [(s, b) for s, b in exact.launch_plan(spec, KNOBS, device) if s.kernel == PRODUCT]
    assert len(products) == 2
    assert not {build.id for _, build in products} & {build.id for build in screened.builds(spec, KNOBS, device)}
    for step, build in products:
        pointers = {n: empty_meta((16,), _DTYPES[kind]) for n, kind in build.signature if kind.startswith("*")}
        given = {**dict(build.constants), **step.integers, **pointers, **dict(build.options)}
        with compile_only_for(device):
            called = find_kernel(build.kernel).warmup(**given, grid=(1,))
        assert read_code(compile_kernel(build, device).asm["cubin"]) == read_code(called.asm["cubin"])


_DTYPES = {"*fp8e4nv": FP8, "*fp32": "float32", "*bf16": "bfloat16", "*i32": "int32"}


@pytest.mark.parametrize("dtype", [None, pytest.param(FP8, marks=SLOW)])
def test_products_of_the_screening_load_as_wide_as_those_of_the_finals(dtype: str | None) -> None:
    device, spec = arch_device("sm_90"), spec_of((16, 1024, 256, 8, 2), "sm_90", dtype)
    kernel = _engine("vllm")

    def copies(form: EngineExperts) -> list[int]:
        plan = form.launch_plan(spec, KNOBS, device)
        products = [compile_kernel(build, device) for step, build in plan if step.kernel == PRODUCT]
        return [product.asm["ptx"].count("cp.async.cg.shared.global") for product in products]

    assert copies(kernel) == copies(kernel.exact_form())
    assert min(copies(kernel)) > 0


def test_sglangs_default_is_known_without_it() -> None:
    device, sglang = arch_device("sm_90"), _engine("sglang")
    few, many = (sglang.default(spec_of((m, 2048, 768, 128, 8)), device) for m in (8, 512))
    assert few is not None
    assert many is not None
    assert (few["BLOCK_SIZE_M"], many["BLOCK_SIZE_M"]) == (16, 64)
    fp8 = sglang.default(spec_of(QWEN, dtype=FP8), device)
    assert fp8 is not None
    assert (fp8["BLOCK_SIZE_N"], fp8["GROUP_SIZE_M"]) == (128, 32)


def test_the_family_names_both_engines() -> None:
    assert set(FMOE.engine_kernels) == {"vllm", "sglang"}
    assert not {i.label for i in FMOE.implementations} & {"vllm", "sglang"}
