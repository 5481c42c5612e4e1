"""SGLang's choice of kernels on NVIDIA devices, from the sources of 0.5.23."""

from dataclasses import replace

from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.engines.kernel_choice import (
    BLOCKS,
    EXPERTS_BLOCKS,
    EXPERTS_SIXTEEN,
    ROWS,
    SIXTEEN,
    EngineRules,
    KernelRule,
    LayerRules,
    Situation,
    multiples,
    needs,
    on,
    variable,
)
from gemmpipe.engines.packages import SGLANG

_FP8 = "sglang/srt/layers/quantization/fp8_utils.py"
_EXPERTS = "sglang/srt/layers/quantization/fp8.py"
_UNQUANTISED = "sglang/srt/layers/quantization/unquant.py"
_BLACKWELL = ("sm_100", "sm_103", "sm_120", "sm_121")
_EXPERT_TRANSPORTS = ("deepep", "mooncake", "nixl")
"""All-to-all backends with which DeepGEMM computes fp8 experts by default."""


def _transported(situation: Situation) -> str:
    """DeepGEMM computes experts by default where a transport distributes tokens in its form."""
    if situation.flag("moe_runner_backend") == "deep_gemm":
        return ""
    transport = situation.flag("moe_a2a_backend", "none")
    return "" if transport in _EXPERT_TRANSPORTS else f"--moe-a2a-backend {transport}"


def _only_asked(situation: Situation) -> str:
    return "" if situation.flag("fp8_gemm_backend") != "auto" else "only where --fp8-gemm-backend asks for it"


_ENABLED = (
    on("sm_90", *_BLACKWELL),
    variable("SGLANG_ENABLE_JIT_DEEPGEMM", default=True),
    needs("deep_gemm"),
)
_DEEPGEMM = KernelRule(
    name="deepgemm_w8a8_block_fp8_linear_with_fallback",
    title="DeepGEMM",
    backend="deep_gemm",
    source=_FP8,
    conditions=_ENABLED,
    sizes=multiples(64, 128),
    labels=("deepgemm",),
    libraries=("deepgemm",),
    scales=COLUMN,
)
_TRITON = KernelRule(
    name="triton_w8a8_block_fp8_linear",
    title="Triton",
    backend="triton",
    source=_FP8,
    reads_files=True,
    labels=("sglang",),
    scales=ROW,
)
_BLOCKS = LayerRules(
    kind=BLOCKS,
    flag="--fp8-gemm-backend",
    fallback="triton",
    strict=True,
    kernels=(
        _DEEPGEMM,
        KernelRule(
            name="flashinfer_gemm_w8a8_block_fp8_linear_with_fallback",
            title="FlashInfer TRT-LLM",
            backend="flashinfer_trtllm",
            source=_FP8,
            conditions=(on(*_BLACKWELL), needs("flashinfer")),
            scales=COLUMN,
        ),
        KernelRule(
            name="cutlass_w8a8_block_fp8_linear_with_fallback",
            title="CUTLASS",
            backend="cutlass",
            source=_FP8,
            conditions=(on("sm_120", "sm_121"),),
            sizes=multiples(128, 128),
            scales=COLUMN,
        ),
        KernelRule(
            name="flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback",
            title="FlashInfer's DeepGEMM with swapped operands",
            backend="flashinfer_deepgemm",
            source=_FP8,
            conditions=(_only_asked, on("sm_90"), needs("flashinfer")),
            sizes=multiples(64, 128),
            libraries=("flashinfer", "deepgemm"),
            scales=COLUMN,
        ),
        _TRITON,
    ),
)
_ROWS = LayerRules(
    kind=ROWS,
    flag="",
    kernels=(
        KernelRule(
            name="apply_fp8_linear",
            title="CUTLASS; Triton at the Ms of a tuned channelwise file",
            backend="",
            source=_FP8,
            reads_files=True,
        ),
    ),
)
_SIXTEEN = LayerRules(
    kind=SIXTEEN,
    flag="",
    kernels=(
        KernelRule(
            name="UnquantizedLinearMethod", title="torch (cuBLAS)", backend="", source=_UNQUANTISED, labels=("torch",)
        ),
    ),
)
_EXPERTS_TRITON = KernelRule(
    name="triton", title="Triton", backend="triton", source=_EXPERTS, reads_files=True, labels=("sglang",)
)
_EXPERTS_FP8 = LayerRules(
    kind=EXPERTS_BLOCKS,
    flag="--moe-runner-backend",
    strict=True,
    kernels=(
        KernelRule(
            name="deep_gemm",
            title="DeepGEMM",
            backend="deep_gemm",
            source=_EXPERTS,
            conditions=(_transported, *_ENABLED),
        ),
        _EXPERTS_TRITON,
        KernelRule(
            name="cutlass",
            title="CUTLASS",
            backend="cutlass",
            source=_EXPERTS,
            conditions=(on("sm_90", "sm_100", "sm_103", "sm_120"),),
        ),
    ),
)
_EXPERTS_16 = LayerRules(
    kind=EXPERTS_SIXTEEN,
    flag="--moe-runner-backend",
    kernels=(replace(_EXPERTS_TRITON, source=_UNQUANTISED),),
    strict=False,
)

RULES = (EngineRules(engine=SGLANG, version="0.5.23", layers=(_BLOCKS, _ROWS, _SIXTEEN, _EXPERTS_FP8, _EXPERTS_16)),)
"""By version. SGLang's log does not name the kernel of a layer: `server_args` and the read files determine it."""
