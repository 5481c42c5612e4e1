"""a16w16's problems: defaults of its key columns, and the product that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError, nearest
from gemmpipe.family import GemmSpec, KernelDefaults, Scaling

WIDE = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
OUT = ("bfloat16", "float16", "float32")


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: bf16 in, the same out (bf16 for fp8), no bias. Raises UserError."""
    dtype = kernel.dtype or "bfloat16"
    _check("kernel.dtype", dtype, WIDE + FP8)
    out = kernel.out_dtype or (dtype if dtype in WIDE else "bfloat16")
    _check("kernel.out_dtype", out, OUT)
    return {
        "bias": bool(kernel.bias),
        "dtype": dtype,
        "outdtype": out,
        "scaleAB": dtype in FP8,
        "bpreshuffle": False,
    }


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError when its values contradict each other."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    if key["bpreshuffle"]:
        raise UserError(
            f"{problem.id}: bpreshuffle=True is no a16w16 problem; expected False (a16w16 weights are [N, K])"
        )
    if key["scaleAB"]:
        _check(f"{problem.id}: dtype with scaleAB=True", dtype, FP8)
    else:
        _check(f"{problem.id}: dtype with scaleAB=False", dtype, WIDE)
    _check(f"{problem.id}: outdtype", out, OUT)
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
        bias=bool(key["bias"]),
    )


def _check(where: str, dtype: str, known: tuple[str, ...]) -> None:
    if dtype not in known:
        raise UserError(f"{where}: '{dtype}', expected one of {', '.join(known)}{nearest(dtype, known)}")
