"""Assumptions of the plug-in for vLLM, checked in vLLM's sources without importing them.

Usage: python tests/plugins/contract.py FOLDER ...; each folder has the package `vllm`. One line for each broken
expectation; exit code 1 if there is any. Only the standard library is needed.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LINEAR = "vllm.model_executor.kernels.linear"
BLOCKS = f"{LINEAR}.scaled_mm.BlockScaledMMLinearKernel"
ROWS = f"{LINEAR}.scaled_mm.ScaledMMLinearKernel"
LAYERS = "vllm.model_executor.layers"
EXPERTS = f"{LAYERS}.fused_moe.experts.triton_moe"
FUSION = "vllm.compilation.passes.fusion"
APPLY = (
    "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale a2_scale "
    "workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A name in a module: a function (`Class.method`), a class with bases and fields, or a variable."""

    module: str
    name: str
    parameters: str | None = None
    """The parameters in order, for a function; a last `*` allows more parameters with defaults or by name."""
    bases: str = ""
    """Bases that the class must have, by their last name."""
    fields: str = ""
    """Annotated fields or attributes that the class must assign."""
    contains: str = ""
    """Text that the definition must contain."""


EXPECTED = (
    Expected(module="vllm.plugins", name="DEFAULT_PLUGINS_GROUP", contains="vllm.general_plugins"),
    Expected(module="vllm.plugins", name="load_general_plugins", parameters="", contains="func()"),
    Expected(module="vllm.envs", name="environment_variables", contains="VLLM_BATCH_INVARIANT"),
    Expected(module="vllm.envs", name="compile_factors", parameters="", contains="environment_variables.items()"),
    Expected(
        module="vllm.compilation.caching",
        name="aot_compile_hash_factors",
        parameters="vllm_config",
        contains="compile_factors()",
    ),
    Expected(module="vllm.config", name="get_current_vllm_config_or_none"),
    Expected(module="vllm.config.kernel", name="KernelConfig", fields="linear_backend moe_backend"),
    Expected(module="vllm.distributed.parallel_state", name="is_local_first_rank", parameters=""),
    Expected(module="vllm.platforms.interface", name="PlatformEnum", fields="CUDA"),
    Expected(module="vllm.platforms.interface", name="Platform.is_cuda", parameters="self"),
    Expected(module="vllm.platforms.interface", name="Platform", fields="_enum device_type"),
    Expected(module=LINEAR, name="_POSSIBLE_FP8_BLOCK_KERNELS", contains="PlatformEnum.CUDA"),
    *(
        Expected(module=LINEAR, name="_POSSIBLE_FP8_BLOCK_KERNELS", contains=name)
        for name in ("DeepGemmFp8BlockScaled", "FlashInferFp8", "CutlassFp8BlockScaled")
    ),
    Expected(module=LINEAR, name="_POSSIBLE_FP8_KERNELS", contains="PlatformEnum.CUDA"),
    Expected(
        module=LINEAR,
        name="choose_scaled_mm_linear_kernel",
        parameters="config possible_kernels compute_capability force_kernel *",
        contains="current_platform._enum",
    ),
    Expected(module=LINEAR, name="init_fp8_linear_kernel", contains="_POSSIBLE_FP8_BLOCK_KERNELS"),
    Expected(module=f"{LINEAR}.base", name="MMLinearKernel.__init__", parameters="self config"),
    Expected(module=BLOCKS, name="Fp8BlockScaledMMLinearKernel", bases="MMLinearKernel", fields="apply_input_quant"),
    Expected(module=BLOCKS, name="Fp8BlockScaledMMLinearKernel.can_implement", parameters="cls config"),
    Expected(module=BLOCKS, name="Fp8BlockScaledMMLinearKernel.process_weights_after_loading", parameters="self layer"),
    Expected(
        module=BLOCKS,
        name="Fp8BlockScaledMMLinearKernel.apply_weights",
        parameters="self layer x bias kwargs",
        contains="self.apply_block_scaled_mm",
    ),
    Expected(module=BLOCKS, name="Fp8BlockScaledMMLinearKernel.apply_block_scaled_mm", parameters="self A B As Bs"),
    Expected(module=BLOCKS, name="Fp8BlockScaledDynamicMMLinearKernel.__init__", contains="self.fallback"),
    Expected(module=BLOCKS, name="FP8BlockParams", fields="weight_scale_inv weight_scale"),
    Expected(
        module=ROWS,
        name="FP8ScaledMMLinearLayerConfig",
        fields="weight_quant_key activation_quant_key weight_shape input_dtype out_dtype",
    ),
    Expected(module=ROWS, name="FP8ScaledMMLinearKernel.__init__", parameters="self c layer_param_names"),
    Expected(
        module=ROWS,
        name="FP8ScaledMMLinearKernel.apply_scaled_mm",
        parameters="self A B out_dtype As Bs bias output_shape",
    ),
    Expected(
        module=ROWS,
        name="FP8ScaledMMLinearKernel._get_layer_params",
        parameters="self layer",
        contains="layer_param_names",
    ),
    Expected(module=ROWS, name="FP8ScaledMMLinearKernel.get_output_padding", parameters="self"),
    Expected(
        module=f"{LINEAR}.scaled_mm.deep_gemm",
        name="DeepGemmFp8BlockScaledMMKernel",
        bases="Fp8BlockScaledMMLinearKernel",
    ),
    Expected(
        module=f"{LINEAR}.scaled_mm.flashinfer",
        name="FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        bases="Fp8BlockScaledDynamicMMLinearKernel",
        fields="base_type fallback_type apply_input_quant",
    ),
    Expected(
        module=f"{LAYERS}.quantization.utils.fp8_utils",
        name="per_token_group_quant_fp8",
        contains="column_major_scales",
    ),
    Expected(
        module=f"{LAYERS}.quantization.utils.fp8_utils",
        name="process_fp8_weight_block_strategy",
        parameters="weight weight_scale",
    ),
    Expected(module=f"{LAYERS}.utils", name="default_unquantized_gemm", parameters="layer x weight bias"),
    Expected(module=f"{LAYERS}.utils", name="dispatch_unquantized_gemm", contains="return default_unquantized_gemm"),
    Expected(
        module=f"{LAYERS}.linear",
        name="UnquantizedLinearMethod.process_weights_after_loading",
        parameters="self layer",
    ),
    Expected(module=f"{LAYERS}.linear", name="UnquantizedLinearMethod.apply", parameters="self layer x bias"),
    Expected(
        module=f"{LAYERS}.vocab_parallel_embedding",
        name="UnquantizedEmbeddingMethod.process_weights_after_loading",
        parameters="self layer",
    ),
    Expected(module=f"{LAYERS}.fused_moe.activation", name="MoEActivation", fields="SILU"),
    Expected(module=EXPERTS, name="TritonExperts.apply", parameters=APPLY, contains="expects_unquantized_inputs"),
    Expected(module=EXPERTS, name="TritonExperts.expects_unquantized_inputs", parameters="self"),
    Expected(
        module=f"{LAYERS}.fused_moe.modular_kernel",
        name="FusedMoEExperts.quant_dtype",
        parameters="self",
    ),
    Expected(module=f"{LAYERS}.fused_moe.config", name="FusedMoEParallelConfig", fields="use_ep"),
    Expected(module=f"{LAYERS}.fused_moe.config", name="FusedMoEParallelConfig.use_all2all_kernels"),
    Expected(module=f"{FUSION}.rms_quant_fusion", name="FUSED_OPS", contains="FusedRMSQuantKey(kFp8Static"),
    Expected(module=f"{FUSION}.rms_quant_fusion", name="FusedRMSQuantKey", fields="quant fused_add"),
    Expected(
        module=f"{FUSION}.rms_quant_fusion",
        name="RMSNormQuantPattern.__init__",
        contains="self.FUSED_OP = FUSED_OPS[key]",
    ),
    Expected(
        module=f"{FUSION}.rms_quant_fusion",
        name="FusedAddRMSNormGroupQuantPattern.register",
        contains="return (at[1], at[3], at[2])",
    ),
    Expected(module=f"{FUSION}.rms_quant_fusion", name="RMSNormQuantFusionPass.__call__", parameters="self graph"),
    Expected(module=f"{FUSION}.act_quant_fusion", name="FUSED_OPS"),
    Expected(
        module=f"{FUSION}.act_quant_fusion",
        name="ActivationQuantPattern.__init__",
        contains="self.FUSED_OP = FUSED_OPS[self.quant_key]",
    ),
    Expected(module="vllm.compilation.passes.utility.fix_functionalization", name="FixFunctionalizationPass.__call__"),
    Expected(module=f"{LAYERS}.quantization.utils.quant_utils", name="kFp8Dynamic128Sym"),
    Expected(module="vllm.config.compilation", name="PassConfig", fields="fuse_norm_quant fuse_act_quant"),
    Expected(module="vllm.config.compilation", name="CompilationConfig", fields="mode pass_config"),
    Expected(
        module="vllm._custom_ops",
        name="rms_norm_per_block_quant",
        contains="(output, input, weight, scales, epsilon, scale_ub, residual, group_size[1], is_scale_transposed)",
    ),
    Expected(
        module="vllm._custom_ops",
        name="silu_and_mul_per_block_quant",
        contains="(output, input, scales, group_size, scale_ub, is_scale_transposed)",
    ),
)
"""The expectations, in the order of the plug-in's modules: vllm.py, then vllm_notice.py to vllm_quantise.py."""


def source_file(folder: Path, module: str) -> Path | None:
    """The file of a module, or None."""
    place = folder.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def definitions(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """(name, definition) of all that a module or class defines, assigns or imports."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)


def broken(expected: Expected, folder: Path) -> str:
    """How the sources differ from an expectation; empty if they do not."""
    path = source_file(folder, expected.module)
    if path is None:
        return f"{expected.module}: no such module"
    scope: ast.Module | ast.ClassDef = ast.parse(path.read_text())
    place = f"{expected.module}.{expected.name}"
    found: ast.AST | None = None
    for name in expected.name.split("."):
        found = dict(definitions(scope)).get(name)
        if found is None:
            return f"{place}: not defined"
        if isinstance(found, ast.ClassDef):
            scope = found
    assert found is not None
    reason = _parameters(expected, found) or _class(expected, found)
    if not reason and expected.contains not in ast.unparse(found):
        reason = f"does not contain {expected.contains}"
    return f"{place}: {reason}" if reason else ""


def _parameters(expected: Expected, found: ast.AST) -> str:
    if expected.parameters is None:
        return ""
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return "no function"
    given = found.args
    rest = [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)] + rest
    wanted = expected.parameters.split()
    if wanted[-1:] == ["*"]:
        wanted, names = wanted[:-1], names[: len(wanted) - 1]
    return "" if names == wanted else f"parameters {' '.join(names) or 'none'}, expected {' '.join(wanted) or 'none'}"


def _class(expected: Expected, found: ast.AST) -> str:
    if not isinstance(found, ast.ClassDef):
        return "" if not expected.bases and not expected.fields else "no class"
    bases = " ".join(ast.unparse(base) for base in found.bases)
    for base in expected.bases.split():
        if base not in bases:
            return f"bases {bases or 'none'}, expected {base}"
    names = dict(definitions(found))
    missing = [name for name in expected.fields.split() if name not in names]
    return f"no {', '.join(missing)}" if missing else ""


def check(folder: Path, expectations: Sequence[Expected] = EXPECTED) -> list[str]:
    """One line for each broken expectation."""
    return [line for line in (broken(each, folder) for each in expectations) if line]


def main(folders: Sequence[str]) -> int:
    """Print the broken expectations of each folder."""
    code = 0
    for folder in folders:
        lines = check(Path(folder))
        print(f"{folder}: {len(EXPECTED) - len(lines)} of {len(EXPECTED)} expectations hold")
        for line in lines:
            print(f"  {line}")
        code = code or int(bool(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
