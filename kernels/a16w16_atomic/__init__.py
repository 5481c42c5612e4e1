"""out[M, N] = x[M, K] @ w[N, K]^T for 16-bit operands, splits of K added to the output by atomics.

x and w are row-major with K innermost (aiter's gemm_a16w16_atomic); out is bf16, fp16 or fp32, there is no bias. Every
split is a whole number of BLOCK_SIZE_K steps, so that none is counted twice whatever NUM_KSPLIT and K are. A split adds
its fp32 sum in out's own type and in any order: bits differ from run to run, and each addition rounds, which the common
tolerance bears (8 splits in bf16: 0.2 % of elements outside, 16: 1 %; the gate is at 5 %). out is zeroed as a part of
the launch. Read on in gemmpipe/templates/ (shared: dense_kernel.py with device functions, dense.py with launch and
builds), _triton.py (what atomics change, what fits where), _problem.py (keys).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.a16w16_atomic import _problem
from gemmpipe.kernels.a16w16_atomic._triton import AtomicDense
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance

FAMILY = Family(
    name="a16w16_atomic",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
    ),
    csv_name="a16w16_atomic_tuned_gemm.csv",
    json_tag="A16W16-ATOMIC",
    json_buckets="atomic",
    entry_point="gemm_a16w16_atomic",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(AtomicDense(),),
)
