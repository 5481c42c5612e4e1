"""Our own kernels under Triton's interpreter: `FOLDER FAMILY...`; results as JSON lines, a line for each family.

The last line is of a tuning script in the style of kernel authors, which writes into the folder.

A program of its own, because TRITON_INTERPRET acts when a kernel is decorated. What is pretended is the device alone.
"""

import json
import os
import sys
from contextlib import nullcontext
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

import gemmpipe
from gemmpipe.core.device import arch_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.runtime import gemm_a8w8_blockscale, linear_fp8
from gemmpipe.tune import benchmark_config, tune_and_save_configs, tune_kernel

SPACE = [
    {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2}
    for m in (16, 32)
]
SIZES = {"M": 5, "N": 64, "K": 256, "B": 2}
SIZES |= {"token": 5, "model_dim": 128, "inter_dim": 64, "expert": 4, "topk": 2}
H200 = arch_device("sm_90")


def on_an_h200() -> list[mock._patch]:
    replaced = [
        mock.patch(f"gemmpipe.runtime.{module}.device_by_index", return_value=H200) for module in ("dispatch", "moe")
    ]
    replaced += [
        mock.patch(f"gemmpipe.runtime.{module}.device_context", return_value=nullcontext())
        for module in ("binding", "moe")
    ]
    return [*replaced, mock.patch("gemmpipe.core.device.get_arch", return_value="sm_90")]


def every_family(name: str) -> dict:
    """One call with a configuration into a given output, against the family's reference."""
    family = load_family(name)
    values = {column.name: SIZES[column.name] for column in family.key_columns if column.name in SIZES}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, values, defaults, H200.gfx, "case"))
    generator = torch.Generator().manual_seed(3)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    operands = [inputs.x, weights.w, *(scale for scale in (inputs.x_scale, weights.w_scale) if scale is not None)]
    if spec.experts is not None:
        operands = [inputs.x, weights.w, weights.w2, inputs.topk_weights, inputs.topk_ids]
    y = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype))
    config = {**SPACE[0], "BLOCK_SIZE_K": 64 if spec.experts else 128}
    function = getattr(gemmpipe.runtime, family.entry_point)
    out = function(*operands, y=y, config=config)
    return {
        "same": out is y,
        "error": error_ratio(y, family.reference(spec, inputs, weights), *family.tolerance(spec)),
        "alone": torch.equal(function(*operands, config=config), y) or name.endswith("atomic"),
    }


def the_documents_script(folder: str) -> dict:
    """`make_run_and_gt_fn` around a run-time function with y and config given by position, then everything by tag."""
    family = load_family("a8w8_blockscale")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": 4, "N": 32, "K": 128}, defaults, H200.gfx, "case"))
    generator = torch.Generator().manual_seed(3)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    truth = family.reference(spec, inputs, weights).bfloat16()

    def make(config: dict) -> tuple:
        y = torch.empty(4, 32, dtype=torch.bfloat16)

        def run() -> torch.Tensor:
            scales = (inputs.x_scale, weights.w_scale)
            return gemm_a8w8_blockscale(
                inputs.x, weights.w, *scales, torch.bfloat16, y, config=config, skip_reduce=False
            )

        return run, truth

    best = tune_kernel([*SPACE, {**SPACE[0], "BLOCK_SIZE_K": 256}], make, num_iters=1, atol=0.2, rtol=0.1)
    unfit, _ = make({**SPACE[0], "BLOCK_SIZE_K": 256})
    found = tune_and_save_configs(
        batch_sizes=[4, 33],
        N=32,
        K=128,
        dtype=torch.bfloat16,
        search_space=SPACE,
        save_path=folder,
        device_name=gemmpipe.get_arch(),
        tag="A8W8_BLOCKSCALE-N=32-K=128",
        buckets={"small": 32, "wide": {"high": None, "BLOCK_SIZE_M": 32}},
    )
    return {"best": best in SPACE, "unfit": benchmark_config(unfit, truth), "found": found}


def bias_by_blocks() -> list[float]:
    """The errors of own kernels of a linear layer with scales by blocks and a bias, which these kernels do not have."""
    family = load_family("linear_fp8_blockscale")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": 5, "N": 64, "K": 256}, defaults, H200.gfx, "case"))
    generator = torch.Generator().manual_seed(3)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    bias = 50 * torch.randn(64, generator=generator).bfloat16()
    expected = family.reference(spec, inputs, weights) + bias.float()
    configs = [{**SPACE[0], **more} for more in ({}, {"kernel_type": "fused"}, {"kernel_type": "weight_only"})]
    found = [linear_fp8(inputs.x, weights.w, weights.w_scale, bias, config=config) for config in configs]
    return [error_ratio(out, expected, *family.tolerance(spec)) for out in found]


if __name__ == "__main__":
    for patched in on_an_h200():
        patched.start()
    with torch.inference_mode():
        folder, *names = sys.argv[1:]
        for name in names:
            print(json.dumps(every_family(name)), flush=True)
        print(json.dumps({**the_documents_script(folder), "biased": bias_by_blocks()}))
