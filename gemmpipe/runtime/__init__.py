"""What engines import: tuned products by name, weights prepared ahead, tables read again."""

from gemmpipe.runtime.dispatch import reload
from gemmpipe.runtime.entry_points import gemm_a8w8_blockscale, gemm_a16w16
from gemmpipe.runtime.weights import forget, prepare

__all__ = ["forget", "gemm_a8w8_blockscale", "gemm_a16w16", "prepare", "reload"]
