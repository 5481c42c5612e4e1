"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T (+ bias[N]): a8w8 with a pre-shuffled weight.

x is int8, e4m3fn or (gfx942) e4m3fnuz, row-major with K innermost; scales, sums, out and bias are as in a8w8. w is of
x's type and in 16 x 16 tiles: element (n, k) is at (n // 16) * 16 * K + (k // 16) * 256 + (n % 16) * 16 + k % 16.
aiter's shuffle_weight(w, layout=(16, 16)) makes this layout (aiter/ops/shuffle.py: [N/16, 16, K/32, 2, 16] permuted to
[N/16, K/32, 2, 16, 16]) and its kernels view it as (N/16, K*16); N is a multiple of 16, K of 32. Kernels and launches
are in gemmpipe/templates/ (dense.py, small_m.py, hopper/), the layout in gemmpipe/family/layouts.py.
"""

from dataclasses import replace

from gemmpipe.core.data import Problem
from gemmpipe.family import Family, GemmSpec, KeyColumn, bytes_moved, flops
from gemmpipe.family.aiter_table import RESULT_COLUMNS, AiterTable
from gemmpipe.family.layouts import TILES_16X16, check_preshuffle_shape
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.kernels import a8w8 as row_major
from gemmpipe.templates.dense import Dense, DenseWarpSpecialised
from gemmpipe.templates.small_m import SkinnyPreshuffled

GRANULARITIES = row_major.GRANULARITIES
key_defaults = row_major.key_defaults


def spec(problem: Problem) -> GemmSpec:
    """The product of a key. Raises UserError for a value that the kernels or the layout do not support."""
    found = replace(row_major.spec(problem), w_layout=TILES_16X16)
    check_preshuffle_shape(problem.id, found.n, found.k)
    return found


FAMILY = Family(
    name="a8w8_bpreshuffle",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="q_dtype_w", kind="dtype", aliases=("dtype",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="granularity", kind="str", default="row", choices=GRANULARITIES),
        KeyColumn(name="bias", kind="bool", default=False),
    ),
    csv_name="a8w8_bpreshuffle_tuned_gemm.csv",
    aiter_table=AiterTable(
        columns=("M", "N", "K", "q_dtype_w", "libtype", *RESULT_COLUMNS), variable="GEMM_A8W8_BPRESHUFFLE"
    ),
    json_tag="A8W8_PRESHUFFLED",
    entry_point="gemm_a8w8_bpreshuffle",
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Dense(layout=TILES_16X16), DenseWarpSpecialised(layout=TILES_16X16), SkinnyPreshuffled()),
)
