"""Runs kernels under Triton's interpreter: cases as JSON on stdin, one result a line on stdout.

A program of its own, because TRITON_INTERPRET acts when a kernel is decorated.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from gemmpipe.device import arch_device
from gemmpipe.family import GemmSpec, KernelDefaults, load_family
from gemmpipe.problem import make_problem
from gemmpipe.reference import error_ratio


def run(case: dict) -> dict:
    family = load_family(case["family"])
    device = arch_device(case.get("gfx", "sm_90"))
    words = KernelDefaults(dtype=case.get("dtype"), out_dtype=case.get("out"), bias=case.get("bias"))
    values = dict(zip("MNK", case.get("mnk", ()), strict=False)) | case.get("key", {})
    problem = make_problem(family, values, words, device.gfx, "case")
    spec: GemmSpec = family.spec(problem)
    generator = torch.Generator().manual_seed(7)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    kernel = next(i for i in family.implementations if i.label == case.get("label", "triton"))
    sizes = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "NUM_KSPLIT")
    knobs = dict(zip(sizes, case["knobs"], strict=False)) | {"GROUP_SIZE_M": 3, "num_warps": 4, "num_stages": 2}
    knobs |= {"SWAP_AB": case.get("swap", False)} if "mnk" in case else case.get("more", {})
    knobs = kernel.normalise(spec, knobs, device)
    out = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype))
    launch = kernel.bind(spec, knobs, device, inputs, kernel.prepare(spec, weights, knobs), out)
    reference = family.reference(spec, inputs, weights)
    first = launch().clone()
    out.fill_(float("nan"))
    again = launch()
    return {
        "misfit": kernel.misfit(spec, knobs, device),
        "splits": knobs.get("NUM_KSPLIT", 1),
        "error": error_ratio(first, reference, *family.tolerance(spec)),
        "same": torch.equal(first, again),
    }


for case in json.load(sys.stdin):
    print(json.dumps(run(case)), flush=True)
