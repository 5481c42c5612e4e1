"""out[B, M, N] = (x[B, M, K] * x_scale) @ (w[B, N, K] * w_scale)^T for 8-bit operands, each product with its weight.

x and w are int8, e4m3fn or (gfx942) e4m3fnuz, contiguous with K innermost; x_scale is fp32 [B, M, 1] per token, w_scale
fp32 [B, 1, N] per channel (aiter's batched_gemm_a8w8; its tables are keyed B M N K). int8 is summed in int32, fp8 in
fp32; out is bf16, fp16 or fp32, there is no bias. A batch of one is a plain product of 2-D operands. Read on in
gemmpipe/templates/ (shared: dense_kernel.py with device functions, dense.py with launch, builds and what fits where),
_problem.py (keys).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.batched_a8w8 import _problem
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance
from gemmpipe.tables.aiter import PLAIN, AiterTable
from gemmpipe.templates.dense import Dense

FAMILY = Family(
    name="batched_a8w8",
    key_columns=(
        KeyColumn(name="B", kind="int"),
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", aliases=("q_dtype_w",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
    ),
    csv_name="a8w8_tuned_batched_gemm.csv",
    aiter_table=AiterTable(columns=("B", "M", "N", "K", *PLAIN), variable="A8W8_BATCHED_GEMM"),
    json_tag="BATCHED_A8W8",
    entry_point="batched_gemm_a8w8",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Dense(batched=True),),
)
