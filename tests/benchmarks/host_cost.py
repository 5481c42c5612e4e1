"""Host time of a tuned call on a GPU: the look-up, the whole call, and plain `kernel[grid](...)` of the same kernel.

    python tests/benchmarks/host_cost.py [M N K]

Medians of 10,000 calls, nothing synchronised in between beyond every 500 calls, so that the launch queue never fills.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from gemmpipe import runtime
from gemmpipe.core.data import Scalar
from gemmpipe.core.device import gpu_device
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import KernelDefaults, Prepared, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import find_kernel, load_build
from gemmpipe.launch.launch import COUNTERS_PARAMETER, PARTS_PARAMETER, KernelImplementation
from gemmpipe.launch.workspace import WORKSPACES
from gemmpipe.runtime.dispatch import EAGER
from gemmpipe.tables.store import render

CALLS, BATCH = 10_000, 500
KNOBS = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
    "cache_modifier": "",
}


def median_us(call: Callable[[], object]) -> float:
    """Median host time of a call."""
    for _ in range(BATCH):
        call()
    times = []
    clock = time.perf_counter_ns
    for _ in range(CALLS // BATCH):
        torch.cuda.synchronize()
        for _ in range(BATCH):
            begin = clock()
            call()
            times.append(clock() - begin)
    return statistics.median(times) / 1000


def measure(name: str, label: str, m: int, n: int, k: int, order: str, **knobs: Scalar) -> None:
    """One line: the family's numbers with these knobs, block scales of x in this memory order."""
    family, device = load_family(name), gpu_device(0)
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problem = make_problem(family, {"M": m, "N": n, "K": k}, defaults, device.gfx, "case")
    spec = family.spec(problem)
    implementation = next(found for found in family.implementations if found.label == label)
    if not isinstance(implementation, KernelImplementation):
        print(f"{name} {label}: bound in each call")
        return
    knobs = dict(implementation.normalise(spec, {**KNOBS, **knobs}, device))
    row = {"gfx": device.gfx, "cu_num": device.cu_num, **dict(problem.key)}
    row |= {"libtype": label, "config": json.dumps(knobs), "us": 1.0}
    path = Path(tempfile.mkdtemp()) / "table.csv"
    path.write_text(render([row], family, ()))
    os.environ[f"GEMMPIPE_CONFIG_{name.upper()}"] = str(path)
    generator = torch.Generator(device="cuda").manual_seed(1)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    function = getattr(runtime, family.entry_point)
    scale = inputs.x_scale if order == ROW or inputs.x_scale is None else inputs.x_scale.t().contiguous().t()
    scales = () if scale is None else (scale, weights.w_scale)
    whole = lambda: function(inputs.x, weights.w, *scales)  # noqa: E731
    whole()
    dispatch = EAGER[name]
    (bound,) = dispatch.calls.values()
    assert bound.__module__ == "gemmpipe.runtime.binding", "the call did not land on a bound kernel"
    numbers = {"nothing": median_us(lambda: None)}
    laid = replace(inputs, x_scale=scale)
    numbers["kernel[grid]"] = median_us(plain_call(implementation, spec, knobs, device, laid, weights))
    numbers["whole call"] = median_us(whole)
    numbers["bound call"] = median_us(lambda: bound(inputs.x, weights.w, scale, weights.w_scale, None))
    for key in list(dispatch.calls):
        dispatch.calls[key] = lambda *operands: None
    numbers["look-up hit"] = median_us(whole)
    us = {word: value - numbers["nothing"] for word, value in numbers.items() if word != "nothing"}
    print(f"{name} {label} M={m} N={n} K={k} splits={knobs.get('NUM_KSPLIT', 1)} scales by {order}: ", end="")
    print(", ".join(f"{word} {value:.2f}" for word, value in us.items()), end="")
    print(f" us; whole call over kernel[grid] {us['whole call'] / us['kernel[grid]']:.2f}", flush=True)


def plain_call(implementation, spec, knobs, device, inputs, weights) -> Callable[[], object]:
    """`kernel[grid](...)` with all arguments at hand."""
    out = torch.empty((spec.m, spec.n), dtype=torch.bfloat16, device="cuda")
    one = implementation.launch(spec, knobs, device, inputs, Prepared(weights=weights), out)
    load_build(one.build, device)
    kernel = find_kernel(one.build.kernel)
    parts, counters = WORKSPACES.take(max(1, one.parts), max(1, one.counters), out.device)
    values = {PARTS_PARAMETER: parts, COUNTERS_PARAMETER: counters, **one.arguments, **dict(one.build.constants)}
    ordered = [values[name] for name, _ in one.build.signature]
    options, grid = dict(one.build.options), one.grid
    return lambda: kernel[grid](*ordered, **options)


def main() -> None:
    """Kernels of three kinds, with and without split-K."""
    m, n, k = (int(word) for word in sys.argv[1:4]) if len(sys.argv) > 3 else (16, 1280, 8192)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}, medians of {CALLS} calls, loop subtracted")
    cases = [(name, "triton", m, {"NUM_KSPLIT": s}) for name in ("a8w8_blockscale", "a16w16") for s in (1, 4)]
    cases.append(("a16w16_atomic", "triton", m, {"NUM_KSPLIT": 4}))
    cases.append(("a8w8_blockscale", "gluon", 128, {"kernel_type": "warp_specialised", "BLOCK_SIZE_M": 64}))
    with torch.inference_mode():
        for name, label, rows, knobs in cases:
            for order in (ROW, COLUMN) if name == "a8w8_blockscale" else (ROW,):
                measure(name, label, rows, n, k, order, **knobs)
                EAGER.clear()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("host_cost.py: needs a GPU: what it times is how launches are queued on one")
    main()
