"""a8w8's problems: defaults of its key columns, and the product that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.family import GemmSpec, KernelDefaults, Scaling
from gemmpipe.operand_types import EIGHT_BITS, OUT, check_word, native_fp8

ROW, TENSOR = "row", "tensor"
GRANULARITIES = ((ROW, ROW), (TENSOR, TENSOR), ("per_token", ROW), ("per_tensor", TENSOR))
"""(what a source may say of the scales; what it means)."""


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: the fp8 format that this architecture multiplies, bf16 out, scales by row, no bias.

    Raises UserError.
    """
    dtype = check_word("kernel.dtype", kernel.dtype or native_fp8(gfx), EIGHT_BITS)
    out = check_word("kernel.out_dtype", kernel.out_dtype or "bfloat16", OUT)
    return {"q_dtype_w": dtype, "outdtype": out, "granularity": ROW, "bias": bool(kernel.bias)}


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError for a value that the kernels do not take."""
    key = dict(problem.key)
    dtype, out, granularity = str(key["q_dtype_w"]), str(key["outdtype"]), str(key["granularity"])
    check_word(f"{problem.id}: q_dtype_w", dtype, EIGHT_BITS)
    check_word(f"{problem.id}: outdtype", out, OUT)
    check_word(f"{problem.id}: granularity", granularity, (ROW, TENSOR))
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
