"""Kernels that quantise activations to fp8 by groups of 128 columns together with what computes them.

`rms_norm_quantise`: residual addition and RMS norm; `silu_mul_quantise`: SiLU(gate) * up; `group_quantise`: nothing
else. They round where vLLM's operators do, so that both write the same bytes: intermediate results to 16 bits, a least
scale instead of a special case for zeros, and quotients to nearest.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gemmpipe.templates.device_fns import round_to

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

GROUP = tl.constexpr(128)
"""Columns that share a scale."""


@triton.jit
def quotient(value, divisor, INTERPRETED: tl.constexpr):
    """value [rows, columns] / divisor [rows], rounded to nearest.

    One reciprocal per row, and one correction per element with the exact remainder: three instructions instead of the
    ten and the branch of a division rounded to nearest.
    """
    if INTERPRETED:  # the interpreter's fma rounds twice; its division rounds to nearest
        return value / divisor[:, None]
    reciprocal = tl.div_rn(1.0, divisor)[:, None]
    estimate = value * reciprocal
    remainder = tl.fma(-estimate, tl.broadcast_to(divisor[:, None], value.shape), value)
    return tl.fma(remainder, tl.broadcast_to(reciprocal, value.shape), estimate)


@triton.jit
def quantise_groups(
    value, TOP: tl.constexpr, LEAST: tl.constexpr, POWER_OF_TWO: tl.constexpr, TO: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """(value [groups, 128] in the fp8 type TO, fp32 scale of each group): the largest magnitude becomes TOP.

    POWER_OF_TWO: scales are rounded up to one, and the largest magnitude becomes less.
    """
    largest = tl.max(tl.abs(value), 1)
    scale = tl.maximum(tl.div_rn(largest, TOP), LEAST)
    if POWER_OF_TWO:  # the least exponent with which the scale is not smaller
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return round_to(tl.clamp(quotient(value, scale, INTERPRETED), -TOP, TOP), TO, INTERPRETED), scale


@triton.jit
def store_groups(
    out_ptr, scale_ptr, quantised, scale, row, groups, columns, inside, width, scale_row_stride, scale_group_stride
):
    """Write a program's groups of a row of `width` columns and their scales."""
    tl.store(tl.max_contiguous(out_ptr + row * width + columns, (1, 8)), quantised, mask=inside)
    scale_ptrs = scale_ptr + row * scale_row_stride + groups.to(tl.int64) * scale_group_stride
    tl.store(scale_ptrs, scale, mask=groups < width // GROUP)


@triton.jit
def group_places(SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """(row, groups, columns, inside) of this program: GROUPS groups of a row, whose programs follow one another."""
    CHUNKS: tl.constexpr = (SIZE // GROUP + GROUPS - 1) // GROUPS
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    groups = tl.program_id(0) % CHUNKS * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (groups < SIZE // GROUP)[:, None] & (tl.arange(0, GROUP) < GROUP)[None, :]
    return row, groups, columns, inside


@triton.jit
def start_overlapped(OVERLAP: tl.constexpr):
    """Programmatic dependent launch: let the next kernel start, then wait for the end of the previous one.

    The next kernel, which waits for this one's end, may load its weights meanwhile: this kernel's programs are all
    resident then, so that it takes no multiprocessor from them.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def rms_norm_quantise(
    x_ptr, residual_ptr, total_ptr, weight_ptr, out_ptr, scale_ptr, x_stride, scale_row_stride, scale_group_stride,
    K: tl.constexpr, GROUPS: tl.constexpr, EPSILON: tl.constexpr, TOP: tl.constexpr, LEAST: tl.constexpr,
    OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out [M, K] in fp8 and its scales of rms_norm(x + residual) * weight; one program per row.

    The sum is written to `total` [M, K], which may be `residual` (both None: no residual). It is normalised before it
    is rounded for that; the norm and the product with the weight are rounded to 16 bits. GROUPS: groups of a row, up to
    a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (groups < K // GROUP)[:, None] & (tl.arange(0, GROUP) < GROUP)[None, :]
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    start_overlapped(OVERLAP)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * K + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(total_ptr + row * K + columns, round_to(x, TYPE, INTERPRETED), mask=inside)
    squares = tl.sum(tl.sum(x * x, 1), 0)
    inverse = tl.rsqrt(tl.div_rn(squares, K * 1.0) + EPSILON)
    normed = round_to(x * inverse, TYPE, INTERPRETED).to(tl.float32)
    value = round_to(normed * weight.to(tl.float32), TYPE, INTERPRETED).to(tl.float32)
    quantised, scale = quantise_groups(value, TOP, LEAST, False, out_ptr.dtype.element_ty, INTERPRETED)
    store_groups(
        out_ptr, scale_ptr, quantised, scale, row, groups, columns, inside, K, scale_row_stride, scale_group_stride
    )


@triton.jit
def silu_mul_quantise(
    x_ptr, out_ptr, scale_ptr, x_stride, scale_row_stride, scale_group_stride,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, LEAST: tl.constexpr,
    OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out [M, SIZE] in fp8 and its scales of silu(x[:, :SIZE]) * x[:, SIZE:], not rounded before it is quantised."""
    row, groups, columns, inside = group_places(SIZE, GROUPS)
    start_overlapped(OVERLAP)
    gate_ptrs = x_ptr + row * x_stride + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=inside, other=0.0).to(tl.float32)
    value = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    quantised, scale = quantise_groups(value, TOP, LEAST, False, out_ptr.dtype.element_ty, INTERPRETED)
    store_groups(
        out_ptr, scale_ptr, quantised, scale, row, groups, columns, inside, SIZE, scale_row_stride, scale_group_stride
    )


@triton.jit
def group_quantise(
    x_ptr, out_ptr, scale_ptr, x_stride, scale_row_stride, scale_group_stride,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, LEAST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out [M, SIZE] in fp8 and its scales of x [M, SIZE]; programs as those of `silu_mul_quantise`."""
    row, groups, columns, inside = group_places(SIZE, GROUPS)
    start_overlapped(OVERLAP)
    value = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    quantised, scale = quantise_groups(value, TOP, LEAST, POWER_OF_TWO, out_ptr.dtype.element_ty, INTERPRETED)
    store_groups(
        out_ptr, scale_ptr, quantised, scale, row, groups, columns, inside, SIZE, scale_row_stride, scale_group_stride
    )
