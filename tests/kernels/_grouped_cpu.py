"""Runs fused experts over sorted rows on a CPU, for _interpret.py, in a process that interprets Triton's kernels.

Triton's interpreter runs sorting, activation and sum; the product of a block, which is written in Gluon and has no
interpreter, is torch's in fp32, with the launch's arguments.
"""

from collections.abc import Mapping

import torch
from _order_cpu import set_chunks

from gemmpipe.core.data import Knobs, Scalar
from gemmpipe.core.device import arch_device
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.moe import routing
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.kernels.fmoe._grouped_launch_plan import TmaLaunchStep, grouped_launch_steps, grouped_scratch_shapes
from gemmpipe.kernels.fmoe._launch_plan import dtypes_of
from gemmpipe.launch.build import load_build

FMOE = load_family("fmoe")
ACTS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "none": lambda value: value}


def scales_of_x(step: TmaLaunchStep, given: Mapping[str, torch.Tensor], place: int, rows: int, k: int) -> torch.Tensor:
    """[rows, k] or [rows, 1] of a block's rows, 1 without scales."""
    if step.constants["SCALES"] == "block":
        own = given["scales"][:, place : place + rows].t()
        return own.repeat_interleave(int(step.constants["BLOCK_SIZE_K"] or 0), 1)[:, :k]
    if step.constants["ROW_SCALES"]:
        return given["row_scale_ptr"][0, place : place + rows, None]
    return torch.ones(rows, 1)


def scales_of_w(
    step: TmaLaunchStep, given: Mapping[str, torch.Tensor], expert: int, w_rows: int, k: int
) -> torch.Tensor:
    """[w_rows, k] or [w_rows, 1] of an expert."""
    if step.constants["SCALES"] == "none":
        return torch.ones(w_rows, 1)
    own = given["w_scale_ptr"][expert]
    if step.constants["SCALES"] == "row":
        return own
    return own.repeat_interleave(128, 0)[:w_rows].repeat_interleave(128, 1)[:, :k]


def rows_of_x(step: TmaLaunchStep, given: Mapping[str, torch.Tensor], place: int, rows: int) -> torch.Tensor:
    """[rows, k] of a block, times their scales: at their places, or gathered from where they are."""
    if "x_ptr" not in given:
        x = given["x"][place : place + rows].float()
        return x * scales_of_x(step, given, place, rows, x.shape[1])
    sources = given["sources_ptr"][place : place + rows].long() // int(step.constants["TOPK"] or 0)
    x = given["x_ptr"][sources].float()
    if step.constants["SCALES"] == "block":
        x *= given["x_scale_ptr"][sources].repeat_interleave(int(step.constants["BLOCK_SIZE_K"] or 0), 1)
    return x


def product(step: TmaLaunchStep, given: Mapping[str, torch.Tensor]) -> None:
    """The kernel's product as documented, block by block."""
    n, w_rows = step.integers["N"], step.integers["w_rows"]
    if "zeroed_ptr" in given:
        given["zeroed_ptr"].reshape(-1)[: step.integers["zeroed"]] = 0
    for block in range(int(given["blocks_ptr"])):
        place, rows = block * int(step.constants["BLOCK_SIZE_M"] or 0), int(given["rows_ptr"][block])
        expert = int(given["owners_ptr"][block])
        x = rows_of_x(step, given, place, rows)
        total = x @ (given["w"][expert].float() * scales_of_w(step, given, expert, w_rows, x.shape[1])).T
        act = ACTS[str(step.constants["ACTIVATION"])]
        total = act(total[:, :n]) * total[:, n:] if step.constants["GATED"] else act(total)
        if step.tensors["out_scale_ptr"] is not None:  # quantised, by groups of 128 columns
            groups = total.reshape(rows, -1, 128)
            scale = groups.abs().amax(2) / float(step.constants["TOP"] or 0)
            total = (groups / scale[:, :, None]).reshape(rows, n)
            given["out_scale_ptr"][:, place : place + rows] = scale.t()
        if step.constants.get("STAGED"):
            add_rows(step, given, place, total)
        else:
            given["out"][place : place + rows] = total.to(given["out"].dtype)


def add_rows(step: TmaLaunchStep, given: Mapping[str, torch.Tensor], place: int, total: torch.Tensor) -> None:
    """Add rows, times the factors of their pairs, to the output, which is rounded each time."""
    pairs = given["sources_ptr"][place : place + len(total)].long()
    if "shares_ptr" in given:
        total = total * given["shares_ptr"].reshape(-1)[pairs, None]
    for row, pair in zip(total, pairs.tolist(), strict=True):
        given["out"][pair // int(step.constants["TOPK"] or 0)] += row.to(given["out"].dtype)


def call(spec: GemmSpec, knobs: Knobs, inputs: Inputs, weights: Weights) -> torch.Tensor:
    """All launches of a call, over scratch full of NaN."""
    device, dtypes = arch_device("sm_90"), dtypes_of(spec, grouped_scratch_shapes(spec, knobs))
    ids, shares = routing(inputs)
    out = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype))
    tensors: dict[str, torch.Tensor | None] = {"x": inputs.x, "ids": ids, "shares": shares, "out": out}
    tensors |= {"w": weights.w, "w_scale": weights.w_scale, "w2": weights.w2, "w2_scale": weights.w2_scale}
    for name, (shape, dtype) in grouped_scratch_shapes(spec, knobs).items():
        whole = dtype.startswith("int")
        tensors[name] = torch.full(shape, -(2**30) if whole else float("nan"), dtype=getattr(torch, dtype))
    for step in grouped_launch_steps(spec, knobs, device, interpreted=True):
        if isinstance(step, TmaLaunchStep):
            product(step, {p: t for p, name in step.tensors.items() if name and (t := tensors[name]) is not None})
        else:
            load_build(step.build(dtypes), device).launcher(step.grid, step.arguments(tensors))()
    return out


def run(case: dict[str, object]) -> float:
    """The error ratio; NaN anywhere counts as wrong."""
    set_chunks(case)
    options = KernelDefaults(dtype=case.get("dtype"), out_dtype=None, bias=None)  # type: ignore[arg-type]
    spec = FMOE.spec(make_problem(FMOE, case["key"], options, "sm_90", "case"))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    weights, inputs = FMOE.make_weights(spec, generator), FMOE.make_inputs(spec, generator)
    if case.get("away"):  # pairs of experts that another rank holds
        ids, _ = routing(inputs)
        ids[::2, 0] = -1
        ids[1::2, 0] = spec.experts.count if spec.experts else 0
    knobs: dict[str, Scalar] = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 1, "num_stages": 4}
    knobs |= {"BLOCK_SIZE_K": 128 if case.get("dtype") == "fp8" else 64, **case.get("more", {})}  # type: ignore[dict-item]
    reference = FMOE.reference(spec, inputs, weights) if not case.get("away") else held_reference(spec, inputs, weights)
    return error_ratio(call(spec, knobs, inputs, weights), reference, *FMOE.tolerance(spec))


def held_reference(spec: GemmSpec, inputs: Inputs, weights: Weights) -> torch.Tensor:
    """The reference in which pairs of other ranks' experts add nothing."""
    ids, shares = routing(inputs)
    assert spec.experts is not None
    away = (ids < 0) | (ids >= spec.experts.count)
    held = Inputs(x=inputs.x, topk_ids=ids.masked_fill(away, 0), topk_weights=shares.masked_fill(away, 0))
    return FMOE.reference(spec, held, weights)
