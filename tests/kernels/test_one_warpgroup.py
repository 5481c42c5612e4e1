"""Tiles of 64 rows that one warpgroup multiplies; results are checked on a GPU (test_scale_orders_on_gpu.py)."""

import re
from collections.abc import Sequence

import pytest
from pairwise import few

from gemmpipe.core.data import Knobs
from gemmpipe.core.device import arch_device
from gemmpipe.family import GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import compile_build, compile_kernel
from gemmpipe.templates.hopper.constraints import ctas_per_sm, hopper_shared_bytes, part_columns, views_of_parts
from gemmpipe.templates.hopper.launch import WarpSpecialised

SM_90 = arch_device("sm_90")
IN_PARTS = pytest.mark.skipif(not views_of_parts(), reason="this Triton does not compile tiles in parts")


def _kernel(name: str, m: int) -> tuple[WarpSpecialised, GemmSpec]:
    family = load_family(name)
    problem = make_problem(
        family, {"M": m, "N": 1280, "K": 8192}, KernelDefaults(dtype=None, out_dtype=None, bias=None), "sm_90", "s"
    )
    (kernel,) = (each for each in family.implementations if isinstance(each, WarpSpecialised))
    return kernel, family.spec(problem)


def _single_knobs(columns: int, slots: int, **further: int) -> Knobs:
    sides = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    knobs = {"kernel_type": "warp_specialised", **sides, "NUM_KSPLIT": 1, "num_stages": slots}
    return {**knobs, "ONE_WARPGROUP": True, **further}


EARLY = {"OWN_PACE": True, "EARLY_COPIES": True}


@IN_PARTS
@pytest.mark.parametrize("reading", ["copied", "fours", "strided"])
@pytest.mark.parametrize(
    "knobs",
    few(
        [
            *[_single_knobs(n, slots) for n, slots in ((32, 12), (48, 10), (64, 8), (80, 8), (96, 7), (128, 8))],
            *[_single_knobs(n, 6, CTAS_PER_SM=2) for n in (32, 48, 64)],
            *[_single_knobs(64, 8, NUM_KSPLIT=4, CLUSTER_SIZE=4), _single_knobs(96, 7, NUM_KSPLIT=2)],
            *[_single_knobs(n, slots, OWN_PACE=True) for n, slots in ((32, 12), (48, 10), (64, 8), (80, 8), (96, 7))],
            *[_single_knobs(n, 6, CTAS_PER_SM=2, OWN_PACE=True) for n in (32, 48, 64)],
            _single_knobs(64, 8, NUM_KSPLIT=4, CLUSTER_SIZE=4, OWN_PACE=True),
            *[_single_knobs(96, 7, NUM_KSPLIT=2, OWN_PACE=True), _single_knobs(128, 8, OWN_PACE=True)],
            _single_knobs(64, 8, OWN_PACE=True, CONSTANT_NK=True),
            *[_single_knobs(n, slots, **EARLY) for n, slots in ((32, 12), (64, 13), (80, 11), (96, 10), (128, 8))],
            *[_single_knobs(n, 6, CTAS_PER_SM=2, **EARLY) for n in (32, 64)],
            *[_single_knobs(64, 8, NUM_KSPLIT=4, CLUSTER_SIZE=4, **EARLY), _single_knobs(96, 7, NUM_KSPLIT=2, **EARLY)],
        ],
        2,
        8,
        13,
        24,
        29,
    ),
    ids=lambda knobs: "-".join(str(value) for value in list(knobs.values())[1:]),
)
def test_one_warpgroup_compiles_within_the_registers(knobs: Knobs, reading: str) -> None:
    kernel, spec = _kernel("a8w8_blockscale", 63 if reading == "strided" else 64)
    wanted, knobs = knobs, kernel.normalise(spec, knobs, SM_90)
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    (build,) = (build for build in kernel.builds(spec, knobs, SM_90) if ("READING", reading) in build.constants)
    own = bool(wanted.get("OWN_PACE"))
    assert build.kernel.endswith(":blockscale_single" if own else ":blockscale_warp_specialised")
    assert kernel.normalise(spec, knobs, SM_90) == knobs
    facts, ptx = compile_build(build, SM_90), compile_kernel(build, SM_90).asm["ptx"]
    assert facts.spills == 0
    assert facts.shared_bytes is not None
    assert facts.shared_bytes <= hopper_shared_bytes(knobs)
    assert facts.registers is not None
    assert facts.registers * 256 * ctas_per_sm(knobs) <= 65_536
    assert set(re.findall(r"\.(?:max|req)ntid (\d+)", ptx)) == {"256"}
    assert ("@p trap" in ptx) == (part_columns(knobs) != knobs["BLOCK_SIZE_N"])
    if own:  # each of the four warps that multiply releases a slot
        counts = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[at \+ \d+\], (\d+);", ptx)
        fillers, slots = "1" if reading == "copied" else "2", int(str(knobs["num_stages"]))
        assert sorted(counts) == [fillers] * slots + ["4"] * slots
        early = bool(knobs.get("EARLY_COPIES"))
        assert (counts[:2] == [fillers, "4"]) != early
        (ready,) = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], (\d+);", ptx)
        assert int(ready) == 1 + early


@pytest.mark.parametrize("reading", ["copied", "fours"])
def test_a_thread_asks_for_no_more_registers_than_there_are(reading: str) -> None:
    kernel, spec = _kernel("a8w8_blockscale", 512)
    single, two = _single_knobs(64, 6), {"BLOCK_SIZE_M": 128, "OWN_PACE": True, "TWO_IN_FLIGHT": True}
    found = {}
    for name, knobs in (
        ("early", {**single, **EARLY}),
        ("two programs", {**single, **EARLY, "CTAS_PER_SM": 2}),
        ("late", {**single, "OWN_PACE": True}),
        ("two in flight", {**single, **two}),
        ("one in flight", {**single, **two, "TWO_IN_FLIGHT": False}),
    ):
        builds = kernel.builds(spec, kernel.normalise(spec, knobs, SM_90), SM_90)
        constants = next(dict(build.constants) for build in builds if _reads(build.constants, reading))
        found[name] = constants["REGISTERS"], constants["LOADER_REGISTERS"]
    assert found["early"][1] == 256
    assert found["two programs"][1] <= 48
    assert found["late"][1] == (24 if reading == "copied" else 40)
    assert (found["two in flight"], found["one in flight"]) == ((224, 56), (240, 24))


def _reads(constants: Sequence[tuple[str, object]], reading: str) -> bool:
    return ("READING", reading) in constants or (reading == "fours" and ("READING", "panels") in constants)


@IN_PARTS
@pytest.mark.parametrize("knobs", [_single_knobs(96, 7), {**_single_knobs(192, 5), "ONE_WARPGROUP": False}], ids=str)
def test_the_ring_is_checked_before_its_slots_are_released_to_the_loader(knobs: Knobs) -> None:
    """The check writes where the loader's first copy arrives."""
    kernel, spec = _kernel("a8w8_blockscale", 64)
    for build in kernel.builds(spec, kernel.normalise(spec, knobs, SM_90), SM_90):
        _, *later = compile_kernel(build, SM_90).asm["ptx"].split("@p trap")
        assert len(later) == 1
        assert 0 < later[0].find("mbarrier.init") < later[0].find("mbarrier.arrive")


@pytest.mark.parametrize(
    ("name", "knobs", "why"),
    [
        ("a8w8_blockscale", _single_knobs(256, 4), "256 columns per warpgroup of a 64x256 tile, 16 to 128 fit"),
        ("a8w8_blockscale", _single_knobs(112, 6), "112 columns per warpgroup of a 64x112 tile, 16 to 96 fit"),
        ("a8w8_blockscale", _single_knobs(96, 4, CTAS_PER_SM=2), "96 columns per warpgroup, 64 fit the registers"),
        ("a8w8_blockscale", {**_single_knobs(64, 6), "BLOCK_SIZE_M": 128}, "a tile of 128 rows"),
        ("a8w8_blockscale_bpreshuffle", _single_knobs(64, 6), "ONE_WARPGROUP: only for row-major weights"),
        ("a8w8_blockscale", _single_knobs(16, 8, OWN_PACE=True), "OWN_PACE: at least 32 columns"),
    ],
)
def test_tiles_that_one_warpgroup_does_not_multiply(name: str, knobs: Knobs, why: str) -> None:
    kernel, spec = _kernel(name, 64)
    assert why in str(kernel.unsupported_reason(spec, knobs, SM_90))


def test_one_warpgroup_is_for_tiles_of_64_rows() -> None:
    kernel, spec = _kernel("a8w8_blockscale", 512)
    for rows in (64, 128, 256):
        knobs = kernel.normalise(spec, {**_single_knobs(64, 4), "BLOCK_SIZE_M": rows}, SM_90)
        assert ("ONE_WARPGROUP" in knobs) == (rows == 64)
        paced = kernel.normalise(spec, {**_single_knobs(64, 4, OWN_PACE=True), "BLOCK_SIZE_M": rows}, SM_90)
        assert "OWN_PACE" in paced
        early = kernel.normalise(spec, {**_single_knobs(64, 4, **EARLY), "BLOCK_SIZE_M": rows}, SM_90)
        assert early == {**paced, **({"EARLY_COPIES": True} if rows == 64 else {})}
        assert "OWN_PACE" not in kernel.normalise(spec, {**paced, "BLOCK_SIZE_M": 32}, SM_90)
        constants = dict(kernel.builds(spec, knobs, SM_90)[0].constants)
        assert constants.get("WARPGROUPS") == {64: 1, 128: 2, 256: None}[rows]
