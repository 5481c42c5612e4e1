"""out[M, N] = x[M, K] @ w[N, K]^T (+ bias[N]) for 16-bit operands, or fp8 ones with one scale each (scaleAB).

x and w are row-major, both with K innermost; accumulation is fp32. With scaleAB: out = (x @ w^T) * x_scale * w_scale (+
bias), both scales fp32 of shape [1]. out and bias are bf16, fp16 or fp32. This module has the key columns, the product
of a key and the implementations; their code is in gemmpipe/templates/ (dense.py, small_m.py, hopper/).
"""

from collections.abc import Mapping

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.family import Family, GemmSpec, KernelDefaults, KeyColumn, Scaling, bytes_moved, flops
from gemmpipe.family.aiter_table import AiterTable
from gemmpipe.family.dtypes import DTYPES_16BIT, FP8_DTYPES, OUT_DTYPES, check_choice
from gemmpipe.family.layouts import ROW_MAJOR, TILES_16X16, check_preshuffle_shape
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.templates.dense import Dense, DenseWarpSpecialised
from gemmpipe.templates.small_m import Skinny, Sliced
from gemmpipe.templates.streamed import Streamed


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: bf16 in, the same out (bf16 for fp8), no bias. Raises UserError."""
    dtype = check_choice("kernel.dtype", kernel.dtype or "bfloat16", DTYPES_16BIT + FP8_DTYPES)
    out = check_choice(
        "kernel.out_dtype", kernel.out_dtype or (dtype if dtype in DTYPES_16BIT else "bfloat16"), OUT_DTYPES
    )
    return {
        "bias": bool(kernel.bias),
        "dtype": dtype,
        "outdtype": out,
        "scaleAB": dtype in FP8_DTYPES,
        "bpreshuffle": False,
    }


def spec(problem: Problem) -> GemmSpec:
    """The product of a key. Raises UserError if its values contradict each other."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    shuffled = bool(key["bpreshuffle"])
    if shuffled:  # 8-bit weights in tiles belong to a8w8_bpreshuffle
        check_choice(f"{problem.id}: dtype with bpreshuffle=True", dtype, DTYPES_16BIT[:1])
        check_preshuffle_shape(problem.id, int(key["N"] or 0), int(key["K"] or 0))
    if key["scaleAB"]:
        check_choice(f"{problem.id}: dtype with scaleAB=True", dtype, FP8_DTYPES)
    else:
        check_choice(f"{problem.id}: dtype with scaleAB=False", dtype, DTYPES_16BIT)
    check_choice(f"{problem.id}: outdtype", out, OUT_DTYPES)
    scaling = Scaling(granularity="tensor") if key["scaleAB"] else None
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=dtype,
        w_dtype=dtype,
        out_dtype=out,
        x_scale=scaling,
        w_scale=scaling,
        w_layout=TILES_16X16 if shuffled else ROW_MAJOR,
        bias=bool(key["bias"]),
    )


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
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch", "scaled_mm"),
    implementations=(Dense(), DenseWarpSpecialised(), Streamed(), Skinny(), Sliced()),
    lm_head=True,
)
