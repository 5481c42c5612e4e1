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
from pathlib import Path

import torch

from gemmpipe.builds import find_kernel, load_build
from gemmpipe.device import gpu_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.problem import make_problem
from gemmpipe.runtime import gemm_a8w8_blockscale, gemm_a16w16
from gemmpipe.runtime.dispatch import EAGER
from gemmpipe.store import render

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


def measure(name: str, m: int, n: int, k: int, splits: int) -> None:
    """One line: the family's numbers with `splits` of K."""
    family, device = load_family(name), gpu_device(0)
    words = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problem = make_problem(family, {"M": m, "N": n, "K": k}, words, device.gfx, "case")
    spec = family.spec(problem)
    implementation = next(found for found in family.implementations if found.label == "triton")
    knobs = implementation.normalise(spec, {**KNOBS, "NUM_KSPLIT": splits}, device)
    row = {"gfx": device.gfx, "cu_num": device.cu_num, **dict(problem.key)}
    row |= {"libtype": "triton", "config": json.dumps(knobs), "us": 1.0}
    path = Path(tempfile.mkdtemp()) / "table.csv"
    path.write_text(render([row], family, ()))
    os.environ[f"GEMMPIPE_CONFIG_{name.upper()}"] = str(path)
    generator = torch.Generator(device="cuda").manual_seed(1)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    if weights.w_scale is None:
        whole = lambda: gemm_a16w16(inputs.x, weights.w)  # noqa: E731
    else:
        whole = lambda: gemm_a8w8_blockscale(inputs.x, weights.w, inputs.x_scale, weights.w_scale)  # noqa: E731
    whole()
    dispatch = EAGER[name]
    (bound,) = dispatch.calls.values()
    assert bound.__module__ == "gemmpipe.runtime.bound", "the call did not land on the bound Triton kernel"
    plain = plain_call(implementation, spec, knobs, device, inputs, weights)
    numbers = {"nothing": median_us(lambda: None), "kernel[grid] without output": median_us(plain)}
    numbers["whole call"] = median_us(whole)
    numbers["bound call"] = median_us(lambda: bound(inputs.x, weights.w, inputs.x_scale, weights.w_scale, None))
    numbers["torch.empty"] = median_us(lambda: torch.empty((m, n), dtype=torch.bfloat16, device="cuda"))
    for key in list(dispatch.calls):
        dispatch.calls[key] = lambda *operands: None
    numbers["look-up hit"] = median_us(whole)
    print(f"{name} M={m} N={n} K={k} splits={knobs['NUM_KSPLIT']}: ", end="")
    print(", ".join(f"{word} {us - numbers['nothing']:.2f} us" for word, us in numbers.items() if word != "nothing"))


def plain_call(implementation, spec, knobs, device, inputs, weights) -> Callable[[], object]:
    """`kernel[grid](...)` with all arguments at hand."""
    from gemmpipe.family import Prepared
    from gemmpipe.workspace import WORKSPACES

    (build,) = implementation.builds(spec, knobs, device)
    load_build(build, device)
    kernel = find_kernel(build.kernel)
    out = torch.empty((spec.m, spec.n), dtype=torch.bfloat16, device="cuda")
    tiles_m, tiles_n = implementation.tiles(spec, knobs)
    splits = knobs["NUM_KSPLIT"]
    parts, counters = WORKSPACES.take(
        max(1, implementation.workspace_bytes(spec, knobs) // 4), tiles_m * tiles_n, out.device
    )
    values = {**implementation.integers(spec), "group_m": knobs["GROUP_SIZE_M"], "splits": splits}
    values |= implementation.arguments(inputs, Prepared(weights=weights), out)
    values |= {"parts_ptr": parts, "counters_ptr": counters, **dict(build.constants)}
    ordered = [values[name] for name, _ in build.signature]
    options, grid = dict(build.options), (tiles_m * tiles_n, splits, 1)
    return lambda: kernel[grid](*ordered, **options)


def main() -> None:
    """Both families, with and without split-K."""
    m, n, k = (int(word) for word in sys.argv[1:4]) if len(sys.argv) > 3 else (16, 1280, 8192)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}, medians of {CALLS} calls, loop subtracted")
    with torch.inference_mode():
        for name in ("a8w8_blockscale", "a16w16"):
            for splits in (1, 4):
                measure(name, m, n, k, splits)
                EAGER.clear()


if __name__ == "__main__":
    main()
