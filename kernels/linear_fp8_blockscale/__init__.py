"""out[M, N] = x[M, K] @ (w[N, K] * w_scale)^T for x in 16 bits and fp8 weights with a scale per 128 x 128 block.

This is what an engine computes for a linear layer of a checkpoint in block-scaled fp8: x is bf16 or fp16, and out has
its type; w is e4m3fn (e4m3fnuz on gfx942), row-major with K innermost; w_scale is fp32 [ceil(N/128), ceil(K/128)]. A
candidate may quantise x to w's type, with one fp32 scale per row and 128 elements along K (the largest magnitude over
the format's greatest value), or multiply it as it is; accumulation is fp32. Candidates:

- `triton`, `gluon`, `skinny`, `sliced`: a launch that quantises x, then the product of a8w8_blockscale;
- `fused`: one launch that quantises x within the product;
- `fused_sliced`, `fused_streamed`: the same within the sliced and the streamed product;
- `weight_only`: one launch that converts w to x's type;
- `quantised_library`: a launch that quantises x, then a library's product.

The x of a check and of a timing lies on the grid of the fp8 format with scales that are powers of two: both kinds of
candidates then compute the same product, so that one reference with a narrow tolerance checks both.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, KeyColumn, Scaling, bytes_moved, flops
from gemmpipe.family.dtypes import DTYPES_16BIT, FP8_DTYPES, check_choice, native_fp8, reject_bias
from gemmpipe.family.operands import make_weights, values_on_fp8_grid
from gemmpipe.family.reference import product, tolerance
from gemmpipe.kernels.a8w8_blockscale import Blockscale
from gemmpipe.kernels.a8w8_blockscale._gluon import BlockscaleWarpSpecialised
from gemmpipe.kernels.linear_fp8_blockscale._few_rows import FusedSliced, FusedStreamed
from gemmpipe.kernels.linear_fp8_blockscale._triton import OneLaunch
from gemmpipe.templates.params import SCALE_BLOCKS
from gemmpipe.templates.quantise import QuantisedFirst
from gemmpipe.templates.small_m import Skinny, Sliced

if TYPE_CHECKING:
    import torch


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: the architecture's fp8 format, bf16 out. Raises UserError."""
    reject_bias(kernel, "linear_fp8_blockscale")
    dtype = check_choice("kernel.dtype", kernel.dtype or native_fp8(gfx), FP8_DTYPES)
    out = check_choice("kernel.out_dtype", kernel.out_dtype or "bfloat16", DTYPES_16BIT)
    return {"dtype": dtype, "outdtype": out}


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
        w_scale=Scaling(granularity="block", block=SCALE_BLOCKS[1]),
    )


def make_inputs(spec: GemmSpec, generator: "torch.Generator") -> Inputs:
    """Random `x` [M, K] of about 1 that is quantised without an error: fp8 values times powers of two per block."""
    return Inputs(x=values_on_fp8_grid(spec, SCALE_BLOCKS[0], generator))


FAMILY = Family(
    name="linear_fp8_blockscale",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", default="float8_e4m3fn", aliases=("q_dtype_w",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
    ),
    csv_name="linear_fp8_blockscale_tuned_gemm.csv",
    json_tag="LINEAR_FP8_BLOCKSCALE",
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
        QuantisedFirst(product=Blockscale()),
        QuantisedFirst(product=BlockscaleWarpSpecialised()),
        QuantisedFirst(product=Skinny()),
        QuantisedFirst(product=Sliced()),
        OneLaunch(quantises=True),
        FusedSliced(),
        FusedStreamed(),
        OneLaunch(quantises=False),
    ),
)
