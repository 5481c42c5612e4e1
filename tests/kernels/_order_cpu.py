"""Runs the order of pairs by expert under Triton's interpreter, for _interpret.py, and compares it with torch's."""

from collections.abc import Mapping
from typing import Any

import torch

from gemmpipe.core.device import arch_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.kernels.fmoe import _launch_plan
from gemmpipe.kernels.fmoe._deepgemm import ends_step
from gemmpipe.kernels.fmoe._launch_plan import max_blocks, order_chunks, order_scratch_shapes, order_steps
from gemmpipe.launch.build import load_build

FMOE = load_family("fmoe")
SHIPPED = (_launch_plan._PAIRS_OF_ONE_LAUNCH, _launch_plan._PAIRS_PER_CHUNK)


def set_chunks(case: Mapping[str, Any]) -> None:
    """Sets the most pairs of one launch and the pairs per program of two, if the case has such `chunks`.

    With fewer than on a GPU, a few hundred pairs are as many chunks as thousands are there.
    """
    _launch_plan._PAIRS_OF_ONE_LAUNCH, _launch_plan._PAIRS_PER_CHUNK = case.get("chunks", SHIPPED)


def routed_ids(experts: int, pairs: int, routing: str) -> torch.Tensor:
    """Experts of pairs: `random`, `away` (some are of other ranks), `few` (most have no pair), `one_hot`, `none`."""
    if routing in ("one_hot", "none"):
        return torch.full((pairs,), experts - 1 if routing == "one_hot" else experts, dtype=torch.int32)
    low, high = {"away": (-2, experts + 2), "few": (experts // 2, experts // 2 + 1)}.get(routing, (0, experts))
    return torch.randint(low, high, (pairs,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)


def run(case: Mapping[str, Any]) -> list[str]:
    """What differs from torch's order, over scratch of random integers."""
    set_chunks(case)
    token, experts, topk = case["sizes"]
    block_m, device = case["block_m"], arch_device(case["gfx"])
    key = {"token": token, "model_dim": 64, "inter_dim": 64, "expert": experts, "topk": topk}
    options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = FMOE.spec(make_problem(FMOE, key, options, device.gfx, "case"))
    blocks = max_blocks(spec, block_m)
    shapes = {name: shape for name, (shape, _) in order_scratch_shapes(spec, block_m).items()}
    shapes |= {"pairs": (blocks * block_m,), "places": (token * topk,), "rows": (blocks,)}
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        for name, shape in shapes.items()
    }
    tensors["ids"] = routed_ids(experts, token * topk, case["routing"])
    tensors["sources"] = torch.full((blocks * block_m,), -9, dtype=torch.int32)
    results = {"places_ptr": "places", "pairs_ptr": None, "sources_ptr": "sources", "rows_ptr": "rows"}
    if case["plain"]:
        results = {"places_ptr": "places" if order_chunks(spec) > 1 else None, "pairs_ptr": "pairs", "rows_ptr": None}
    for step in order_steps(spec, {"BLOCK_SIZE_M": block_m}, results, device.vendor, overlap=False):
        load_build(step.build(dict.fromkeys(tensors, "int32")), device).launcher(step.grid, step.arguments(tensors))()
    tensors["ends"] = torch.full((experts,), -9, dtype=torch.int32)
    ends = ends_step(spec, block_m)
    load_build(ends.build(dict.fromkeys(tensors, "int32")), device).launcher(ends.grid, ends.arguments(tensors))()
    wrong = differences(tensors, experts, block_m, case["plain"])
    if tensors["ends"].tolist() != ends_of(tensors["ids"], experts, block_m):
        wrong.append("ends")
    if not case["plain"]:
        places = tensors["places"]
        pairs = torch.arange(token * topk, dtype=torch.int32)
        if not torch.equal(tensors["sources"][places[places >= 0].long()], pairs[places >= 0]):
            wrong.append("sources")
    return wrong


def ends_of(ids: torch.Tensor, experts: int, block_m: int) -> list[int]:
    """The place after each expert's last row; each expert's rows begin a block."""
    found, first = [], 0
    for expert in range(experts):
        rows = int((ids == expert).sum())
        found.append(first + rows)
        first += -(-rows // block_m) * block_m
    return found


def differences(tensors: Mapping[str, torch.Tensor], experts: int, block_m: int, plain: bool) -> list[str]:
    """The names of results that are wrong."""
    ids, pairs = tensors["ids"], len(tensors["ids"])
    held = (ids >= 0) & (ids < experts)
    own = [torch.nonzero(ids == expert).flatten().tolist() for expert in range(experts)]
    owners = [expert for expert, each in enumerate(own) for _ in range(0, len(each), block_m)]
    rows = [min(block_m, len(each) - begin) for each in own for begin in range(0, len(each), block_m)]
    entries = tensors["pairs"]
    if not plain:
        entries = torch.full_like(entries, pairs)
        entries[tensors["places"][held].long()] = torch.nonzero(held).flatten().to(torch.int32)
    begin, ordered = 0, True
    for each in own:
        end = begin + -(-len(each) // block_m) * block_m
        found = entries[begin:end].tolist()
        ordered &= sorted(found[: len(each)]) == each and set(found[len(each) :]) <= {pairs}
        begin = end
    right = {
        "pairs": ordered,
        "places": plain or bool((tensors["places"][~held] == -1).all()),
        "rows": plain or tensors["rows"][: len(rows)].tolist() == rows,
        "owners": tensors["owners"][: len(owners)].tolist() == owners,
        "blocks": int(tensors["blocks"]) == len(owners),
    }
    return [name for name, is_right in right.items() if not is_right]
