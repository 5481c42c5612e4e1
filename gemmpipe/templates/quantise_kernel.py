"""Device functions that quantise activations to fp8 with a scale per row and block of columns."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gemmpipe.templates.device_fns import round_to

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@triton.jit
def quantise_tile(x, TOP: tl.constexpr, TO: tl.constexpr, INTERPRETED: tl.constexpr):
    """(x [rows, columns] in the fp8 type TO, fp32 scale of each row): the largest magnitude becomes TOP.

    The scale of a row of zeros is 1. Divided, not multiplied by the reciprocal: equal to the engines' quantisers.
    """
    value = x.to(tl.float32)
    largest = tl.max(tl.abs(value), 1)
    scale = tl.where(largest > 0, largest / TOP, 1.0)
    value = tl.minimum(tl.maximum(value / scale[:, None], -TOP), TOP)
    return round_to(value, TO, INTERPRETED), scale


@triton.jit
def quantise_rows(
    x_ptr, out_ptr, scale_ptr, K, x_stride, scale_row_stride, scale_block_stride,
    BLOCKS: tl.constexpr, SCALE_BLOCK: tl.constexpr, TOP: tl.constexpr,
    OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[row] and its scales of x[row]; the program (row, i) takes BLOCKS blocks of SCALE_BLOCK columns.

    OVERLAP: programmatic dependent launch; the product that follows may load its weights meanwhile.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)[None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < K, other=0.0)
    quantised, scale = quantise_tile(x, TOP, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + row * K + columns, quantised, mask=columns < K)
    scale_ptrs = scale_ptr + row * scale_row_stride + blocks.to(tl.int64) * scale_block_stride
    tl.store(scale_ptrs, scale, mask=blocks * SCALE_BLOCK < K)
