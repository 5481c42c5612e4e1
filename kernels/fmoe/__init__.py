"""Fused mixture of experts: out[M, N] = sum over a row's experts of weight * (act(x @ w1[e]^T) @ w2[e]^T).

x [token, model_dim] and out are bf16 or fp16; w1 is [expert, 2 * inter_dim, model_dim], the gate's rows before the up
projection's (h = act(gate) * up; without `use_g1u1` [expert, inter_dim, model_dim] and h = act(x @ w1^T)), w2
[expert, model_dim, inter_dim]. With fp8 weights x and h are quantised in the call: `per_Token` (one scale per row;
weights too, [expert, rows, 1]) or `per_1x128` (weights 128 x 128). inter_dim is a rank's own share, expert the number
of experts that it holds.

This module has the key columns (those of aiter's untuned_fmoe), the experts of a key and the columns of aiter's
tuned_fmoe.csv. Implementations: _triton.py with _launch_plan.py and _kernel.py; for rows sorted by expert on Hopper
_gluon.py with _grouped_launch_plan.py, _sorted.py, _grouped.py, _gathered.py and _pingpong.py; for few rows on the
CUDA cores _skinny.py with _skinny_kernel.py; in the form of vLLM's and SGLang's kernels _engine.py with
_engine_launch_plan.py and _engine_kernel.py; with DeepGEMM's grouped products _deepgemm.py. _order.py orders pairs.
"""

import json
from collections.abc import Mapping

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.family import Experts, Family, GemmSpec, KernelDefaults, KeyColumn, Scaling
from gemmpipe.family.aiter_table import AiterTable
from gemmpipe.family.dtypes import DTYPES_16BIT, FP8_DTYPES, native_fp8, reject_bias
from gemmpipe.family.moe import bytes_moved, flops, make_inputs, make_weights, product, tolerance
from gemmpipe.family.problem import parse_choice
from gemmpipe.family.routing import parse_routing
from gemmpipe.kernels.fmoe._deepgemm import DeepGemmExperts
from gemmpipe.kernels.fmoe._engine import ENGINES
from gemmpipe.kernels.fmoe._gluon import GroupedExperts
from gemmpipe.kernels.fmoe._skinny import LABEL as SKINNY
from gemmpipe.kernels.fmoe._skinny import SkinnyExperts
from gemmpipe.kernels.fmoe._triton import FusedExperts
from gemmpipe.templates.params import KERNEL_TYPE
from gemmpipe.templates.tiled import FUSED_ACT, stage_knobs

SILU, GELU = "ActivationType.Silu", "ActivationType.Gelu"
ACTIVATIONS = (("silu", SILU), ("gelu", GELU))
OTHER_ACTIVATIONS = (("swiglu", "ActivationType.Swiglu"), ("situv2", "ActivationType.Situv2"))
"""Activations in aiter's tables that these kernels do not compute; rows with them are read, with a message."""
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
    """Defaults of the key. Raises UserError.

    `kernel.dtype` is the type that is multiplied: bf16 (the default), fp16, or the architecture's fp8 (with block
    scales unless `q_type` is per token); `kernel.out_dtype` is the type of x and out of fp8 products.
    """
    reject_bias(kernel, "fmoe")
    given = kernel.key.get("q_type")
    q_type = parse_choice(QUANTISATIONS, given, OTHER_QUANTISATIONS) if given is not None else None
    native = native_fp8(gfx)
    multiplied = kernel.dtype or (native if q_type in (TOKEN, BLOCK) else "bfloat16")
    _check("kernel.dtype", multiplied, (*DTYPES_16BIT, *FP8_DTYPES))
    if multiplied in DTYPES_16BIT and q_type in (TOKEN, BLOCK):  # the type of x and out, quantised by q_type
        dtype, multiplied = multiplied, native
    elif multiplied in FP8_DTYPES:
        dtype, q_type = kernel.out_dtype or "bfloat16", q_type or BLOCK
    else:
        dtype, q_type = multiplied, NONE
    _check("kernel.out_dtype", kernel.out_dtype or dtype, (dtype,) if multiplied in DTYPES_16BIT else DTYPES_16BIT)
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
    """The experts of a key. Raises UserError for values that the kernels do not compute."""
    key = dict(problem.key)
    dtype, weight, q_type = str(key["dtype"]), str(key["q_dtype_w"]), str(key["q_type"])
    _check(f"{problem.id}: dtype", dtype, DTYPES_16BIT)
    _check("fmoe: act_type", str(key["act_type"]), (SILU, GELU), " is not computed")
    _check("fmoe: q_type", q_type, tuple(_SCALING), " is not computed")
    _check(f"{problem.id}: q_dtype_w", weight, (dtype,) if q_type == NONE else FP8_DTYPES)
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
            routing=_routing(problem, key.get("routing")),
        ),
    )


def _routing(problem: Problem, value: Scalar) -> str | None:
    """The routing of a key. Raises UserError for one that is none."""
    if value is None:
        return None
    try:
        parse_routing(str(value))
    except UserError as error:
        raise UserError(f"routing: {error}") from None
    return str(value)


def _check(where: str, value: str, known: tuple[str, ...], clause: str = "") -> None:
    """Raises UserError for an unknown value, without a suggestion: it is valid elsewhere, not misspelt."""
    if value not in known:
        expected = " or ".join(filter(None, (", ".join(known[:-1]), known[-1])))
        raise UserError(f"{where}: '{value}'{clause}, expected {expected}")


AITER_COLUMNS = ("block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2")
AITER_REST = ("us", "run_1stage", "xbf16", "flat", "tflops", "bw", "_tag")
"""Further columns of aiter's newest header; older ones lack some of these."""


def aiter_cells(row: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    """A row's cells for aiter's table, from its knobs and kernel name; stages are not timed separately: us1 is None."""
    config = json.loads(str(row.get("config") or "{}"))
    name, _, source = str(row.get("kernelName") or "").partition("@")
    if "BLOCK_SIZE_K" not in config:  # a library's
        block_m = {"block_m": config["BLOCK_SIZE_M"]} if "BLOCK_SIZE_M" in config else {}
        return {**block_m, "kernelName1": name, "kernelName2": name}
    names = []
    for stage in (1, 2):
        own = stage_knobs(config, stage)
        tile = "x".join(str(own[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
        fused = "_fused" if stage == 1 and config.get(FUSED_ACT) else ""
        kernel, warps = ("routed", f"_w{own['num_warps']}") if "num_warps" in own else ("grouped", "")
        if config.get(KERNEL_TYPE) == SKINNY:
            kernel = SKINNY
        names.append(f"{kernel}{stage}{fused}_{tile}{warps}_s{own['num_stages']}@{source}")
    return {"block_m": config["BLOCK_SIZE_M"], "ksplit": 0, "kernelName1": names[0], "kernelName2": names[1]}


_KEY = (
    KeyColumn(name="token", kind="int", aliases=("tokens", "M")),
    KeyColumn(name="model_dim", kind="int"),
    KeyColumn(name="inter_dim", kind="int"),
    KeyColumn(name="expert", kind="int", aliases=("E",)),
    KeyColumn(name="topk", kind="int"),
    KeyColumn(name="act_type", kind="str", choices=ACTIVATIONS, others=OTHER_ACTIVATIONS),
    KeyColumn(name="dtype", kind="dtype"),
    KeyColumn(name="q_dtype_a", kind="dtype"),
    KeyColumn(name="q_dtype_w", kind="dtype"),
    KeyColumn(name="q_type", kind="str", choices=QUANTISATIONS, others=OTHER_QUANTISATIONS),
    KeyColumn(name="use_g1u1", kind="flag"),
    KeyColumn(name="doweight_stage1", kind="flag"),
    KeyColumn(name="routing", kind="str", optional=True, condition=True),
)
_AITER_KEY = tuple(column.name for column in _KEY if not column.condition)

FAMILY = Family(
    name="fmoe",
    key_columns=_KEY,
    csv_name="tuned_fmoe.csv",
    aiter_table=AiterTable(columns=(*_AITER_KEY, *AITER_COLUMNS, *AITER_REST), variable="FMOE"),
    extra_columns=AITER_COLUMNS,
    extra_cells=aiter_cells,
    json_tag="FMOE",
    entry_point="fused_moe",
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(FusedExperts(), GroupedExperts(), SkinnyExperts()),
    engine_kernels=ENGINES,
    library_kernels={"deepgemm": DeepGemmExperts()},
    rows_column="token",
)
