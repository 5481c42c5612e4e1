"""The order of pairs by expert: every result against torch's, in one launch and in two, and builds for other GPUs."""

import itertools

import pytest
from interpreter_process import INTERPRETED, Interpreter
from moe_problems import QWEN, spec_of
from pairwise import few

from gemmpipe.core.device import arch_device
from gemmpipe.kernels.fmoe._gluon import GroupedExperts
from gemmpipe.kernels.fmoe._launch_plan import ORDER_MODULE, order_steps
from gemmpipe.launch.build import compile_build
from gemmpipe.templates.tiled import next_power_of_2

SIZES = [(1, 1, 1), (7, 3, 1), (10, 128, 8), (1, 512, 10), (64, 300, 10), (625, 512, 8)]  # token, experts, topk
ROUTINGS = ("random", "away", "few", "one_hot", "none")
PLAIN = {"places_ptr": "places", "pairs_ptr": "pairs", "rows_ptr": None}


def _case(number: int, size: tuple[int, int, int], routing: str, block_m: int) -> dict[str, object]:
    """One launch, two launches of a few chunks or of more than are added up at a time, the shipped number."""
    case = {"sizes": size, "routing": routing, "block_m": block_m, "gfx": ("sm_90", "gfx942")[number % 7 == 0]}
    pairs = size[0] * size[2]
    chunks = [[pairs, 1], [0, next_power_of_2(pairs // 4 + 1)], [0, next_power_of_2(pairs // 40 + 1)], None]
    chosen = chunks[number % len(chunks)]
    return {**case, "chunks": chosen} if chosen else case


CASES = [_case(number, *values) for number, values in enumerate(itertools.product(SIZES, ROUTINGS, (16, 64, 128)))]


@INTERPRETED
@pytest.mark.parametrize("plain", [True, False], ids=["pairs", "places"])
@pytest.mark.parametrize("size", few([(size,) for size in SIZES], 1, 3))
def test_order_matches_torchs(interpreter: Interpreter, size: tuple[int, int, int], plain: bool) -> None:
    for case in (each for each in CASES if each["sizes"] == size):
        assert interpreter.run("order", {**case, "plain": plain}) == [], case


@pytest.mark.parametrize(("token", "programs"), [(1, 1), (192, 1), (193, 4), (1024, 16), (4096, 32), (16384, 64)])
def test_many_pairs_are_ordered_by_two_launches(token: int, programs: int) -> None:
    """With 512 pairs per program up to 32 programs, then with up to 2,048."""
    steps = order_steps(spec_of((token, *QWEN[1:])), {"BLOCK_SIZE_M": 64}, PLAIN, "nvidia", overlap=False)
    names = [step.kernel for step in steps]
    assert names == (["order_pairs"] if programs == 1 else ["rank_pairs", "place_pairs"])
    assert all(step.grid == (programs, 1, 1) for step in steps)


@pytest.mark.parametrize("gfx", ["sm_90", "gfx942"])
@pytest.mark.parametrize("token", [256, 4096])
def test_compiles_without_a_gpu_for_threads_that_exist(gfx: str, token: int) -> None:
    """AMD's programs have at most 1024 threads, in warps of 64."""
    device, spec = arch_device(gfx), spec_of((token, 2048, 512, 512, 10), gfx)
    steps = order_steps(spec, {"BLOCK_SIZE_M": 16}, PLAIN, device.vendor, overlap=gfx == "sm_90")
    for step in steps:
        names = ("ids", "counts", "places", "pairs", "owners", "rows", "blocks")
        facts = compile_build(step.build(dict.fromkeys(names, "int32")), device)
        assert facts.spills is None or facts.spills < 16
        assert int(step.options["num_warps"] or 0) * (64 if gfx == "gfx942" else 32) <= 1024


def test_the_warp_specialised_kernels_order_by_the_same_kernels() -> None:
    spec, device = spec_of(QWEN), arch_device("sm_90")
    knobs = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_stages": 6, "GROUP_SIZE_M": 1}
    first = GroupedExperts().launch_plan(spec, knobs, device)[0][0]
    assert (first.module, first.kernel) == (ORDER_MODULE, "order_pairs")
    assert first.tensors["places_ptr"] == "places"
    assert first.tensors["pairs_ptr"] is None
