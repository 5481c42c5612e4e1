"""out[B, M, N] = x[B, M, K] @ w[B, N, K]^T for 16-bit operands, each product with its own weight.

x, w and out are contiguous, K innermost in both operands (aiter's batched_gemm_bf16; its tables are keyed B M N K);
accumulation is fp32, out is bf16, fp16 or fp32, there is no bias. A batch of one is a plain product of 2-D operands.
Read on in gemmpipe/templates/ (shared: dense_kernel.py with device functions, dense.py with launch, builds and what
fits where), _problem.py (keys).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.batched_bf16 import _problem
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance
from gemmpipe.tables.aiter import PLAIN, AiterTable
from gemmpipe.templates.dense import Dense

FAMILY = Family(
    name="batched_bf16",
    key_columns=(
        KeyColumn(name="B", kind="int"),
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
    ),
    csv_name="bf16_tuned_batched_gemm.csv",
    aiter_table=AiterTable(columns=("B", "M", "N", "K", *PLAIN), variable="BF16_BATCHED_GEMM"),
    json_tag="BATCHED_A16W16",
    entry_point="batched_gemm_bf16",
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
