"""a4w4_blockscale's problems: defaults of its key columns, and the product that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import GemmSpec, KernelDefaults, Scaling
from gemmpipe.operand_types import OUT, check_word, refuse_bias

FP4 = "float4_e2m1fn_x2"
SCALE_GROUP = 32


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: bf16 out. Raises UserError."""
    refuse_bias(kernel, "a4w4_blockscale")
    check_word("kernel.dtype", kernel.dtype or FP4, (FP4,))
    out = check_word("kernel.out_dtype", kernel.out_dtype or "bfloat16", OUT)
    return {"outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError for a type or K that the kernels do not take."""
    key = dict(problem.key)
    out, k = str(key["outdtype"]), int(key["K"] or 0)
    check_word(f"{problem.id}: outdtype", out, OUT)
    if k % SCALE_GROUP:
        raise UserError(f"{problem.id}: K={k}, expected a multiple of {SCALE_GROUP} (one scale for so many elements)")
    scaling = Scaling(granularity="block", block=(1, SCALE_GROUP), dtype="float8_e8m0fnu", order="row")
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=k,
        x_dtype=FP4,
        w_dtype=FP4,
        out_dtype=out,
        x_scale=scaling,
        w_scale=scaling,
    )
