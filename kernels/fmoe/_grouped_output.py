"""A block of rows sorted by expert on its way out of _grouped: scaled, activated, quantised, stored.

Written in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gemmpipe.kernels.fmoe._kernel import activation
from gemmpipe.templates.hopper import store_tile


@gluon.jit
def finished(
    total, row_scale_ptr, w_scale_ptr, row, expert, column, N, w_rows, TILE: gl.constexpr, HALF: gl.constexpr,
    SCALES: gl.constexpr, ROW_SCALES: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """[64, columns] with the scales of whole rows and columns, activated; GATED: act(its first half) * its second."""
    if ROW_SCALES:
        total = total * gl.load(row_scale_ptr + row + gl.arange(0, 64, gl.SliceLayout(1, TILE)))[:, None]
    if SCALES == "row":
        columns = gl.arange(0, total.shape[1], gl.SliceLayout(0, TILE))
        if GATED:
            SIDE: gl.constexpr = total.shape[1] // 2
            columns = gl.where(columns < SIDE, columns, columns - SIDE + N)
        total = total * gl.load(w_scale_ptr + expert * w_rows + gl.minimum(column + columns, w_rows - 1))[None, :]
    if GATED:
        gate, up = total.reshape([64, 2, total.shape[1] // 2]).permute((0, 2, 1)).split()
        total = gl.convert_layout(activation(gate, ACTIVATION) * up, HALF)
    else:
        total = activation(total, ACTIVATION)
    return total


@gluon.jit
def meet(bar, phase):
    """Both math warpgroups have come here, and what each wrote to shared memory before may be read."""
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, phase)


@gluon.jit
def quantised_pair(
    GROUP: gl.constexpr, total, swap, maxima, meetings, phase, scale_ptr, LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """[64, 128] of the gate in one warpgroup and of the up side in the other: act(gate) * up, half of it in each.

    It is one group of columns along the next product's K: quantised by the largest magnitude of a row over TOP, which
    goes to scale_ptr.
    """
    low, high = total.reshape([64, 2, total.shape[1] // 2]).permute((0, 2, 1)).split()
    if GROUP == 0:
        own = gl.convert_layout(low, LAYOUT)
        given = gl.convert_layout(high, LAYOUT)
    else:
        own = gl.convert_layout(high, LAYOUT)
        given = gl.convert_layout(low, LAYOUT)
    swap.index(GROUP).store(given.to(swap.dtype))
    meet(meetings.index(0), phase)
    other = swap.index(1 - GROUP).load(LAYOUT).to(gl.float32)
    if GROUP == 0:
        value = activation(own, ACTIVATION) * other
    else:
        value = activation(other, ACTIVATION) * own
    largest = gl.max(gl.abs(value), 1)
    maxima.index(GROUP).store(largest)
    meet(meetings.index(1), phase)
    largest = gl.maximum(largest, maxima.index(1 - GROUP).load(gl.SliceLayout(1, LAYOUT)))
    scale = gl.where(largest > 0, largest / TOP, 1.0)
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
def store_block(
    total, out, out_stage, row, column, rows, N, GROUP: gl.constexpr, LAYOUT: gl.constexpr, FEW: gl.constexpr
):
    """A warpgroup's [64, columns] on its way to the output; FEW: `rows` of it, as the rest is padding."""
    if FEW:
        store_rows(total, out, row, column, rows, N, LAYOUT)
    else:
        store_tile(total, out, out_stage.index(GROUP), row, column)
