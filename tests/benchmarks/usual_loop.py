"""Cost of tuning one configuration in the usual loop: python tests/benchmarks/usual_loop.py [CONFIGS] [M N K]

Compile in the same process, make the inputs anew, 5 + 10 eager launches with events, compare the output with the
reference: seconds a configuration, over a random sample of space=a8w8_blockscale_aiter, nothing in Triton's cache.
"""

import random
import statistics
import sys
import time

import torch
import yaml

from gemmpipe.core.data import Problem
from gemmpipe.core.device import gpu_device
from gemmpipe.core.paths import shipped
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.family.space import Space
from gemmpipe.launch.build import compile_build
from gemmpipe.stages.screen.candidates import list_candidates


def space() -> Space:
    """The space of aiter's blockscale script."""
    axes = yaml.safe_load((shipped("conf") / "space" / "a8w8_blockscale_aiter.yaml").read_text())
    axes.pop("when")
    return Space(axes={k: tuple(v) for k, v in axes.items()}, when=(), pinned=())


def one(family: Family, problem: Problem, candidate, listing, device) -> float:
    """Seconds that the loop spends on a configuration."""
    begin = time.perf_counter()
    for build in listing.builds[candidate.id]:
        compile_build(build, device)
    spec = listing.spec
    generator = torch.Generator(device="cuda").manual_seed(0)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    implementation = next(i for i in family.implementations if i.label == candidate.backend)
    out = torch.empty((spec.m, spec.n), dtype=torch.bfloat16, device="cuda")
    prepared = implementation.prepare(spec, weights, candidate.knobs)
    launch = implementation.bind(spec, candidate.knobs, device, inputs, prepared, out)
    for _ in range(5):
        launch()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        launch()
    end.record()
    torch.cuda.synchronize()
    atol, rtol = family.tolerance(spec)
    error_ratio(out, family.reference(spec, inputs, weights), atol, rtol)
    return time.perf_counter() - begin


def main() -> None:
    """Mean and median over the sample."""
    arguments = [int(word) for word in sys.argv[1:]] or [40]
    m, n, k = arguments[1:] or (64, 1280, 8192)
    family, device = load_family("a8w8_blockscale"), gpu_device(0)
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problem = make_problem(family, {"M": m, "N": n, "K": k}, defaults, device.gfx, "case")
    own = [i for i in family.implementations if i.label == "triton"]
    listing = list_candidates(problem, family, own, device, space(), ())
    sample = random.Random(0).sample(listing.candidates, min(arguments[0], len(listing.candidates)))
    one(family, problem, sample[0], listing, device)  # the compiler's own start
    seconds = [one(family, problem, candidate, listing, device) for candidate in sample[1:]]
    mean, median = statistics.mean(seconds), statistics.median(seconds)
    print(f"{len(seconds)} of {len(listing.candidates)} configurations: mean {mean:.3f} s, median {median:.3f} s each")


if __name__ == "__main__":
    main()
