"""Specification of a matrix product (types, scales, layout) and its operands."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemmpipe.core.renamed import renamed_members

if TYPE_CHECKING:
    import torch


ROW, COLUMN = "row", "column"
"""Memory orders of a matrix of scales [M, blocks]: strides (blocks, 1), and M-major strides (1, M or more)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Scaling of one operand: `tensor` (one scale), `row` (one per row of x or w), `block` (one per `block` tile)."""

    granularity: str
    block: tuple[int, int] = (0, 0)
    """(rows, columns along K) of a tile; rows are M for x and N for w."""
    dtype: str = "float32"
    """Type of a stored scale: fp32, or `float8_e8m0fnu` for powers of two."""
    order: str | None = None
    """Memory order of x's block scales [M, blocks]: ROW or COLUMN; None: a workload may have either, and a candidate
    must support both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts: each row goes through `topk` of `count` two-layer networks; the results are weighted.

    For every expert e of a row, with a = x @ w[e]^T: h = act(a[:inner]) * a[inner:] (h = act(a) when not `gated`), and
    out += weight * (h @ w2[e]^T). w is [count, 2 * inner, K] ([count, inner, K] when not gated), w2 [count, N, inner].
    """

    count: int
    topk: int
    inner: int
    activation: str = "silu"
    """`silu`, or `gelu` (the exact one, by erf)."""
    gated: bool = True
    weight_first: bool = False
    """True if the routing weight multiplies a, before the activation, instead of the result."""
    quantised: Scaling | None = None
    """Scaling of x and h, which are quantised to the weights' type before each product; None: not quantised."""
    routing: str | None = None
    """How random rows spread over the experts (see gemmpipe.family.routing); no kernel depends on it."""

    @property
    def w1_rows(self) -> int:
        """Columns of the first product: 2 * inner when gated."""
        return self.inner * (2 if self.gated else 1)


@renamed_members(possible_orders="x_scale_orders", in_order="with_scale_order")
@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSpec:
    """out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T + bias[N]; all that backends base decisions on.

    dtypes are torch's names without `torch.` (`bfloat16`, `float8_e4m3fn`). A `batch` above 1 means that number of
    products with separate operands: x, w, row scales and out get a leading dimension and are contiguous. With `experts`
    the product is a mixture of experts; x [M, K] then has the output's type and no scales.
    """

    m: int
    n: int
    k: int
    x_dtype: str
    w_dtype: str
    out_dtype: str
    x_scale: Scaling | None = None
    w_scale: Scaling | None = None
    w_layout: str = "nk"
    """`nk` (row-major [N, K]) or the name of a pre-shuffled layout (see family.layouts)."""
    bias: bool = False
    batch: int = 1
    experts: Experts | None = None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """[M, N], or [B, M, N] with a batch."""
        return (self.m, self.n) if self.batch == 1 else (self.batch, self.m, self.n)

    @property
    def x_scale_orders(self) -> tuple[str, ...]:
        """The memory orders of x_scale (see Scaling.order) that a candidate must support, row-major first.

        A single one if the workload has only that, if both are the same memory, or without block scales.
        """
        scaling = self.x_scale
        if scaling is None or scaling.granularity != "block":
            return (ROW,)
        if scaling.order is not None:
            return (scaling.order,)
        return (ROW,) if self.m == 1 or self.k <= scaling.block[1] else (ROW, COLUMN)

    def with_scale_order(self, order: str) -> "GemmSpec":
        """The same product restricted to one memory order of x's block scales; itself if it has a single order."""
        if self.x_scale is None or len(self.x_scale_orders) == 1:
            return self
        return replace(self, x_scale=replace(self.x_scale, order=order))

    @property
    def weight_elements(self) -> int:
        """Number of elements of all stored weights."""
        if self.experts is not None:
            return (
                self.experts.count * self.experts.inner * (self.experts.w1_rows // self.experts.inner * self.k + self.n)
            )
        return self.batch * self.n * self.k


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """The weight side of a problem: `w` [N, K], `w_scale` as in the spec, `bias` [N] or None.

    Scales: tensor [1], row [N, 1] ([B, 1, N] in a batch), block [ceil(N/rows), ceil(K/columns)]. Experts have two
    weights, `w` and `w2` (shapes in `Experts`), with the scales of each expert in a leading dimension.
    """

    w: "torch.Tensor"
    w_scale: "torch.Tensor | None" = None
    bias: "torch.Tensor | None" = None
    w2: "torch.Tensor | None" = None
    w2_scale: "torch.Tensor | None" = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The activation side: `x` [M, K] and `x_scale` [M, ceil(K/columns)], [M, 1], [1] or None.

    Block scales are in either memory order (see scale_order): row-major (strides (blocks, 1)) or M-major (strides (1,
    M), or (1, M rounded up to a multiple of 4)); a launch reads the strides of its tensor.
    """

    x: "torch.Tensor"
    x_scale: "torch.Tensor | None" = None
    topk_ids: "torch.Tensor | None" = None
    """int32 [M, topk]: the distinct experts of each row."""
    topk_weights: "torch.Tensor | None" = None
    """fp32 [M, topk]: the weight of each expert's result."""


def scale_order(scales: "torch.Tensor") -> str | None:
    """ROW or COLUMN, the memory order of scales [M, blocks]; None for other strides.

    A single row or a single block is in both orders; it counts as ROW if its elements are contiguous.
    """
    (rows, blocks), (row, block) = scales.shape, scales.stride()
    if blocks == 1 or block == 1:
        return ROW
    return COLUMN if rows == 1 or row == 1 else None
