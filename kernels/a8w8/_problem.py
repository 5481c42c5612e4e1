"""a8w8's problems: defaults of its key columns, and the product that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError, nearest
from gemmpipe.family import GemmSpec, KernelDefaults, Scaling

EIGHT = ("float8_e4m3fn", "float8_e4m3fnuz", "int8")
OUT = ("bfloat16", "float16", "float32")
GRANULARITIES = ("row", "tensor")


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: the fp8 format that this architecture multiplies, bf16 out, scales by row, no bias.

    Raises UserError.
    """
    dtype = kernel.dtype or ("float8_e4m3fnuz" if gfx == "gfx942" else "float8_e4m3fn")
    check("kernel.dtype", dtype, EIGHT)
    out = kernel.out_dtype or "bfloat16"
    check("kernel.out_dtype", out, OUT)
    return {"q_dtype_w": dtype, "outdtype": out, "granularity": "row", "bias": bool(kernel.bias)}


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError for a value that the kernels do not take."""
    key = dict(problem.key)
    dtype, out, granularity = str(key["q_dtype_w"]), str(key["outdtype"]), str(key["granularity"])
    check(f"{problem.id}: q_dtype_w", dtype, EIGHT)
    check(f"{problem.id}: outdtype", out, OUT)
    check(f"{problem.id}: granularity", granularity, GRANULARITIES)
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


def check(where: str, word: str, known: tuple[str, ...]) -> None:
    """Raises UserError for a word that is none of the known ones."""
    if word not in known:
        raise UserError(f"{where}: '{word}', expected one of {', '.join(known)}{nearest(word, known)}")
