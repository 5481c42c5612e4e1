"""`vllm` and `sglang` for products of x in 16 bits and w in fp8: the engine's own quantiser, then a product it calls.

What an engine runs for a linear layer of an fp8 checkpoint. The quantiser is vLLM's operator or SGLang's function, in
the layout of scales that the engine uses for the product: DeepGEMM (its own choice of tile), CUTLASS or Triton.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.backends import NO_SPACE, Backend
from gemmpipe.backends.aten import library_violation
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.engine_compile import empty_meta, scales_shape
from gemmpipe.backends.engine_functions import GEMM_FUNCTIONS
from gemmpipe.backends.packages import also_missing, not_installed
from gemmpipe.backends.vllm_cutlass import QUANTISE_BLOCKS, QUANTISE_ROWS, VllmCutlass, library_problem, operator
from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.core.errors import one_line
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Prepared, Weights
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.launch.workspace import SCRATCH, TensorShape
from gemmpipe.templates.quantise import by_row, quantised_spec, weight_only_violation
from gemmpipe.templates.tiled import ceil_div

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

DEEPGEMM, CUTLASS, TRITON = "deepgemm", "cutlass", "triton"
_BLOCK, _LINE = 128, 4
_LEAST_SCALE = 1e-10
"""The engines' default of `eps`."""
_PADDED, _ROWS = "padded", "rows"
_LAYOUTS = {DEEPGEMM: _PADDED, CUTLASS: COLUMN, TRITON: ROW}
"""The memory order of x's block scales by product; `padded`: M-major in lines of a multiple of four rows."""
_SGLANG_MODULE = "sglang.kernels.ops.quantization.fp8_kernel"
_SGLANG_QUANTISER = "sglang_per_token_group_quant_fp8"


class EnginePair(Backend):
    """Candidates by one knob, `product`: what the engine calls after its quantiser."""

    reads_strides = False
    block_products: ClassVar[tuple[str, ...]]
    row_products: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def missing(self, product: str) -> str | None:
        """Why the quantiser or the product's function is missing, without importing the engine, or None."""

    @abstractmethod
    def quantiser(self, spec: GemmSpec, x: "torch.Tensor", into: Inputs, product: str) -> Callable[[], object]:
        """A call that fills `into`, whose scales have the product's layout. Raises RuntimeError in one line."""

    def unavailable(self, device: Device) -> str | None:
        """It needs an NVIDIA GPU and the engine's quantiser."""
        missing = self.missing("")
        if device.kind != "cuda":
            return also_missing(f"no NVIDIA GPU: {self.label}'s quantiser runs on NVIDIA only here", missing)
        return missing

    def form_violation(self, spec: GemmSpec) -> str | None:
        """One product of x in 16 bits and w in fp8."""
        return library_violation(spec) or weight_only_violation(spec)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The engine's products for these scales; none for other operands."""
        if self.form_violation(spec):
            return ()
        return tuple({"product": name} for name in (self.row_products if by_row(spec) else self.block_products))

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The product."""
        return ("product",)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the operands, of the quantiser or of the product, or None."""
        if reason := self.form_violation(spec):
            return reason
        product = knobs.get("product")
        if product not in (self.row_products if by_row(spec) else self.block_products):
            return f"product: {self.label} has no {product} for these scales"
        if spec.k % _BLOCK and not by_row(spec):
            return f"K: {spec.k}, the quantiser takes multiples of {_BLOCK}"
        if (reason := self.missing(str(product))) or product == TRITON:
            return reason
        inner, inner_knobs = _inner(spec, str(product), device)
        reason = inner.unavailable(device) or inner.unsupported_reason(quantised_spec(spec), inner_knobs, device)
        return None if reason is None else f"{product}: {reason}"

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """DeepGEMM's tile; the engine's functions compile by themselves."""
        if knobs["product"] != DEEPGEMM:
            return ()
        inner, inner_knobs = _inner(spec, DEEPGEMM, device)
        return inner.builds(quantised_spec(spec), inner_knobs, device)

    def compiles_when_called(self, spec: GemmSpec, knobs: Knobs) -> bool:
        """True for the engine's Triton function."""
        return knobs.get("product") == TRITON

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """Call that function on operands without memory, with the configuration that it looks up itself."""
        from gemmpipe.family.operands import torch_dtype

        inner = quantised_spec(spec)
        if not self.compiles_when_called(spec, knobs) or inner.x_scale is None or inner.w_scale is None:
            raise ValueError(f"product: {self.label} {knobs.get('product')} does not compile when it is called")
        x_scale = empty_meta((spec.m, ceil_div(spec.k, _BLOCK)), "float32")
        x = Inputs(x=empty_meta((spec.m, spec.k), spec.w_dtype), x_scale=x_scale)
        w_scale = empty_meta(scales_shape(inner.w_scale, spec.n, spec.k), inner.w_scale.dtype)
        weights = Weights(w=empty_meta((spec.n, spec.k), spec.w_dtype), w_scale=w_scale)
        _triton(self.label, x, weights, torch_dtype(spec.out_dtype))()

    def kernel_name(self, knobs: Knobs) -> str:
        """`vllm quantised deepgemm`."""
        return f"{self.label} quantised {knobs['product']}"

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The stored weight, contiguous."""
        scales = weights.w_scale if weights.w_scale is None else weights.w_scale.contiguous()
        return Prepared(weights=replace(weights, w=weights.w.contiguous(), w_scale=scales))

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The quantiser into scratch memory, then the product."""
        product = str(knobs["product"])
        quantised = _scratch(spec, _ROWS if by_row(spec) else _LAYOUTS[product], inputs.x.device)
        quantise = self.quantiser(spec, inputs.x.contiguous(), quantised, product)
        if product == TRITON:
            multiply = _triton(self.label, quantised, prepared.weights, out.dtype)
        else:
            inner, inner_knobs = _inner(spec, product, device)
            multiply = inner.bind(quantised_spec(spec), inner_knobs, device, quantised, prepared, out)

        def launch() -> "torch.Tensor":
            quantise()
            return multiply()

        return launch


@dataclass(frozen=True, kw_only=True)
class VllmPair(EnginePair):
    """vLLM's operators `per_token_group_fp8_quant` or `dynamic_per_token_scaled_fp8_quant`, then a product."""

    label = "vllm"
    block_products = (DEEPGEMM, CUTLASS, TRITON)
    row_products = (CUTLASS,)

    def missing(self, product: str) -> str | None:
        """The library of operators."""
        return library_problem()

    def quantiser(self, spec: GemmSpec, x: "torch.Tensor", into: Inputs, product: str) -> Callable[[], object]:
        """The operator."""
        if by_row(spec):
            quantise_rows = operator(QUANTISE_ROWS)
            return lambda: quantise_rows(into.x, x, into.x_scale, None)
        quantise, top = operator(QUANTISE_BLOCKS), FP8_MAX[spec.w_dtype]
        layout = (product != TRITON, product == DEEPGEMM)  # M-major, in lines for the copy engine
        return lambda: quantise(x, into.x, into.x_scale, _BLOCK, _LEAST_SCALE, -top, top, False, *layout)


@dataclass(frozen=True, kw_only=True)
class SglangPair(EnginePair):
    """SGLang's `sglang_per_token_group_quant_fp8`, then a product."""

    label = "sglang"
    block_products = (DEEPGEMM, TRITON)

    def missing(self, product: str) -> str | None:
        """The package."""
        return None if find_spec("sglang") is not None else not_installed("sglang")

    def quantiser(self, spec: GemmSpec, x: "torch.Tensor", into: Inputs, product: str) -> Callable[[], object]:
        """The function."""
        quantise = _sglang_quantiser()
        layout = {"column_major_scales": product != TRITON, "scale_tma_aligned": product == DEEPGEMM}
        given = {"eps": _LEAST_SCALE, **layout, "output_q": into.x, "output_s": into.x_scale}
        return lambda: quantise(x, _BLOCK, **given)


def _sglang_quantiser() -> "Callable[..., object]":
    found = _import_quantiser()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _import_quantiser() -> "Callable[..., object] | str":
    """SGLang's function, or one line with the reason why it cannot be used; an import that fails is not repeated."""
    try:
        module = import_module(_SGLANG_MODULE)
    except Exception as error:  # noqa: BLE001 - engines run much code when they are imported
        return f"sglang cannot be imported: {one_line(error)}"
    return getattr(module, _SGLANG_QUANTISER, None) or f"this sglang has no {_SGLANG_QUANTISER} in {_SGLANG_MODULE}"


def _inner(spec: GemmSpec, product: str, device: Device) -> tuple[Implementation, Knobs]:
    """The product of fp8 operands and its knobs: DeepGEMM with the tile that its model ranks first."""
    if product == CUTLASS:
        return VllmCutlass(), {}
    library = DeepGemm(tiles=1)
    choices = list(library.configs(quantised_spec(spec), device, NO_SPACE))
    return library, choices[-1] if choices else {}


def _scratch(spec: GemmSpec, layout: str, device: "torch.device") -> Inputs:
    """fp8 x [M, K] and its scales, not yet written, valid for the call only."""
    blocks, line = ceil_div(spec.k, _BLOCK), ceil_div(spec.m, _LINE) * _LINE
    sizes = {_ROWS: (spec.m, 1), ROW: (spec.m, blocks), COLUMN: (blocks, spec.m), _PADDED: (blocks, line)}
    shapes: dict[str, TensorShape] = {"q": ((spec.m, spec.k), spec.w_dtype), "scale": (sizes[layout], "float32")}
    scratch = SCRATCH.take(shapes, device)
    scale = scratch["scale"]
    return Inputs(x=scratch["q"], x_scale=scale if layout in (_ROWS, ROW) else scale.t()[: spec.m])


def _triton(engine: str, quantised: Inputs, weights: Weights, dtype: "torch.dtype") -> Launch:
    """The engine's Triton function with the configuration that it looks up itself."""
    function = GEMM_FUNCTIONS[engine]
    if reason := function.unavailable_reason():
        raise RuntimeError(reason)
    call = getattr(import_module(function.module), function.function)
    operands = (quantised.x, weights.w, quantised.x_scale, weights.w_scale)
    return lambda: call(*operands, [_BLOCK, _BLOCK], dtype)
