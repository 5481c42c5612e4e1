"""out[M, N] = x[M, K] @ w[N, K]^T for 16-bit operands, splits of K added to the output by atomics.

x and w are row-major with K innermost (aiter's gemm_a16w16_atomic); out is bf16, fp16 or fp32, there is no bias. Every
split is a whole number of BLOCK_SIZE_K steps, so that none is counted twice for any NUM_KSPLIT and K. A split adds its
fp32 sum in out's own type and in any order: bits differ from run to run, and each addition rounds, which the common
tolerance allows (8 splits in bf16: 0.2 % of elements outside, 16: 1 %; the limit is 5 %). out is zeroed as a part of
the launch. The kernel is the dense one (gemmpipe/templates/dense.py); _triton.py has what atomics change.
"""

from collections.abc import Mapping

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.family import Family, GemmSpec, KernelDefaults, KeyColumn, bytes_moved, flops
from gemmpipe.family.dtypes import DTYPES_16BIT, OUT_DTYPES, check_choice, reject_bias
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.kernels.a16w16_atomic._triton import AtomicDense


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: bf16 in, the same out. Raises UserError."""
    reject_bias(kernel, "a16w16_atomic")
    dtype = check_choice("kernel.dtype", kernel.dtype or "bfloat16", DTYPES_16BIT)
    out = check_choice("kernel.out_dtype", kernel.out_dtype or dtype, OUT_DTYPES)
    return {"dtype": dtype, "outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The product of a key. Raises UserError for a type that the kernels do not support."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    check_choice(f"{problem.id}: dtype", dtype, DTYPES_16BIT)
    check_choice(f"{problem.id}: outdtype", out, OUT_DTYPES)
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=dtype,
        w_dtype=dtype,
        out_dtype=out,
    )


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
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(AtomicDense(),),
)
