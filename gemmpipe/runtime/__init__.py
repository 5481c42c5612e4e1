"""What engines import: tuned products by name, weights prepared ahead, tables read again."""

from gemmpipe.runtime.dispatches import reload
from gemmpipe.runtime.entry_points import (
    batched_gemm_a8w8,
    batched_gemm_bf16,
    fused_moe,
    gemm_a4w4_blockscale,
    gemm_a8w8,
    gemm_a8w8_blockscale,
    gemm_a8w8_blockscale_bpreshuffle,
    gemm_a8w8_bpreshuffle,
    gemm_a16w16,
    gemm_a16w16_atomic,
)
from gemmpipe.runtime.selection import answers
from gemmpipe.runtime.weights import forget, prepare

__all__ = [
    "answers",
    "batched_gemm_a8w8",
    "batched_gemm_bf16",
    "forget",
    "fused_moe",
    "gemm_a4w4_blockscale",
    "gemm_a8w8",
    "gemm_a8w8_blockscale",
    "gemm_a8w8_blockscale_bpreshuffle",
    "gemm_a8w8_bpreshuffle",
    "gemm_a16w16",
    "gemm_a16w16_atomic",
    "prepare",
    "reload",
]
