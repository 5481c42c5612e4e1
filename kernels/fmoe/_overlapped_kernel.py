"""The plain kernels of fused experts as launches that begin while the previous one ends (sm_90 and later).

A launch waits for the previous one's end before it reads or writes: only its start overlaps.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gemmpipe.kernels.fmoe._kernel import activate as plain_activate
from gemmpipe.kernels.fmoe._kernel import routed as plain_routed
from gemmpipe.kernels.fmoe._kernel import total as plain_total


@triton.jit
def wait_and_launch():
    """Wait for the previous kernel's end; the next one may start."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def routed(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, shares_ptr, out_ptr, pairs_ptr, owners_ptr, blocks_ptr,
    pairs, N, K, w_rows, group_m,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, TOPK: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    EVEN_K: tl.constexpr, CACHE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """See _kernel.routed."""
    wait_and_launch()
    plain_routed(
        x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, shares_ptr, out_ptr, pairs_ptr, owners_ptr, blocks_ptr,
        pairs, N, K, w_rows, group_m,
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, TOPK, SCALES, GROUP, UNIFORM, ACTIVATION, GATED, EVEN_K, CACHE,
        INTERPRETED,
    )  # fmt: skip


@triton.jit
def activate(
    x_ptr, out_ptr, scale_ptr, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """See _kernel.activate."""
    wait_and_launch()
    plain_activate(x_ptr, out_ptr, scale_ptr, columns, ACTIVATION, GATED, GROUPS, GROUP, TOP, INTERPRETED)


@triton.jit
def total(parts_ptr, out_ptr, N, TOPK: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """See _kernel.total."""
    wait_and_launch()
    plain_total(parts_ptr, out_ptr, N, TOPK, BLOCK, INTERPRETED)
