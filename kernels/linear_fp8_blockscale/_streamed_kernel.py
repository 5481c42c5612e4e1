"""A linear layer of few rows in one launch: the streamed product (templates/streamed_kernel.py) quantises x itself."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.templates.streamed_kernel import stream


@gluon.jit
def linear_streamed(
    x_ptr, w_ptr, bias_ptr, w_scale_ptr, out_ptr,
    M, N, K, x_stride, w_stride, w_scale_stride, out_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, MODE: gl.constexpr, SCALES: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """out = x @ (w * w_scale)^T + bias; x in 16 bits is quantised to w's type. TOP: its greatest value.

    SCALES: `block`, or `channel` of w and one of each row of x.
    """
    stream(
        x_ptr, w_ptr, w_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, M, N, K, x_stride, w_stride, 0, 0,
        w_scale_stride, out_stride, BLOCK_SIZE_M, BLOCK_SIZE_N, WARPS, STAGES, BLOCKS, MODE, SCALES, TOP,
    )  # fmt: skip
