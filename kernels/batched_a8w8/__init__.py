"""out[B, M, N] = (x[B, M, K] * x_scale) @ (w[B, N, K] * w_scale)^T for 8-bit operands, one weight per product.

x and w are int8, e4m3fn or (gfx942) e4m3fnuz, contiguous with K innermost; x_scale is fp32 [B, M, 1] per token, w_scale
fp32 [B, 1, N] per channel (aiter's batched_gemm_a8w8; its tables are keyed B M N K). int8 is summed in int32, fp8 in
fp32; out is bf16, fp16 or fp32, there is no bias. A batch of one is a single product of 2-D operands. The kernel is
the dense one (gemmpipe/templates/dense.py).
"""

from collections.abc import Mapping

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.family import Family, GemmSpec, KernelDefaults, KeyColumn, Scaling, bytes_moved, flops
from gemmpipe.family.aiter_table import RESULT_COLUMNS, AiterTable
from gemmpipe.family.dtypes import DTYPES_8BIT, OUT_DTYPES, check_choice, native_fp8, reject_bias
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.templates.dense import Dense


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: the architecture's fp8 format, bf16 out. Raises UserError."""
    reject_bias(kernel, "batched_a8w8")
    dtype = check_choice("kernel.dtype", kernel.dtype or native_fp8(gfx), DTYPES_8BIT)
    out = check_choice("kernel.out_dtype", kernel.out_dtype or "bfloat16", OUT_DTYPES)
    return {"dtype": dtype, "outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The products of a key. Raises UserError for a type that the kernels do not support."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    check_choice(f"{problem.id}: dtype", dtype, DTYPES_8BIT)
    check_choice(f"{problem.id}: outdtype", out, OUT_DTYPES)
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=dtype,
        w_dtype=dtype,
        out_dtype=out,
        x_scale=Scaling(granularity="row"),
        w_scale=Scaling(granularity="row"),
        batch=int(key["B"] or 0),
    )


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
    aiter_table=AiterTable(
        columns=("B", "M", "N", "K", *RESULT_COLUMNS), variable="A8W8_BATCHED_GEMM", implied={"dtype": "int8"}
    ),
    json_tag="BATCHED_A8W8",
    entry_point="batched_gemm_a8w8",
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
