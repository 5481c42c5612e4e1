"""Times the order of pairs by expert alone on a GPU: forms, chunks and warps, beside vLLM's moe_align_block_size.

    python tests/benchmarks/pair_order.py
    python tests/benchmarks/pair_order.py --tokens 64,4096 --mixtures 512x10 --block-m 16 --routings uniform,one_hot

A figure is the median of replays of a CUDA graph of 20 calls, us per call, with the gaps between launches; variants are
interleaved. `one`: one launch of one program; `twoN`: two launches with N pairs per program; `+`: the second begins
while the first ends; `wN`: N warps at most; `*`: what a call of so many pairs has. plain stores pairs by place, sorted
places by pair. Every result is compared with torch's order.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from engine_experts import graph_of, replay_us

from gemmpipe.core.data import Device
from gemmpipe.core.device import gpu_device
from gemmpipe.family import GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.kernels.fmoe import _launch_plan as plan
from gemmpipe.launch.build import load_build

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from _order_cpu import differences

CALLS = 20
SHIPPED = {name: getattr(plan, name) for name in ("_PAIRS_OF_ONE_LAUNCH", "_PAIRS_PER_CHUNK", "_CHUNKS", "_MAX_WARPS")}
MOST_OF_ONE = 16384
"""More pairs are not ordered by one program here."""


def variants(pairs: int) -> Iterator[tuple[str, Mapping[str, int], bool]]:
    """Names, settings of the launch plan, True if the second launch overlaps the first."""
    yield "*", SHIPPED, False
    for warps in (16, 32) if torch.version.hip is None else (16,):
        if pairs <= MOST_OF_ONE:
            yield f"one w{warps}", {**SHIPPED, "_PAIRS_OF_ONE_LAUNCH": pairs, "_MAX_WARPS": warps}, False
        for chunk in (512, 1024, 2048, 4096):
            if pairs > chunk:
                own = {"_PAIRS_OF_ONE_LAUNCH": 0, "_PAIRS_PER_CHUNK": chunk, "_CHUNKS": pairs, "_MAX_WARPS": warps}
                yield f"two{chunk} w{warps}", own, False
                if torch.version.hip is None:
                    yield f"two{chunk}+ w{warps}", own, True


def order_call(
    spec: GemmSpec, ids: torch.Tensor, block_m: int, plain: bool, overlap: bool, device: Device
) -> Callable[[], None]:
    """The launches with the present settings of the plan, checked against torch's order."""
    experts = spec.experts.count if spec.experts else 0
    blocks = plan.max_blocks(spec, block_m)
    shapes = {name: shape for name, (shape, _) in plan.order_scratch_shapes(spec, block_m).items()}
    shapes |= {"pairs": (blocks * block_m,), "places": (len(ids),), "rows": (blocks,)}
    tensors = {name: torch.full(shape, -7, dtype=torch.int32, device=ids.device) for name, shape in shapes.items()}
    tensors["ids"] = ids
    results = {"places_ptr": "places", "pairs_ptr": None, "rows_ptr": "rows"}
    if plain:
        between = "places" if plan.order_chunks(spec) > 1 else None
        results = {"places_ptr": between, "pairs_ptr": "pairs", "rows_ptr": None}
    steps = plan.order_steps(spec, {"BLOCK_SIZE_M": block_m}, results, device.vendor, overlap=overlap)
    if overlap:
        steps = (*steps[:-1], replace(steps[-1], options={**steps[-1].options, "launch_pdl": True}))
    dtypes = dict.fromkeys(tensors, "int32")
    runs = [load_build(step.build(dtypes), device).launcher(step.grid, step.arguments(tensors)) for step in steps]

    def call() -> None:
        for run in runs:
            run()

    call()
    wrong = differences({name: tensor.cpu() for name, tensor in tensors.items()}, experts, block_m, plain)
    assert not wrong, wrong
    return call


def vllms(ids: torch.Tensor, topk: int, experts: int, block_m: int) -> Callable[[], object] | None:
    """vLLM's kernels for the same order, or None."""
    try:
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    except ImportError:
        return None
    return lambda: moe_align_block_size(ids.view(-1, topk), block_m, experts)


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    """CALLS of them."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    return calls


def timed(graphs: Mapping[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Medians of 15 interleaved rounds, us per call."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(15):
        for name, graph in graphs.items():
            found[name].append(replay_us(graph, 3) / CALLS)
    return {name: statistics.median(values) for name, values in found.items()}


def routed(routing: str, tokens: int, experts: int, topk: int, device: Device) -> torch.Tensor:
    """Distinct experts of each token: any, or (one_hot) the same ones for all tokens."""
    generator = torch.Generator(device=device.torch_name).manual_seed(1)
    scores = torch.rand(tokens, experts, generator=generator, device=device.torch_name)
    if routing == "one_hot":
        scores[:] = scores[:1].clone()
    return scores.topk(topk, 1).indices.to(torch.int32).flatten().contiguous()


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1,16,64,128,256,512,1024,4096")
    parser.add_argument("--mixtures", default="512x10,256x8,128x8,8x2")
    parser.add_argument("--block-m", type=int, default=16)
    parser.add_argument("--routings", default="uniform,one_hot")
    given = parser.parse_args()
    device, family = gpu_device(0), load_family("fmoe")
    for mixture in given.mixtures.split(","):
        experts, topk = map(int, mixture.split("x"))
        for tokens in map(int, given.tokens.split(",")):
            key = {"token": tokens, "model_dim": 64, "inter_dim": 64, "expert": experts, "topk": topk}
            options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
            spec = family.spec(make_problem(family, key, options, device.gfx, "order"))
            for routing in given.routings.split(","):
                ids, graphs = routed(routing, tokens, experts, topk, device), {}
                for form in ("plain", "sorted"):
                    block_m = given.block_m if form == "plain" else 64
                    for name, settings, overlap in variants(tokens * topk):
                        for setting, value in settings.items():
                            setattr(plan, setting, value)
                        call = order_call(spec, ids, block_m, form == "plain", overlap, device)
                        graphs[f"{form} {name}"] = graph_of(repeated(call))
                if (call_of_vllm := vllms(ids, topk, experts, given.block_m)) is not None:
                    graphs["vllm"] = graph_of(repeated(call_of_vllm))
                fastest = sorted(timed(graphs).items(), key=lambda item: item[1])
                print(mixture, f"{tokens} tokens", routing, *(f"{name} {us:.2f};" for name, us in fastest), flush=True)


if __name__ == "__main__":
    main()
