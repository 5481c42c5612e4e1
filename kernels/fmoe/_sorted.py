"""Device functions of rows sorted by expert: places of pairs, rows copied there, rows activated, the sum."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gemmpipe.kernels.fmoe._kernel import activation
from gemmpipe.templates.device_fns import round_to


@triton.jit
def gdc_wait_and_launch(INTERPRETED: tl.constexpr):
    """Programmatic dependent launch: wait for the previous kernel's end; the next one may start."""
    if not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def count_chunk(ids_ptr, places_ptr, begin, pairs, experts, writes, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """The number of pairs of each expert in a chunk; with `writes`, stores -1 as the place of pairs of other ranks."""
    at = begin + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + at, mask=at < pairs, other=-1)
    bin_of = tl.where((ids >= 0) & (ids < experts), ids, BINS - 1)
    if writes:
        tl.store(places_ptr + at, ids * 0 - 1, mask=(bin_of == BINS - 1) & (at < pairs))
    return tl.histogram(bin_of, BINS)


@triton.jit
def count_pairs(
    ids_ptr, places_ptr, counts_ptr, pairs, experts,
    BINS: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """counts[chunk, expert] of chunks of CHUNK pairs, if these are many: else each program of sort_pairs counts all."""
    gdc_wait_and_launch(INTERPRETED)
    chunk = tl.program_id(0)
    counts = count_chunk(ids_ptr, places_ptr, chunk * CHUNK, pairs, experts, True, BINS, CHUNK)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit
def sort_pairs(
    ids_ptr, places_ptr, counts_ptr, owners_ptr, rows_ptr, blocks_ptr, pairs, experts, chunks,
    BLOCK_SIZE_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """places[pair] of every pair (row * topk + choice): its row among rows sorted by expert; -1 if no expert here.

    An expert's rows begin a block of BLOCK_SIZE_M. owners_ptr and rows_ptr get each block's expert and number of rows,
    blocks_ptr the number of blocks. One program per expert; for the offset of its own pairs it adds up the `chunks`
    counts of count_pairs, or without them (counts_ptr is None) counts all pairs itself.
    """
    gdc_wait_and_launch(INTERPRETED)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    if counts_ptr is not None:
        for begin in range(0, chunks, 16):
            chunk = begin + tl.arange(0, 16)
            counted = tl.load(counts_ptr + chunk[:, None] * BINS + bins, mask=(chunk < chunks)[:, None], other=0)
            counts += tl.sum(counted, 0)
    else:
        for begin in range(0, pairs, CHUNK):
            counts += count_chunk(ids_ptr, places_ptr, begin, pairs, experts, expert == 0, BINS, CHUNK)
    blocks = tl.where(bins < experts, tl.cdiv(counts, BLOCK_SIZE_M), 0)
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    if expert == 0:
        tl.store(blocks_ptr, tl.sum(blocks, 0))
    for begin in range(0, tl.cdiv(own, BLOCK_SIZE_M), BINS):
        left = own - (begin + bins) * BLOCK_SIZE_M
        tl.store(owners_ptr + first + begin + bins, expert + bins * 0, mask=left > 0)
        tl.store(rows_ptr + first + begin + bins, tl.minimum(left, BLOCK_SIZE_M), mask=left > 0)
    following = first * BLOCK_SIZE_M
    lanes = tl.arange(0, CHUNK)
    for begin in range(0, pairs, CHUNK):
        mine = tl.load(ids_ptr + begin + lanes, mask=begin + lanes < pairs, other=-1) == expert
        before = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(places_ptr + begin + lanes, following + before - 1, mask=mine)
        following += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def sorted_rows(
    x_ptr, out_ptr, scale_ptr, shares_ptr, places_ptr, columns, capacity,
    TOPK: tl.constexpr, SORTED: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, QUANTISED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[place, columns] = act(x[row, :columns]), times x[row, columns:] when GATED, for each of the row's pairs.

    SORTED: x's rows are at their places already, and a program takes one pair's; else it takes a row of x with its TOPK
    pairs. A program takes GROUPS groups of GROUP columns. QUANTISED: a group's scale, its largest magnitude over TOP,
    is stored at scale[group, place], times the pair's share if there are shares. Shares alone are one scale per row.
    """
    gdc_wait_and_launch(INTERPRETED)
    row = tl.program_id(0)
    source = row
    if SORTED:
        source = tl.load(places_ptr + row)
        if source < 0:
            return
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < columns
    x_ptr += source.to(tl.int64) * columns * (2 if GATED else 1)
    value = activation(tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        value *= tl.load(x_ptr + columns + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.full((GROUPS,), 1.0, tl.float32)
    scales = 1
    if QUANTISED:
        largest = tl.max(tl.abs(value), 1)
        scale = tl.where(largest > 0, largest / TOP, 1.0)
        scales = tl.cdiv(columns, GROUP)
        value = tl.minimum(tl.maximum(value / scale[:, None], -TOP), TOP)
    result = round_to(value, out_ptr.dtype.element_ty, INTERPRETED)
    for i in tl.static_range(TOPK):
        place = tl.load(places_ptr + row * TOPK + i)
        held = column < tl.where(place >= 0, columns, 0)
        tl.store(out_ptr + place.to(tl.int64) * columns + column, result, mask=held)
        if scale_ptr is not None:
            factor = scale
            if shares_ptr is not None:
                factor = scale * tl.load(shares_ptr + row * TOPK + i)
            held = groups < tl.where(place >= 0, scales, 0)
            tl.store(scale_ptr + groups.to(tl.int64) * capacity + place, factor, mask=held)


@triton.jit
def total_of_places(
    parts_ptr, shares_ptr, places_ptr, out_ptr, N, TOPK: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """out[row, N] = the sum of the parts [places, N] of the row's TOPK pairs, times their shares if there are any."""
    gdc_wait_and_launch(INTERPRETED)
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    added = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOPK):
        place = tl.load(places_ptr + row * TOPK + i)
        held = columns < tl.where(place >= 0, N, 0)
        part = tl.load(parts_ptr + place.to(tl.int64) * N + columns, mask=held, other=0.0).to(tl.float32)
        if shares_ptr is not None:
            part *= tl.load(shares_ptr + row * TOPK + i)
        added += part
    out_ptr += row.to(tl.int64) * N
    tl.store(out_ptr + columns, round_to(added, out_ptr.dtype.element_ty, INTERPRETED), mask=columns < N)
