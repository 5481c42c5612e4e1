"""fmoe's problems: defaults of its key columns, and the experts that a key means."""

from collections.abc import Mapping

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Experts, GemmSpec, KernelDefaults, Scaling
from gemmpipe.parsing import parse_word

WIDE = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
SILU, GELU = "ActivationType.Silu", "ActivationType.Gelu"
ACTIVATIONS = (("silu", SILU), ("gelu", GELU))
OTHER_ACTIVATIONS = (("swiglu", "ActivationType.Swiglu"),)
"""What aiter's tables also hold and these kernels do not compute: rows that say so are read, and words that name it."""
NONE, TOKEN, BLOCK = "QuantType.No", "QuantType.per_Token", "QuantType.per_1x128"
QUANTISATIONS = (
    ("no", NONE),
    ("none", NONE),
    ("per_token", TOKEN),
    ("per_1x128", BLOCK),
    ("block", BLOCK),
)
OTHER_QUANTISATIONS = (
    ("quanttype.per_128x128", BLOCK),  # aiter's older name of the same
    ("per_tensor", "QuantType.per_Tensor"),
    ("per_1x32", "QuantType.per_1x32"),
)
_SCALING = {
    NONE: (None, None),
    TOKEN: (Scaling(granularity="row"), Scaling(granularity="row")),
    BLOCK: (Scaling(granularity="block", block=(1, 128)), Scaling(granularity="block", block=(128, 128))),
}


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open. Raises UserError.

    `kernel.dtype` is what is multiplied: bf16 (the default), fp16, or the architecture's fp8, then with block scales
    unless `q_type` says per token; `kernel.out_dtype` the type of x and out beside fp8.
    """
    if kernel.bias:
        raise UserError("kernel.bias: true, expected false or null (fmoe has no bias)")
    known = kernel.key.get("q_type")
    q_type = parse_word(QUANTISATIONS, known, OTHER_QUANTISATIONS) if known is not None else None
    native = "float8_e4m3fnuz" if gfx == "gfx942" else "float8_e4m3fn"
    multiplied = kernel.dtype or (native if q_type in (TOKEN, BLOCK) else "bfloat16")
    _check("kernel.dtype", multiplied, (*WIDE, *FP8))
    if multiplied in WIDE and q_type in (TOKEN, BLOCK):  # the row's own 16-bit type beside its quantisation
        dtype, multiplied = multiplied, native
    elif multiplied in FP8:
        dtype, q_type = kernel.out_dtype or "bfloat16", q_type or BLOCK
    else:
        dtype, q_type = multiplied, NONE
    _check("kernel.out_dtype", kernel.out_dtype or dtype, (dtype,) if multiplied in WIDE else WIDE)
    return {
        "act_type": SILU,
        "dtype": dtype,
        "q_dtype_a": multiplied,
        "q_dtype_w": multiplied,
        "q_type": q_type,
        "use_g1u1": 1,
        "doweight_stage1": 0,
    }


def spec(problem: Problem) -> GemmSpec:
    """The experts that the key means. Raises UserError for what the kernels do not compute."""
    key = dict(problem.key)
    dtype, weight, q_type = str(key["dtype"]), str(key["q_dtype_w"]), str(key["q_type"])
    _check(f"{problem.id}: dtype", dtype, WIDE)
    _check("fmoe: act_type", str(key["act_type"]), (SILU, GELU), " is not computed")
    _check("fmoe: q_type", q_type, tuple(_SCALING), " is not computed")
    _check(f"{problem.id}: q_dtype_w", weight, (dtype,) if q_type == NONE else FP8)
    _check(f"{problem.id}: q_dtype_a", str(key["q_dtype_a"]), (weight,))
    count, topk = int(key["expert"] or 0), int(key["topk"] or 0)
    if topk > count:
        raise UserError(f"{problem.id}: topk {topk}, expected at most the {count} experts")
    quantised, w_scale = _SCALING[q_type]
    return GemmSpec(
        m=int(key["token"] or 0),
        n=int(key["model_dim"] or 0),
        k=int(key["model_dim"] or 0),
        x_dtype=dtype,
        w_dtype=weight,
        out_dtype=dtype,
        w_scale=w_scale,
        experts=Experts(
            count=count,
            topk=topk,
            inner=int(key["inter_dim"] or 0),
            activation="gelu" if key["act_type"] == GELU else "silu",
            gated=bool(key["use_g1u1"]),
            weight_first=bool(key["doweight_stage1"]),
            quantised=quantised,
        ),
    )


def _check(where: str, word: str, known: tuple[str, ...], clause: str = "") -> None:
    """No word is misspelt here, so none is suggested: what is not computed is another thing, not a slip."""
    if word not in known:
        expected = " or ".join(filter(None, (", ".join(known[:-1]), known[-1])))
        raise UserError(f"{where}: '{word}'{clause}, expected {expected}")
