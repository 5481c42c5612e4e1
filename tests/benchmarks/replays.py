"""A decode step in a CUDA graph, replayed after ordinary kernels and after a dependent launch: a GPU from sm_90 on.

    python tests/benchmarks/replays.py [--layers 24] [--tokens 1] [--replays 15]

Layers with the sizes of Qwen3-8B in bf16, by torch alone. Before each replay 40 small kernels are launched, as by a
sampler; then the graph alone, or after `dependent_launch`. Prints milliseconds of the graph, medians, twice each.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as functional

from gemmpipe.core.device import gpu_device
from gemmpipe.launch.replays import dependent_launch

HIDDEN, INTERMEDIATE, HEADS, GROUPS, WIDTH, CACHED = 4096, 12288, 32, 8, 128, 512
ORDINARY = 40


class Layer:
    """Weights and cache of a layer, random."""

    def __init__(self, tokens: int) -> None:
        self.qkv = _random((HEADS + 2 * GROUPS) * WIDTH, HIDDEN)
        self.out = _random(HIDDEN, HEADS * WIDTH)
        self.gate_up = _random(2 * INTERMEDIATE, HIDDEN)
        self.down = _random(HIDDEN, INTERMEDIATE)
        self.keys, self.values = (_random(tokens, GROUPS, CACHED, WIDTH) for _ in range(2))
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.rotation = _random(1, 1, 1, WIDTH)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, HIDDEN] after the layer; each token is the first of its cache."""
        rows = x.shape[0]
        fused = functional.linear(functional.rms_norm(x, (HIDDEN,), self.norm), self.qkv)
        q, k, v = fused.split([HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH], -1)
        q, k = (each.view(rows, -1, 1, WIDTH) * self.rotation for each in (q, k))
        self.keys[:, :, 0:1], self.values[:, :, 0:1] = k, v.view(rows, GROUPS, 1, WIDTH)
        mixed = functional.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        x = x + functional.linear(mixed.reshape(rows, HEADS * WIDTH), self.out)
        gate, up = functional.linear(functional.rms_norm(x, (HIDDEN,), self.norm), self.gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, self.down)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def captured(layers: list[Layer], x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """The step in a graph, after a call without one."""

    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, before: Callable[[], object], replays: int) -> float:
    """Milliseconds of the graph, the median without the first three replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: list[float] = []
    for _ in range(replays):
        before()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[3:])


def main() -> None:
    """Time both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--replays", type=int, default=15)
    given = parser.parse_args()
    launch, small = dependent_launch(gpu_device(0)), torch.zeros(1024, device="cuda")
    if launch is None:
        parser.error("this GPU has no programmatic dependent launch")

    def ordinary() -> None:
        for _ in range(ORDINARY):
            small.add_(1)

    def dependent() -> None:
        ordinary()
        launch()

    with torch.inference_mode():
        layers = [Layer(given.tokens) for _ in range(given.layers)]
        graph = captured(layers, _random(given.tokens, HIDDEN))
        for _ in range(2):
            for name, before in (("ordinary kernels before", ordinary), ("then a dependent launch", dependent)):
                print(f"{name}: {replay_ms(graph, before, given.replays):.4f} ms", flush=True)


if __name__ == "__main__":
    main()
