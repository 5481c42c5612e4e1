"""Device functions that tiled kernels share: the order of tiles, and the end of a split-K product."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def place(pid, tiles_m, tiles_n, group_m):
    """(row, column) of a program's tile: columns vary slowest within `group_m` rows, so that weights stay in L2."""
    width = group_m * tiles_n
    group = pid // width
    first = group * group_m
    rows = min(tiles_m - first, group_m)
    within = pid % width
    return first + within % rows, within // rows


@triton.jit
def k_range(K, split, splits, BLOCK_SIZE_K: tl.constexpr):
    """The K blocks [begin, end) of one split: whole blocks, each in exactly one split."""
    blocks = tl.cdiv(K, BLOCK_SIZE_K)
    share = tl.cdiv(blocks, splits)
    begin = split * share
    return begin, min(begin + share, blocks)


@triton.jit
def sum_of_parts(
    acc, parts_ptr, counters_ptr, tile, split, splits, rows_left, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    """Store this split's fp32 part; return (whether it was the last to arrive, then the sum of all parts).

    The sum is taken in the order of the splits, so that results do not depend on who came last. The last one sets
    the tile's counter back to 0 for the next launch. Rows from `rows_left` on are padding and take no traffic.
    """
    # Loads of one batch are in flight together: one after the other, each would cost the latency of L2.
    BATCH: tl.constexpr = 4 if BLOCK_SIZE_M * BLOCK_SIZE_N <= 4096 else 2
    rows = tl.arange(0, BLOCK_SIZE_M)[:, None]
    columns = tl.arange(0, BLOCK_SIZE_N)[None, :]
    size = BLOCK_SIZE_M * BLOCK_SIZE_N
    inside = (rows < rows_left) & (columns < BLOCK_SIZE_N)
    first = parts_ptr + tile.to(tl.int64) * splits * size + rows * BLOCK_SIZE_N + columns
    tl.store(first + split * size, acc, mask=inside)
    # All threads' stores come before the one thread's release; its acquire comes before all threads' loads.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
    last = arrived == splits - 1
    if last:
        acc = tl.zeros_like(acc)
        for begin in range(0, splits, BATCH):
            for i in tl.static_range(BATCH):
                other = begin + i + rows * 0
                acc += tl.load(first + other * size, mask=inside & (other < splits), other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return last, acc
