"""The parts of SGLang that the plug-in meets, on a CPU: its real hook registry and the real functions that are hooked.

They are taken from the sources (`ENGINE_SOURCES`); only what needs a GPU or a server below them is replaced.
"""

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engine_sources import definition, function, source_of
from torch.nn.functional import linear

LAYERS = "sglang.srt.layers"
QUANTIZATION = f"{LAYERS}.quantization"
FUSED_MOE = f"{LAYERS}.moe.moe_runner.triton_utils.fused_moe"


def quantise(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8 with a scale per row and group of columns."""
    groups = x.float().view(*x.shape[:-1], -1, group)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    return (groups / scale).to(torch.float8_e4m3fn).view(x.shape), scale[..., 0].contiguous()


@dataclass
class Sglang:
    """The stand-in: modules by name, and the number of calls of SGLang's kernels."""

    version: str
    modules: dict[str, ModuleType] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """The kernels that ran: `linear`, `blocks`, `rows`, `experts`."""
    scales: list[torch.Tensor] = field(default_factory=list)
    """x's block scales, as its quantiser laid them out."""
    settings: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            deterministic=SimpleNamespace(enable_deterministic_inference=False),
            kernel=SimpleNamespace(fp8_gemm_runner_backend="auto"),
            graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))),
        )
    )
    pads: bool = False
    """True if padding tokens have expert -1."""

    def module(self, name: str, **names: object) -> ModuleType:
        """A module with these names, known to its parents."""
        made = self.modules.setdefault(name, ModuleType(name))
        made.__path__ = []  # type: ignore[attr-defined]
        vars(made).update(names)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(self.module(parent), last, made)
        return made

    def source(self, path: str) -> str:
        return source_of("sglang", self.version, f"sglang/srt/{path}")

    @property
    def registry(self) -> Any:
        return self.modules["sglang.srt.plugins.hook_registry"].HookRegistry  # type: ignore[attr-defined]

    def apply_hooks(self) -> None:
        self.registry.apply_hooks()


def method(text: str, owner: str, name: str, **names: object) -> Callable[..., Any]:
    """A method of a class in a source, compiled alone."""
    found = definition(text, owner)
    return function(ast.unparse(ast.Module(body=found.body, type_ignores=[])), name, **names)  # type: ignore[attr-defined,no-any-return]


def install(version: str, monkeypatch: pytest.MonkeyPatch) -> Sglang:
    """The modules of this version in sys.modules, in a process that runs a model."""
    made = Sglang(version=version)
    text = made.source("plugins/hook_registry.py")
    registry = made.module("sglang.srt.plugins.hook_registry")
    monkeypatch.setitem(sys.modules, registry.__name__, registry)  # dataclasses and NamedTuple look it up
    exec(compile(text, registry.__name__, "exec"), vars(registry))
    _linear(made)
    _experts(made)
    made.module("sglang.srt.managers.scheduler")
    made.module("sglang.srt.runtime_context", get_exec=lambda: made.settings)
    made.module("sglang.srt.model_executor.forward_batch_info", enable_num_token_non_padded=lambda: made.pads)
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("gemmpipe.plugins.sglang.metadata.version", lambda name: version)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(pid=1))
    monkeypatch.setattr("torch.version.cuda", "12.8")
    return made


def _linear(made: Sglang) -> None:
    """The real `apply` of both methods and the real parameters of `apply_fp8_linear`, with products by torch."""
    off = SimpleNamespace(is_cutedsl=lambda: False, is_gemv=lambda: False)

    def counted_linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made.calls.append("linear")
        return linear(x, w, bias)

    apply = method(
        made.source("layers/quantization/unquant.py"),
        "UnquantizedLinearMethod",
        "apply",
        use_intel_amx_backend=lambda layer: False,
        _use_aiter=False,
        get_bf16_gemm_backend=lambda: off,
        torch=torch,
        F=SimpleNamespace(linear=counted_linear),
    )
    made.module(
        f"{QUANTIZATION}.unquant", UnquantizedLinearMethod=type("UnquantizedLinearMethod", (), {"apply": apply})
    )
    utils = made.module(
        f"{QUANTIZATION}.fp8_utils",
        apply_fp8_linear=_rows_function(made),
        per_token_group_quant_fp8=group_quantiser(made),
        sglang_per_token_group_quant_fp8=group_quantiser(made),
        sglang_per_token_quant_fp8=lambda x: quantise(x, x.shape[-1]),
    )
    apply = method(
        made.source("layers/quantization/fp8.py"),
        "Fp8LinearMethod",
        "apply",
        use_intel_amx_backend=lambda layer: False,
        _is_hip=False,
        Mxfp8SwizzledInput=type("Mxfp8SwizzledInput", (), {}),
        torch=torch,
        apply_fp8_linear=lambda **given: utils.apply_fp8_linear(**given),  # type: ignore[attr-defined]
    )
    made.module(f"{QUANTIZATION}.fp8", Fp8LinearMethod=type("Fp8LinearMethod", (), {"apply": apply}))


def group_quantiser(made: Sglang) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """SGLang's parameters and its own layout of scales, with torch's arithmetic."""
    text = source_of("sglang", made.version, "sglang/kernels/ops/quantization/fp8_kernel.py")
    scales_for = function(text, "create_per_token_group_quant_fp8_output_scale", torch=torch)

    def per_token_group_quant_fp8(
        x: torch.Tensor,
        group_size: int,
        eps: float = 1e-10,
        column_major_scales: bool = False,
        scale_tma_aligned: bool = False,
        scale_ue8m0: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.is_contiguous()
        layout = (column_major_scales, scale_tma_aligned, scale_ue8m0)
        held = scales_for(x.shape, x.device, group_size, *layout)
        groups = x.float().view(*x.shape[:-1], -1, group_size)
        scale = groups.abs().amax(-1).clamp(min=1e-6) / 448
        held.copy_(scale.log2().ceil().exp2() if scale_ue8m0 else scale)
        made.scales.append(held)
        return (groups / held.unsqueeze(-1)).to(torch.float8_e4m3fn).view(x.shape), held

    return per_token_group_quant_fp8


def _rows_function(made: Sglang) -> Callable[..., torch.Tensor]:
    node = definition(made.source("layers/quantization/fp8_utils.py"), "apply_fp8_linear")
    assert isinstance(node, ast.FunctionDef)
    node.body = ast.parse("return compute(input, weight, weight_scale, bias)").body

    def compute(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made.calls.append("rows")
        return linear(x, (weight.t().float() * scale.view(-1, 1)).to(x.dtype), bias)

    text = ast.unparse(ast.Module(body=[node], type_ignores=[]))
    return function(text, "apply_fp8_linear", cutlass_fp8_supported=lambda: True, compute=compute)  # type: ignore[no-any-return]


def block_linear(made: Sglang, name: str = "triton_w8a8_block_fp8_linear") -> Callable[..., torch.Tensor]:
    """SGLang's product by blocks of this name, by torch; with the parameters of all its backends."""

    def compute(
        input: torch.Tensor,  # noqa: A002 - SGLang's name
        weight: torch.Tensor,
        block_size: list[int],
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        act_scale_ue8m0: bool = False,
    ) -> torch.Tensor:
        made.calls.append("blocks")
        assert input_scale is None or "flashinfer" not in name
        wide = weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        if input_scale is not None:
            input = (input.float() * input_scale.repeat_interleave(128, 1)).bfloat16()  # noqa: A001 - as above
        return linear(input, (weight.float() * wide).to(input.dtype), bias)

    compute.__name__ = name
    return compute


def _experts(made: Sglang) -> None:
    """The real `fused_experts` above a loop over experts."""

    def outplace(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: Any, ids: Any, *rest: Any, **more: Any
    ) -> torch.Tensor:
        made.calls.append("experts")
        out = torch.zeros(x.shape, dtype=torch.float32)
        for token in range(x.shape[0]):
            for weight, expert in zip(weights[token], ids[token], strict=True):
                gate, up = linear(x[token].float(), w1[expert].float()).chunk(2)
                out[token] += weight * linear(torch.nn.functional.silu(gate) * up, w2[expert].float())
        return (out * (more.get("routed_scaling_factor") or 1.0)).to(x.dtype)

    def inplace(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: Any, ids: Any, *rest: Any, **more: Any
    ) -> None:
        x.copy_(outplace(x, w1, w2, weights, ids))

    text = made.source("layers/moe/moe_runner/triton_utils/fused_moe.py")
    real = function(text, "fused_experts", inplace_fused_experts=inplace, outplace_fused_experts=outplace)
    made.module(FUSED_MOE, fused_experts=real)
