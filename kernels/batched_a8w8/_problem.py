"""batched_a8w8's problems: defaults of its key columns, and the products that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError, nearest
from gemmpipe.family import GemmSpec, KernelDefaults, Scaling

EIGHT = ("float8_e4m3fn", "float8_e4m3fnuz", "int8")
OUT = ("bfloat16", "float16", "float32")


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: the fp8 format that this architecture multiplies, bf16 out. Raises UserError."""
    if kernel.bias:
        raise UserError("kernel.bias: true, expected false or null (batched_a8w8 has no bias)")
    dtype = kernel.dtype or ("float8_e4m3fnuz" if gfx == "gfx942" else "float8_e4m3fn")
    _check("kernel.dtype", dtype, EIGHT)
    out = kernel.out_dtype or "bfloat16"
    _check("kernel.out_dtype", out, OUT)
    return {"dtype": dtype, "outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The products that the key means. Raises UserError for a type the kernels do not take."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    _check(f"{problem.id}: dtype", dtype, EIGHT)
    _check(f"{problem.id}: outdtype", out, OUT)
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


def _check(where: str, dtype: str, known: tuple[str, ...]) -> None:
    if dtype not in known:
        raise UserError(f"{where}: '{dtype}', expected one of {', '.join(known)}{nearest(dtype, known)}")
