"""`triton.autotune` on a family's own kernel: `python _autotune.py interpreted|compiled`, cases as JSON on stdin.

A separate program, because TRITON_INTERPRET acts when a kernel is decorated, and Triton's driver is global.
"""

import json
import os
import sys
import time
from types import SimpleNamespace

if sys.argv[1] == "interpreted":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from gemmpipe.backends.autotune import Autotune
from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.jobs import AutotuneJob, InFlight, WorkerContext
from gemmpipe.bench.setup import WorkerBench
from gemmpipe.bench.timer import CpuClock, Timer
from gemmpipe.core.data import Candidate
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.core.nvml import ForeignProcesses
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch import triton_autotune
from gemmpipe.launch.build import find_kernel, record_cache_hits

FINALS = Timer(warmup=0, iters=1, rounds=3, budget_ms=1)


def benchmark(call, quantiles):
    """The benchmark function of a driver's `get_benchmarker`: one launch, on the host's clock."""
    assert quantiles == (0.5, 0.2, 0.8)
    begun = time.perf_counter()
    call()
    return [(time.perf_counter() - begun) * 1e3] * 3


def use_driver(target):
    driver.set_active(
        SimpleNamespace(
            get_benchmarker=lambda: benchmark,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )


def set_up(case, device):
    family = load_family(case["family"])
    defaults = KernelDefaults(dtype=case.get("dtype"), out_dtype=None, bias=None)
    problem = make_problem(family, dict(zip("MNK", case["mnk"], strict=True)), defaults, device.gfx, "case")
    [tuned] = Autotune(limit_s=case.get("limit_s")).implementations(family)
    kernel, spec = tuned.kernel, family.spec(problem)
    points = [
        {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "NUM_KSPLIT": splits, "GROUP_SIZE_M": 1,
         "num_warps": warps, "num_stages": 2, "cache_modifier": ""}
        for m in case["block_m"] for splits in case["splits"] for warps in case["warps"]
    ]  # fmt: skip
    return family, problem, tuned, [kernel.normalise(spec, p, device) for p in points]


def interpreted(case):
    """The job of a worker, then the finals: the choice launched by Triton's JIT, and its knobs in gemmpipe's launch."""
    use_driver(None)
    device = cpu_device()
    family, problem, tuned, knobs = set_up(case, device)
    bench = WorkerBench(family, {tuned.label: tuned, "triton": tuned.kernel}, device)
    cells = [0.0, 0.0]
    context = WorkerContext(
        bench=bench, clock=CpuClock(), in_flight=InFlight(cells), foreign_processes=ForeignProcesses(device)
    )
    candidates = tuple(Candidate.of("triton", k) for k in knobs)
    [trial] = AutotuneJob(stage="autotune", problem=problem, configurations=candidates).run(context)
    finalists = (trial.candidate, Candidate.of("triton", trial.candidate.knobs))
    all_ids = frozenset(c.id for c in finalists)
    finals = FinalsJob(stage="bench", problem=problem, finalists=finalists, library=frozenset(), always_timed=all_ids,
                       timer=FINALS, err_ratio=0.05).run(context)  # fmt: skip
    return {
        "status": trial.status,
        "among": Candidate.of("triton", trial.candidate.knobs) in candidates,
        "time_us": trial.time_us,
        "tuning": [trial.tuning.tried, trial.tuning.of, trial.tuning.seconds] if trial.tuning else None,
        "finals": [[t.candidate.backend, t.status, t.err_ratio] for t in finals],
        "purposes": sorted(context.spent_s),
        "in_flight": cells[0],
    }


def compiled(case):
    """Compilation of the launch by Triton's JIT, on a machine without the device."""
    device = arch_device(case["gfx"])
    arch = device.gfx if device.kind == "hip" else int(device.gfx.removeprefix("sm_"))
    use_driver(GPUTarget(device.kind, arch, device.warp_size))
    family, problem, tuned, knobs = set_up(case, device)
    spec, generator = family.spec(problem), torch.Generator().manual_seed(7)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    out = torch.empty(spec.out_shape, dtype=getattr(torch, spec.out_dtype))
    launches = [tuned.kernel.launch(spec, k, device, inputs, tuned.prepare(spec, weights, k), out) for k in knobs]
    function = find_kernel(launches[0].build.kernel)
    with record_cache_hits() as cached:
        for one, call in zip(launches, triton_autotune._call_arguments(launches, function, out), strict=True):
            function.warmup(grid=one.grid, **call)
    return {"compiled": len(cached)}


for case in json.load(sys.stdin):
    print(json.dumps({"interpreted": interpreted, "compiled": compiled}[sys.argv[1]](case)), flush=True)
