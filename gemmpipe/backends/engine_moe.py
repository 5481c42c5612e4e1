"""The `fused_experts` of an installed vLLM or SGLang, called with a given configuration.

That function reads the engine's configuration files, so its time is the one to tune. Nothing of an engine is imported
before the first call.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gemmpipe.backends.engine_compile import empty_meta, scales_shape
from gemmpipe.backends.engine_functions import patched_attribute
from gemmpipe.backends.packages import not_installed
from gemmpipe.core.data import Knobs, Scalar
from gemmpipe.core.errors import one_line
from gemmpipe.family import GemmSpec, Inputs, Launch, Weights
from gemmpipe.family.moe import require_experts, routing
from gemmpipe.templates.tiled import ceil_div

if TYPE_CHECKING:
    import torch

_MODULES: Mapping[str, str] = {
    "vllm": "vllm.model_executor.layers.fused_moe",
    "sglang": "sglang.srt.layers.moe.moe_runner.triton_utils",
}


def launch(label: str, spec: GemmSpec, knobs: Knobs, inputs: Inputs, weights: Weights) -> Launch:
    """A call of the engine's own function with these knobs; with none as the engine configures it.

    Raises RuntimeError if it cannot be called here.

    The launch allocates and returns its output [M, N], as the engine does; it can be captured in a graph.
    """
    if reason := unavailable_reason(label):
        raise RuntimeError(reason)
    call = _vllm_call(spec, inputs, weights)
    configuration = {name: value for name, value in knobs.items() if value is not None}
    if not configuration:
        return call
    engine = importlib.import_module(_MODULES[label])

    def run() -> "torch.Tensor":
        with engine.override_config(configuration):
            return call()

    return run


@cache
def unavailable_reason(label: str) -> str | None:
    """Why the engine's function cannot be called in this process, or None; imports the engine."""
    if label != "vllm":
        return f"{label}'s fused_experts runs inside a server only"  # it reads the server's arguments
    module = _MODULES[label]
    if find_spec(label) is None:
        return not_installed(label)
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - an import can fail in any of the engine's dependencies
        return f"{label} cannot be imported: {one_line(error)}"
    return None


def folders(label: str) -> tuple[Path, ...]:
    """The folders of files that the installed engine ships, in the order in which it reads them."""
    try:
        found = find_spec(label)
    except (ImportError, ValueError):
        found = None
    roots = [] if found is None else list(found.submodule_search_locations or ())
    within = Path(*_MODULES[label].split(".")[1:], "configs")
    configs = [path for root in roots if (path := Path(root) / within).is_dir()]
    if label == "sglang":  # a folder per version of Triton: the installed one, then the newest first
        return tuple(sorted((p for path in configs for p in path.iterdir() if p.is_dir()), key=_version, reverse=True))
    return tuple(configs)


def _version(folder: Path) -> tuple[bool, tuple[int, ...]]:
    numbers = tuple(int(part) for part in folder.name.removeprefix("triton_").split("_") if part.isdigit())
    own = metadata.version("triton").split("+")[0].replace(".", "_")
    return folder.name == f"triton_{own}", numbers


def default_engine_config(label: str, spec: GemmSpec) -> dict[str, Scalar] | None:
    """The engine's configuration for these experts without a file, or None if it is not installed."""
    if label == "sglang":
        return _sglang_default(spec)
    if unavailable_reason(label):
        return None
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    experts = require_experts(spec)
    found = module.get_default_config(
        spec.m, experts.count, experts.inner, spec.k, experts.topk, _dtype_name(spec), _block_shape(spec)
    )
    return {name: value for name, value in found.items() if name != "SPLIT_K"}


def _sglang_default(spec: GemmSpec) -> dict[str, Scalar]:
    """A copy of SGLang 0.5.23's `get_default_config` for NVIDIA, without importing it."""
    few = spec.m <= require_experts(spec).count
    block = _block_shape(spec)
    if block is not None:
        return _knobs((64, block[0], block[1], 32), 4, 3)
    if _dtype_name(spec):
        return _knobs((64, 128, 128, 1), 4, 4) if few else _knobs((128, 256, 128, 32), 8, 4)
    return _knobs((16, 32, 64, 1) if few else (64, 64, 32, 8), 4, 3)


def _knobs(tile: tuple[int, int, int, int], warps: int, stages: int) -> dict[str, Scalar]:
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
    return {**dict(zip(names, tile, strict=True)), "num_warps": warps, "num_stages": stages}


def _dtype_name(spec: GemmSpec) -> str | None:
    return "fp8_w8a8" if spec.w_dtype.startswith("float8") else None


def _block_shape(spec: GemmSpec) -> list[int] | None:
    scale = spec.w_scale
    return list(scale.block) if scale is not None and scale.granularity == "block" else None


def _vllm_call(spec: GemmSpec, inputs: Inputs, weights: Weights) -> "Callable[[], torch.Tensor]":
    """vLLM's function with these operands, within the configuration object that its operators need."""
    config = importlib.import_module("vllm.config")
    fused = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    quantised: Any = None
    if weights.w_scale is not None:
        quant = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
        quantised = quant.fp8_w8a8_moe_quant_config(
            w1_scale=weights.w_scale,
            w2_scale=weights.w2_scale,
            per_act_token_quant=_block_shape(spec) is None,
            block_shape=_block_shape(spec),
        )
    ids, shares = routing(inputs)
    engine_config = _vllm_config()
    activations = importlib.import_module("vllm.model_executor.layers.fused_moe.activation")
    activation = activations.MoEActivation.from_str(require_experts(spec).activation)

    def call() -> "torch.Tensor":
        with config.set_current_vllm_config(engine_config):
            out: torch.Tensor = fused.fused_experts(
                inputs.x,
                weights.w,
                weights.w2,
                shares,
                ids,
                activation=activation,
                apply_router_weight_on_input=require_experts(spec).weight_first,
                quant_config=quantised,
            )
        return out

    return call


def call_on_meta(label: str, spec: GemmSpec, knobs: Knobs) -> None:
    """vLLM's own launch code on `meta` tensors without its compiled operators, which compiles its Triton kernels."""
    if reason := unavailable_reason(label):
        raise RuntimeError(reason)
    fused: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    experts, group = require_experts(spec), _block_shape(spec)
    w, w2 = (experts.count, experts.w1_rows, spec.k), (experts.count, spec.n, experts.inner)
    scales = [_expert_scales(spec, shape) for shape in (w, w2)]

    def quantised(A: "torch.Tensor", **_: object) -> "tuple[torch.Tensor, torch.Tensor | None]":
        if experts.quantised is None:
            return A, None
        rows, columns = A.shape
        return empty_meta((rows, columns), spec.w_dtype), empty_meta(
            scales_shape(experts.quantised, rows, columns), "float32"
        )

    def sorted_rows(
        ids: "torch.Tensor", block_m: int, count: int, *_: object, **__: object
    ) -> "tuple[torch.Tensor, ...]":
        pairs = ids.numel()
        rows = pairs + count * (block_m - 1)
        rows = min(pairs * block_m, rows) if pairs < count else rows
        return tuple(empty_meta((size,), "int32") for size in (rows, ceil_div(rows, block_m), 1))

    engine = importlib.import_module(_MODULES[label])
    with (
        engine.override_config({name: value for name, value in knobs.items() if value is not None}),
        patched_attribute(fused, "moe_kernel_quantize_input", quantised),
        patched_attribute(fused, "moe_align_block_size", sorted_rows),
        patched_attribute(fused, "apply_moe_activation", lambda *_: None),
        patched_attribute(fused, "ops", SimpleNamespace(moe_sum=lambda *_: None)),
    ):
        fused.fused_experts_impl(
            empty_meta((spec.m, spec.k), spec.x_dtype),
            empty_meta(w, spec.w_dtype),
            empty_meta(w2, spec.w_dtype),
            empty_meta((spec.m, experts.topk), "float32"),
            empty_meta((spec.m, experts.topk), "int32"),
            activation=experts.activation,
            apply_router_weight_on_input=experts.weight_first,
            use_fp8_w8a8=_dtype_name(spec) is not None,
            per_channel_quant=_dtype_name(spec) is not None and group is None,
            w1_scale=scales[0],
            w2_scale=scales[1],
            block_shape=group,
        )


def _expert_scales(spec: GemmSpec, shape: tuple[int, int, int]) -> "torch.Tensor | None":
    if spec.w_scale is None:
        return None
    return empty_meta((shape[0], *scales_shape(spec.w_scale, *shape[1:])), spec.w_scale.dtype)


@cache
def _vllm_config() -> Any:
    return importlib.import_module("vllm.config").VllmConfig()
