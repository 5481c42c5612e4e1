"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T (+ bias[N]) for 8-bit operands whose scales span all of K.

x and w are int8, e4m3fn or (gfx942) e4m3fnuz, row-major with K innermost. The key's `granularity` says what a scale is
for: `row`, fp32 x_scale [M, 1] per token and w_scale [N, 1] per channel (a [1, N] is the same memory; aiter's gemm_a8w8
takes that one, its gemm_a8w8_per_token_scale the other), or `tensor`, fp32 [1] each. int8 is summed in int32, fp8 in
fp32; out and bias are bf16, fp16 or fp32. Read on in gemmpipe/templates/ (shared: dense_kernel.py with device
functions, dense.py with launch, builds and what fits where; their Hopper, skinny and sliced kin), _problem.py (keys).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.a8w8 import _problem
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance
from gemmpipe.tables.aiter import PLAIN, AiterTable
from gemmpipe.templates.dense import Dense
from gemmpipe.templates.dense_gluon import DenseWarpSpecialised
from gemmpipe.templates.skinny import Skinny
from gemmpipe.templates.sliced import Sliced

FAMILY = Family(
    name="a8w8",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="q_dtype_w", kind="dtype", aliases=("dtype",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="granularity", kind="str", default="row", words=_problem.GRANULARITIES),
        KeyColumn(name="bias", kind="bool", default=False),
    ),
    csv_name="a8w8_tuned_gemm.csv",
    aiter_table=AiterTable(columns=("M", "N", "K", "q_dtype_w", *PLAIN), variable="GEMM_A8W8"),
    json_tag="A8W8",
    entry_point="gemm_a8w8",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("scaled_mm", "torch"),
    implementations=(Dense(), DenseWarpSpecialised(), Skinny(), Sliced()),
)
