"""Device functions of the order of pairs (row * topk + choice) by expert: one launch for few pairs, two for many.

Each expert's pairs begin a block of BLOCK_SIZE_M places. A pair's place is its expert's first place, plus the pairs of
that expert in chunks before, plus its rank in its own chunk, which an atomic addition to the chunk's count of the
expert returns. Ranks of one call may differ from those of the next; no row's result depends on its place in a block.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.kernels.fmoe._overlapped_kernel import wait_and_launch


@triton.jit
def fill_padding(pairs_ptr, pairs, entries, FILL: tl.constexpr):
    """Store `pairs`, which is no pair, in all entries, divided among the programs; placed pairs overwrite theirs."""
    for begin in range(tl.program_id(0) * FILL, entries, tl.num_programs(0) * FILL):
        at = begin + tl.arange(0, FILL)
        tl.store(pairs_ptr + at, at * 0 + pairs, mask=at < entries)


@triton.jit
def load_experts(ids_ptr, pairs, experts, share, CHUNK: tl.constexpr):
    """(the pairs of this program, their experts, mask of those that are one of `experts`, mask of those that exist).

    `share` pairs per program, at most CHUNK. It is no constant, so that a thread's pairs are loaded one by one, in the
    layout in which atomics take them: no exchange between threads is needed.
    """
    lane = tl.arange(0, CHUNK)
    pair = tl.program_id(0) * share + lane
    own = (lane < share) & (pair < pairs)
    expert = tl.load(ids_ptr + pair, mask=own, other=-1)
    held = (expert >= 0) & (expert < experts)
    return pair, tl.where(held, expert, 0), held, own


@triton.jit
def rank_in_chunk(counts_ptr, expert, held, BINS: tl.constexpr, ORDERING: tl.constexpr):
    """The pairs' ranks among those of the same expert, whose number is added to counts[BINS], set to 0 before."""
    bins = tl.arange(0, BINS)
    tl.atomic_and(counts_ptr + bins, bins * 0, sem=ORDERING)
    tl.debug_barrier()
    return tl.atomic_add(counts_ptr + expert, held.to(tl.int32), mask=held, sem=ORDERING)


@triton.jit
def store_places(
    pair, expert, held, own, rank, before, counts, places_ptr, pairs_ptr, sources_ptr, owners_ptr,
    rows_ptr, blocks_ptr, BLOCK_SIZE_M: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Store the places of a chunk's pairs, and what belongs to the blocks that begin with one of them.

    `counts` are all pairs of each expert, `before` those in chunks before.
    """
    blocks = (counts + BLOCK_SIZE_M - 1) // BLOCK_SIZE_M
    ends = tl.cumsum(blocks, 0)
    first = (ends - blocks) * BLOCK_SIZE_M
    bins = tl.arange(0, BINS)
    if tl.program_id(0) == 0:
        tl.store(blocks_ptr + bins * 0, ends, mask=bins == BINS - 1)
    place = tl.gather(first + before, expert, 0) + rank
    begins = held & (place % BLOCK_SIZE_M == 0)
    tl.store(owners_ptr + place // BLOCK_SIZE_M, expert, mask=begins)
    if rows_ptr is not None:
        left = tl.gather(first + counts, expert, 0) - place
        tl.store(rows_ptr + place // BLOCK_SIZE_M, tl.minimum(left, BLOCK_SIZE_M), mask=begins)
    if pairs_ptr is not None:
        tl.store(pairs_ptr + place, pair, mask=held)
    else:
        tl.store(places_ptr + pair, tl.where(held, place, -1), mask=own)
    if sources_ptr is not None:
        tl.store(sources_ptr + place, pair, mask=held)


@triton.jit
def order_pairs(
    ids_ptr, counts_ptr, places_ptr, pairs_ptr, sources_ptr, owners_ptr, rows_ptr, blocks_ptr,
    pairs, experts, share, entries,
    BINS: tl.constexpr, CHUNK: tl.constexpr, ORDERING: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, FILL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Places of at most CHUNK pairs by one program, as pairs_ptr[place] = pair or as places_ptr[pair] = place.

    pairs_ptr: the entries of blocks that have no pair get `pairs`. places_ptr: pairs of no expert here get -1.
    sources_ptr: if it is given, each place gets its pair; places of no pair keep theirs.
    owners_ptr and rows_ptr, if it is given, get each block's expert and number of rows, blocks_ptr the number of
    blocks. ORDERING: the atomics' memory order. OVERLAP: the launch begins while the previous one ends.
    """
    if OVERLAP:
        wait_and_launch()
    pair, expert, held, own = load_experts(ids_ptr, pairs, experts, share, CHUNK)
    rank = rank_in_chunk(counts_ptr, expert, held, BINS, ORDERING)
    if pairs_ptr is not None:
        fill_padding(pairs_ptr, pairs, entries, FILL)
    tl.debug_barrier()
    # Read where atomics add: another thread's addition need not be in this one's cache.
    bins = tl.arange(0, BINS)
    counts = tl.atomic_add(counts_ptr + bins, bins * 0, sem=ORDERING)
    store_places(
        pair, expert, held, own, rank, bins * 0, counts, places_ptr, pairs_ptr, sources_ptr, owners_ptr,
        rows_ptr, blocks_ptr, BLOCK_SIZE_M, BINS,
    )  # fmt: skip


@triton.jit
def rank_pairs(
    ids_ptr, counts_ptr, places_ptr, pairs_ptr, pairs, experts, share, entries,
    BINS: tl.constexpr, CHUNK: tl.constexpr, ORDERING: tl.constexpr, FILL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first launch for many pairs, a program per chunk: counts[chunk, BINS], and ranks in places_ptr[pair]."""
    if OVERLAP:
        wait_and_launch()
    pair, expert, held, _ = load_experts(ids_ptr, pairs, experts, share, CHUNK)
    rank = rank_in_chunk(counts_ptr + tl.program_id(0) * BINS, expert, held, BINS, ORDERING)
    if pairs_ptr is not None:
        fill_padding(pairs_ptr, pairs, entries, FILL)
    tl.store(places_ptr + pair, rank, mask=held)


@triton.jit
def place_pairs(
    ids_ptr, counts_ptr, places_ptr, pairs_ptr, sources_ptr, owners_ptr, rows_ptr, blocks_ptr,
    pairs, experts, share,
    BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The second launch: stores what order_pairs stores. Each program adds up all chunks' counts, STEP at a time."""
    if OVERLAP:
        wait_and_launch()
    pair, expert, held, own = load_experts(ids_ptr, pairs, experts, share, CHUNK)
    rank = tl.load(places_ptr + pair, mask=held, other=0)
    bins, chunks = tl.arange(0, BINS), tl.num_programs(0)
    counts = tl.zeros((BINS,), tl.int32)
    before = counts
    for begin in range(0, chunks, STEP):
        for chunk in tl.static_range(STEP):
            at = begin + chunk
            counted = tl.load(counts_ptr + at * BINS + bins, mask=bins < tl.where(at < chunks, BINS, 0), other=0)
            counts += counted
            before += tl.where(at < tl.program_id(0), counted, 0)
    store_places(
        pair, expert, held, own, rank, before, counts, places_ptr, pairs_ptr, sources_ptr, owners_ptr,
        rows_ptr, blocks_ptr, BLOCK_SIZE_M, BINS,
    )  # fmt: skip


@triton.jit
def ends_of_experts(counts_ptr, ends_ptr, experts, chunks, BINS: tl.constexpr, BLOCK_SIZE_M: tl.constexpr):
    """ends[expert] = the place after its last row, of counts[chunks, BINS]; each expert's rows begin a block."""
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for chunk in range(chunks):
        counts += tl.load(counts_ptr + chunk * BINS + bins)
    blocks = (counts + BLOCK_SIZE_M - 1) // BLOCK_SIZE_M
    first = (tl.cumsum(blocks, 0) - blocks) * BLOCK_SIZE_M
    tl.store(ends_ptr + bins, first + counts, mask=bins < experts)
