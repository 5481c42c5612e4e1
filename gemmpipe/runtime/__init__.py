"""The interface for engines: tuned products by name, preparation of weights, reloading of tables."""

from gemmpipe.launch.replays import restore_replays, shorten_replays
from gemmpipe.runtime.api import (
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
    linear_fp8,
)
from gemmpipe.runtime.dispatch import reload
from gemmpipe.runtime.product import prepare_weight, release_prepared
from gemmpipe.runtime.selection_log import dispatch_report

__all__ = [
    "batched_gemm_a8w8",
    "batched_gemm_bf16",
    "dispatch_report",
    "fused_moe",
    "gemm_a4w4_blockscale",
    "gemm_a8w8",
    "gemm_a8w8_blockscale",
    "gemm_a8w8_blockscale_bpreshuffle",
    "gemm_a8w8_bpreshuffle",
    "gemm_a16w16",
    "gemm_a16w16_atomic",
    "linear_fp8",
    "prepare_weight",
    "release_prepared",
    "reload",
    "restore_replays",
    "shorten_replays",
]
