"""a16w16's problems: defaults of its key columns, and the product that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.family import GemmSpec, KernelDefaults, Scaling
from gemmpipe.layouts import PLAIN, TILES_16X16, check_tiles
from gemmpipe.operand_types import FP8, OUT, WIDE, check_word


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: bf16 in, the same out (bf16 for fp8), no bias. Raises UserError."""
    dtype = check_word("kernel.dtype", kernel.dtype or "bfloat16", WIDE + FP8)
    out = check_word("kernel.out_dtype", kernel.out_dtype or (dtype if dtype in WIDE else "bfloat16"), OUT)
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
    shuffled = bool(key["bpreshuffle"])
    if shuffled:  # 8-bit weights in tiles are a8w8_bpreshuffle's
        check_word(f"{problem.id}: dtype with bpreshuffle=True", dtype, WIDE[:1])
        check_tiles(problem.id, int(key["N"] or 0), int(key["K"] or 0))
    if key["scaleAB"]:
        check_word(f"{problem.id}: dtype with scaleAB=True", dtype, FP8)
    else:
        check_word(f"{problem.id}: dtype with scaleAB=False", dtype, WIDE)
    check_word(f"{problem.id}: outdtype", out, OUT)
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
        w_layout=TILES_16X16 if shuffled else PLAIN,
        bias=bool(key["bias"]),
    )
