"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T (+ bias[N]) for 8-bit operands, scales constant along K.

x and w are int8, e4m3fn or (gfx942) e4m3fnuz, row-major with K innermost. The key's `granularity` is the scales':
`row`, fp32 x_scale [M, 1] per token and w_scale [N, 1] per channel (a [1, N] is the same memory; aiter's gemm_a8w8
takes that one, its gemm_a8w8_per_token_scale the other), or `tensor`, fp32 [1] each. int8 is summed in int32, fp8 in
fp32; out and bias are bf16, fp16 or fp32. This module has the key columns, the product of a key and the
implementations; their code is in gemmpipe/templates/ (dense.py, small_m.py, hopper/).
"""

from collections.abc import Mapping

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.family import Family, GemmSpec, KernelDefaults, KeyColumn, Scaling, bytes_moved, flops
from gemmpipe.family.aiter_table import RESULT_COLUMNS, AiterTable
from gemmpipe.family.dtypes import DTYPES_8BIT, OUT_DTYPES, check_choice, native_fp8
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.templates.dense import Dense, DenseWarpSpecialised
from gemmpipe.templates.small_m import Skinny, Sliced
from gemmpipe.templates.streamed import Streamed

ROW, TENSOR = "row", "tensor"
GRANULARITIES = ((ROW, ROW), (TENSOR, TENSOR), ("per_token", ROW), ("per_tensor", TENSOR))
"""(granularity as a source may name it, its name in the key)."""


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: the architecture's fp8 format, bf16 out, scales per row, no bias. Raises UserError."""
    dtype = check_choice("kernel.dtype", kernel.dtype or native_fp8(gfx), DTYPES_8BIT)
    out = check_choice("kernel.out_dtype", kernel.out_dtype or "bfloat16", OUT_DTYPES)
    return {"q_dtype_w": dtype, "outdtype": out, "granularity": ROW, "bias": bool(kernel.bias)}


def spec(problem: Problem) -> GemmSpec:
    """The product of a key. Raises UserError for a value that the kernels do not support."""
    key = dict(problem.key)
    dtype, out, granularity = str(key["q_dtype_w"]), str(key["outdtype"]), str(key["granularity"])
    check_choice(f"{problem.id}: q_dtype_w", dtype, DTYPES_8BIT)
    check_choice(f"{problem.id}: outdtype", out, OUT_DTYPES)
    check_choice(f"{problem.id}: granularity", granularity, (ROW, TENSOR))
    scaling = Scaling(granularity=granularity)
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=dtype,
        w_dtype=dtype,
        out_dtype=out,
        x_scale=scaling,
        w_scale=scaling,
        bias=bool(key["bias"]),
    )


FAMILY = Family(
    name="a8w8",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="q_dtype_w", kind="dtype", aliases=("dtype",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="granularity", kind="str", default="row", choices=GRANULARITIES),
        KeyColumn(name="bias", kind="bool", default=False),
    ),
    csv_name="a8w8_tuned_gemm.csv",
    aiter_table=AiterTable(columns=("M", "N", "K", "q_dtype_w", *RESULT_COLUMNS), variable="GEMM_A8W8"),
    json_tag="A8W8",
    entry_point="gemm_a8w8",
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("scaled_mm", "torch"),
    implementations=(Dense(), DenseWarpSpecialised(), Streamed(), Skinny(), Sliced()),
)
