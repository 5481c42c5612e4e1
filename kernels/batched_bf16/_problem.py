"""batched_bf16's problems: defaults of its key columns, and the products that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.family import GemmSpec, KernelDefaults
from gemmpipe.operand_types import OUT, WIDE, check_word, refuse_bias


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: bf16 in, the same out. Raises UserError."""
    refuse_bias(kernel, "batched_bf16")
    dtype = check_word("kernel.dtype", kernel.dtype or "bfloat16", WIDE)
    out = check_word("kernel.out_dtype", kernel.out_dtype or dtype, OUT)
    return {"dtype": dtype, "outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The products that the key means. Raises UserError for a type the kernels do not take."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    check_word(f"{problem.id}: dtype", dtype, WIDE)
    check_word(f"{problem.id}: outdtype", out, OUT)
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=dtype,
        w_dtype=dtype,
        out_dtype=out,
        batch=int(key["B"] or 0),
    )
