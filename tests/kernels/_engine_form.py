"""Runs the kernels of the engines' form, for _interpret.py, in a process that interprets Triton's kernels."""

from dataclasses import replace

import torch

from gemmpipe.core.device import arch_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio


def run(case: dict) -> dict:
    """A product in an engine's form, against the reference."""
    family = load_family("a8w8_blockscale")
    device = arch_device(case.get("gfx", "sm_90"))
    options = KernelDefaults(dtype=None, out_dtype=case.get("out"), bias=None)
    problem = make_problem(family, dict(zip("MNK", case["mnk"], strict=True)), options, device.gfx, "case")
    spec = family.spec(problem)
    generator = torch.Generator().manual_seed(7)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    if case.get("m_major"):
        inputs = replace(inputs, x_scale=inputs.x_scale.t().contiguous().t())
    kernel = family.engine_kernels[case["engine"]]
    if case.get("exact"):
        kernel = kernel.finals_implementation()
    sizes = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
    knobs = dict(zip(sizes, case["knobs"], strict=True)) | {"GROUP_SIZE_M": 2, "num_warps": 4, "num_stages": 2}
    knobs = kernel.normalise(spec, {**knobs, **case.get("more", {})}, device)
    out = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype))
    launch = kernel.bind(spec, knobs, device, inputs, kernel.prepare(spec, weights, knobs), out)
    reference = family.reference(spec, inputs, weights)
    first = launch().clone()
    same = True
    if "SPLIT_K" in knobs:  # scratch of its own
        out.fill_(float("nan"))
        same = torch.equal(first, launch())
    return {
        "reason": kernel.unsupported_reason(spec, knobs, device),
        "error": error_ratio(first, reference, *family.tolerance(spec)),
        "same": same,
    }
