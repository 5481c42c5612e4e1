"""Device functions that tiled kernels share: the order of tiles, loads of operands, split-K and the epilogue.

A weight is row-major, or SHUFFLED: 16 x 16 tiles of bytes (family/layouts.py). Tiles of the same 16 columns follow one
another along K: a program reads one contiguous run of them. Read so, a warp has whole lines; read as [K, N], 16 bytes
per thread, it touches two sectors of each of eight lines.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@triton.jit
def swizzle2d(pid, tiles_m, tiles_n, group_m):
    """(row, column) of a program's tile: columns vary slowest within `group_m` rows, so that weights stay in L2."""
    width = group_m * tiles_n
    group = pid // width
    first = group * group_m
    rows = min(tiles_m - first, group_m)
    within = pid % width
    return first + within % rows, within // rows


@triton.jit
def xcd_swizzle(pid, programs, XCDS: tl.constexpr):
    """The program's number in an order that gives neighbouring tiles to programs of one XCD (and its L2).

    The hardware deals consecutive programs to the XCDs round-robin.
    """
    if XCDS == 1:
        return pid
    xcd = pid % XCDS
    least = programs // XCDS
    return xcd * least + min(xcd, programs % XCDS) + pid // XCDS


@triton.jit
def program_tile(M, N, group_m, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, XCDS: tl.constexpr):
    """(number in the grid's first dimension, split of K in its second, row and column of the tile) of this program."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    pid, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = swizzle2d(xcd_swizzle(pid, tiles_m * tiles_n, XCDS), tiles_m, tiles_n, group_m)
    return pid, split, tile_m, tile_n


@triton.jit
def tile_rows(tile, size, BLOCK: tl.constexpr):
    """(first row of a tile, its rows counted from there): those past the end repeat the last, and are never stored."""
    tl.assume(tile >= 0)
    first = tile * BLOCK
    return first, tl.maximum(tl.minimum(tl.arange(0, BLOCK), size - 1 - first), 0)


@triton.jit
def row_offsets(rows, stride):
    """Elements from a tile's first row to its rows: 32 bits and not negative, as AMD's buffer loads want them."""
    tl.assume(stride >= 0)
    tl.assume(stride < 1048576)
    return rows * stride


@triton.jit
def k_range(K, split, splits, BLOCK_SIZE_K: tl.constexpr):
    """The K blocks [begin, end) of one split: whole blocks, each in exactly one split."""
    blocks = tl.cdiv(K, BLOCK_SIZE_K)
    share = tl.cdiv(blocks, splits)
    begin = split * share
    return begin, min(begin + share, blocks)


@triton.jit
def load_k(ptrs, ks, left, EVEN_K: tl.constexpr, CACHE: tl.constexpr):
    """Loads `ptrs`; 0 where the offset along K (`ks`, counted from the K block's first) is not below `left`."""
    if EVEN_K:
        loaded = tl.load(ptrs, cache_modifier=CACHE)
    else:
        loaded = tl.load(ptrs, mask=ks < left, other=0.0, cache_modifier=CACHE)
    return loaded


@triton.jit
def mma_operands(x, w, SWAP_AB: tl.constexpr):
    """The operands of the matrix instruction for x [M, K] and w [K, N]: (x, w), or with SWAP_AB (w^T, x^T).

    Swapped, the weight takes the wide side of the instruction (64 on Hopper), few rows of x its narrow one.
    """
    if SWAP_AB:
        x, w = tl.trans(w), tl.trans(x)
    return x, w


@triton.jit
def zero_accumulator(
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, SWAP_AB: tl.constexpr, OPERANDS: tl.constexpr
):
    """Zeros to add a tile's products to, laid out by `mma_operands`: int32 for operands of int8, fp32 for others."""
    SUM: tl.constexpr = tl.int32 if tl.int8 == OPERANDS else tl.float32
    return tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M) if SWAP_AB else (BLOCK_SIZE_M, BLOCK_SIZE_N), SUM)


@triton.jit
def reduce_split_k(acc, parts_ptr, counters_ptr, tile, split, splits, rows_left):
    """Store this split's fp32 part; returns (True for the last split to arrive, for that one the sum of all parts).

    Parts are added in the order of the splits, so that results do not depend on the order of arrival. The last one sets
    the tile's counter back to 0 for the next launch. Rows from `rows_left` on are padding and take no traffic.
    """
    BLOCK_SIZE_M: tl.constexpr = acc.shape[0]
    BLOCK_SIZE_N: tl.constexpr = acc.shape[1]
    # Loads of one batch are in flight together: sequential loads would each cost the latency of L2.
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


@triton.jit
def apply_epilogue(acc, bias_ptr, x_scale_ptr, w_scale_ptr, row, rows, column, columns, SCALES: tl.constexpr):
    """acc * x_scale * w_scale + bias of its rows and columns; bias_ptr is None without a bias.

    SCALES: `row` (fp32, one per row and one per column), `tensor` (one each), anything else: none at the end of a sum.
    """
    if SCALES == "row":
        acc *= tl.load(x_scale_ptr + row + rows)[:, None]
        acc *= tl.load(w_scale_ptr + column + columns)[None, :]
    if SCALES == "tensor":
        acc *= tl.load(x_scale_ptr) * tl.load(w_scale_ptr)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column + columns).to(tl.float32)[None, :]
    return acc


@triton.jit
def store_tile(total, out_ptr, first_row, first_column, M, N, stride, ADDED: tl.constexpr):
    """Store the part of a tile inside [M, N], in the output's type; ADDED: add it to the output, in any order."""
    rows = first_row + tl.arange(0, total.shape[0])
    columns = first_column + tl.arange(0, total.shape[1])
    ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if ADDED:
        tl.atomic_add(ptrs, total.to(out_ptr.dtype.element_ty), mask=inside, sem="relaxed")
    else:
        tl.store(ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gdc_wait_after(pointer):
    """Programmatic dependent launch: wait for the previous kernel's end; its output may be read, its input written.

    `pointer` is computed while waiting: ptxas moves a wait without operands ahead of such arithmetic.
    """
    asm: tl.constexpr = "{ .reg .pred p; setp.ne.s64 p, $1, 0; @p griddepcontrol.wait; mov.u32 $0, 0; }"
    tl.inline_asm_elementwise(asm, "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_and_gdc_wait(w_ptr, rows, w_stride, left, lines):
    """Programmatic dependent launch: prefetch this program's first weights, gdc_wait, gdc_launch_dependents.

    Only from here on may the output of the previous kernel be read and its input written. The weights are only
    prefetched into L2, where all writes arrive too: correct even when the previous kernel writes them. `w_ptr`: where
    this program begins to read; `rows`: the rows that it reads, `left` elements of each; `lines`: lines (128 bytes)
    prefetched per row.
    """
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    for i in range(lines):
        line = (w_ptr + row_offsets(rows, w_stride) + min(i * LINE, left - 1)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
        )
    gdc_wait_after(w_ptr)
    # Not earlier: later kernels would start as well, and occupy the multiprocessors that this one's programs need.
    gdc_launch_dependents()


@triton.jit
def weight_offsets(tile_n, columns, ks, N, stride, SHUFFLED: tl.constexpr):
    """Elements from a tile's first column of w to its [K, N]; SHUFFLED: to its [N / 16, K * 16] in memory order."""
    if SHUFFLED:
        _, runs = tile_rows(tile_n, N // 16, columns.shape[0] // 16)
        at = row_offsets(runs * 16, stride)[:, None] + tl.arange(0, ks.shape[0] * 16)[None, :]
    else:
        at = row_offsets(columns, stride)[None, :] + ks[:, None]
    return at


@triton.jit
def load_weight(ptrs, ks, left, EVEN_K: tl.constexpr, CACHE: tl.constexpr, SHUFFLED: tl.constexpr):
    """[K, N] from the pointers of `weight_offsets`; 0 where the offset along K is not below `left`."""
    if SHUFFLED:
        RUNS: tl.constexpr = ptrs.shape[0]
        DEPTH: tl.constexpr = ptrs.shape[1] // 256
        w = load_k(ptrs, (tl.arange(0, DEPTH * 256) // 256 * 16)[None, :], left, EVEN_K, CACHE)
        w = tl.permute(tl.reshape(w, (RUNS, DEPTH, 16, 16)), (1, 3, 0, 2))
        w = tl.reshape(w, (DEPTH * 16, RUNS * 16))
    else:
        w = load_k(ptrs, ks[:, None], left, EVEN_K, CACHE)
    return w


@triton.jit
def prefetch_tiles_and_gdc_wait(w_ptr, columns, stride, lines):
    """prefetch_and_gdc_wait for a weight in tiles: as many lines per column, but those of 16 columns are one run."""
    LINE: tl.constexpr = 128
    starts = row_offsets(columns // 16 * 16, stride) + columns % 16 * (lines * LINE)
    prefetch_and_gdc_wait(w_ptr, starts, 1, lines * LINE, lines)


@triton.jit
def prefetch_weight_and_gdc_wait(w_ptr, columns, stride, left, lines, SHUFFLED: tl.constexpr):
    """prefetch_and_gdc_wait for either weight layout."""
    if SHUFFLED:
        prefetch_tiles_and_gdc_wait(w_ptr, columns, stride, lines)
    else:
        prefetch_and_gdc_wait(w_ptr, columns, stride, left, lines)


@triton.jit
def round_to(value, TO: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 in another type, to nearest even; Triton's interpreter truncates to bf16 and loses carries to fp8."""
    if INTERPRETED and tl.float16 != TO:
        DROPPED: tl.constexpr = 16 if tl.bfloat16 == TO else 20
        bits = value.to(tl.int32, bitcast=True)
        bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
        value = (bits & -(1 << DROPPED)).to(tl.float32, bitcast=True)
    return value.to(TO)
