"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T (+ bias[N]): a8w8 with a pre-shuffled weight.

x is int8, e4m3fn or (gfx942) e4m3fnuz, row-major with K innermost; scales, sums, out and bias are as in a8w8. w is of
x's type and in 16 x 16 tiles: element (n, k) lies at (n // 16) * 16 * K + (k // 16) * 256 + (n % 16) * 16 + k % 16.
That is what aiter's shuffle_weight(w, layout=(16, 16)) makes (aiter/ops/shuffle.py: [N/16, 16, K/32, 2, 16] permuted to
[N/16, K/32, 2, 16, 16]) and its kernels view as (N/16, K*16); N is a multiple of 16, K of 32. Read on in
gemmpipe/layouts.py, gemmpipe/templates/ (shared: dense_kernel.py and weight_tiles.py with device functions, dense.py
with launch, builds and what fits where; their Hopper kin, skinny_tiles.py and its kernel), _problem.py (keys).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.a8w8_bpreshuffle import _problem
from gemmpipe.layouts import TILES_16X16
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance
from gemmpipe.tables.aiter import PLAIN, AiterTable
from gemmpipe.templates.dense import Dense
from gemmpipe.templates.dense_gluon import DenseWarpSpecialised
from gemmpipe.templates.skinny_tiles import SkinnyTiles

FAMILY = Family(
    name="a8w8_bpreshuffle",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="q_dtype_w", kind="dtype", aliases=("dtype",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="granularity", kind="str", default="row", words=_problem.GRANULARITIES),
        KeyColumn(name="bias", kind="bool", default=False),
    ),
    csv_name="a8w8_bpreshuffle_tuned_gemm.csv",
    aiter_table=AiterTable(columns=("M", "N", "K", "q_dtype_w", "libtype", *PLAIN), variable="GEMM_A8W8_BPRESHUFFLE"),
    json_tag="A8W8_PRESHUFFLED",
    entry_point="gemm_a8w8_bpreshuffle",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Dense(layout=TILES_16X16), DenseWarpSpecialised(layout=TILES_16X16), SkinnyTiles()),
)
