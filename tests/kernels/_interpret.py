"""Runs kernels under Triton's interpreter: cases as JSON lines on stdin, one line with a result or error on stdout.

A program of its own, because TRITON_INTERPRET acts when a kernel is decorated; interpreter_process.py talks to it.
"""

import json
import os
import sys
import traceback
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import _builtin_members  # noqa: F401  (acts on import)
import _engine_form
import _fused_quantise
import _grouped_cpu
import _order_cpu
import torch

from gemmpipe.core.device import arch_device
from gemmpipe.core.spec import scale_order
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Scaling, load_family
from gemmpipe.family.operands import quantise_blockwise
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.launch.workspace import SCRATCH
from gemmpipe.templates.quantise import quantised_inputs


def laid(scales: torch.Tensor | None, how: str | None) -> torch.Tensor | None:
    """The same scales in memory as rows, as columns, or as columns (rows) with NaN in gaps between."""
    if scales is None or how is None:
        return scales
    rows, blocks = scales.shape
    padded = -(-rows // 4) * 4 + 4
    strides = {"rows": (blocks, 1), "columns": (1, rows), "padded": (1, padded), "padded_rows": (blocks + 3, 1)}[how]
    held = torch.full(((rows - 1) * strides[0] + (blocks - 1) * strides[1] + 1,), float("nan"))
    return held.as_strided((rows, blocks), strides).copy_(scales)


def of_this_rank(inputs: Inputs, spec: GemmSpec) -> Inputs:
    """The same with weight 0 for experts of another rank."""
    if spec.experts is None or inputs.topk_ids is None:
        return inputs
    known = (inputs.topk_ids >= 0) & (inputs.topk_ids < spec.experts.count)
    return replace(inputs, topk_ids=inputs.topk_ids * known, topk_weights=inputs.topk_weights * known)


def run(case: dict) -> dict:
    family = load_family(case["family"])
    device = arch_device(case.get("gfx", "sm_90"))
    options = KernelDefaults(dtype=case.get("dtype"), out_dtype=case.get("out"), bias=case.get("bias"))
    values = dict(zip("MNK", case.get("mnk", ()), strict=False)) | case.get("key", {})
    problem = make_problem(family, values, options, device.gfx, "case")
    spec: GemmSpec = replace(family.spec(problem), **case.get("spec", {}))
    generator = torch.Generator().manual_seed(7)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    inputs = replace(inputs, x_scale=laid(inputs.x_scale, case.get("scales")))
    if "ids" in case:
        inputs = replace(inputs, topk_ids=torch.tensor(case["ids"], dtype=torch.int32))
    known = (*family.implementations, *family.engine_kernels.values())
    label = case.get("label", "triton")
    kernel = next(i for i in known if i.label == label)
    sizes = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "NUM_KSPLIT")
    knobs = dict(zip(sizes, case["knobs"], strict=False)) | {"GROUP_SIZE_M": 3, "num_warps": 4, "num_stages": 2}
    knobs |= {"SWAP_AB": case.get("swap", False)} if "mnk" in case else case.get("more", {})
    knobs = kernel.normalise(spec, knobs, device)
    out = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype))
    SCRATCH.held[-1, 0] = torch.full((1 << 23,), 255, dtype=torch.uint8)  # NaN and -1 in what no launch has written
    launch = kernel.bind(spec, knobs, device, inputs, kernel.prepare(spec, weights, knobs), out)
    reference = family.reference(spec, of_this_rank(inputs, spec), weights)
    first = launch().clone()
    same = True
    if knobs.get("NUM_KSPLIT", 1) > 1 or "mnk" not in case or label == "fused":  # launches with scratch of their own
        out.fill_(float("nan"))
        same = torch.equal(first, launch())
    return {
        "reason": kernel.unsupported_reason(spec, knobs, device),
        "splits": knobs.get("NUM_KSPLIT", 1),
        "error": error_ratio(first, reference, *family.tolerance(spec)),
        "same": same,
    }


def quantise(case: dict) -> dict:
    """The quantiser on values of any size, against torch's quantisation by blocks."""
    m, k = case["mk"]
    scaling = Scaling(granularity="row") if case.get("by_row") else Scaling(granularity="block", block=(128, 128))
    spec = GemmSpec(m=m, n=128, k=k, x_dtype=case["x"], w_dtype=case["w"], out_dtype=case["x"], w_scale=scaling)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-6, 7, (m, 1), generator=generator))
    values[m // 2, : k if case.get("by_row") else 128] = 0  # the scale of zeros is 1
    x = values.to(getattr(torch, case["x"]))
    wide = torch.zeros(m, k + 8, dtype=x.dtype)
    wide[:, :k] = x
    got = quantised_inputs(spec, arch_device(case["gfx"]), wide[:, :k], case["order"])
    got.run()
    stored, scales = quantise_blockwise(x.float(), (1, k if case.get("by_row") else 128), getattr(torch, case["w"]))
    found, expected = got.inputs.x.float(), stored.float()
    return {
        "order": scale_order(got.inputs.x_scale),
        "scales": torch.equal(got.inputs.x_scale, scales),
        "different": float((found != expected).float().mean()),
        "worst": float(((found - expected).abs() / expected.abs().clamp_min(1)).max()),
    }


def fused_sliced(case: dict) -> dict:
    """The one-launch sliced kernel against the quantiser and the sliced product, on values of any size."""
    family, device = load_family("linear_fp8_blockscale"), arch_device("sm_90")
    options = KernelDefaults(dtype=None, out_dtype=case["x"], bias=None)
    spec = family.spec(make_problem(family, dict(zip("MNK", case["mnk"], strict=True)), options, "sm_90", "case"))
    generator = torch.Generator().manual_seed(5)
    weights = family.make_weights(spec, generator)
    sizes = torch.exp2(torch.randint(-12, 14, (spec.m, 1), generator=generator))
    values = (torch.randn(spec.m, spec.k, generator=generator) * sizes).clamp(-60000, 60000)
    values[spec.m // 2, :128] = 0
    x = torch.full((spec.m, spec.k + 8), float("nan"), dtype=getattr(torch, case["x"]))
    x[:, : spec.k] = values
    inputs, found = Inputs(x=x[:, : spec.k]), {}
    for label, rows in (("fused_sliced", case["rows"]), ("sliced", max(8, case["rows"]))):
        kernel = next(i for i in family.implementations if i.label == label)
        knobs = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": case["columns"], "BLOCK_SIZE_K": 128 * case["warps"]}
        knobs = kernel.normalise(spec, {**knobs, "num_warps": case["warps"], "num_stages": 3}, device)
        out = torch.full(spec.out_shape, float("nan"), dtype=x.dtype)
        kernel.bind(spec, knobs, device, inputs, kernel.prepare(spec, weights, knobs), out)()
        found[label] = out
    return {"equal": torch.equal(*found.values()), "zeros": int((found["sliced"] == 0).sum())}


PROGRAMS = {
    "kernel": run,
    "engine form": _engine_form.run,
    "fused_sliced": fused_sliced,
    "grouped": _grouped_cpu.run,
    "order": _order_cpu.run,
    "quantise": quantise,
    "fused_quantise": _fused_quantise.run,
}

for line in sys.stdin:
    program, case = json.loads(line)
    try:
        answer = [PROGRAMS[program](case), None]
    except Exception:  # noqa: BLE001  (any error of a kernel is the case's result)
        answer = [None, traceback.format_exc()]
    print(json.dumps(answer), flush=True)
