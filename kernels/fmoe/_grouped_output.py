"""A block of rows sorted by expert on its way out of _grouped: scaled, activated, quantised, stored.

Written in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gemmpipe.kernels.fmoe._kernel import activation
from gemmpipe.templates.hopper_output import store_tile


class Kind(NamedTuple):
    """What becomes of a product, known when the kernel is compiled (see _grouped.grouped_warp_specialised).

    PAIRED: the gate's columns are one warpgroup's and the up side's the other's.
    """

    SCALES: gl.constexpr
    ROW_SCALES: gl.constexpr
    ACTIVATION: gl.constexpr
    GATED: gl.constexpr
    PAIRED: gl.constexpr
    TOP: gl.constexpr
    SCALE_BLOCK: gl.constexpr

    def mangle(self) -> str:
        """Its part of the name of a function that it is given to."""
        return "kind_" + "_".join(str(each.value) for each in self)


@gluon.constexpr_function
def kind_of(scales, row_scales, act, gated, top, scale_block):
    """Of a kernel's constants."""
    found = (scales, row_scales, act, gated, gated and scales == "block", top, scale_block)
    return Kind(*map(gl.constexpr, found))


class GroupedOutput(NamedTuple):
    """Where blocks go, a tensor descriptor or a pointer, and the scales on their way, or None."""

    out: object
    w_scale_ptr: gl.tensor
    row_scale_ptr: gl.tensor
    out_scale_ptr: gl.tensor


class Pair(NamedTuple):
    """Where the two warpgroups meet that have one side each: halves of their sums, largest magnitudes, barriers."""

    swap: gl.shared_memory_descriptor
    maxima: gl.shared_memory_descriptor
    meetings: gl.shared_memory_descriptor


@gluon.jit
def pair_of(COLUMNS: gl.constexpr):
    """Of tiles whose warpgroups have so many columns each, in shared memory of their own."""
    SWAPPED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    swap = gl.allocate_shared_memory(gl.bfloat16, [2, 64, COLUMNS // 2], SWAPPED)
    maxima = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    meetings = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(meetings.index(i), count=2)
    fence_async_shared()
    return Pair(swap, maxima, meetings)


@gluon.jit
def finished(total, output, row, expert, column, work, share, kind, HALF: gl.constexpr):
    """[64, columns] with the scales of whole rows and columns, activated; GATED: act(its first half) * its second."""
    if kind.ROW_SCALES:
        total = total * gl.load(output.row_scale_ptr + row + gl.arange(0, 64, gl.SliceLayout(1, share.LAYOUT)))[:, None]
    if kind.SCALES == "row":
        columns = gl.arange(0, total.shape[1], gl.SliceLayout(0, share.LAYOUT))
        if kind.GATED:
            SIDE: gl.constexpr = total.shape[1] // 2
            columns = gl.where(columns < SIDE, columns, columns - SIDE + work.N)
        inside = gl.minimum(column + columns, work.w_rows - 1)
        total = total * gl.load(output.w_scale_ptr + expert * work.w_rows + inside)[None, :]
    if kind.GATED:
        gate, up = total.reshape([64, 2, total.shape[1] // 2]).permute((0, 2, 1)).split()
        total = gl.convert_layout(activation(gate, kind.ACTIVATION) * up, HALF)
    else:
        total = activation(total, kind.ACTIVATION)
    return total


@gluon.jit
def meet(bar, phase):
    """Both math warpgroups have come here, and what each wrote to shared memory before may be read."""
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, phase)


@gluon.jit
def quantised_pair(total, pair, phase, scale_ptr, share, kind, LAYOUT: gl.constexpr):
    """[64, 128] of the gate in one warpgroup and of the up side in the other: act(gate) * up, half of it in each.

    It is one group of columns along the next product's K: quantised by the largest magnitude of a row over TOP, which
    goes to scale_ptr.
    """
    GROUP: gl.constexpr = share.GROUP
    low, high = total.reshape([64, 2, total.shape[1] // 2]).permute((0, 2, 1)).split()
    if GROUP == 0:
        own = gl.convert_layout(low, LAYOUT)
        given = gl.convert_layout(high, LAYOUT)
    else:
        own = gl.convert_layout(high, LAYOUT)
        given = gl.convert_layout(low, LAYOUT)
    pair.swap.index(GROUP).store(given.to(pair.swap.dtype))
    meet(pair.meetings.index(0), phase)
    other = pair.swap.index(1 - GROUP).load(LAYOUT).to(gl.float32)
    if GROUP == 0:
        value = activation(own, kind.ACTIVATION) * other
    else:
        value = activation(other, kind.ACTIVATION) * own
    largest = gl.max(gl.abs(value), 1)
    pair.maxima.index(GROUP).store(largest)
    meet(pair.meetings.index(1), phase)
    largest = gl.maximum(largest, pair.maxima.index(1 - GROUP).load(gl.SliceLayout(1, LAYOUT)))
    scale = gl.where(largest > 0, largest / kind.TOP, 1.0)
    if GROUP == 0:
        gl.store(scale_ptr + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), scale)
    return value / scale[:, None]


@gluon.jit
def store_rows(total, out_ptr, row, column, rows, N, LAYOUT: gl.constexpr):
    """The first `rows` rows of [64, columns], converted: where most of a block is padding, its rest is not written."""
    at = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = out_ptr + (row + at).to(gl.int64)[:, None] * N + columns[None, :]
    gl.store(ptrs, total.to(out_ptr.dtype.element_ty), mask=(at < rows)[:, None] & (columns < N)[None, :])


@gluon.jit
def store_block(total, out, ring, row, column, rows, N, share, LAYOUT: gl.constexpr):
    """A warpgroup's [64, columns] on its way; where nothing is staged, `rows` of it, as the rest is padding."""
    if ring.stage is None:
        store_rows(total, out, row, column, rows, N, LAYOUT)
    else:
        store_tile(total, out, ring.stage.index(share.GROUP), row, column)
