"""What the kernels of one launch have in common: operands that they take, and their parameters."""

from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.templates.constraints import launch_violation
from gemmpipe.templates.params import SCALE_BLOCK, operand_pointers, size_arguments
from gemmpipe.templates.quantise import by_row, quantised_spec, weight_only_violation


def operands_violation(spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
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
