"""vLLM's linear layers: fp8 by blocks and by row as kernels first in its lists, bf16 as its unquantised product.

A kernel of ours is combined with the one that vLLM chooses without it: the combined class is a subclass of both, so
weights are processed and activations are quantised as vLLM does, and all that depends on the class of its kernel
(warm-up, fusion) still finds it. Only the product is replaced, by an operator that dispatches per M. Layers without
rows are not combined: vLLM takes its next kernel.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.kernels.linear as kernels
from torch.nn.functional import linear
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import PlatformEnum, current_platform

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import one_line
from gemmpipe.plugins import quantise_operators
from gemmpipe.plugins.engine_dispatch import (
    DTYPES_16BIT,
    KERNEL_ATTRIBUTE,
    SCALE_BLOCK,
    EngineKernel,
    Quantise,
    register_kernel,
)
from gemmpipe.plugins.scope import BF16, FP8_BLOCKS, FP8_ROWS
from gemmpipe.plugins.tuned_products import has_rows
from gemmpipe.plugins.vllm_notice import (
    NOTICE,
    PRODUCTS,
    forced_linear_backend,
    fused_communication,
)
from gemmpipe.runtime.binding import GemmCall
from gemmpipe.runtime.cache import process_device
from gemmpipe.runtime.operands import OptionalTensor, dtype_name

_BLOCK_SCHEME, _ROW_SCHEME = "fp8_block_w8a8", "fp8_w8a8"
"""vLLM's names of the schemes, since 0.33."""
"""The attribute of a bf16 layer that is taken over, and of our kernels: the name of the engine's kernel."""
_LIBRARIES = {"DeepGemm": "deepgemm", "DeepGEMM": "deepgemm", "FlashInfer": "flashinfer", "Cutlass": "vllm_cutlass"}
"""Part of the name of a kernel class of vLLM -> gemmpipe's backend of its library."""
_COMBINED: dict[tuple[type, type], type] = {}
Verdict = tuple[bool, str | None]
"""(may implement, the reason if not), as in vLLM."""


def install() -> None:
    """Put our kernels first in vLLM's lists, and replace its unquantised product."""
    blocks, rows = kernels._POSSIBLE_FP8_BLOCK_KERNELS, kernels._POSSIBLE_FP8_KERNELS
    for possible, ours in ((blocks, GemmpipeFp8BlockKernel), (rows, GemmpipeFp8RowKernel)):
        found = possible[PlatformEnum.CUDA]
        found[:] = [ours, *(kernel for kernel in found if kernel is not ours)]
    _install_unquantised()


def engines_choice(config: Any, possible: Any, scheme: str) -> type:
    """The kernel that vLLM chooses without ours. Raises ValueError if it has none."""
    platform = current_platform._enum
    others = {platform: [kernel for kernel in possible[platform] if not issubclass(kernel, _Ours)]}
    choose = kernels.choose_scaled_mm_linear_kernel
    named = {"quantization": scheme} if "quantization" in inspect.signature(choose).parameters else {}
    chosen: type = choose(config=config, possible_kernels=others, **named)
    return chosen


def combined(ours: type, chosen: type) -> type:
    """The subclass of our kernel and vLLM's, one for each pair."""
    found = _COMBINED.get((ours, chosen))
    if found is None:
        members = {"__module__": __name__, "__doc__": ours.__doc__}
        found = _COMBINED.setdefault((ours, chosen), type(f"Gemmpipe{chosen.__name__}", (ours, chosen), members))
    return found


def _left_reason(product: str, scheme: str, config: Any, key: dict[str, Scalar]) -> str:
    """Why a layer is left to the engine, known before its weights exist; empty if a row may answer."""
    NOTICE.announce()
    if config.out_dtype not in DTYPES_16BIT:
        return f"gemmpipe: out_dtype {dtype_name(config.out_dtype)}"
    if reason := forced_linear_backend(scheme) or fused_communication():
        return f"gemmpipe: {reason}"
    n, k = config.weight_shape
    wanted: dict[str, Scalar] = {"N": int(n), "K": int(k), "outdtype": dtype_name(config.out_dtype), **key}
    if not has_rows(PRODUCTS[product][1], process_device(), wanted):
        return f"gemmpipe: no tuned rows for N={n} K={k}"
    return ""


class _Ours:
    """The common part of our kernels: `gemmpipe_kernel` is the registered name of the engine's kernel, or empty."""

    gemmpipe_kernel: str = ""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Verdict:
        """Always: rows decide."""
        return True, None


class GemmpipeFp8BlockKernel(_Ours, Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]  # vLLM is optional
    """fp8 with scales of 1 x 128 and 128 x 128: tuned rows, else the kernel that vLLM chooses without it."""

    def __new__(cls, config: Any) -> "GemmpipeFp8BlockKernel":
        """An instance of the combined class."""
        if cls is not GemmpipeFp8BlockKernel:
            return object.__new__(cls)
        chosen = engines_choice(config, kernels._POSSIBLE_FP8_BLOCK_KERNELS, _BLOCK_SCHEME)
        made: GemmpipeFp8BlockKernel = object.__new__(combined(cls, chosen))
        return made

    @classmethod
    def can_implement(cls, config: Any) -> Verdict:
        """Only for layers with rows, and if vLLM's own choice reads weights in blocks."""
        able, why = Fp8BlockScaledMMLinearKernel.can_implement(config)
        if not able:
            return able, why
        activation, weight = config.activation_quant_key.scale.group_shape, config.weight_quant_key.scale.group_shape
        if (activation, weight) != (GroupShape(1, 128), GroupShape(128, 128)):
            return False, f"gemmpipe: scales of {tuple(activation)} and {tuple(weight)}"
        dtype = dtype_name(config.weight_quant_key.dtype)
        if reason := _left_reason(FP8_BLOCKS, _BLOCK_SCHEME, config, {"dtype": dtype}):
            return False, reason
        chosen = engines_choice(config, kernels._POSSIBLE_FP8_BLOCK_KERNELS, _BLOCK_SCHEME)
        if not issubclass(chosen, Fp8BlockScaledMMLinearKernel):
            NOTICE.leave(FP8_BLOCKS, f"{chosen.__name__} stores weights in a form of its own")
            return False, f"gemmpipe: {chosen.__name__} stores weights in a form of its own"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """vLLM's own processing, for its kernel; the tuned kernels read the result if it is still [N, K] in blocks."""
        super().process_weights_after_loading(layer)
        params = self._get_layer_params(layer)
        scale = params.weight_scale if params.weight_scale_inv is None else params.weight_scale_inv
        reason = block_layout_reason(params.weight, scale)
        kernel = None if reason else self._engine_kernel(params.weight)
        if kernel is None:
            NOTICE.leave(FP8_BLOCKS, reason or f"{type(self).__name__} quantises activations in a way of its own")
        self.gemmpipe_kernel = "" if kernel is None else register_kernel(kernel)

    def _engine_kernel(self, weight: torch.Tensor) -> EngineKernel | None:
        """The engine's kernel for this weight; None if activations cannot be quantised outside of it."""
        name, call = _kernel_name(self, weight), block_call(super().apply_block_scaled_mm)
        libtypes = libraries_of(name)
        if self.apply_input_quant:
            return EngineKernel(
                name=name, call=call, libtypes=libtypes, after_quantiser=quantise_operators.are_registered()
            )
        inner = getattr(self, "fallback", None)  # of a kernel that quantises x itself for few rows alone
        if not isinstance(inner, Fp8BlockScaledMMLinearKernel) or not inner.apply_input_quant:
            return None
        return EngineKernel(
            name=name,
            call=block_call(inner.apply_block_scaled_mm),
            from_16bit=call,
            quantise=block_quantiser(inner),
            libtypes=libtypes,
            after_quantiser=quantise_operators.are_registered(),
        )

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
    ) -> torch.Tensor:
        """The product [M, N]; A is in 16 bits if vLLM's kernel quantises it itself."""
        out: torch.Tensor
        family, dtype = PRODUCTS[FP8_BLOCKS][1], self.config.out_dtype
        if not self.gemmpipe_kernel:
            out = super().apply_block_scaled_mm(A, B, As, Bs)
        elif self.apply_input_quant:
            out = torch.ops.gemmpipe.engine_product(family, A, B, As, Bs, None, dtype, self.gemmpipe_kernel)
        else:
            out = torch.ops.gemmpipe.engine_product_16bit(family, A, B, Bs, dtype, self.gemmpipe_kernel)
        return out


def block_call(apply: Callable[..., torch.Tensor]) -> GemmCall:
    """vLLM's `apply_block_scaled_mm` as a call; x_scale is None for x in 16 bits, where vLLM passes a placeholder."""

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        return apply(A=x, B=w, As=x.new_empty(1) if x_scale is None else x_scale, Bs=w_scale)

    return call


def block_quantiser(kernel: Any) -> Quantise:
    """The quantisation of activations for this kernel of vLLM, by the function that vLLM's own operator calls.

    It is looked up where that operator finds it: the scope `quantise` puts ours there.
    """
    from vllm.model_executor.kernels.linear.scaled_mm import flashinfer
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    quantiser = getattr(flashinfer, "per_token_group_quant_fp8", fp8_utils.per_token_group_quant_fp8)
    group, power_of_two = kernel.weight_group_shape.col, bool(getattr(kernel, "use_deep_gemm_e8m0", False))

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = quantiser(
            x, group_size=group, column_major_scales=True, use_ue8m0=power_of_two
        )
        return made

    return quantise


def block_layout_reason(weight: torch.Tensor, scale: OptionalTensor) -> str:
    """Why tuned kernels cannot read a processed weight; empty if it is [N, K] with fp32 scales of 128 x 128.

    The values may have changed: rounding to powers of two (DeepGEMM) changes weights and scales together.
    """
    if weight.dim() != 2 or weight.element_size() != 1 or not weight.dtype.is_floating_point:
        return f"weights are stored as {dtype_name(weight.dtype)} {list(weight.shape)}"
    expected = [-(-size // SCALE_BLOCK) for size in weight.shape]
    if scale is None or scale.dtype != torch.float32 or list(scale.shape) != expected:
        found = "none" if scale is None else f"{dtype_name(scale.dtype)} {list(scale.shape)}"
        return f"scales of weights are stored as {found}, expected float32 {expected}"
    if not weight.is_contiguous() or not scale.is_contiguous():
        return "weights or scales are not contiguous"
    return ""


def libraries_of(kernel_name: str) -> frozenset[str]:
    """gemmpipe's backends of the libraries that vLLM's kernel of this name runs, with vLLM's own choice of tiles."""
    return frozenset(backend for part, backend in _LIBRARIES.items() if part in kernel_name)


def _kernel_name(kernel: Any, weight: torch.Tensor) -> str:
    """The name of vLLM's part of a combined kernel for a weight [N, K]; the same in every process."""
    chosen = next(c for c in type(kernel).__mro__ if not issubclass(c, _Ours))
    n, k = weight.shape
    return f"vllm {chosen.__name__} N={n} K={k} {dtype_name(kernel.config.out_dtype)}"


class GemmpipeFp8RowKernel(_Ours, FP8ScaledMMLinearKernel):  # type: ignore[misc]  # vLLM is optional
    """fp8 with a scale per token and per channel, or one each: tuned rows, else the kernel that vLLM chooses."""

    def __new__(cls, c: Any, layer_param_names: Any) -> "GemmpipeFp8RowKernel":
        """An instance of the combined class."""
        if cls is not GemmpipeFp8RowKernel:
            return object.__new__(cls)
        chosen = engines_choice(c, kernels._POSSIBLE_FP8_KERNELS, _ROW_SCHEME)
        made: GemmpipeFp8RowKernel = object.__new__(combined(cls, chosen))
        return made

    @classmethod
    def can_implement(cls, c: Any) -> Verdict:
        """Only for layers with rows."""
        granularity = row_granularity(c)
        if not granularity:
            return False, "gemmpipe: scales of activations and weights are of different kinds"
        key: dict[str, Scalar] = {"q_dtype_w": dtype_name(c.weight_quant_key.dtype), "granularity": granularity}
        reason = _left_reason(FP8_ROWS, _ROW_SCHEME, c, key)
        return not reason, reason or None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """vLLM's own processing, for its kernel; the tuned kernels read the result if it is still [N, K] transposed."""
        super().process_weights_after_loading(layer)
        weight, scale, *_ = self._get_layer_params(layer)
        reason = row_layout_reason(weight, scale, self.config)
        if reason:
            NOTICE.leave(FP8_ROWS, reason)
        name = _kernel_name(self, weight.t()) if not reason else ""
        self.gemmpipe_kernel = name and register_kernel(EngineKernel(name=name, call=self._engine_call()))

    def _engine_call(self) -> GemmCall:
        engine, out_dtype = super().apply_scaled_mm, self.config.out_dtype

        def call(
            x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
        ) -> torch.Tensor:
            shape = [x.shape[0], w.shape[0]]
            out: torch.Tensor = engine(
                A=x, B=w.t(), out_dtype=out_dtype, As=x_scale, Bs=w_scale, bias=bias, output_shape=shape
            )
            return out

        return call

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """The product [..., N]; B is [K, N], and A may have padding rows, which some of vLLM's kernels need."""
        out: torch.Tensor
        if not self.gemmpipe_kernel or out_dtype != self.config.out_dtype:
            out = super().apply_scaled_mm(
                A=A, B=B, out_dtype=out_dtype, As=As, Bs=Bs, bias=bias, output_shape=output_shape
            )
            return out
        if self.get_output_padding() is not None:  # rows are looked up by the tokens' own number
            tokens = math.prod(output_shape[:-1])
            A, As = A[:tokens], As if As.numel() == 1 else As[:tokens]
        family, name = PRODUCTS[FP8_ROWS][1], self.gemmpipe_kernel
        out = torch.ops.gemmpipe.engine_product(family, A, B.t(), As, Bs, bias, out_dtype, name)
        return out.view(*output_shape)


def row_granularity(config: Any) -> str:
    """`row` or `tensor` for a layer's scales as in the family's key; empty for mixed kinds."""
    activation, weight = config.activation_quant_key.scale.group_shape, config.weight_quant_key.scale.group_shape
    kinds = {
        (GroupShape.PER_TOKEN, GroupShape.PER_CHANNEL): "row",
        (GroupShape.PER_TENSOR, GroupShape.PER_TENSOR): "tensor",
    }
    return kinds.get((activation, weight), "")


def row_layout_reason(weight: torch.Tensor, scale: OptionalTensor, config: Any) -> str:
    """Why tuned kernels cannot read a processed weight; empty if it is the transpose of a contiguous [N, K]."""
    n, k = config.weight_shape
    if weight.dim() != 2 or weight.element_size() != 1 or tuple(weight.shape) != (k, n):
        return f"weights are stored as {dtype_name(weight.dtype)} {list(weight.shape)}, expected [{k}, {n}]"
    if not weight.t().is_contiguous():
        return "weights are not the transpose of [N, K]"
    wanted = n if row_granularity(config) == "row" else 1
    if scale is None or scale.dtype != torch.float32 or scale.numel() != wanted:
        found = "none" if scale is None else f"{dtype_name(scale.dtype)} {list(scale.shape)}"
        return f"scales of weights are stored as {found}, expected {wanted} in float32"
    return ""


def _linear_call(
    x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
) -> torch.Tensor:
    return linear(x, w, bias)


_UNQUANTISED = EngineKernel(
    name="vllm default_unquantized_gemm", call=_linear_call, libtypes=frozenset({"torch"}), is_baseline=True
)
"""torch's product, the baseline of bf16's rows."""


def _install_unquantised() -> None:
    """Replace `default_unquantized_gemm`, which vLLM finds by its name, and mark layers when they are loaded."""
    plain = layer_utils.default_unquantized_gemm
    if getattr(plain, KERNEL_ATTRIBUTE, False):
        return

    def unquantized_gemm(
        layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        name = getattr(layer, KERNEL_ATTRIBUTE, "")
        out: torch.Tensor
        if not name or x.dtype != weight.dtype:
            out = plain(layer, x, weight, bias)
        else:
            family = PRODUCTS[BF16][1]
            out = torch.ops.gemmpipe.engine_product(family, x, weight, None, None, bias, x.dtype, name)
        return out

    setattr(unquantized_gemm, KERNEL_ATTRIBUTE, True)
    layer_utils.default_unquantized_gemm = unquantized_gemm
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        _mark_after_loading(method)


def _mark_after_loading(method: type) -> None:
    """Mark the layers of a method of vLLM once their weights are loaded."""
    process = method.process_weights_after_loading  # type: ignore[attr-defined]

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        process(self, layer)
        try:
            mark_unquantised(layer)
        except Exception as error:  # noqa: BLE001 - the layer keeps the engine's product
            NOTICE.leave(BF16, one_line(error))

    method.process_weights_after_loading = process_weights_after_loading  # type: ignore[attr-defined]


def mark_unquantised(layer: torch.nn.Module) -> None:
    """Take a layer over if its weight is in 16 bits, [N, K], contiguous, and has rows."""
    NOTICE.announce()
    setattr(layer, KERNEL_ATTRIBUTE, "")
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.dtype not in DTYPES_16BIT:
        return
    if weight.is_meta or not weight.is_contiguous() or forced_linear_backend() or fused_communication():
        return
    n, k = weight.shape
    dtype = dtype_name(weight.dtype)
    wanted: dict[str, Scalar] = {"N": n, "K": k, "dtype": dtype, "outdtype": dtype}
    if has_rows(PRODUCTS[BF16][1], process_device(), wanted):
        setattr(layer, KERNEL_ATTRIBUTE, register_kernel(_UNQUANTISED))
