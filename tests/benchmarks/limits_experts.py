"""What a Hopper GPU allows beside the experts: their weights read once, and two dense products of as many rows.

    python tests/benchmarks/limits_experts.py --limit-s 120 [--tokens 256,1024,4096]

Five mixtures in bf16 and fp8, CUDA graphs, medians of nine replays, all in turn. `read`: the fastest kernel that only
reads as many bytes as all weights of the experts have (few are not hit by 256 tokens and more). `dense`:
torch's products of one weight with a row for each pair of token and expert, bf16 or fp8 with one scale per tensor
(fast accumulation): nothing is sorted, quantised, activated or summed, and no block is padded. `ours`: the shipped row.
No kernel of this layer gains more than the factor of ours over the larger of both. vLLM's function over ours, times
this factor, is the most that vLLM's function can be over any kernel: compare it with an aim.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from engine_experts import FAMILY, FP8, MIXTURES, Case, graph_of
from experts_variants import implementation, in_a_row, interleaved_us
from limits_read import WAYS

from gemmpipe.core.data import Device
from gemmpipe.core.device import gpu_device
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import GemmSpec, Prepared
from gemmpipe.family.moe import require_experts
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store

Call = Callable[[], object]
SETS = 3
"""Inputs with routings of their own; a graph has a call of each."""
Row = Mapping[str, object]


def cases(tokens: list[int]) -> Iterator[Case]:
    for dtype in ("bfloat16", FP8):
        for mixture in MIXTURES:
            if mixture != ("qwen3-235b-tp4" if dtype == "bfloat16" else "qwen3-235b-tp8"):
                yield from (Case(mixture, dtype, each) for each in tokens)


def shipped_row(case: Case, device: Device, rows: list[Row]) -> Row | None:
    """The row of this problem, one of this model of device first."""
    key = dict(case.problem.key)
    names = ("token", "model_dim", "inter_dim", "expert", "topk", "q_dtype_w")
    found = [row for row in rows if all(str(row[name]) == str(key[name]) for name in names)]
    return min(found, key=lambda row: row.get("device") != device.name, default=None)


def our_calls(case: Case, device: Device, row: Row) -> list[Call]:
    candidate = candidate_of(str(row["libtype"]), str(row["config"]))
    own, spec = implementation(candidate.backend), case.spec
    knobs = own.normalise(spec, candidate.knobs, device)
    weights = FAMILY.make_weights(spec, torch.Generator(device="cuda").manual_seed(1))
    inputs = [FAMILY.make_inputs(spec, torch.Generator(device="cuda").manual_seed(2 + i)) for i in range(SETS)]
    outs = [torch.empty(spec.out_shape, dtype=torch.bfloat16, device="cuda") for _ in inputs]
    prepared = Prepared(weights=weights)
    return [own.bind(spec, knobs, device, each, prepared, out) for each, out in zip(inputs, outs, strict=True)]


def reads(spec: GemmSpec, device: Device) -> dict[str, list[Call]]:
    """Calls of each way to read two buffers in turn, each of as many bytes as the weights have."""
    experts = require_experts(spec)
    count = experts.count * (experts.w1_rows * spec.k + spec.n * experts.inner) // (4 if spec.w_scale else 2)
    buffers = [torch.zeros(count // 4 * 4, dtype=torch.int32, device="cuda") for _ in range(2)]
    found = {}
    for way in WAYS:
        sums = torch.zeros(way.each * device.cu_num, dtype=torch.int32, device="cuda")
        found[way.name] = [way.launch(buffer, sums) for buffer in buffers]
    return found


def dense_calls(spec: GemmSpec) -> list[Call]:
    """The two products of one expert's weights with a row for each pair, SETS times."""
    experts = require_experts(spec)
    pairs, calls = spec.m * experts.topk, list[Call]()
    scale = torch.ones(1, device="cuda")
    for n, k in ((experts.w1_rows, spec.k), (spec.n, experts.inner)):
        x, w = (torch.randn(rows, k, device="cuda").to(torch.bfloat16) for rows in (pairs, n))
        out = torch.empty(pairs, n, dtype=torch.bfloat16, device="cuda")
        if spec.w_scale:
            x, w = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)

        def call(x: torch.Tensor = x, w: torch.Tensor = w, out: torch.Tensor = out) -> object:
            if x.dtype == torch.bfloat16:
                return torch.mm(x, w.t(), out=out)
            return torch._scaled_mm(x, w.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True, out=out)

        calls.append(call)
    return calls * SETS


def measured(case: Case, device: Device, row: Row, rounds: int) -> dict[str, float]:
    """Times in us of a call: `ours`, `dense`, and the fastest `read`."""
    spec = case.spec
    calls = {"ours": our_calls(case, device, row), "dense": dense_calls(spec)}  # they own what graphs read and write
    times = interleaved_us({name: graph_of(in_a_row(each)) for name, each in calls.items()}, SETS, rounds)
    del calls
    torch.cuda.empty_cache()
    ways = reads(spec, device)
    read_times = interleaved_us({name: graph_of(in_a_row(each)) for name, each in ways.items()}, 2, rounds)
    return {**times, "read": min(read_times.values())}


def report(found: Mapping[Case, Mapping[str, float]]) -> None:
    """Geomeans by type and tokens: ours over the read, over the dense products, over the larger of both."""
    print(
        "| | cases | ours over read | ours over dense | ours over the larger (least to most) |\n|---|---|---|---|---|"
    )
    for dtype, tokens in dict.fromkeys((case.dtype, case.tokens) for case in found):
        own = [times for case, times in found.items() if (case.dtype, case.tokens) == (dtype, tokens)]
        ratios = [[t["ours"] / t["read"], t["ours"] / t["dense"], t["ours"] / max(t["read"], t["dense"])] for t in own]
        read, dense, both = (math.exp(statistics.fmean(map(math.log, each))) for each in zip(*ratios, strict=True))
        spread = f"{min(r[2] for r in ratios):.2f} to {max(r[2] for r in ratios):.2f}"
        kind = "fp8" if dtype == FP8 else "bf16"
        print(f"| {kind}, {tokens} tokens | {len(own)} | {read:.2f} | {dense:.2f} | {both:.2f} ({spread}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=120)
    parser.add_argument("--tokens", default="256,1024,4096")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    device, begin, found = gpu_device(0), time.monotonic(), {}
    paths = sorted(shipped_tables().glob(f"{Path(FAMILY.csv_name).stem}*.csv"))
    rows: list[Row] = [row for path in paths for row in store.read(path, FAMILY)]
    for case in cases([int(each) for each in given.tokens.split(",")]):
        if time.monotonic() - begin > given.limit_s:
            print("the time limit ended the benchmark here")
            break
        if (row := shipped_row(case, device, rows)) is None:
            print(f"{case}: no row")
            continue
        found[case] = measured(case, device, row, given.rounds)
        shown = {name: round(us, 1) for name, us in found[case].items()}
        print(f"{case.mixture} {case.dtype} {case.tokens}: {json.dumps(shown)}", flush=True)
        torch.cuda.empty_cache()
    print(f"device {device.name}")
    report(found)


if __name__ == "__main__":
    main()
