"""out[B, M, N] = x[B, M, K] @ w[B, N, K]^T for 16-bit operands, one weight per product.

x, w and out are contiguous, K innermost in both operands (aiter's batched_gemm_bf16; its tables are keyed B M N K);
accumulation is fp32, out is bf16, fp16 or fp32, there is no bias. A batch of one is a single product of 2-D operands.
The kernel is the dense one (gemmpipe/templates/dense.py).
"""

from collections.abc import Mapping

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.family import Family, GemmSpec, KernelDefaults, KeyColumn, bytes_moved, flops
from gemmpipe.family.aiter_table import RESULT_COLUMNS, AiterTable
from gemmpipe.family.dtypes import DTYPES_16BIT, OUT_DTYPES, check_choice, reject_bias
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.templates.dense import Dense


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: bf16 in, the same out. Raises UserError."""
    reject_bias(kernel, "batched_bf16")
    dtype = check_choice("kernel.dtype", kernel.dtype or "bfloat16", DTYPES_16BIT)
    out = check_choice("kernel.out_dtype", kernel.out_dtype or dtype, OUT_DTYPES)
    return {"dtype": dtype, "outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The products of a key. Raises UserError for a type that the kernels do not support."""
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
        batch=int(key["B"] or 0),
    )


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
    aiter_table=AiterTable(columns=("B", "M", "N", "K", *RESULT_COLUMNS), variable="BF16_BATCHED_GEMM"),
    json_tag="BATCHED_A16W16",
    entry_point="batched_gemm_bf16",
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Dense(batched=True),),
)
