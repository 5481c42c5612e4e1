"""Host side of the quantiser (quantise_kernel.py), and candidates that quantise x before a product of fp8 operands.

`QuantisedFirst` makes candidates for x [M, K] in 16 bits and w [N, K] in fp8, with scales of 128 x 128 blocks or of
rows, from an implementation that multiplies fp8 operands: a launch of the quantiser, then the product. x gets a scale
per row and 128 columns, or per row. On NVIDIA GPUs from sm_90 on the product's launch overlaps the quantiser
(programmatic dependent launch) if its kernel supports that; the quantiser's overlaps nothing, since foreign kernels let
nothing start early.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Prepared, Scaling
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.launch.build import find_kernel, is_interpreted, load_build
from gemmpipe.launch.launch import KernelImplementation
from gemmpipe.launch.workspace import SCRATCH, TensorShape
from gemmpipe.templates.constraints import launch_violation
from gemmpipe.templates.params import (
    NO_GPU,
    SCALE_BLOCK,
    SCALE_BLOCKS,
    TRITON_TYPES,
    operand_pointers,
    size_arguments,
)
from gemmpipe.templates.tiled import ceil_div, make_build, next_power_of_2, uses_pdl

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

KERNEL = "gemmpipe.templates.quantise_kernel:quantise_rows"
_BLOCKS_PER_PROGRAM = 8
"""Blocks of 128 columns per program: 1,024 elements in 16 bits, 2 kB."""
_MAX_ROW = 65536
"""Columns of a row that one program quantises: 128 values per thread of 16 warps."""
_VALUES_PER_WARP = 1024
_X, _OUT, _SCALE = "x_ptr", "out_ptr", "scale_ptr"


def weight_only_violation(spec: GemmSpec) -> str | None:
    """`rule: detail` unless x has 16 bits without scales and w is fp8 with scales of 128 x 128 blocks or of rows."""
    scaling = spec.w_scale
    scaled = scaling is not None and (by_row(spec) or scaling.block == SCALE_BLOCKS[1])
    if not scaled or spec.x_scale is not None or spec.x_dtype != spec.out_dtype or spec.w_dtype not in FP8_MAX:
        return "operands: these candidates take x in 16 bits and w in fp8 with scales of 128 x 128 blocks or of rows"
    if by_row(spec) and spec.k > _MAX_ROW:
        return f"row: K={spec.k}, a program quantises a row of {_MAX_ROW} at most"
    return None


def by_row(spec: GemmSpec) -> bool:
    """True if the weight has a scale per row."""
    return spec.w_scale is not None and spec.w_scale.granularity == "row"


def quantised_spec(spec: GemmSpec, order: str | None = None) -> GemmSpec:
    """The product after x is quantised: fp8 operands, x's block scales in this memory order (None: either)."""
    block = Scaling(granularity="block", block=SCALE_BLOCKS[0], order=order)
    return replace(spec, x_dtype=spec.w_dtype, x_scale=Scaling(granularity="row") if by_row(spec) else block)


def linear_violation(spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
    """`rule: detail` unless x has 16 bits and w is fp8 of the device's format, or None."""
    return weight_only_violation(spec) or launch_violation(quantised_spec(spec), knobs, device)


def row_scales_violation(spec: GemmSpec) -> str | None:
    """`rule: detail` for scales of rows, with which a kernel cannot quantise x block by block, or None."""
    return "scales: the scale of a whole row of x is known only after the row is read" if by_row(spec) else None


def linear_pointers(spec: GemmSpec) -> dict[str, str]:
    """Operands, bias, the weight's scales and output."""
    pointers = {**operand_pointers(spec), "w_scale_ptr": "*fp32"}
    del pointers["x_scale_ptr"]
    return pointers


def linear_sizes(spec: GemmSpec) -> dict[str, int]:
    """Sizes and row strides."""
    sizes = size_arguments(spec, scale_group=SCALE_BLOCK)
    del sizes["x_scale_stride"]
    return sizes


def quantiser_build(spec: GemmSpec, device: Device) -> Build:
    """The build of the quantiser for this product's x; strides and K are its arguments.

    Raises ValueError for the specification of the product after x is quantised: the build reads x in 16 bits.
    """
    if spec.x_scale is not None:
        raise ValueError(f"the quantiser reads x in 16 bits; this product has x in {spec.x_dtype} with scales")
    interpreted = is_interpreted(find_kernel(KERNEL))
    overlap = uses_pdl(device, interpreted=interpreted)
    blocks, size = _blocks_per_program(spec)
    pointers = {_X: f"*{TRITON_TYPES[spec.x_dtype]}", _OUT: f"*{TRITON_TYPES[spec.w_dtype]}", _SCALE: "*fp32"}
    constants: dict[str, Scalar] = {
        "BLOCKS": blocks,
        "SCALE_BLOCK": size,
        "TOP": FP8_MAX[spec.w_dtype],
        "OVERLAP": overlap,
        "INTERPRETED": interpreted,
    }
    warps = min(16, max(4, blocks * size // _VALUES_PER_WARP))
    options: dict[str, Scalar] = {
        "num_warps": min(warps, 1024 // device.warp_size),
        **({"launch_pdl": True} if overlap else {}),
    }
    aligned = [name for name in ("K", "x_stride") if spec.k % 16 == 0]
    return make_build(KERNEL, pointers, _integers(spec, ROW), constants, options, aligned)


def _blocks_per_program(spec: GemmSpec) -> tuple[int, int]:
    """(blocks of a row that one program quantises, columns of a block): a whole row is one block."""
    if by_row(spec):
        return 1, next_power_of_2(spec.k)
    return min(_BLOCKS_PER_PROGRAM, next_power_of_2(ceil_div(spec.k, SCALE_BLOCK))), SCALE_BLOCK


def _scales_per_row(spec: GemmSpec) -> int:
    return 1 if by_row(spec) else ceil_div(spec.k, SCALE_BLOCK)


def _integers(spec: GemmSpec, order: str) -> dict[str, int]:
    row, block = (1, spec.m) if order == COLUMN else (_scales_per_row(spec), 1)
    return {"K": spec.k, "x_stride": spec.k, "scale_row_stride": row, "scale_block_stride": block}


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedInputs:
    """fp8 x [M, K] and its fp32 scales, [M, ceil(K/128)] or [M, 1], in scratch memory; the launch that fills both."""

    inputs: Inputs
    run: Callable[[], object]


def quantised_inputs(spec: GemmSpec, device: Device, x: "torch.Tensor", order: str) -> QuantisedInputs:
    """The quantised x of this product, its scales in the memory order `order`; valid for the call only.

    `x` may have fewer rows than the product, whose further rows have undefined values then.
    """
    blocks = _scales_per_row(spec)
    scales = (spec.m, blocks) if order == ROW else (blocks, spec.m)
    shapes: dict[str, TensorShape] = {"q": ((spec.m, spec.k), spec.w_dtype), "scale": (scales, "float32")}
    scratch = SCRATCH.take(shapes, x.device)
    arguments = {
        _X: x,
        _OUT: scratch["q"],
        _SCALE: scratch["scale"],
        **_integers(spec, order),
        "x_stride": x.stride(0),
    }
    grid = (x.shape[0], ceil_div(blocks, _blocks_per_program(spec)[0]), 1)
    run = load_build(quantiser_build(spec, device), device).launcher(grid, arguments, launch_pdl=False)
    scale = scratch["scale"] if order == ROW else scratch["scale"].t()
    return QuantisedInputs(inputs=Inputs(x=scratch["q"], x_scale=scale), run=run)


@dataclass(frozen=True, kw_only=True)
class QuantisedFirst(Implementation):
    """The quantiser, then a product of fp8 operands by `product`, whose label and knobs it has.

    `product` reads the weight as it is: nothing is prepared.
    """

    product: Implementation

    @property
    def label(self) -> str:  # type: ignore[override]
        """The product's."""
        return self.product.label

    def unavailable(self, device: Device) -> str | None:
        """The product's reason, or that there is no GPU for the quantiser."""
        return NO_GPU if device.kind == "cpu" else self.product.unavailable(device)

    def check(self, space: "Space") -> None:
        """The product's check."""
        self.product.check(space)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...] | None:
        """The product's."""
        return self.product.knob_names(self._product_spec(spec), device)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The product's; none for other operands."""
        return () if weight_only_violation(spec) else self.product.configs(self._product_spec(spec), device, space)

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """As the product does."""
        return self.product.normalise(self._product_spec(spec), knobs, device)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that the operands or the product break, or None."""
        if reason := weight_only_violation(spec):
            return reason
        if device.kind == "cpu":
            return NO_GPU
        return self.product.unsupported_reason(self._product_spec(spec), knobs, device)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The product's reason."""
        return self.product.dominated_reason(self._product_spec(spec), knobs, device)

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """The product's."""
        return self.product.knobs_from_row(row, self._product_spec(spec), device)

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """The quantiser's build and the product's for scales in the order that the quantiser writes."""
        return quantiser_build(spec, device), *self.product.builds(self._product_spec(spec), knobs, device)

    def kernel_name(self, knobs: Knobs) -> str:
        """The product's kernel."""
        return self.product.kernel_name(knobs)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """Both launches, in order."""
        product_spec = self._product_spec(spec)
        quantised = quantised_inputs(spec, device, inputs.x, product_spec.x_scale_orders[0])
        quantise = quantised.run
        multiply = self._overlapping_product().bind(product_spec, knobs, device, quantised.inputs, prepared, out)

        def launch() -> "torch.Tensor":
            quantise()
            return multiply()

        return launch

    def _overlapping_product(self) -> Implementation:
        """The product whose launch may begin while the quantiser ends."""
        product = self.product
        return replace(product, launch_pdl=True) if isinstance(product, KernelImplementation) else product

    def _product_spec(self, spec: GemmSpec) -> GemmSpec:
        """With block scales M-major where the product reads them so (TMA does), else row-major."""
        free = quantised_spec(spec)
        orders = self.product.scale_orders(free) if isinstance(self.product, KernelImplementation) else (COLUMN,)
        return quantised_spec(spec, COLUMN if COLUMN in orders and spec.m > 1 else ROW)
