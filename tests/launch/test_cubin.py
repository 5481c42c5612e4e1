"""Registers and spills read from a binary, compared with Triton's disassembler."""

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.data import Device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import read_code, read_resources

HOPPER = Device(
    kind="cuda", index=0, name="", gfx="sm_90", cu_num=132, shared_bytes=232448, cache_bytes=0, warp_size=32
)
KNOBS = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 32,
    "GROUP_SIZE_M": 1,
    "NUM_KSPLIT": 1,
    "num_stages": 2,
    "cache_modifier": "",
    "SWAP_AB": False,
}


def _cubin(num_warps: int) -> bytes:
    from gemmpipe.launch.build import compile_kernel, find_kernel, is_interpreted

    family = load_family("a16w16")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": 256, "N": 256, "K": 512}, defaults, "sm_90", "test"))
    triton = next(i for i in family.implementations if i.label == "triton")
    (build,) = triton.builds(spec, triton.normalise(spec, KNOBS | {"num_warps": num_warps}, HOPPER), HOPPER)
    if is_interpreted(find_kernel(build.kernel)):
        pytest.skip("kernels are decorated for the interpreter in this process")
    return bytes(compile_kernel(build, HOPPER).asm["cubin"])


@pytest.mark.parametrize("num_warps", [pytest.param(1, marks=pytest.mark.slow), 4])  # 1: seconds
def test_resources_equal_those_of_the_disassembler(num_warps: int, tmp_path: Path) -> None:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    path = tmp_path / "kernel.cubin"
    path.write_bytes(_cubin(num_warps))
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()  # type: ignore[union-attr]
    assert read_resources(path.read_bytes()) == (int(registers), int(stack) // 4)
    assert (int(stack) > 0) == (num_warps == 1), "one warp with 64 x 128 sums spills: 255 registers per thread"


def test_code_is_part_of_the_binary_and_depends_on_the_knobs() -> None:
    binary, other = _cubin(4), _cubin(8)
    assert 0 < len(read_code(binary)) < len(binary)
    assert read_code(binary) in binary and read_code(binary) != read_code(other)


@given(st.binary(max_size=400), st.booleans())
def test_anything_but_a_binary_has_no_resources(noise: bytes, elf: bool) -> None:
    assert read_resources((b"\x7fELF" if elf else b"") + noise) == (None, None)
