"""FlashInfer's function and vLLM's and SGLang's quantisers, by stand-ins with their signatures that compute on the CPU.

The stand-ins read and write scales by their memory as the real ones do: FlashInfer 0.7, vLLM 0.25, SGLang 0.5.23.
test_peers_on_gpu runs the real ones.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from moe_problems import FMOE, spec_of

from gemmpipe.backends import NO_SPACE, Backend, engine_pair, library_backends, vllm_cutlass
from gemmpipe.backends.engine_function import SglangFunction, VllmFunction
from gemmpipe.backends.engine_functions import EngineFunction
from gemmpipe.backends.engine_pair import SglangPair, VllmPair
from gemmpipe.backends.flashinfer import FlashInfer
from gemmpipe.backends.packages import REQUIREMENTS
from gemmpipe.backends.quack import Quack
from gemmpipe.backends.vllm_cutlass import PRODUCT, QUANTISE_BLOCKS, QUANTISE_ROWS, VllmCutlass
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio

H200 = arch_device("sm_90")
N, K = 192, 384
FP8, MAX = torch.float8_e4m3fn, 448.0
SCHEMAS = {
    PRODUCT: "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    QUANTISE_BLOCKS: "(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float fp8_min, "
    "float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    QUANTISE_ROWS: "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
}
"""As the library of vLLM 0.25.1 registers them."""


def multiply(x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """x [M, K] and w [N, K] with scales for each element of a block."""
    by_column = x_scale.repeat_interleave(x.shape[1] // x_scale.shape[1], 1)
    rows, columns = (-(-size // blocks) for size, blocks in zip(w.shape, w_scale.shape, strict=True))
    rows = 128 if w_scale.shape[1] > 1 else rows
    blocks = w_scale.repeat_interleave(rows, 0)[: w.shape[0]].repeat_interleave(columns, 1)[:, : w.shape[1]]
    return (x.float() * by_column) @ (w.float() * blocks).t()


def quantise(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and scales [M, K / group]."""
    grouped = x.float().view(x.shape[0], -1, group)
    scales = grouped.abs().amax(-1).clamp_min(1e-10) / MAX
    return (grouped / scales[..., None]).view(x.shape).to(FP8), scales


def vllm_product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor, bias: object
) -> None:
    assert bias is None
    assert b.stride(0) == 1, "b is column-major"
    if a_scales.shape[1] > 1:
        assert len(a_scales) == 1 or a_scales.stride(0) == 1, "scales of x are M-major"
        assert b_scales.stride(0) == 1, "scales of w are transposed"
        assert b_scales.shape == (K // 128, -(-N // 128))
        out.copy_(multiply(a, b.t(), a_scales, b_scales.t()))
    else:
        assert (a_scales.shape, b_scales.shape) == ((a.shape[0], 1), (N, 1))
        out.copy_(multiply(a, b.t(), a_scales, b_scales))


def vllm_quantise_blocks(
    x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, group: int, eps: float, low: float, high: float,
    power_of_two: bool, transposed: bool, aligned: bool,
) -> None:  # fmt: skip
    assert x.is_contiguous()
    assert q.is_contiguous()
    assert (group, eps, low, high, power_of_two) == (128, 1e-10, -MAX, MAX, False)
    assert scales.shape == (x.shape[0], K // 128)
    line = -(-x.shape[0] // 4) * 4 if aligned else x.shape[0]
    assert scales.stride() == ((1, line) if transposed else (K // 128, 1))
    values, found = quantise(x, group)
    q.copy_(values)
    scales.copy_(found)


def vllm_quantise_rows(q: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, limit: object) -> None:
    assert limit is None
    assert scale.shape == (x.shape[0], 1)
    values, found = quantise(x, K)
    q.copy_(values)
    scale.copy_(found)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's operators on the CPU."""
    library = torch.library.Library("_C", "FRAGMENT")
    done: dict[str, Callable[..., None]] = {
        PRODUCT: vllm_product, QUANTISE_BLOCKS: vllm_quantise_blocks, QUANTISE_ROWS: vllm_quantise_rows
    }  # fmt: skip
    for name, function in done.items():
        library.define(name + SCHEMAS[name])
        library.impl(name, function, "CPU")
    vllm_cutlass.operator.cache_clear()
    yield
    vllm_cutlass.operator.cache_clear()
    library._destroy()
    for name in done:
        torch.ops._C.__dict__.pop(name, None)


def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,  # noqa: A002 - its name there
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """FlashInfer's function, which reads `input_scale` by its address, M-major in lines of a multiple of four rows."""
    assert weight_scale is not None
    assert out is not None
    assert weight_scale.is_contiguous()
    m = input.shape[0]
    if input_scale is None:
        assert input.dtype == torch.bfloat16
        x, scales = quantise(input, 128)
    else:
        x = input
        assert input_scale.data_ptr() % 16 == 0
        scales = input_scale.as_strided((m, K // 128), (1, -(-m // 4) * 4))
    return out.copy_(multiply(x, weight, scales, weight_scale))


def cutlass_fused_moe(
    input: torch.Tensor,  # noqa: A002 - its name there
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    *,
    output: torch.Tensor | None = None,
    use_deepseek_fp8_block_scale: bool = False,
) -> torch.Tensor:
    """FlashInfer's function: the up projection's rows are before the gate's."""
    assert output is not None
    assert (token_selected_experts.dtype, token_final_scales.dtype) == (torch.int32, torch.float32)
    assert use_deepseek_fp8_block_scale == (len(quant_scales) == 2)
    output.zero_()
    for expert in range(len(fc1_expert_weights)):
        rows, places = (token_selected_experts == expert).nonzero(as_tuple=True)
        w, w2 = fc1_expert_weights[expert].float(), fc2_expert_weights[expert].float()
        if quant_scales:
            w, w2 = (
                each * scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
                for each, scale in zip((w, w2), quant_scales, strict=True)
            )
        up, gate = (input[rows].float() @ w.t()).chunk(2, 1)
        part = (torch.nn.functional.silu(gate) * up) @ w2.t()
        output.index_add_(0, rows, (part * token_final_scales[rows, places, None]).to(output_dtype))
    return output


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package with its two functions."""
    experts = ModuleType("flashinfer.fused_moe")
    experts.cutlass_fused_moe = cutlass_fused_moe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", experts)
    module = ModuleType("flashinfer.gemm")
    module.fp8_blockscale_gemm_sm90 = fp8_blockscale_gemm_sm90  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", module)


def sglang_per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    *,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's function."""
    assert output_q is not None
    assert output_s is not None
    vllm_quantise_blocks(
        x, output_q, output_s, group_size, eps, -MAX, MAX, scale_ue8m0, column_major_scales, scale_tma_aligned
    )
    return output_q, output_s


def problem(
    family: str, m: int, order: str = "row"
) -> tuple[GemmSpec, Weights, Inputs, Callable[[torch.Tensor], float]]:
    """The product, its operands, and the share of wrong elements of a result."""
    found, defaults = load_family(family), KernelDefaults(dtype=None, out_dtype=None, bias=None)
    key = {"M": m, "N": N, "K": K, **({"q_dtype_w": "float8_e4m3fn"} if family == "a8w8" else {})}
    spec = found.spec(make_problem(found, key, defaults, "sm_90", "test"))
    if spec.x_scale is not None and spec.x_scale.granularity == "block":
        spec = replace(spec, x_scale=replace(spec.x_scale, order=order))
    generator = torch.Generator().manual_seed(3)
    weights, inputs = found.make_weights(spec, generator), found.make_inputs(spec, generator)
    reference, tolerance = found.reference(spec, inputs, weights), found.tolerance(spec)
    return spec, weights, inputs, lambda out: float(error_ratio(out, reference, *tolerance))


def run(backend: Backend, knobs: dict[str, str], family: str, m: int, order: str = "row") -> float:
    """The share of wrong elements of the second call, with other contents of scratch memory than the first."""
    spec, weights, inputs, error = problem(family, m, order)
    out = torch.full(spec.out_shape, torch.nan, dtype=torch.bfloat16)
    prepared = backend.prepare(spec, weights, knobs)
    launch = backend.bind(spec, knobs, H200, inputs, prepared, out)
    launch()
    out.fill_(torch.nan)
    return error(launch())


@pytest.mark.parametrize("m", [1, 3, 4, 9])
@pytest.mark.parametrize("order", ["row", "column"])
@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_gets_scales_in_whole_lines(m: int, order: str) -> None:
    assert run(FlashInfer(), {}, "a8w8_blockscale", m, order) == 0


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_quantises_bf16_itself() -> None:
    assert run(FlashInfer(), {}, "linear_fp8_blockscale", 5) == 0


@pytest.mark.parametrize("key", [{}, {"q_type": "per_1x128"}], ids=["bf16", "fp8"])
@pytest.mark.usefixtures("flashinfer")
def test_flashinfers_experts_read_the_up_projection_first(key: dict[str, object]) -> None:
    backend, dtype = FlashInfer(), "float8_e4m3fn" if key else None
    spec = spec_of((5, 256, 128, 4, 2), dtype=dtype, key=key)
    assert backend.unsupported_reason(spec, {}, H200) is None
    generator = torch.Generator().manual_seed(3)
    weights, inputs = FMOE.make_weights(spec, generator), FMOE.make_inputs(spec, generator)
    prepared = backend.prepare(spec, weights, {})
    assert prepared.extra_bytes == sum(
        each.numel() * each.element_size() for each in (weights.w, weights.w_scale) if each is not None
    )
    out = torch.full(spec.out_shape, torch.nan, dtype=torch.bfloat16)
    result = backend.bind(spec, {}, H200, inputs, prepared, out)()
    assert error_ratio(result, FMOE.reference(spec, inputs, weights), *FMOE.tolerance(spec)) == 0


@pytest.mark.parametrize(
    ("sizes", "dtype", "key", "reason"),
    [
        ((5, 256, 130, 4, 2), None, {}, "alignment: sizes must be multiples of 8"),
        ((5, 256, 192, 4, 2), "float8_e4m3fn", {}, "sizes: model_dim=256 and inter_dim=192 must be multiples of 128"),
        ((5, 256, 128, 4, 2), "float16", {}, "types: bfloat16 in and out, not float16 and float16"),
        ((5, 256, 128, 4, 2), "float8_e4m3fn", {"q_type": "per_token"}, "weights: fp8 is float8_e4m3fn with 128x128"),
    ],
)
def test_experts_that_flashinfer_lacks(
    sizes: tuple[int, ...], dtype: str | None, key: dict[str, object], reason: str
) -> None:
    found = FlashInfer().unsupported_reason(spec_of(sizes, dtype=dtype, key=key), {}, H200)
    assert (found or "").startswith(reason)


def test_reasons_of_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FlashInfer()
    missing = "the package flashinfer is not installed: pip install flashinfer-python"
    monkeypatch.setattr("gemmpipe.backends.flashinfer.find_spec", lambda name: None)
    assert backend.unavailable(H200) == missing
    assert backend.unavailable(arch_device("sm_100")) == ("FlashInfer's products for Hopper are for sm_90, not sm_100")
    monkeypatch.setattr("gemmpipe.backends.flashinfer.find_spec", lambda name: None if "jit" in name else object())
    monkeypatch.setattr("gemmpipe.backends.flashinfer.cuda_home", lambda: None)
    assert "set CUDA_HOME" in (backend.unavailable(H200) or "")
    spec = problem("a8w8_blockscale", 4)[0]
    assert backend.unsupported_reason(spec, {}, H200) is None
    assert backend.unsupported_reason(replace(spec, n=48), {}, H200) == (
        "sizes: K=384 must be a multiple of 128, N=48 of 64"
    )
    assert (backend.unsupported_reason(problem("a8w8", 4)[0], {}, H200) or "").startswith("w: float8_e4m3fn with")


@pytest.mark.parametrize("m", [1, 4, 6])
@pytest.mark.parametrize(
    ("family", "order"), [("a8w8_blockscale", "row"), ("a8w8_blockscale", "column"), ("a8w8", "row")]
)
@pytest.mark.usefixtures("vllm")
def test_vllms_product(family: str, order: str, m: int) -> None:
    assert run(VllmCutlass(), {}, family, m, order) == 0
    spec = problem(family, m, order)[0]
    assert VllmCutlass().unsupported_reason(spec, {}, H200) is None
    assert VllmCutlass().unavailable(H200) is None


@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("family", ["linear_fp8_blockscale", "linear_fp8_row"])
@pytest.mark.usefixtures("vllm")
def test_vllms_pair_with_cutlass(family: str, m: int) -> None:
    assert run(VllmPair(), {"product": "cutlass"}, family, m) == 0


def fake_deepgemm(x: tuple[torch.Tensor, ...], w: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    """DeepGEMM's `fp8_gemm_nt`, for scales that it need not copy."""
    line = -(-x[0].shape[0] // 4) * 4
    assert x[1].stride() == (1, line)
    out.copy_(multiply(x[0], w[0], x[1], w[1]))


@pytest.mark.parametrize("label", ["vllm", "sglang"])
@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.usefixtures("vllm")
def test_pairs_with_deepgemm_and_triton(label: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    deepgemm = ModuleType("deep_gemm")
    deepgemm.fp8_gemm_nt = fake_deepgemm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", deepgemm)
    monkeypatch.setattr(engine_pair, "_sglang_quantiser", lambda: sglang_per_token_group_quant_fp8)
    backend = library_backends()[label]
    assert run(backend, {"product": "deepgemm"}, "linear_fp8_blockscale", m) == 0

    def engine_triton(a: torch.Tensor, b: torch.Tensor, a_s: torch.Tensor, *rest: object) -> torch.Tensor:
        b_s, block, dtype = rest
        assert block == [128, 128]
        assert a_s.is_contiguous()
        return multiply(a, b, a_s, b_s).to(dtype)

    function = engine_pair.GEMM_FUNCTIONS[label]
    module = ModuleType(function.module)
    setattr(module, function.function, engine_triton)
    monkeypatch.setattr(type(function), "unavailable_reason", lambda self: None)
    monkeypatch.setattr(engine_pair, "import_module", lambda name: module)
    assert run(backend, {"product": "triton"}, "linear_fp8_blockscale", m) == 0


@pytest.mark.usefixtures("vllm")
def test_candidates_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    block, row = problem("linear_fp8_blockscale", 4)[0], problem("linear_fp8_row", 4)[0]
    pair = VllmPair()
    assert [knobs["product"] for knobs in pair.configs(block, H200, NO_SPACE)] == ["deepgemm", "cutlass", "triton"]
    assert [knobs["product"] for knobs in pair.configs(row, H200, NO_SPACE)] == ["cutlass"]
    assert pair.configs(problem("a8w8_blockscale", 4)[0], H200, NO_SPACE) == ()
    experts = spec_of((5, 256, 256, 4, 2), dtype="float8_e4m3fn")
    assert pair.configs(experts, H200, NO_SPACE) == ()
    assert pair.unsupported_reason(experts, {"product": "triton"}, H200) == "experts: one product at a time"
    assert pair.unsupported_reason(block, {"product": "cutlass"}, H200) is None
    assert pair.unsupported_reason(row, {"product": "triton"}, H200) == "product: vllm has no triton for these scales"
    assert pair.unsupported_reason(replace(block, k=200), {"product": "cutlass"}, H200) == (
        "K: 200, the quantiser takes multiples of 128"
    )
    monkeypatch.setattr("gemmpipe.backends.deepgemm.find_package", lambda: None)
    assert pair.unsupported_reason(block, {"product": "deepgemm"}, H200) == (
        "deepgemm: the package deep_gemm is not installed, neither alone nor within vLLM: pip install 'gemmpipe[vllm]'"
    )
    monkeypatch.setattr(engine_pair, "find_spec", lambda name: None)
    assert SglangPair().unavailable(H200) == "the package sglang is not installed: pip install 'gemmpipe[sglang]'"
    assert pair.unavailable(arch_device("gfx942")) == "no NVIDIA GPU: vllm's quantiser runs on NVIDIA only here"


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cutlass, "_vllm_folders", list)
    vllm_cutlass.operator.cache_clear()
    reason = "the package vllm is not installed: pip install 'gemmpipe[vllm]'"
    assert VllmCutlass().unavailable(H200) == VllmPair().unavailable(H200) == reason
    assert (VllmCutlass().unavailable(arch_device("gfx942")) or "").endswith(f"; also, {reason}")
    with pytest.raises(RuntimeError, match=re.escape(reason)):
        vllm_cutlass.operator(PRODUCT)
    monkeypatch.setattr(vllm_cutlass, "_vllm_folders", lambda: ["/nowhere"])
    assert VllmCutlass().unavailable(H200) == "the installed vLLM has no library of operators for CUDA"


def test_a_missing_package_has_a_command_in_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of our extra where there is one; without a GPU, too."""
    monkeypatch.setattr("gemmpipe.backends.quack.find_spec", lambda name: None)
    monkeypatch.setattr("gemmpipe.backends.flashinfer.find_spec", lambda name: None)
    monkeypatch.setattr(EngineFunction, "folders", lambda self: ())
    monkeypatch.setattr("gemmpipe.backends.engine_moe.folders", lambda label: ())
    commands = {
        Quack(): "quack-kernels",
        FlashInfer(): "flashinfer-python",
        VllmFunction(): "'gemmpipe[vllm]'",
        SglangFunction(): "'gemmpipe[sglang]'",
    }
    for backend, requirement in commands.items():
        for device in (H200, arch_device("sm_90"), cpu_device()):
            found = backend.unavailable(device) or ""
            assert found.endswith(f" is not installed: pip install {requirement}"), found
        assert (backend.unavailable(cpu_device()) or "").startswith("no ")
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ours = {each[1:-1] for each in REQUIREMENTS.values() if each.startswith("'")}
    assert ours <= {f"gemmpipe[{name}]" for name in extras["optional-dependencies"]}


def test_operators_of_another_version() -> None:
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()")
    vllm_cutlass.operator.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"has other parameters: expected those of vLLM 0\.25"):
            vllm_cutlass.operator(QUANTISE_ROWS)
    finally:
        library._destroy()
        torch.ops._C.__dict__.pop(QUANTISE_ROWS, None)
