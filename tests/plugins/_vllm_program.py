"""vLLM's real layers with the plug-in, on a CPU: selection of kernels, products, experts, and the compile cache's key.

Usage: python _vllm_program.py SOURCES PACKAGES FOLDER; prints one JSON line. A program of its own, since
TRITON_INTERPRET acts when a kernel is decorated: our kernels and vLLM's run in Triton's interpreter. What is pretended
is the device alone.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM keeps Triton without a driver then
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
os.environ["VLLM_DISABLED_KERNELS"] = "MarlinFP8ScaledMMLinearKernel,HummingFP8ScaledMMLinearKernel"  # libraries

sys.path.insert(0, str(Path(__file__).parent))
from vllm_import import import_vllm

N, K = 256, 384
KNOBS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
KNOBS |= {"num_stages": 2}
EXPERTS = {"model_dim": 256, "inter_dim": 128, "expert": 4, "topk": 2}
REPLACED = (
    "runtime.dispatch.device_by_index",
    "runtime.moe.device_by_index",
    "plugins.engine_dispatch.device_by_index",
    "runtime.cache.device_by_index",
)


def pretend_an_h200(stack: ExitStack) -> Any:
    """Rows of an H200 are used on CPU tensors, in the interpreter."""
    from gemmpipe.core.device import arch_device

    device = arch_device("sm_90")
    for name in REPLACED:
        stack.enter_context(mock.patch(f"gemmpipe.{name}", return_value=device))
    for module in ("binding", "moe"):
        stack.enter_context(mock.patch(f"gemmpipe.runtime.{module}.device_context", return_value=nullcontext()))
    for module in ("plugins.engine_dispatch", "runtime.binding"):
        stack.enter_context(mock.patch(f"gemmpipe.{module}.is_capturing", return_value=False))
    stack.enter_context(mock.patch("gemmpipe.core.device.get_arch", return_value="sm_90"))
    return device


def write_rows(folder: Path, device: Any, family: str, keys: list[Mapping[str, Any]], dtype: str | None) -> None:
    from gemmpipe.core.paths import tables_variable
    from gemmpipe.family import KernelDefaults, load_family
    from gemmpipe.family.problem import make_problem
    from gemmpipe.tables.store import render

    found, made = load_family(family), []
    knobs = {**KNOBS, "BLOCK_SIZE_K": 64} if family == "fmoe" else KNOBS
    for key in keys:
        problem = make_problem(
            found, dict(key), KernelDefaults(dtype=dtype, out_dtype=None, bias=None), "sm_90", "test"
        )
        implementation = found.implementations[0]
        spec = found.spec(problem)
        normalised = implementation.normalise(spec, knobs, device)
        row = {"gfx": device.gfx, "cu_num": device.cu_num, **dict(problem.key), "libtype": implementation.label}
        row |= {"us": 1.0, "config": json.dumps(dict(normalised)), "kernelName": implementation.kernel_name(normalised)}
        made.append(row)
    path = folder / f"{family}.csv"
    path.write_text(render(made, found, ()))
    os.environ[tables_variable(family)] = str(path)


def settings(custom_ops: Sequence[str] = ("none",)) -> Any:
    """vLLM's configuration without a model's files: quantisation in torch's operators by default, no compilation."""
    import torch
    from vllm.config import CompilationConfig, VllmConfig

    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=list(custom_ops), mode=0))
    text = SimpleNamespace(model_type="qwen3")
    object.__setattr__(config, "model_config", SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text))
    return config


def random(*shape: int, seed: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def block_weight(n: int, k: int, seed: int) -> Any:
    """(weight in fp8, scales of 128 x 128, the weight in fp32)."""
    import torch

    full = random(n, k, seed=seed) * k**-0.5
    blocks = full.view(n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    weight = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    exact = (weight.float() * scale[:, None, :, None]).view(n, k)
    return weight.view(n, k), scale, exact


def error(out: Any, expected: Any) -> float:
    return float((out.detach().float() - expected).norm() / expected.norm())


def linear_layer(quantised: Any) -> Any:
    import torch
    from vllm.model_executor.layers.linear import ReplicatedLinear

    torch.set_default_dtype(torch.bfloat16)
    try:
        return ReplicatedLinear(K, N, bias=False, quant_config=quantised, disable_tp=True)
    finally:
        torch.set_default_dtype(torch.float32)


def steps_of(layer: Any, expected: Any, ms: tuple[int, ...]) -> dict[str, Any]:
    """Error and step of each M."""
    from gemmpipe.runtime import dispatch_report
    from gemmpipe.runtime.selection_log import LOG

    found = {}
    for m in ms:
        LOG.steps.clear()
        x = random(m, K, seed=m).bfloat16()
        out = layer.quant_method.apply(layer, x)
        found[str(m)] = [error(out, x.float() @ expected.t()), *dispatch_report().values()]
    return found


def block_layer() -> tuple[Any, Any]:
    """(layer, its weight in fp32)."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    layer = linear_layer(config)
    weight, scale, exact = block_weight(N, K, 1)
    layer.weight.data.copy_(weight)
    layer.weight_scale_inv.data.copy_(scale)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, exact


def block_linear(folder: Path, device: Any) -> dict[str, Any]:
    import torch

    layer, exact = block_layer()
    kernel = layer.quant_method.fp8_linear
    found = {"kernel": [c.__name__ for c in type(kernel).__mro__[:3]], "name": kernel.gemmpipe_kernel}
    found["steps"] = steps_of(layer, exact, (1, 16, 9, 40))
    # reloaded in place: the next call multiplies by the new weight
    weight, scale, exact = block_weight(N, K, 2)
    layer.weight.data.copy_(weight)
    layer.weight_scale_inv.data.copy_(scale)
    found["reloaded"] = steps_of(layer, exact, (1, 40))
    # replaced, as by vLLM's loader
    weight, scale, exact = block_weight(N, K, 3)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    found["replaced"] = steps_of(layer, exact, (1, 40))
    return found


def quantising_linear(folder: Path, device: Any) -> dict[str, Any]:
    """A kernel of vLLM that takes activations in 16 bits, as FlashInfer's with DeepGEMM."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledDynamicMMLinearKernel,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel

    from gemmpipe.plugins import vllm_linear

    class Quantising(Fp8BlockScaledDynamicMMLinearKernel):  # type: ignore[misc]
        base_type = fallback_type = TritonFp8BlockScaledMMKernel
        apply_input_quant = False

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            assert A.dtype == torch.bfloat16
            quantised, scale = self.fallback.quant_fp8(A)
            return self.fallback.apply_block_scaled_mm(A=quantised, B=B, As=scale, Bs=Bs)

    with mock.patch.object(vllm_linear, "engines_choice", return_value=Quantising):
        layer, exact = block_layer()
    kernel = layer.quant_method.fp8_linear
    found = {"kernel": [c.__name__ for c in type(kernel).__mro__[:3]], "name": kernel.gemmpipe_kernel}
    for _ in range(2):
        found["steps"] = steps_of(layer, exact, (1, 16, 9, 40))
    return found


def deepgemm_linear(folder: Path, device: Any) -> dict[str, Any]:
    """vLLM's DeepGEMM kernel, which rounds scales to powers of two; only the library's product is computed by torch."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    def fp8_gemm_nt(x: Any, w: Any, out: Any, **others: Any) -> None:
        (values, scales), (weight, blocks) = x, w
        left = values.float() * scales.repeat_interleave(128, 1)
        right = weight.float() * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
        out.copy_(left @ right.t())
        found["library"] = found.get("library", 0) + 1

    found: dict[str, Any] = {}
    answers = {"is_deep_gemm_supported": True, "is_deep_gemm_e8m0_used": True, "fp8_gemm_nt": fp8_gemm_nt}
    answers |= {"should_use_deepgemm_for_fp8_linear": True, "should_auto_disable_deep_gemm": False}
    with ExitStack() as stack:
        for name, answer in answers.items():
            made = answer if callable(answer) else lambda *a, answer=answer: answer
            stack.enter_context(mock.patch.object(deep_gemm, name, made))
        stack.enter_context(mock.patch.object(fp8_utils, "transform_sf_into_required_layout", lambda sf, **_: sf))
        layer, exact = block_layer()
        kernel = layer.quant_method.fp8_linear
        found |= {"kernel": [c.__name__ for c in type(kernel).__mro__[:3]], "name": kernel.gemmpipe_kernel}
        found["isinstance"] = isinstance(kernel, deep_gemm.DeepGemmFp8BlockScaledMMKernel)
        scale = layer.weight_scale_inv
        found["power_of_two"] = bool((scale == torch.exp2(torch.log2(scale).round())).all())
        found["steps"] = steps_of(layer, exact, (1, 16, 9, 40))
        x = random(16, K, seed=1).bfloat16()
        ours = layer.quant_method.apply(layer, x)
        kernel.gemmpipe_kernel = ""
        found["against_library"] = error(ours, layer.quant_method.apply(layer, x).float())
    return found


def compiled(folder: Path, device: Any) -> dict[str, Any]:
    """Layers under torch.compile with a dynamic M: one operator of ours, no break, the same numbers."""
    import torch

    from gemmpipe.runtime import dispatch_report
    from gemmpipe.runtime.selection_log import LOG

    plain = linear_layer(None)
    plain.weight.data.copy_((random(N, K, seed=1) * K**-0.5).bfloat16())
    plain.quant_method.process_weights_after_loading(plain)
    found = {}
    for name, layer in (("bf16", plain), ("blocks", block_layer()[0])):
        operators: list[str] = []

        def backend(graph: Any, inputs: Any, operators: list[str] = operators) -> Any:
            operators += [str(node.target) for node in graph.graph.nodes if "gemmpipe" in str(node.target)]
            return graph.forward

        def forward(x: Any, layer: Any = layer) -> Any:
            return layer.quant_method.apply(layer, x)

        LOG.steps.clear()
        call = torch.compile(forward, fullgraph=True, dynamic=True, backend=backend)
        errors = []
        for m in (16, 40, 9):
            x = random(m, K, seed=m).bfloat16()
            torch._dynamo.mark_dynamic(x, 0)
            errors.append(error(call(x), forward(x).float()))
        found[name] = {"operators": operators, "errors": errors, "steps": sorted(dispatch_report().values())}
    return found


def row_layer() -> tuple[Any, Any]:
    """(layer with a kernel by row as compressed-tensors builds it, on vLLM's torch kernel; its weight in fp32)."""
    import torch
    import vllm.model_executor.kernels.linear as kernels
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym

    kernel = kernels.init_fp8_linear_kernel(
        activation_quant_key=kFp8DynamicTokenSym,
        weight_quant_key=kFp8StaticChannelSym,
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
        weight_shape=(N, K),
        module_name="test",
    )
    full = random(N, K, seed=1) * K**-0.5
    scale = full.abs().amax(1, keepdim=True) / 448
    weight = (full / scale).to(torch.float8_e4m3fn)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.input_scale = None
    layer.quant_method = SimpleNamespace(apply=lambda layer, x: kernel.apply_weights(layer, x), kernel=kernel)
    kernel.process_weights_after_loading(layer)
    return layer, weight.float() * scale


def row_linear(folder: Path, device: Any) -> dict[str, Any]:
    layer, exact = row_layer()
    kernel = layer.quant_method.kernel
    found = {"kernel": [c.__name__ for c in type(kernel).__mro__[:3]], "name": kernel.gemmpipe_kernel}
    return {**found, "steps": steps_of(layer, exact, (1, 16, 9, 40))}


def bf16_linear(folder: Path, device: Any) -> dict[str, Any]:
    layer = linear_layer(None)
    full = (random(N, K, seed=1) * K**-0.5).bfloat16()
    layer.weight.data.copy_(full)
    layer.quant_method.process_weights_after_loading(layer)
    found = {"name": layer.gemmpipe_kernel, "steps": steps_of(layer, full.float(), (1, 16, 9, 40))}
    layer.weight.data.copy_(full * 2)
    return {**found, "reloaded": steps_of(layer, full.float() * 2, (1, 40))}


def experts(folder: Path, device: Any) -> dict[str, Any]:
    """`apply` of vLLM's Triton experts with real operands, against the family's reference."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    from gemmpipe.family import KernelDefaults, load_family
    from gemmpipe.family.problem import make_problem
    from gemmpipe.runtime import dispatch_report
    from gemmpipe.runtime.selection_log import LOG

    found: dict[str, Any] = {}
    family = load_family("fmoe")
    parallel = SimpleNamespace(use_ep=False, use_all2all_kernels=False)
    for name, q_type in (("bf16", "none"), ("fp8", "per_1x128")):
        for tokens in (4, 7):
            defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
            values = {**EXPERTS, "token": tokens, "q_type": q_type}
            spec = family.spec(make_problem(family, values, defaults, "sm_90", "test"))
            generator = torch.Generator().manual_seed(tokens)
            weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
            scheme = FUSED_MOE_UNQUANTIZED_CONFIG
            if name == "fp8":
                scheme = fp8_w8a8_moe_quant_config(
                    w1_scale=weights.w_scale, w2_scale=weights.w2_scale, block_shape=[128, 128]
                )
            made = TritonExperts.__new__(TritonExperts)
            made.moe_config, made.quant_config = SimpleNamespace(moe_parallel_config=parallel), scheme
            made.quantization_emulation = False
            made.activation_config = SimpleNamespace(clamp_limit=None)  # since 0.29
            LOG.steps.clear()
            out = torch.full(spec.out_shape, float("nan"), dtype=torch.bfloat16)
            engine: list[int] = []  # vLLM's kernels need its library: that they are reached is seen here
            with mock.patch.object(made, "moe_problem_size", side_effect=ZeroDivisionError):
                try:
                    TritonExperts.apply(
                        made,
                        output=out,
                        hidden_states=inputs.x,
                        w1=weights.w,
                        w2=weights.w2,
                        topk_weights=inputs.topk_weights,
                        topk_ids=inputs.topk_ids,
                        activation=MoEActivation.SILU,
                        global_num_experts=-1,
                        expert_map=None,
                        a1q_scale=None,
                        a2_scale=None,
                        workspace13=None,
                        workspace2=None,
                        expert_tokens_meta=None,
                        apply_router_weight_on_input=False,
                    )
                except (ZeroDivisionError, AttributeError):
                    engine.append(2)
            reference = family.reference(spec, inputs, weights)
            found[f"{name} {tokens}"] = {
                "engine": bool(engine),
                "error": None if engine else error(out, reference),
                "deferred": made.expects_unquantized_inputs,
                "steps": list(dispatch_report().values()),
            }
    return found


def quantisers(folder: Path, device: Any) -> dict[str, Any]:
    """A norm and a SiLU compiled with vLLM's fusion passes, with our operators and with vLLM's: what inductor calls,
    and how far results are from those without compilation."""
    import torch
    from torch._inductor import config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.utils import run_and_get_code
    from vllm.compilation.passes.fusion import act_quant_fusion, rms_quant_fusion
    from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.platforms import current_platform

    quantise = partial(per_token_group_quant_fp8, group_size=128, column_major_scales=True, use_ue8m0=False)

    def forward(x: Any, residual: Any, weight: Any, pair: Any) -> Any:
        normed, total = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, 1e-6)
        alone = quantise(residual, use_ue8m0=True)
        return *quantise(normed, tma_aligned_scales=True), *quantise(SiluAndMul.forward_native(pair)), total, *alone

    class Passes(CustomGraphPass):  # type: ignore[misc]
        def __init__(self) -> None:
            made = (rms_quant_fusion.RMSNormQuantFusionPass, act_quant_fusion.ActivationQuantFusionPass)
            self.passes = [each(config) for each in (*made, VllmIRLoweringPass, FixFunctionalizationPass)]

        def __call__(self, graph: Any) -> None:
            for each in self.passes:
                each(graph)

        def uuid(self) -> str:
            return os.urandom(8).hex()

    def compiled_code() -> tuple[str, list[float]]:
        """(inductor's code, the relative error of each result)."""
        torch._dynamo.reset()
        settled = {"post_grad_custom_post_pass": Passes(), "enable_auto_functionalized_v2": False}
        with inductor.patch({**settled, "force_disable_caches": True}):
            given = [x, residual.clone(), weight, pair]
            results, (code,) = run_and_get_code(torch.compile(forward, fullgraph=True), *given)
        return code, [error(a, b.float()) for a, b in zip(results, expected, strict=True)]

    config = settings(["none", "+quant_fp8"])
    config.device_config.device = torch.device("cpu")
    config.compilation_config.pass_config.fuse_norm_quant = True
    x, residual = (random(6, 256, seed=seed).bfloat16() for seed in (1, 2))
    weight, pair = random(256, seed=3).abs().bfloat16(), random(6, 512, seed=4).bfloat16()
    expected = forward(x, residual.clone(), weight, pair)
    found: dict[str, Any] = {}
    with mock.patch.object(current_platform, "device_type", "cpu"), set_current_vllm_config(config):
        code, found["errors"] = compiled_code()
        found["operators"] = sorted(set(re.findall(r"torch\.ops\.(\w+\.\w+)\.", code)))
        with ExitStack() as stack:
            for table in (rms_quant_fusion.FUSED_OPS, act_quant_fusion.FUSED_OPS):
                own = {
                    key: getattr(torch.ops._C, each._schema.name.split("::")[1]).default for key, each in table.items()
                }
                stack.enter_context(mock.patch.dict(table, own))
            theirs, found["engine_errors"] = compiled_code()
    # a kernel besides the operators is a copy of the residual, an input of the graph
    found["copies"], found["engine_copies"] = (len(re.findall("async_compile.cpp", each)) for each in (code, theirs))
    return found


def cache_key(folder: Path, device: Any) -> dict[str, Any]:
    """The hash of vLLM's compile caches by tables and scope, with vLLM's own functions."""
    import vllm.envs as envs
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.config import VllmConfig
    from vllm.config.utils import hash_factors

    from gemmpipe.plugins import tuned_products
    from gemmpipe.plugins import vllm as plugin

    def both() -> list[str]:
        return [hash_factors(envs.compile_factors()), aot_compile_hash_factors(config)[0]]

    config = VllmConfig()
    installed = both()
    table = folder / "a16w16.csv"
    text = table.read_text()
    table.write_text(text.replace("1.0", "2.0", 1))
    tuned_products.tables_digest.cache_clear()
    changed = both()
    table.write_text(text)
    tuned_products.tables_digest.cache_clear()
    again = both()
    del envs.environment_variables[plugin.CACHE_FACTOR]
    return {"installed": installed, "changed": changed, "again": again, "removed": both()}


def plugin_log() -> tuple[list[str], Callable[[], None]]:
    """Lines that the plug-in logs from now on, and a function that ends this."""
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.gemmpipe")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return lines, lambda: log.removeHandler(handler)


def start_lines(folder: Path, device: Any) -> dict[str, Any]:
    """The start line with the user's own backends."""
    from vllm.config import set_current_vllm_config

    from gemmpipe.plugins.scope import read_scope
    from gemmpipe.plugins.vllm_notice import NOTICE

    lines, ended = plugin_log()
    config = settings()
    for linear_backend, moe_backend in (("auto", "auto"), ("cutlass", "triton")):
        config.kernel_config.linear_backend, config.kernel_config.moe_backend = linear_backend, moe_backend
        NOTICE.start("vLLM test", read_scope("GEMMPIPE_VLLM"))
        with set_current_vllm_config(config):
            NOTICE.announce()
            NOTICE.announce()
    ended()
    NOTICE.start("vLLM test", read_scope("GEMMPIPE_VLLM"))
    return {"lines": lines}


def forced_backend(folder: Path, device: Any) -> dict[str, Any]:
    """With the user's own backend no kernel of ours is chosen."""
    import torch
    import vllm.model_executor.kernels.linear as kernels
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key

    found = {}
    for backend in ("auto", "triton"):
        config = settings()
        config.kernel_config.linear_backend = backend
        with set_current_vllm_config(config):
            kernel = kernels.init_fp8_linear_kernel(
                activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, 128)),
                weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(128, 128)),
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
                weight_shape=(N, K),
            )
            other = kernels.init_fp8_linear_kernel(
                activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, 128)),
                weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(128, 128)),
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
                weight_shape=(2 * N, K),
            )
        found[backend] = [type(kernel).__name__, type(other).__name__]
    return found


CASES: dict[str, Callable[[Path, Any], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        block_linear,
        quantising_linear,
        deepgemm_linear,
        row_linear,
        bf16_linear,
        compiled,
        experts,
        quantisers,
        cache_key,
        start_lines,
    )
}


def states() -> dict[str, Callable[[Path, Any], dict[str, Any]]]:
    """The cases of `_vllm_states.py`, which imports this module."""
    from _vllm_states import STATES

    return {case.__name__: case for case in STATES}


def main(sources: str, packages: str, folder: str) -> None:
    import_vllm(Path(sources), Path(packages))
    from vllm.config import set_current_vllm_config

    from gemmpipe.plugins import vllm as plugin

    place = Path(folder)
    os.environ["XDG_DATA_HOME"] = str(place)
    os.environ["GEMMPIPE_GIVEN_TABLES_ONLY"] = "1"
    with ExitStack() as stack:
        device = pretend_an_h200(stack)
        sizes = [{"M": m, "N": N, "K": K} for m in (1, 16)]
        write_rows(place, device, "a16w16", [*sizes, *({**size, "bias": True} for size in sizes)], None)
        write_rows(place, device, "a8w8_blockscale", sizes, None)
        write_rows(place, device, "a8w8", sizes, "float8_e4m3fn")
        tokens = [{**EXPERTS, "token": 4, "q_type": q} for q in ("none", "per_1x128")]
        write_rows(place, device, "fmoe", tokens, None)
        os.environ["GEMMPIPE_VLLM"] = "linear,moe,quantise"
        inactive = plugin.set_up()
        assert not inactive, inactive
        found = {"forced_backend": forced_backend(place, device)}
        with set_current_vllm_config(settings()):
            found |= {name: case(place, device) for name, case in {**CASES, **states()}.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
