"""Imports a real vLLM, unpacked from its wheel without its libraries, on a machine without a GPU.

Third-party packages that vLLM imports but that its layers never call are replaced by empty stand-ins; its compiled
operators that are asked about at import answer no. The platform is CUDA's, with the answers of an H200.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UNUSED = frozenset(
    [
        "aiohttp",
        "anthropic",
        "blake3",
        "cpuinfo",
        "depyf",
        "diskcache",
        "fastapi",
        "fastsafetensors",
        "gguf",
        "ijson",
        "lark",
        "llguidance",
        "lmformatenforcer",
        "mcp",
        "mistral_common",
        "model_hosting_container_standards",
        "outlines_core",
        "partial_json_parser",
        "PIL",
        "prometheus_client",
        "prometheus_fastapi_instrumentator",
        "pythonjsonlogger",
        "setproctitle",
        "starlette",
        "uvloop",
        "watchfiles",
        "xgrammar",
        "einops",
    ]
)
"""Packages of the front end and of other models; a stand-in is used only if the package is missing."""
LIBRARIES = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._C", "vllm._moe_C")
QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_sparse_scaled_mm_supported",
)
"""Operators of vLLM's library (capability) -> bool that are called at import."""


FUSION = (
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
    "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids, "
    "int forced_token_heads_per_warp=-1) -> ()",
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None, "
    "bool is_scale_transposed=False) -> ()",
)
"""Operators that vLLM's fusion passes name, with their schemas in 0.25.1."""


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


def _stand_in(name: str) -> Any:
    members = {
        "__init__": lambda self, *a, **k: None,
        "__call__": lambda self, *a, **k: a[0] if a and callable(a[0]) else None,
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__get_pydantic_core_schema__": classmethod(lambda cls, source, handler: _any_schema()),
    }
    return _Anything(name, (), members)


def _any_schema() -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _Module(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stand_in(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: it makes what no other finds."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name.partition(".")[0] not in UNUSED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = _Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _scaled_mm(out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any) -> None:
    """The result of vLLM's CUTLASS operator, with scales per row and per column."""
    full = (a.float() * a_scales.view(-1, 1)) @ (b.float() * b_scales.view(1, -1))
    out.copy_(full if bias is None else full + bias.float())


def _quantise_groups(x: Any, x_q: Any, x_s: Any, group: int, eps: float, low: float, high: float, *_: bool) -> None:
    """The result of vLLM's operator: fp8 with a scale per group of K."""
    groups = x.float().view(*x.shape[:-1], -1, group)
    scale = groups.abs().amax(-1).clamp(min=eps) / high
    x_s.copy_(scale)
    x_q.copy_((groups / scale[..., None]).clamp(low, high).view(x.shape))


def _never(*_: Any) -> None:
    raise AssertionError("an operator that these tests never call")


def _norm_and_quantise(
    out: Any, x: Any, weight: Any, scale: Any, epsilon: float, ub: Any, residual: Any, group: int, transposed: bool
) -> None:
    """The result of vLLM's operator; the scales are written by their strides."""
    full = x.float() if residual is None else x.float() + residual.float()
    normed = (full * (full.square().mean(1, keepdim=True) + epsilon).rsqrt()).to(x.dtype) * weight
    if residual is not None:
        residual.copy_(full)
    _quantise_groups(normed, out, scale, group, 1e-10, -448.0, 448.0)


def _multiply_and_quantise(out: Any, x: Any, scale: Any, group: int, ub: Any = None, transposed: bool = False) -> None:
    """The result of vLLM's operator."""
    gate, up = x.float().chunk(2, 1)
    _quantise_groups(gate / (1 + (-gate).exp()) * up, out, scale, group, 1e-10, -448.0, 448.0)


FUSED = {
    "rms_norm_per_block_quant": _norm_and_quantise,
    "silu_and_mul_per_block_quant": _multiply_and_quantise,
}


def import_vllm(sources: Path, packages: Path | None = None) -> Any:
    """vLLM from a folder with the package and its dist-info; `packages` has further packages that it needs.

    Call it once, in a process of its own, before torch is imported.
    """
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")  # its library is not here
    os.environ.setdefault("VLLM_CACHE_ROOT", os.environ.get("TMPDIR", "/tmp") + "/vllm-cache")
    sys.path.append(str(sources))
    if packages is not None:
        sys.path.append(str(packages))
    sys.meta_path.append(_Finder())
    for name in LIBRARIES:
        sys.modules[name] = types.ModuleType(name)
    # vllm.vllm_flash_attn raises without one of its libraries
    sys.modules["vllm.vllm_flash_attn._vllm_fa2_C"] = types.ModuleType("vllm.vllm_flash_attn._vllm_fa2_C")
    import torch

    library = torch.library.Library("_C", "DEF")
    for name in QUESTIONS:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    library.define(
        "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"
    )
    library.impl("cutlass_scaled_mm", _scaled_mm, "CompositeExplicitAutograd")
    library.define(
        "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
        "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) "
        "-> ()"
    )
    library.impl("per_token_group_fp8_quant", _quantise_groups, "CompositeExplicitAutograd")
    for schema in FUSION:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, FUSED.get(name, _never), "CompositeExplicitAutograd")
    for name in ("per_token_group_fp8_quant", *(schema.partition("(")[0] for schema in FUSION)):
        torch.library.register_fake(f"_C::{name}", lambda *operands, **named: None, lib=library)
    import_vllm.library = library  # type: ignore[attr-defined]  # kept for the process
    import vllm
    import vllm.distributed.parallel_state as groups
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    groups._TP = types.SimpleNamespace(world_size=1, rank_in_group=0)  # a single rank, without communication

    class H200(NonNvmlCudaPlatform):  # type: ignore[misc]
        dispatch_key = "CPU"
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H200")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 143771 << 20)

    vllm.platforms._current_platform = H200()
    return vllm
