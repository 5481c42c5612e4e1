"""out[M, N] = x[M, K] @ (w[N, K] * w_scale)^T (+ bias[N]) for x in 16 bits and fp8 weights with a scale per row.

This is what an engine computes for a linear layer of a checkpoint in fp8 with scales per channel and dynamic scales per
token: x is bf16 or fp16, out and bias have its type; w is e4m3fn (e4m3fnuz on gfx942), row-major with K innermost;
w_scale is fp32 [N, 1]. A candidate may quantise x to w's type, with one fp32 scale per row (the largest magnitude over
the format's greatest value), or multiply it as it is; accumulation is fp32. Candidates are those of
linear_fp8_blockscale, with the products of a8w8; of those that quantise within the product `fused_streamed` alone,
since a row's scale is known only after the whole row is read. The x of a check and of a timing lies on the grid of the
fp8 format (see there).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, KeyColumn, Scaling, bytes_moved, flops
from gemmpipe.family.dtypes import DTYPES_16BIT, FP8_DTYPES, check_choice, native_fp8
from gemmpipe.family.operands import make_weights, values_on_fp8_grid
from gemmpipe.family.reference import product, tolerance
from gemmpipe.kernels.linear_fp8_blockscale._few_rows import FusedStreamed
from gemmpipe.kernels.linear_fp8_blockscale._triton import OneLaunch
from gemmpipe.templates.dense import Dense, DenseWarpSpecialised
from gemmpipe.templates.quantise import QuantisedFirst
from gemmpipe.templates.small_m import Skinny, Sliced

if TYPE_CHECKING:
    import torch


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: the architecture's fp8 format, bf16 out, no bias. Raises UserError."""
    dtype = check_choice("kernel.dtype", kernel.dtype or native_fp8(gfx), FP8_DTYPES)
    out = check_choice("kernel.out_dtype", kernel.out_dtype or "bfloat16", DTYPES_16BIT)
    return {"dtype": dtype, "outdtype": out, "bias": bool(kernel.bias)}


def spec(problem: Problem) -> GemmSpec:
    """The product of a key. Raises UserError for a type that the kernels do not support."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    check_choice(f"{problem.id}: dtype", dtype, FP8_DTYPES)
    check_choice(f"{problem.id}: outdtype", out, DTYPES_16BIT)
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=out,
        w_dtype=dtype,
        out_dtype=out,
        w_scale=Scaling(granularity="row"),
        bias=bool(key["bias"]),
    )


def make_inputs(spec: GemmSpec, generator: "torch.Generator") -> Inputs:
    """Random `x` [M, K] of about 1 that is quantised without an error: fp8 values times a power of two per row."""
    return Inputs(x=values_on_fp8_grid(spec, (1, spec.k), generator))


FAMILY = Family(
    name="linear_fp8_row",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", default="float8_e4m3fn", aliases=("q_dtype_w",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        KeyColumn(name="bias", kind="bool", default=False),
    ),
    csv_name="linear_fp8_row_tuned_gemm.csv",
    json_tag="LINEAR_FP8_ROW",
    entry_point="linear_fp8",
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("quantised_library", "torch"),
    implementations=(
        QuantisedFirst(product=Dense()),
        QuantisedFirst(product=DenseWarpSpecialised()),
        QuantisedFirst(product=Skinny()),
        QuantisedFirst(product=Sliced()),
        FusedStreamed(),
        OneLaunch(quantises=False),
    ),
)
