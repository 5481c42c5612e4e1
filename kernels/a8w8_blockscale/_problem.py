"""a8w8_blockscale's problems: defaults of its key columns, and the product that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.family import GemmSpec, KernelDefaults, Scaling
from gemmpipe.operand_types import FP8, OUT, check_word, native_fp8, refuse_bias


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: the fp8 format that this architecture multiplies, bf16 out. Raises UserError."""
    refuse_bias(kernel, "a8w8_blockscale")
    dtype = check_word("kernel.dtype", kernel.dtype or native_fp8(gfx), FP8)
    out = check_word("kernel.out_dtype", kernel.out_dtype or "bfloat16", OUT)
    return {"dtype": dtype, "outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError for a type the kernels do not take."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    check_word(f"{problem.id}: dtype", dtype, FP8)
    check_word(f"{problem.id}: outdtype", out, OUT)
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=dtype,
        w_dtype=dtype,
        out_dtype=out,
        x_scale=Scaling(granularity="block", block=(1, 128), order=_order(key.get("x_scale"))),
        w_scale=Scaling(granularity="block", block=(128, 128)),
    )


def _order(value: Scalar) -> str | None:
    return None if value is None else str(value)
