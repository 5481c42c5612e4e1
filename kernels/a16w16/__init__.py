"""out[M, N] = x[M, K] @ w[N, K]^T (+ bias[N]) for 16-bit operands, or fp8 ones with one scale each (scaleAB).

x and w are row-major, both with K innermost; accumulation is fp32. With scaleAB: out = (x @ w^T) * x_scale * w_scale (+
bias), both scales fp32 of shape [1]. out and bias are bf16, fp16 or fp32. Read on in gemmpipe/templates/ (shared:
dense_kernel.py with device functions, dense.py with launch, builds and what fits where; their Hopper, skinny and sliced
kin), _problem.py (keys and operands).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.a16w16 import _problem
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance
from gemmpipe.tables.aiter import AiterTable
from gemmpipe.templates.dense import Dense
from gemmpipe.templates.dense_gluon import DenseWarpSpecialised
from gemmpipe.templates.skinny import Skinny
from gemmpipe.templates.sliced import Sliced

FAMILY = Family(
    name="a16w16",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="bias", kind="bool", default=False),
        KeyColumn(name="dtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="scaleAB", kind="bool", default=False),
        KeyColumn(name="bpreshuffle", kind="bool", default=False),
    ),
    csv_name="bf16_tuned_gemm.csv",
    aiter_table=AiterTable(
        columns=(
            *("M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle"),
            *("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"),
        ),
        variable="GEMM_BF16",
    ),
    json_tag="A16W16",
    entry_point="gemm_a16w16",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch", "scaled_mm"),
    implementations=(Dense(), DenseWarpSpecialised(), Skinny(), Sliced()),
    lm_head=True,
)
