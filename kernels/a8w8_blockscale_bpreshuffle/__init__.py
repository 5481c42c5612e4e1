"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T: block-scaled fp8 with a pre-shuffled weight.

x is e4m3fn (e4m3fnuz on gfx942), row-major with K innermost. x_scale is fp32 [M, ceil(K/128)], one for 128 elements
of a row, stored transposed: stride (1, M), as aiter's gemm_a8w8_blockscale_preshuffle takes it by default. w is of
x's type in 16 x 16 tiles: element (n, k) lies at (n // 16) * 16 * K + (k // 16) * 256 + (n % 16) * 16 + k % 16, what
aiter's shuffle_weight(w, layout=(16, 16)) makes and its kernels view as (N/16, K*16); N is a multiple of 16, K of 32.
w_scale is fp32 row-major [ceil(N/128), ceil(K/128)], one for a 128 x 128 tile, not shuffled. Accumulation is fp32, out
is bf16, fp16 or fp32. Read on in gemmpipe/layouts.py, a8w8_blockscale/ (device functions; the skinny kernel lies in
gemmpipe/templates/), _triton.py (launch, builds and what fits where), _problem.py (keys).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.a8w8_blockscale._gluon import BlockscaleWarpSpecialised
from gemmpipe.kernels.a8w8_blockscale_bpreshuffle import _problem
from gemmpipe.kernels.a8w8_blockscale_bpreshuffle._triton import Blockscale
from gemmpipe.layouts import TILES_16X16
from gemmpipe.operand_types import X_SCALE
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance
from gemmpipe.tables.aiter import PLAIN, AiterTable
from gemmpipe.templates.skinny_tiles import SkinnyTiles

FAMILY = Family(
    name="a8w8_blockscale_bpreshuffle",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", default="float8_e4m3fn", aliases=("q_dtype_w",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        X_SCALE,
    ),
    csv_name="a8w8_blockscale_bpreshuffle_tuned_gemm.csv",
    aiter_table=AiterTable(columns=("M", "N", "K", "libtype", *PLAIN), variable="GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE"),
    json_tag="A8W8_BLOCKSCALE_PRESHUFFLED",
    entry_point="gemm_a8w8_blockscale_bpreshuffle",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Blockscale(), BlockscaleWarpSpecialised(layout=TILES_16X16), SkinnyTiles()),
)
