"""vLLM's choice of kernels on NVIDIA devices, from the sources of 0.25.1 and 0.33.0."""

from collections.abc import Sequence

from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.engines.kernel_choice import (
    BLOCKS,
    EXPERTS_BLOCKS,
    EXPERTS_SIXTEEN,
    ROWS,
    SIXTEEN,
    Condition,
    EngineRules,
    KernelRule,
    LayerRules,
    Situation,
    multiples,
    needs,
    not_disabled,
    on,
    variable,
)
from gemmpipe.engines.packages import VLLM

_SCALED = "vllm/model_executor/kernels/linear/scaled_mm"
_ORACLE = "vllm/model_executor/layers/fused_moe/oracle"
_HOPPER, _BLACKWELL = "sm_90", ("sm_100", "sm_103", "sm_120", "sm_121")
_DEEPGEMM_PACKAGES = ("deep_gemm", "vllm.third_party.deep_gemm")
_ALIGNED = multiples(64, 128)


def _linear(name: str, title: str, backend: str, file: str, *conditions: Condition, **more: object) -> KernelRule:
    return KernelRule(
        name=name,
        title=title,
        backend=backend,
        source=f"{_SCALED}/{file}.py",
        conditions=(not_disabled("VLLM_DISABLED_KERNELS", name), *conditions),
        **more,  # type: ignore[arg-type]
    )


_DEEPGEMM_CONDITIONS = (
    on(_HOPPER, *_BLACKWELL),
    variable("VLLM_USE_DEEP_GEMM", default=True),
    needs(*_DEEPGEMM_PACKAGES),
    _ALIGNED,
)
_FLASHINFER_DEEPGEMM = _linear(
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "FlashInfer for M < 32, DeepGEMM above",
    "flashinfer_cutlass",
    "flashinfer",
    on(_HOPPER),
    variable("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", default=True),
    needs("flashinfer"),
    *_DEEPGEMM_CONDITIONS,
    libraries=("flashinfer", "deepgemm"),
    scales=COLUMN,
)
_DEEPGEMM = _linear(
    "DeepGemmFp8BlockScaledMMKernel",
    "DeepGEMM",
    "deep_gemm",
    "deep_gemm",
    *_DEEPGEMM_CONDITIONS,
    labels=("deepgemm",),
    libraries=("deepgemm",),
    scales=COLUMN,
)
_CUTLASS_BLOCKS = _linear(
    "CutlassFp8BlockScaledMMKernel",
    "CUTLASS",
    "cutlass",
    "cutlass",
    on(_HOPPER, *_BLACKWELL, "sm_110"),
    libraries=("vllm_cutlass",),
    scales=COLUMN,
)


def _marlin_is_forced(situation: Situation) -> str:
    if situation.enabled("VLLM_TEST_FORCE_FP8_MARLIN", default=False) or situation.gfx in ("sm_80", "sm_86"):
        return ""
    return "above sm_89 only with VLLM_TEST_FORCE_FP8_MARLIN=1"


_MARLIN = _linear("MarlinFP8ScaledMMLinearKernel", "Marlin (16-bit products)", "marlin", "marlin", _marlin_is_forced)
_MARLIN_33 = _linear("MarlinFP8ScaledMMLinearKernel", "Marlin (16-bit products)", "marlin", "marlin")
"""0.33.0 has it after the kernels for fp8, without a variable."""
_TRITON_BLOCKS = _linear(
    "TritonFp8BlockScaledMMKernel", "Triton", "triton", "triton", reads_files=True, labels=("vllm",), scales=ROW
)
_B12X = _linear("B12xFp8BlockScaledMMKernel", "B12x", "b12x", "b12x", on("sm_120", "sm_121"), needs("b12x"))
_HUMMING = _linear("HummingFP8ScaledMMLinearKernel", "Humming", "humming", "humming", needs("humming"))

_FLASHINFER_ROWS = _linear(
    "FlashInferFP8ScaledMMLinearKernel",
    "FlashInfer (scales by tensor alone)",
    "flashinfer_cutlass",
    "flashinfer",
    lambda situation: "scales by row",
)
_CUTLASS_ROWS = _linear("CutlassFP8ScaledMMLinearKernel", "CUTLASS", "cutlass", "cutlass")
_TORCH_ROWS = _linear(
    "ChannelWiseTorchFP8ScaledMMLinearKernel", "torch._scaled_mm", "torch", "pytorch", labels=("scaled_mm",)
)
_UNQUANTISED = KernelRule(
    name="UnquantizedLinearMethod",
    title="torch (cuBLAS)",
    backend="",
    source="vllm/model_executor/layers/utils.py",
    labels=("torch",),
)


def _experts(name: str, title: str, backend: str, file: str, *conditions: Condition, **more: object) -> KernelRule:
    return KernelRule(
        name=name,
        title=title,
        backend=backend,
        source=f"{_ORACLE}/{file}.py",
        conditions=conditions,
        **more,  # type: ignore[arg-type]
    )


def _requests_deepgemm(situation: Situation) -> bool:
    """True if a variable was set by hand, which makes DeepGEMM the only choice of fp8 experts."""
    names = ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM")
    return any(name in situation.variables for name in names) and all(situation.enabled(name, True) for name in names)


def _fp8_order(situation: Situation, rules: Sequence[KernelRule]) -> Sequence[KernelRule]:
    """On Hopper Triton first, under expert parallelism FlashInfer's CUTLASS; DeepGEMM alone if its variable is set."""
    if _requests_deepgemm(situation):
        return [rule for rule in rules if rule.backend == "deep_gemm"]
    if situation.gfx != _HOPPER:
        return rules
    first = "flashinfer_cutlass" if situation.expert_parallel else "triton"
    return sorted(rules, key=lambda rule: rule.backend != first)


def _sixteen_order(situation: Situation, rules: Sequence[KernelRule]) -> Sequence[KernelRule]:
    """On Hopper Triton first, as FlashInfer's kernels are slower there."""
    return sorted(rules, key=lambda rule: rule.backend != "triton") if situation.gfx == _HOPPER else rules


_LIBRARIES = ("vllm_function",)
_LABELS = ("vllm", *_LIBRARIES)
_EXPERTS_FP8 = (
    _experts(
        "FLASHINFER_TRTLLM",
        "FlashInfer TRT-LLM",
        "flashinfer_trtllm",
        "fp8",
        on("sm_100", "sm_103"),
        needs("flashinfer"),
    ),
    _experts("FLASHINFER_CUTLASS", "FlashInfer CUTLASS", "flashinfer_cutlass", "fp8", on(_HOPPER), needs("flashinfer")),
    _experts(
        "DEEPGEMM",
        "DeepGEMM",
        "deep_gemm",
        "fp8",
        on(_HOPPER, "sm_100", "sm_103"),
        variable("VLLM_USE_DEEP_GEMM", default=True),
        variable("VLLM_MOE_USE_DEEP_GEMM", default=True),
        needs(*_DEEPGEMM_PACKAGES),
    ),
    _experts("VLLM_CUTLASS", "CUTLASS", "cutlass", "fp8", lambda situation: "not for scales by blocks"),
    _experts("TRITON", "Triton", "triton", "fp8", reads_files=True, labels=_LABELS, libraries=_LIBRARIES),
)
_EXPERTS_16 = (
    _experts(
        "FLASHINFER_TRTLLM",
        "FlashInfer TRT-LLM",
        "flashinfer_trtllm",
        "unquantized",
        on("sm_100", "sm_103"),
        needs("flashinfer"),
    ),
    _experts(
        "FLASHINFER_CUTLASS",
        "FlashInfer CUTLASS",
        "flashinfer_cutlass",
        "unquantized",
        on(_HOPPER, "sm_100", "sm_103"),
        needs("flashinfer"),
    ),
    _experts("TRITON", "Triton", "triton", "unquantized", reads_files=True, labels=_LABELS, libraries=_LIBRARIES),
)
_EXPERT_LAYERS = (
    LayerRules(kind=EXPERTS_BLOCKS, flag="--moe-backend", kernels=_EXPERTS_FP8, order=_fp8_order, strict=True),
    LayerRules(kind=EXPERTS_SIXTEEN, flag="--moe-backend", kernels=_EXPERTS_16, order=_sixteen_order, strict=True),
)
_SIXTEEN_LAYER = LayerRules(kind=SIXTEEN, flag="", kernels=(_UNQUANTISED,))

RULES = (
    EngineRules(
        engine=VLLM,
        version="0.25.1",
        layers=(
            LayerRules(
                kind=BLOCKS,
                flag="--linear-backend",
                kernels=(_FLASHINFER_DEEPGEMM, _DEEPGEMM, _CUTLASS_BLOCKS, _MARLIN, _TRITON_BLOCKS, _HUMMING),
                strict=True,
            ),
            LayerRules(
                kind=ROWS,
                flag="--linear-backend",
                kernels=(_MARLIN, _FLASHINFER_ROWS, _CUTLASS_ROWS, _TORCH_ROWS, _HUMMING),
                strict=True,
            ),
            _SIXTEEN_LAYER,
            *_EXPERT_LAYERS,
        ),
    ),
    EngineRules(
        engine=VLLM,
        version="0.33.0",
        layers=(
            LayerRules(
                kind=BLOCKS,
                flag="--linear-backend",
                kernels=(
                    *(_FLASHINFER_DEEPGEMM, _DEEPGEMM, _CUTLASS_BLOCKS, _B12X, _MARLIN_33, _HUMMING, _TRITON_BLOCKS),
                ),
            ),
            LayerRules(
                kind=ROWS,
                flag="--linear-backend",
                kernels=(_FLASHINFER_ROWS, _CUTLASS_ROWS, _TORCH_ROWS, _MARLIN_33, _HUMMING),
            ),
            _SIXTEEN_LAYER,
            *_EXPERT_LAYERS,
        ),
    ),
)
"""By version, ascending. `Selected NAME for MODULE` in a server's log names the kernel."""
