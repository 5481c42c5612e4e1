"""Peak rates of a GPU, as an option of the group `roofline`; a GPU that does nothing else.

    python tests/benchmarks/roofline_rates.py [--out conf/roofline/h100.yaml] [--index 0] [--sustained-s 5]

Measures bytes per second of copies and of reads of buffers far larger than the cache, the time of an empty kernel in a
CUDA graph, and operations per second of products of 8192^3 in bf16 and fp8 by cuBLASLt (hipBLASLt), both in bursts of
ten products after a pause and under load that lasts, where power and heat lower the clock. Takes about half a minute.
Prints every figure, then the YAML, whose rates are the highest found, as they bound times from below.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
import triton.language as tl

from gemmpipe.core import nvml
from gemmpipe.core.data import Device
from gemmpipe.core.device import gpu_device, versions
from gemmpipe.family.dtypes import native_fp8
from gemmpipe.launch._empty import empty

SIDE = 8192
ELEMENTS = 2**29  # of 4 bytes
COPIES, EMPTIES, PRODUCTS = 8, 2000, 10
REPLAYS = 9
PAUSE_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates that an option of the group has, with the words of their comments."""

    bytes_per_s: float
    bytes_words: str
    flops_16_per_s: float
    flops_16_words: str
    flops_8_per_s: float
    flops_8_words: str
    launch_us: float


@triton.jit
def read(src, sums, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Sums fp32 blocks; a program takes one in as many as there are programs."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        total += tl.load(src + block * BLOCK + lanes)
    tl.store(sums + tl.program_id(0), tl.sum(total))


def graph_of(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of calls, after one outside it that compiles and chooses."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def seconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Of one call in one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


def median_s(graph: torch.cuda.CUDAGraph, calls: int, pause_s: float = 0.0) -> float:
    """Of one call, over replays with a pause before each."""
    seconds(graph, calls)
    found = []
    for _ in range(REPLAYS):
        time.sleep(pause_s)
        found.append(seconds(graph, calls))
    return statistics.median(found)


def copy_rates() -> Iterator[tuple[str, float]]:
    """Bytes read plus written per second, by the copy engine's node of a graph and by a kernel."""
    src, dst = torch.randn(ELEMENTS, device="cuda"), torch.empty(ELEMENTS, device="cuda")
    ways: Mapping[str, Callable[[], object]] = {
        "copy (copy_)": lambda: dst.copy_(src),
        "copy (neg)": lambda: torch.neg(src, out=dst),
    }
    for name, call in ways.items():
        yield name, 8 * ELEMENTS / median_s(graph_of(call, COPIES), COPIES)


def read_rates(units: int) -> Iterator[tuple[str, float]]:
    """Bytes read per second, by blocks, warps, programs and stages. Raises RuntimeError for a wrong sum."""
    src = torch.rand(ELEMENTS, device="cuda")
    expected = float(src.sum(dtype=torch.float64))
    for block, warps, each, stages in (
        (block, warps, each, stages)
        for block in (2048, 4096, 8192)
        for warps in (4, 8)
        for each in (2, 4, 8)
        for stages in (1, 3)
    ):
        programs, blocks = units * each, ELEMENTS // block
        sums = torch.full((programs,), float("nan"), device="cuda")
        launch = lambda: read[(programs,)](src, sums, blocks, block, stages, num_warps=warps)  # noqa: B023, E731
        took_s = median_s(graph_of(launch, COPIES), COPIES)
        found = float(sums.sum(dtype=torch.float64))
        if not abs(found - expected) < 512:  # a missing block changes it by 1024 or more
            raise RuntimeError(f"read: sum {found} instead of {expected}")
        yield f"read (blocks of {block}, {warps} warps, {each} programs a unit, {stages} stages)", 4 * ELEMENTS / took_s


def product_16() -> Callable[[], object]:
    """A product of bf16 operands, which are random: zeros draw less power."""
    x, w = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(x, w.t(), out=out)


def product_8(gfx: str) -> Callable[[], object]:
    """A product of fp8 operands with one scale each."""
    fp8 = getattr(torch, str(native_fp8(gfx)))
    x, w = (torch.randn(SIDE, SIDE, device="cuda").to(fp8) for _ in range(2))
    one = torch.ones(1, device="cuda")
    return lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def product_rates(call: Callable[[], object], device: Device, sustained_s: float) -> tuple[float, float, str]:
    """Operations per second in bursts and under load that lasts, and the state of the device at its end."""
    graph, flops = graph_of(call, PRODUCTS), 2 * SIDE**3
    burst = flops / median_s(graph, PRODUCTS, PAUSE_S)
    found: list[float] = []
    until = time.monotonic() + sustained_s
    while not found or time.monotonic() < until:
        found.append(seconds(graph, PRODUCTS))
    graph.replay()
    state = nvml.conditions(device)
    torch.cuda.synchronize()
    words = ", ".join(
        f"{state[key]:.0f} {unit}"
        for key, unit in (("sm_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "C"))
        if state[key] is not None
    )
    return burst, flops / statistics.median(found[-max(1, len(found) // 5) :]), words


def measure(device: Device, sustained_s: float) -> Rates:
    """All rates; each figure is printed when it is found."""

    def shown(name: str, bytes_per_s: float) -> float:
        print(f"{name}: {bytes_per_s / 1e12:.3f} TB/s", flush=True)
        return bytes_per_s

    copied = max(shown(*each) for each in copy_rates())
    was_read = max(shown(*each) for each in read_rates(device.cu_num))
    launch_us = 1e6 * median_s(graph_of(lambda: empty[(1,)](), EMPTIES), EMPTIES)
    print(f"empty kernel in a graph: {launch_us:.3f} us", flush=True)
    flops: dict[str, tuple[float, str]] = {}
    for name, make in (("16", product_16), ("8", lambda: product_8(device.gfx))):
        burst, lasting, state = product_rates(make(), device, sustained_s)
        torch.cuda.empty_cache()
        tflops = f"{burst / 1e12:.0f} TFLOP/s in bursts, {lasting / 1e12:.0f} under load"
        print(f"{name} bits: {tflops} ({state or 'clock unknown'})", flush=True)
        words = f"in bursts of {PRODUCTS}; {lasting / 1e15:.3f}e+15 under load of {sustained_s:g} s"
        flops[name] = max(burst, lasting), f"{words} ({state})" if state else words
    return Rates(
        bytes_per_s=max(copied, was_read),
        bytes_words=f"copy of large buffers, read plus written: {copied:.3e}; reads alone: {was_read:.3e}",
        flops_16_per_s=flops["16"][0],
        flops_16_words=f"torch.mm of {SIDE}^3 in bf16, {flops['16'][1]}",
        flops_8_per_s=flops["8"][0],
        flops_8_words=f"torch._scaled_mm of {SIDE}^3 in fp8, one scale per tensor, {flops['8'][1]}",
        launch_us=launch_us,
    )


def entry_name(device: str, gfx: str) -> str:
    """The name of an entry for a model of device: `h100` for `NVIDIA H100 80GB HBM3`."""
    model = re.search(r"\b[A-Za-z]+\d+\w*", device)
    return model[0].lower() if model else gfx


def yaml_text(name: str, device: str, rates: Rates, software: str, day: str) -> str:
    """The option as a file of the group."""
    return f"""\
# {device}, measured by tests/benchmarks/roofline_rates.py
{name}:
  _target_: gemmpipe.family.roofline.Roofline
  device: {device} # the model as the driver names it
  measured: true # false: derived from a specification, as `source` says
  bytes_per_s: {rates.bytes_per_s:.3e} # {rates.bytes_words}
  flops_16_per_s: {rates.flops_16_per_s:.3e} # {rates.flops_16_words}
  flops_8_per_s: {rates.flops_8_per_s:.3e} # {rates.flops_8_words}
  flops_4_per_s: null # not measured: kernels convert fp4 to 16 bits
  launch_us: {rates.launch_us:.2f} # an empty kernel in a CUDA graph
  source: '{device}, {software}; CUDA graphs' # of the rates
  date: '{day}' # of the measurements
"""


def main(arguments: list[str]) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the YAML to this file too")
    parser.add_argument("--index", type=int, default=0, help="the GPU in torch's numbering")
    parser.add_argument("--sustained-s", type=float, default=5.0, help="seconds of load per type")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("roofline_rates: torch sees no GPU", file=sys.stderr)
        return 3
    torch.cuda.set_device(given.index)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    device = gpu_device(given.index)
    found = versions()
    software = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton") if name in found)
    rates = measure(device, given.sustained_s)
    name = entry_name(device.name, device.gfx)
    text = yaml_text(name, device.name, rates, software, datetime.now(UTC).date().isoformat())
    print(f"\n{text}", end="")
    if given.out is not None:
        given.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
