"""a16w16_atomic's problems: defaults of its key columns, and the product that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError, nearest
from gemmpipe.family import GemmSpec, KernelDefaults

WIDE = ("bfloat16", "float16")
OUT = ("bfloat16", "float16", "float32")


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: bf16 in, the same out. Raises UserError."""
    if kernel.bias:
        raise UserError("kernel.bias: true, expected false or null (a16w16_atomic has no bias)")
    dtype = kernel.dtype or "bfloat16"
    _check("kernel.dtype", dtype, WIDE)
    out = kernel.out_dtype or dtype
    _check("kernel.out_dtype", out, OUT)
    return {"dtype": dtype, "outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError for a type the kernels do not take."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    _check(f"{problem.id}: dtype", dtype, WIDE)
    _check(f"{problem.id}: outdtype", out, OUT)
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=dtype,
        w_dtype=dtype,
        out_dtype=out,
    )


def _check(where: str, dtype: str, known: tuple[str, ...]) -> None:
    if dtype not in known:
        raise UserError(f"{where}: '{dtype}', expected one of {', '.join(known)}{nearest(dtype, known)}")
