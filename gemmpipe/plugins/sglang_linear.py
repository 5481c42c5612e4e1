"""SGLang's linear layers: hooks that pass products with tuned rows to an operator, which dispatches per M.

The operator's other branch is SGLang's own function with the same operands. A weight is looked at once: its sizes must
have rows, and its layout must be the one that tuned kernels read.
"""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from gemmpipe.core.data import Scalar
from gemmpipe.family.dtypes import X_SCALE_COLUMN
from gemmpipe.plugins.engine_dispatch import (
    DTYPES_16BIT,
    KERNEL_ATTRIBUTE,
    SCALE_BLOCK,
    EngineKernel,
    register_kernel,
)
from gemmpipe.plugins.scope import BF16, FP8_BLOCKS, FP8_ROWS
from gemmpipe.plugins.sglang import FAMILIES
from gemmpipe.plugins.sglang_blocks import UTILS, block_kernel, dequantised_call, scale_order
from gemmpipe.plugins.sglang_notice import SGLANG_NOTICE
from gemmpipe.plugins.tuned_products import has_rows
from gemmpipe.runtime.cache import process_device
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.operands import OptionalTensor, dtype_name

Original = Callable[..., torch.Tensor]
"""SGLang's function."""
_FP8 = torch.float8_e4m3fn
_ROWS: dict[tuple[object, ...], bool] = {}
"""Key of a product -> True if rows may be used, for functions without a layer."""
_ROW_KERNELS: dict[tuple[tuple[str, Any], ...], str] = {}
"""Registered names of SGLang's function of scales by row, by its options."""


def _known(layer: Any, find: Callable[[], str]) -> str:
    """The layer's kernel, found at its first call outside of a compiled graph."""
    known = getattr(layer, KERNEL_ATTRIBUTE, None)
    if known is None:
        if torch.compiler.is_compiling():
            return ""
        known = find()
        setattr(layer, KERNEL_ATTRIBUTE, known)
    return str(known)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def around_unquantised(
    original: Original, method: Any, layer: Any, x: torch.Tensor, bias: OptionalTensor = None, **more: Any
) -> torch.Tensor:
    """`UnquantizedLinearMethod.apply`: x [..., K] in 16 bits."""
    name = "" if more else _known(layer, lambda: _sixteen_bit_kernel(original, method, layer))
    if not name or not isinstance(x, torch.Tensor) or x.dtype != layer.weight.dtype or x.requires_grad:
        return original(method, layer, x, bias, **more)
    out: torch.Tensor = torch.ops.gemmpipe.engine_product(
        FAMILIES[BF16], x, layer.weight, None, None, bias, x.dtype, name
    )
    return out


def _sixteen_bit_kernel(original: Original, method: Any, layer: Any) -> str:
    weight = getattr(layer, "weight", None)
    if not SGLANG_NOTICE.allows(BF16) or not _is_plain(weight, DTYPES_16BIT):
        return ""
    assert isinstance(weight, torch.Tensor)
    n, k = weight.shape
    dtype = dtype_name(weight.dtype)
    wanted: dict[str, Scalar] = {"N": n, "K": k, "dtype": dtype, "outdtype": dtype}
    if not has_rows(FAMILIES[BF16], process_device(), wanted):
        return ""

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        return original(method, SimpleNamespace(weight=w), x, bias)

    kernel = EngineKernel(
        name=f"sglang {type(method).__name__}", call=call, libtypes=frozenset({"torch"}), is_baseline=True
    )
    return register_kernel(kernel)


def _is_plain(weight: object, dtypes: tuple[torch.dtype, ...]) -> bool:
    """True for a contiguous weight [N, K] of one of these types, with memory."""
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and weight.dtype in dtypes
        and not weight.is_meta
        and weight.is_contiguous()
    )


def around_fp8(
    original: Original, method: Any, layer: Any, x: Any, bias: OptionalTensor = None, **more: Any
) -> torch.Tensor:
    """`Fp8LinearMethod.apply`: weights with scales by blocks, x [..., K] in 16 bits; all else is SGLang's."""
    name = "" if more else _known(layer, lambda: _block_kernel(method, layer))
    if not name or bias is not None or not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
        return original(method, layer, x, bias, **more)
    out: torch.Tensor = torch.ops.gemmpipe.engine_product_16bit(
        FAMILIES[FP8_BLOCKS], _flat(x), layer.weight, layer.weight_scale_inv, x.dtype, name
    )
    return out.view(*x.shape[:-1], out.shape[-1])


def _block_kernel(method: Any, layer: Any) -> str:
    if not SGLANG_NOTICE.allows(FP8_BLOCKS) or not getattr(method, "block_quant", False):
        return ""
    if reason := block_layer_reason(method, layer):
        SGLANG_NOTICE.leave(FP8_BLOCKS, reason)
        return ""
    weight = layer.weight
    n, k = weight.shape
    wanted: dict[str, Scalar] = {"N": n, "K": k, "outdtype": "bfloat16"}
    if not has_rows(FAMILIES[FP8_BLOCKS], process_device(), wanted):
        return ""
    _say_other_order(wanted, scale_order(method.w8a8_block_fp8_linear, n, k))
    return register_kernel(block_kernel(method.w8a8_block_fp8_linear, n, k))


def _say_other_order(wanted: dict[str, Scalar], order: str) -> None:
    """Log once if all rows of a weight are for x's scales in another order than SGLang's."""
    alternatives = dispatch_of(FAMILIES[FP8_BLOCKS]).tables().rows_with(process_device(), wanted)
    orders = {row.get(X_SCALE_COLUMN.name) for rows in alternatives for row in rows}
    if orders.isdisjoint({None, "", order}):
        tuned = ", ".join(sorted(map(str, orders)))
        reason = f"for more than one token its rows have x_scale={tuned}, SGLang's function {order}"
        SGLANG_NOTICE.leave(FP8_BLOCKS, f"{reason}; shapes=engine shapes.engine=sglang tunes for it")


def block_layer_reason(method: Any, layer: Any) -> str:
    """Why a layer's weight is not [N, K] in fp8 with fp32 scales of 128 x 128; empty if it is."""
    for flag in ("use_mxfp8", "use_marlin"):
        if getattr(method, flag, False):
            return flag.removeprefix("use_")
    if getattr(method, "block_fp8_as_mxfp8", False) and getattr(layer, "block_fp8_mxfp8_ready", False):
        return "scales are converted to MXFP8"
    if list(getattr(method, "weight_block_size", None) or ()) != [SCALE_BLOCK, SCALE_BLOCK]:
        return f"blocks of {getattr(method, 'weight_block_size', None)}"
    if getattr(layer, "_block_fp8_bf16_weight", None) is not None:
        return "the weight is kept in bf16"
    weight, scale = getattr(layer, "weight", None), getattr(layer, "weight_scale_inv", None)
    if not _is_plain(weight, (_FP8,)):
        return "the weight is not [N, K] in fp8"
    assert isinstance(weight, torch.Tensor)
    expected = [-(-size // SCALE_BLOCK) for size in weight.shape]
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or list(scale.shape) != expected:
        found = "none" if not isinstance(scale, torch.Tensor) else f"{dtype_name(scale.dtype)} {list(scale.shape)}"
        return f"scales of the weight are {found}, expected float32 {expected}"
    return "" if scale.is_contiguous() else "scales of the weight are not contiguous"


def around_fp8_rows(
    original: Original,
    input: Any,  # noqa: A002 - SGLang's name
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: OptionalTensor = None,
    input_scale_ub: OptionalTensor = None,
    bias: OptionalTensor = None,
    *rest: Any,
    **more: Any,
) -> torch.Tensor:
    """`apply_fp8_linear`: weight [K, N] with a scale per column, x quantised per token; all else is SGLang's."""
    plain = not rest and input_scale is None and input_scale_ub is None and bias is None
    if not plain or not _row_rows(input, weight, weight_scale, more):
        return original(input, weight, weight_scale, input_scale, input_scale_ub, bias, *rest, **more)
    out: torch.Tensor = torch.ops.gemmpipe.engine_product_16bit(
        FAMILIES[FP8_ROWS], _flat(input), weight.t(), weight_scale, input.dtype, _row_kernel(original, more)
    )
    return out.view(*input.shape[:-1], out.shape[-1])


def _row_kernel(original: Original, options: dict[str, Any]) -> str:
    """The registered name of SGLang's function with these options, made once."""
    key = tuple(sorted(options.items()))
    if key not in _ROW_KERNELS:

        def from_16bit(
            x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
        ) -> torch.Tensor:
            return original(x, w.t(), w_scale, None, None, bias, **options)

        flags = " ".join(f"{name}={value}" for name, value in key)
        kernel = EngineKernel(
            name=f"sglang apply_fp8_linear {flags}",
            call=dequantised_call(from_16bit),
            from_16bit=from_16bit,
            quantise=_quantise_rows,
        )
        _ROW_KERNELS[key] = register_kernel(kernel)
    return _ROW_KERNELS[key]


def _quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x per token, by SGLang's own function."""
    made: tuple[torch.Tensor, torch.Tensor] = import_module(UTILS).sglang_per_token_quant_fp8(x)
    return made


def _row_rows(x: Any, weight: torch.Tensor, scale: torch.Tensor, more: dict[str, Any]) -> bool:
    """True if rows may answer for this weight; looked up once per size."""
    if torch.compiler.is_compiling() or not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
        return False
    if any(isinstance(value, torch.Tensor) for value in more.values()):
        return False
    if more.get("compressed_tensor_quant") and not more.get("use_per_token_if_dynamic"):
        return False  # one scale for the whole of x
    if more.get("cutlass_fp8_supported") is False or weight.dim() != 2 or weight.dtype != _FP8:
        return False
    k, n = weight.shape
    if scale.dtype != torch.float32 or scale.numel() != n or n == 1 or not weight.t().is_contiguous():
        return False
    key = (n, k, x.dtype, weight.get_device())
    if key not in _ROWS:
        wanted: dict[str, Scalar] = {"N": n, "K": k, "outdtype": dtype_name(x.dtype)}
        wanted |= {"q_dtype_w": dtype_name(weight.dtype), "granularity": "row"}
        _ROWS[key] = SGLANG_NOTICE.allows(FP8_ROWS) and has_rows(FAMILIES[FP8_ROWS], process_device(), wanted)
    return _ROWS[key]


def forget_rows() -> None:
    """Look every weight up again: after tables have changed."""
    _ROWS.clear()
    _ROW_KERNELS.clear()
