"""SGLang's function of a product in fp8 with scales by blocks: its library, and the quantiser before it.

x is quantised in the memory order in which SGLang's function for the layer quantises it: in columns padded to fours for
DeepGEMM, CUTLASS and FlashInfer, in rows for Triton. A table that is tuned for this order has times of the library
without a copy of the scales, as SGLang calls it, and a call that no row answers after all needs no copy either.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.engines.kernel_choice import BLOCKS, KernelRule, Situation
from gemmpipe.engines.sglang_kernels import RULES
from gemmpipe.plugins.engine_dispatch import SCALE_BLOCK, EngineKernel, Quantise
from gemmpipe.runtime.binding import GemmCall
from gemmpipe.runtime.operands import OptionalTensor

UTILS = "sglang.srt.layers.quantization.fp8_utils"
"""SGLang's module with its quantisers."""
_LIBRARIES = {"deepgemm": "deepgemm", "flashinfer": "flashinfer", "cutlass": "vllm_cutlass"}
"""Part of the name of a function of SGLang -> gemmpipe's backend of its library."""
_TRITON = "triton_w8a8_block_fp8_linear"


def block_kernel(function: Callable[..., torch.Tensor], n: int, k: int) -> EngineKernel:
    """SGLang's function for weights [N, K]: of x in 16 bits, and of x that is quantised already."""
    size = [SCALE_BLOCK, SCALE_BLOCK]

    def from_16bit(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        return function(input=x, weight=w, block_size=size, weight_scale=w_scale, input_scale=None, bias=bias)

    def quantised(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        return function(input=x, weight=w, block_size=size, weight_scale=w_scale, input_scale=x_scale, bias=bias)

    title, options = _title(function), _options(function)
    name = function_for(title, n, k)
    bound = " ".join(f"{key}={value}" for key, value in sorted(options.items()))
    return EngineKernel(
        name=f"sglang {title} {bound} N={n} K={k}",
        call=dequantised_call(from_16bit) if "flashinfer" in title else quantised,  # they quantise x themselves
        from_16bit=from_16bit,
        quantise=block_quantiser(scale_order(function, n, k), power_of_two=_is_power_of_two(function)),
        libtypes=libraries_of(name),
    )


def _title(function: Callable[..., torch.Tensor]) -> str:
    return getattr(getattr(function, "func", function), "__name__", type(function).__name__)


def _options(function: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """The arguments that SGLang has bound."""
    found: dict[str, Any] = getattr(function, "keywords", {})
    return found


def _is_power_of_two(function: Callable[..., torch.Tensor]) -> bool:
    """True if x's scales are powers of two, as the checkpoint's."""
    return bool(_options(function).get("act_scale_ue8m0"))


def scale_order(function: Callable[..., torch.Tensor], n: int, k: int) -> str:
    """The memory order in which SGLang quantises x before this function, for a weight of these sizes."""
    rule = _rule(function_for(_title(function), n, k))
    return ROW if rule is None or not rule.scales or _is_power_of_two(function) else rule.scales


def function_for(title: str, n: int, k: int) -> str:
    """The name of the function that computes these sizes: SGLang's own falls back to Triton for some."""
    rule = _rule(title)
    falls_back = rule is not None and rule.sizes is not None and rule.sizes(Situation(gfx="", sizes=((n, k),)))
    return _TRITON if falls_back else title


def _rule(title: str) -> KernelRule | None:
    layer = RULES[-1].layer(BLOCKS)
    return None if layer is None else next((rule for rule in layer.kernels if rule.name == title), None)


def libraries_of(function_name: str) -> frozenset[str]:
    """gemmpipe's backends of the libraries that a function of SGLang runs; none for its Triton kernel."""
    return frozenset(backend for part, backend in _LIBRARIES.items() if part in function_name)


def block_quantiser(order: str, *, power_of_two: bool) -> Quantise:
    """The quantisation of x in groups of 128 along K, with scales in this memory order, by SGLang's own function.

    A single row has the same scales in both orders, and is quantised without gaps: so its rows are tuned.
    """
    utils = import_module(UTILS)

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor]
        if power_of_two:
            made = utils.sglang_per_token_group_quant_fp8(x, SCALE_BLOCK, scale_ue8m0=True)
        elif order == COLUMN and x.shape[0] > 1:
            made = utils.per_token_group_quant_fp8(x, SCALE_BLOCK, column_major_scales=True, scale_tma_aligned=True)
        else:
            made = utils.per_token_group_quant_fp8(x, SCALE_BLOCK)
        return made

    return quantise


def dequantised_call(from_16bit: GemmCall) -> GemmCall:
    """For a quantised x that no row answers after all: back to 16 bits, then SGLang's function."""

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        assert x_scale is not None
        groups = x.float().view(x.shape[0], x_scale.numel() // x.shape[0], -1)
        wide = (groups * x_scale.reshape(x.shape[0], -1, 1)).view(x.shape)
        return from_16bit(wide.bfloat16(), w, None, w_scale, bias)

    return call
