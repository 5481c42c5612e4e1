"""The kernels that engines choose, and that the rules are those of the engines' sources."""

import ast

import pytest
from engine_sources import definition, source_of

from gemmpipe.engines.kernel_choice import BLOCKS, EXPERTS_BLOCKS, EXPERTS_SIXTEEN, KINDS, ROWS, Situation
from gemmpipe.engines.sglang_kernels import RULES as SGLANG_RULES
from gemmpipe.engines.vllm_kernels import RULES as VLLM_RULES

ALL = {"deep_gemm": True, "vllm.third_party.deep_gemm": True, "flashinfer": True, "humming": False, "b12x": False}
VLLM_25, VLLM_33 = VLLM_RULES
(SGLANG,) = SGLANG_RULES


def hopper(packages: dict[str, bool] | None = None, variables: dict[str, str] | None = None, **flags: str) -> Situation:
    return Situation(gfx="sm_90", packages=packages or ALL, variables=variables or {}, flags=flags)


def name(rules: object, kind: str, situation: Situation) -> str:
    rule = rules.layer(kind).chosen(situation).rule  # type: ignore[attr-defined]
    return rule.name if rule is not None else ""


@pytest.mark.parametrize("rules", [VLLM_25, VLLM_33])
def test_vllm_reads_no_tuned_file_of_a_dense_product_by_default(rules: object) -> None:
    assert name(rules, BLOCKS, hopper()) == "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    without = {**ALL, "flashinfer": False}
    assert name(rules, BLOCKS, hopper(without)) == "DeepGemmFp8BlockScaledMMKernel"
    off = {"VLLM_USE_DEEP_GEMM": "0"}
    assert name(rules, BLOCKS, hopper(variables=off)) == "CutlassFp8BlockScaledMMKernel"
    disabled = {"VLLM_DISABLED_KERNELS": "DeepGemmFp8BlockScaledMMKernel,CutlassFp8BlockScaledMMKernel"}
    then = {"0.25.1": "TritonFp8BlockScaledMMKernel", "0.33.0": "MarlinFP8ScaledMMLinearKernel"}
    assert name(rules, BLOCKS, hopper(without, disabled)) == then[rules.version]  # type: ignore[attr-defined]
    choice = rules.layer(BLOCKS).chosen(hopper(linear_backend="triton"))  # type: ignore[attr-defined]
    assert choice.reads_files
    assert choice.note == "--linear-backend triton"


def test_sizes_that_deepgemm_lacks() -> None:
    odd = Situation(gfx="sm_90", packages=ALL, sizes=[(576, 7168), (1000, 7168)])
    choice = VLLM_25.layer(BLOCKS).chosen(odd)  # type: ignore[union-attr]
    assert choice.rule is not None
    assert choice.rule.title == "CUTLASS"
    assert [reason for _, reason in choice.passed_over] == ["N % 64 or K % 128: N=1000 K=7168"] * 2


@pytest.mark.parametrize(
    ("gfx", "flags"), [("sm_90", {}), ("sm_100", {}), ("sm_90", {"fp8_gemm_backend": "deep_gemm"})]
)
def test_sizes_that_deepgemm_lacks_in_sglang(gfx: str, flags: dict[str, str]) -> None:
    odd = Situation(gfx=gfx, packages=ALL, flags=flags, sizes=[(576, 7168), (1000, 7168)])
    layer = SGLANG.layer(BLOCKS)
    assert layer is not None
    found = {each.rule.title: each.sizes for each in layer.chosen_by_size(odd) if each.rule is not None}
    assert found == {"DeepGEMM": ((576, 7168),), "Triton": ((1000, 7168),)}, "its function falls back to Triton"
    (deepgemm,) = [rule for rule in layer.kernels if rule.title == "DeepGEMM"]
    assert not layer.computes_all(deepgemm, odd)


def test_a_backend_without_a_kernel_of_the_kind() -> None:
    triton = hopper(linear_backend="triton")
    older, newer = (rules.layer(ROWS).chosen(triton) for rules in (VLLM_25, VLLM_33))  # type: ignore[union-attr]
    assert (older.rule, older.note) == (
        None,
        "--linear-backend triton: no kernel of this kind: the server does not start",
    )
    assert newer.rule is not None
    assert newer.note == "--linear-backend triton: no kernel of this kind, ignored"


@pytest.mark.parametrize("rules", [VLLM_25, VLLM_33])
def test_vllms_experts(rules: object) -> None:
    assert name(rules, EXPERTS_BLOCKS, hopper()) == "TRITON"
    assert name(rules, EXPERTS_BLOCKS, hopper(enable_expert_parallel="true")) == "FLASHINFER_CUTLASS"
    assert name(rules, EXPERTS_BLOCKS, hopper(moe_backend="deep_gemm")) == "DEEPGEMM"
    assert name(rules, EXPERTS_BLOCKS, hopper(variables={"VLLM_USE_DEEP_GEMM": "1"})) == "DEEPGEMM"
    assert name(rules, EXPERTS_SIXTEEN, hopper()) == "TRITON"
    blackwell = Situation(gfx="sm_100", packages=ALL)
    assert name(rules, EXPERTS_SIXTEEN, blackwell) == "FLASHINFER_TRTLLM"


def test_sglangs_kernels() -> None:
    assert name(SGLANG, BLOCKS, hopper()) == "deepgemm_w8a8_block_fp8_linear_with_fallback"
    assert name(SGLANG, BLOCKS, hopper(fp8_gemm_backend="triton")) == "triton_w8a8_block_fp8_linear"
    off = {"SGLANG_ENABLE_JIT_DEEPGEMM": "false"}
    assert name(SGLANG, BLOCKS, hopper(variables=off)) == "triton_w8a8_block_fp8_linear"
    assert name(SGLANG, EXPERTS_BLOCKS, hopper()) == "triton"
    assert name(SGLANG, EXPERTS_BLOCKS, hopper(moe_a2a_backend="deepep")) == "deep_gemm"
    assert name(SGLANG, EXPERTS_BLOCKS, hopper(moe_runner_backend="cutlass")) == "cutlass"


@pytest.mark.parametrize("rules", [*VLLM_RULES, *SGLANG_RULES])
def test_every_kind_has_rules(rules: object) -> None:
    assert tuple(layer.kind for layer in rules.layers) == KINDS  # type: ignore[attr-defined]


LINEAR = "vllm/model_executor/kernels/linear/__init__.py"


def listed(text: str, variable: str, platform: str = "CUDA") -> list[str]:
    found = definition(text, variable)
    assert isinstance(found, ast.Dict)
    for key, value in zip(found.keys, found.values, strict=True):
        if ast.unparse(key or ast.Constant(None)) in (f"PlatformEnum.{platform}", repr(platform)):
            assert isinstance(value, ast.List | ast.Set)
            return [ast.unparse(each) for each in value.elts]
    raise AssertionError(f"{variable} has no {platform}")


@pytest.mark.parametrize("rules", VLLM_RULES, ids=lambda rules: rules.version)
@pytest.mark.parametrize(
    ("kind", "variable"), [(BLOCKS, "_POSSIBLE_FP8_BLOCK_KERNELS"), (ROWS, "_POSSIBLE_FP8_KERNELS")]
)
def test_vllms_kernels_have_the_order_of_its_source(rules: object, kind: str, variable: str) -> None:
    text = source_of("vllm", rules.version, LINEAR)  # type: ignore[attr-defined]
    theirs = listed(text, variable)
    ours = [rule.name for rule in rules.layer(kind).kernels]  # type: ignore[attr-defined]
    assert [each for each in theirs if each in ours] == ours
    never_first = {"PerTensorTorchFP8ScaledMMLinearKernel", "B12xTensorFP8ScaledMMLinearKernel"}
    last = {"BlockWiseTorchFP8ScaledMMLinearKernel"}
    assert set(theirs) - set(ours) <= never_first | last, "kernels without a rule"


@pytest.mark.parametrize("rules", VLLM_RULES, ids=lambda rules: rules.version)
def test_vllms_flags_ask_for_these_kernels(rules: object) -> None:
    text = source_of("vllm", rules.version, LINEAR)  # type: ignore[attr-defined]
    for kind in (BLOCKS, ROWS):
        for rule in rules.layer(kind).kernels:  # type: ignore[attr-defined]
            assert rule.name in listed(text, "_LINEAR_BACKEND_KERNEL_MAP", rule.backend), rule.name
            file = source_of("vllm", rules.version, rule.source)  # type: ignore[attr-defined]
            assert f"class {rule.name}" in file, rule.source


@pytest.mark.parametrize("rules", VLLM_RULES, ids=lambda rules: rules.version)
def test_vllms_variables_are_in_its_source(rules: object) -> None:
    text = source_of("vllm", rules.version, "vllm/envs.py")  # type: ignore[attr-defined]
    for variable in (
        "VLLM_USE_DEEP_GEMM",
        "VLLM_MOE_USE_DEEP_GEMM",
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
        "VLLM_DISABLED_KERNELS",
        "VLLM_TUNED_CONFIG_FOLDER",
        "VLLM_TEST_FORCE_FP8_MARLIN",
    ):
        if (variable, rules.version) != ("VLLM_TEST_FORCE_FP8_MARLIN", "0.33.0"):  # type: ignore[attr-defined]
            assert f'"{variable}"' in text, variable


def test_sglangs_functions_fall_back_to_triton() -> None:
    text = source_of("sglang", "0.5.23", "sglang/srt/layers/quantization/fp8_utils.py")
    layer = SGLANG.layer(BLOCKS)
    assert layer is not None
    for rule in layer.kernels:
        if rule.sizes is not None:
            body = ast.unparse(definition(text, rule.name))
            assert "triton_w8a8_block_fp8_linear(" in body, rule.name


def test_sglangs_functions_and_flags_are_in_its_source() -> None:
    choices = source_of("sglang", "0.5.23", "sglang/srt/arg_groups/choices.py")
    flags = {
        "--fp8-gemm-backend": ast.literal_eval(definition(choices, "FP8_GEMM_RUNNER_BACKEND_CHOICES")),  # type: ignore[arg-type]
        "--moe-runner-backend": ast.literal_eval(definition(choices, "MOE_RUNNER_BACKEND_CHOICES")),  # type: ignore[arg-type]
    }
    for layer in SGLANG.layers:
        for rule in layer.kernels:
            file = source_of("sglang", "0.5.23", rule.source)
            assert rule.name in file, rule.source
            if rule.backend:
                assert rule.backend in flags[layer.flag], rule.name
    auto = ast.unparse(
        definition(source_of("sglang", "0.5.23", SGLANG.layers[0].kernels[0].source), "_dispatch_auto_backend")
    )
    order = [auto.index(rule.name) for rule in SGLANG.layers[0].kernels if rule.name in auto]
    assert order == sorted(order)
