"""a4w4_blockscale's problems: defaults of its key columns, and the product that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError, nearest
from gemmpipe.family import GemmSpec, KernelDefaults, Scaling

FP4 = "float4_e2m1fn_x2"
OUT = ("bfloat16", "float16", "float32")
SCALE_GROUP = 32


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: bf16 out. Raises UserError."""
    if kernel.bias:
        raise UserError("kernel.bias: true, expected false or null (a4w4_blockscale has no bias)")
    _check("kernel.dtype", kernel.dtype or FP4, (FP4,))
    out = kernel.out_dtype or "bfloat16"
    _check("kernel.out_dtype", out, OUT)
    return {"outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError for a type or K that the kernels do not take."""
    key = dict(problem.key)
    out, k = str(key["outdtype"]), int(key["K"] or 0)
    _check(f"{problem.id}: outdtype", out, OUT)
    if k % SCALE_GROUP:
        raise UserError(f"{problem.id}: K={k}, expected a multiple of {SCALE_GROUP} (one scale for so many elements)")
    scaling = Scaling(granularity="block", block=(1, SCALE_GROUP), dtype="float8_e8m0fnu")
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


def _check(where: str, dtype: str, known: tuple[str, ...]) -> None:
    if dtype not in known:
        raise UserError(f"{where}: '{dtype}', expected one of {', '.join(known)}{nearest(dtype, known)}")
