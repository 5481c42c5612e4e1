"""The loader of the kernels at own pace: no fence before the copies of a slot, and the barriers that it uses."""

import re

import pytest

from gemmpipe.core.device import arch_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import compile_kernel
from gemmpipe.templates.hopper import own_pace_loader, own_pace_memory

SM_90 = arch_device("sm_90")
TILES = [(64, 64, 8, {"ONE_WARPGROUP": True}), (128, 96, 7, {}), (128, 144, 6, {}), (256, 128, 3, {})]


def _ptx(m: int, block_m: int, columns: int, stages: int, knobs: dict[str, bool]) -> dict[str, str]:
    """By reading of x's scales."""
    family = load_family("a8w8_blockscale")
    kernel = next(each for each in family.implementations if each.label == "gluon")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": 4608, "K": 1024}, defaults, "sm_90", "test"))
    point = {"kernel_type": "warp_specialised", "BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 128}
    point |= {"GROUP_SIZE_M": 1, "NUM_KSPLIT": 1, "num_stages": stages, "OWN_PACE": True, **knobs}
    builds = kernel.builds(spec, kernel.normalise(spec, point, SM_90), SM_90)
    return {str(dict(build.constants)["READING"]): compile_kernel(build, SM_90).asm["ptx"] for build in builds}


@pytest.mark.parametrize(("block_m", "columns", "stages", "knobs"), TILES)
def test_nothing_is_fenced_between_a_slot_s_announcement_and_its_copies(
    block_m: int, columns: int, stages: int, knobs: dict[str, bool]
) -> None:
    for reading, ptx in _ptx(1024, block_m, columns, stages, knobs).items():
        assert ptx.count("expect_tx") == 1
        after = ptx.split("expect_tx")[1]
        loop = after[: after.index("bra")]
        assert "fence" not in loop, reading
        assert loop.count("cp.async.bulk.tensor") == (3 if reading == "copied" else 2)


@pytest.mark.parametrize(("block_m", "stages"), [(64, 12), (128, 7), (256, 3)])
def test_the_announced_barriers_are_those_of_own_pace_memory(block_m: int, stages: int) -> None:
    first = stages * block_m * 128 + own_pace_memory.scale_lines(block_m, stages) * own_pace_memory.line_bytes()
    text = own_pace_loader._begin_slot_asm(block_m, stages)
    waited, announced = re.findall(r"\[at \+ (\d+)\]", text)
    assert (int(announced), int(waited)) == (first, first + own_pace_memory.line_bytes())
    assert f"[at + {first}], " in own_pace_memory._init_asm(block_m, stages, 1)
