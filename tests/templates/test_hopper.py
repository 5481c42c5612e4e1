"""TMA boxes of a tile, and work tiles of a product."""

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairwise import SLOW, few

from gemmpipe.core.data import Build, Knobs
from gemmpipe.core.device import arch_device
from gemmpipe.family import GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import compile_build, compile_kernel, set_descriptor_boxes
from gemmpipe.templates.hopper.constraints import (
    MAX_WORK_TILES,
    PersistentGrid,
    accumulator_width,
    has_halves,
    hopper_shared_bytes,
    stage_buffers,
    views_of_parts,
)
from gemmpipe.templates.hopper.launch import WarpSpecialised
from gemmpipe.templates.hopper.tile_scheduler import accumulator_parts
from gemmpipe.templates.hopper.waves import wave_part_columns
from gemmpipe.templates.params import BLOCK_SCALED_KNOBS

IN_PARTS = pytest.mark.skipif(not views_of_parts(), reason="this Triton views whole buffers of shared memory only")

SM_90 = arch_device("sm_90")
FAMILIES = ("a16w16", "a8w8", "a8w8_blockscale", "a8w8_bpreshuffle", "a8w8_blockscale_bpreshuffle")


def _kernel(name: str, m: int, n: int = 1280) -> tuple[WarpSpecialised, GemmSpec]:
    family = load_family(name)
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": n, "K": 8192}, defaults, "sm_90", "test"))
    (kernel,) = (i for i in family.implementations if isinstance(i, WarpSpecialised))
    return kernel, spec


def _knobs(spec: GemmSpec, block_m: int) -> Knobs:
    depth = 64 if spec.x_dtype == "bfloat16" else 128
    sides = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": depth, "GROUP_SIZE_M": 1}
    return {"kernel_type": "warp_specialised", **sides, "NUM_KSPLIT": 1, "num_stages": 4}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("m", "block_m", "rows"),
    [(8, 64, 16), (24, 64, 32), (48, 64, 16), (64, 64, 64), (96, 128, 32), (100, 128, 16), (4096, 128, 128)],
)
def test_rows_of_a_copy(name: str, m: int, block_m: int, rows: int) -> None:
    kernel, spec = _kernel(name, m)
    knobs = _knobs(spec, block_m)
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    assert kernel.boxes(spec, knobs)["x"][1][0] == rows


@pytest.mark.parametrize("name", FAMILIES)
def test_any_number_of_rows_needs_three_builds_of_a_tile(name: str) -> None:
    builds = set()
    for m in (4, 8, 24, 32, 64, 72, 512, 4096):
        kernel, spec = _kernel(name, m)
        builds |= set(kernel.builds(spec, _knobs(spec, 64), SM_90))
    assert len(builds) == (6 if "blockscale" in name else 3)  # x's scales have either order


@pytest.mark.parametrize(
    ("m", "splits", "whole", "programs", "work_tiles"),
    [
        (64, 4, 0, 80, 80),  # 20 tiles, all of them in splits
        (4096, 1, 1280, 128, 1280),
        (4096, 4, 1188, 132, 1188 + 92 * 4),  # nine waves over 132 multiprocessors, and 92 tiles more
    ],
)
def test_only_tiles_that_fill_no_wave_are_split(
    m: int, splits: int, whole: int, programs: int, work_tiles: int
) -> None:
    _, spec = _kernel("a8w8_blockscale", m)
    grid = PersistentGrid.of(spec, {**_knobs(spec, 64), "NUM_KSPLIT": splits}, SM_90)
    assert (grid.whole, grid.programs) == (whole, programs)
    assert grid.parts == (0 if splits == 1 else (work_tiles - whole) * 64 * 64)


@pytest.mark.parametrize(
    ("m", "n", "columns", "rest"),
    [
        (4096, 24576, 128, 36),  # 23 rounds over 132 multiprocessors, and 36 tiles more
        (4096, 4224, 128, 0),  # four rounds
        (4096, 7168, 128, 0),  # six rounds and 104 tiles: twice as many halves are no less work
        (1024, 1280, 128, 0),  # no round is full
        (4096, 24576, 64, 0),
    ],
)
def test_the_last_round_of_tiles_of_256_rows_is_in_halves_if_these_fit_it(
    m: int, n: int, columns: int, rest: int
) -> None:
    kernel, spec = _kernel("a8w8_blockscale", m, n)
    knobs = kernel.normalise(spec, _wave_knobs(256, columns, 3, own_pace=True), SM_90)
    grid = PersistentGrid.of(spec, knobs, SM_90)
    assert (grid.halved, grid.tiles - grid.whole, grid.work_tiles - grid.tiles, grid.parts) == (rest > 0, rest, rest, 0)
    assert not rest or (grid.splits == 2 and grid.programs == SM_90.cu_num)
    modes = {dict(build.constants)["SPLIT_K"] for build in kernel.builds(spec, knobs, SM_90)}
    assert modes == ({"none", "halves"} if columns == 128 else {"none"})  # calls of other M use this row too


@pytest.mark.parametrize(
    ("units", "cluster", "n"), [(132, 8, 17), (78, 4, 80), (114, 4, 89), (132, 2, 36), (78, 1, 20)]
)
def test_halves_never_give_a_program_more(units: int, cluster: int, n: int) -> None:
    kernel, spec = _kernel("a8w8_blockscale", 4096, 128 * n)
    knobs = {**_wave_knobs(256, 128, 3, own_pace=True), "GROUP_SIZE_M": 8, "CLUSTER_SIZE": cluster}
    device = replace(SM_90, cu_num=units)
    grid = PersistentGrid.of(spec, kernel.normalise(spec, knobs, device), device)
    halves = [1.0] * grid.whole + [0.5] * (grid.work_tiles - grid.whole)
    busiest = max(sum(halves[first :: grid.programs]) for first in range(grid.programs))
    assert busiest <= -(-grid.tiles // grid.programs) - 0.5 * grid.halved
    assert grid.programs % cluster == 0


def test_nothing_is_split_if_all_waves_are_full() -> None:
    kernel, spec = _kernel("a8w8_blockscale", 64 * 33)  # 33 x 20 tiles on 132 multiprocessors
    assert kernel.normalise(spec, {**_knobs(spec, 64), "NUM_KSPLIT": 4}, SM_90)["NUM_KSPLIT"] == 1


def test_two_programs_share_a_multiprocessor_if_both_fit() -> None:
    kernel, spec = _kernel("a8w8_blockscale", 64)
    knobs = {**_knobs(spec, 64), "num_stages": 6, "CTAS_PER_SM": 2}
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    assert PersistentGrid.of(spec, {**knobs, "NUM_KSPLIT": 10}, SM_90).programs == 200  # two waves for one program each
    assert PersistentGrid.of(spec, {**knobs, "NUM_KSPLIT": 10, "CTAS_PER_SM": 1}, SM_90).programs == 100
    for more in ({"num_stages": 8}, {"BLOCK_SIZE_N": 128, "num_stages": 3}):
        assert "two programs" in str(kernel.unsupported_reason(spec, {**knobs, **more}, SM_90))
    assert "CTAS_PER_SM" not in kernel.normalise(spec, {**knobs, "CTAS_PER_SM": 1}, SM_90)


def test_splits_of_a_tile_are_a_cluster() -> None:
    kernel, spec = _kernel("a8w8_blockscale", 64)  # 20 tiles
    knobs = kernel.normalise(spec, {**_knobs(spec, 64), "NUM_KSPLIT": 5, "CLUSTER_SIZE": 2}, SM_90)
    assert knobs["CLUSTER_SIZE"] == 5
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    assert PersistentGrid.of(spec, knobs, SM_90).programs == 100
    alone = {name: value for name, value in knobs.items() if name != "CLUSTER_SIZE"}
    together, apart = (kernel.builds(spec, k, SM_90)[0] for k in (knobs, alone))
    assert (dict(together.constants)["SPLIT_K"], dict(apart.constants)["SPLIT_K"]) == ("cluster", "last")
    for splits, why in ((7, "140 splits for 70 programs"), (11, "11, 8 programs are portable")):
        more = kernel.normalise(spec, {**knobs, "NUM_KSPLIT": splits}, SM_90)
        assert why in str(kernel.unsupported_reason(spec, more, SM_90))


@pytest.mark.parametrize(("splits", "columns"), [(2, 64), (3, 32), (4, 32), (5, 16), (8, 16)])
def test_a_split_of_a_cluster_adds_up_about_its_share(splits: int, columns: int) -> None:
    kernel, spec = _kernel("a8w8_blockscale", 128)
    tile = {**_knobs(spec, 128), "BLOCK_SIZE_N": 128, "NUM_KSPLIT": splits, "CLUSTER_SIZE": splits}
    assert kernel.boxes(spec, tile)["out"][1] == [64, columns]


def test_neighbours_are_a_cluster_if_they_share_columns_of_the_weight() -> None:
    kernel, spec = _kernel("a8w8_blockscale", 192)  # 3 x 20 tiles
    pairs = {**_knobs(spec, 64), "CLUSTER_SIZE": 2, "GROUP_SIZE_M": 16}
    assert kernel.unsupported_reason(spec, pairs, SM_90) is kernel.dominated_reason(spec, pairs, SM_90) is None
    assert "share no columns" in str(kernel.dominated_reason(spec, {**pairs, "GROUP_SIZE_M": 1}, SM_90))
    assert PersistentGrid.of(spec, {**pairs, "CLUSTER_SIZE": 8}, SM_90).programs == 64  # four of them without a tile
    assert "CLUSTER_SIZE" not in kernel.normalise(spec, {**pairs, "CLUSTER_SIZE": 1}, SM_90)


def test_foreign_knobs_are_unsupported_with_a_reason() -> None:
    """A row of a table may have knobs that no space has."""
    kernel, spec = _kernel("a8w8_blockscale", 64)
    for splits in (0, -3):
        assert kernel.normalise(spec, {**_knobs(spec, 64), "NUM_KSPLIT": splits}, SM_90)["NUM_KSPLIT"] == 1
    reason = kernel.unsupported_reason(
        spec, kernel.normalise(spec, {**_knobs(spec, 64), "CTAS_PER_SM": 3}, SM_90), SM_90
    )
    assert reason == "CTAS_PER_SM: 3, there are registers for 1 or 2 programs"


@given(st.integers(1, MAX_WORK_TILES), st.integers(0, MAX_WORK_TILES), st.sampled_from([-2, -1, 0, 1, 2]))
def test_quotients_are_exact_however_the_reciprocal_is_rounded(divisor: int, number: int, ulps: int) -> None:
    """tile_scheduler.fast_div, step by step in fp32; a device's reciprocal is within two units in the last place."""
    inverse = np.float32(1) / np.float32(divisor)
    inverse += np.float32(ulps) * np.spacing(inverse)
    for near in {number, number // divisor * divisor, max(0, number // divisor * divisor - 1)}:
        assert int((np.float32(near) + np.float32(0.5)) * inverse) == near // divisor


def test_more_work_tiles_than_have_exact_coordinates_are_unsupported() -> None:
    kernel, spec = _kernel("a8w8_blockscale", (MAX_WORK_TILES // 20 + 1) * 64)  # of 1280 columns in tiles of 64
    reason = kernel.unsupported_reason(spec, _knobs(spec, 64), SM_90)
    assert reason == f"order: {MAX_WORK_TILES + 4} work tiles, at most {MAX_WORK_TILES} have exact coordinates"
    assert kernel.unsupported_reason(spec, _knobs(spec, 128), SM_90) is None


LOADS = ("by warps", "by TMA")
"""How a build with block scales loads those of x."""


def _build_of(kernel: WarpSpecialised, spec: GemmSpec, knobs: Knobs, loads: str) -> Build:
    by_warps, by_tma = kernel.builds(spec, knobs, SM_90)
    return by_tma if loads == "by TMA" else by_warps


SPLIT = {("a16w16", (64, 160)): 3}
"""The tile that is compiled always, with this cluster."""
WHOLE = ("a8w8_blockscale", (128, 80))
"""The family and the tile that is compiled always without splits: with block scales, and no spills as in NARROW."""
TILES = [(128, 80, 16), (128, 96, 32), (64, 160, 16), (64, 192, 32), (128, 160, 32), (128, 192, 64)]


@IN_PARTS
@pytest.mark.parametrize(
    ("name", "block_m", "columns", "part"),
    [
        pytest.param(name, *tile, marks=() if (name, tile[:2]) == WHOLE else SLOW)
        for name in ("a16w16", "a8w8", "a8w8_blockscale")
        for tile in TILES
    ],
)
def test_a_tile_of_any_columns_is_copied_whole_and_stored_by_parts(
    name: str, block_m: int, columns: int, part: int
) -> None:
    kernel, spec = _kernel(name, 256)
    knobs = {**_knobs(spec, block_m), "BLOCK_SIZE_N": columns}
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    *_, build = kernel.builds(spec, knobs, SM_90)  # the one with scales, if any, loaded by TMA
    boxes = kernel.boxes(spec, knobs)
    assert build.boxes == (("w", (columns, knobs["BLOCK_SIZE_K"])),)
    assert boxes["w"][1][0] == boxes["out"][1][1] == part
    facts, kernel_made = compile_build(build, SM_90), compile_kernel(build, SM_90)
    assert facts.spills == 0
    assert facts.shared_bytes is not None
    assert facts.shared_bytes <= hopper_shared_bytes(knobs)
    assert "@p trap" in kernel_made.asm["ptx"]  # the check of the rings' address
    set_descriptor_boxes(kernel_made, build)  # for Triton's launcher
    shapes = [each["block_size"] for each in kernel_made.metadata.tensordesc_meta]
    assert shapes[:3] == [boxes["x"][1], [columns, knobs["BLOCK_SIZE_K"]], boxes["out"][1]]


@pytest.mark.slow
@IN_PARTS
@pytest.mark.parametrize(
    ("name", "block_m", "columns", "splits", "cluster"),
    [
        pytest.param(name, *tile, *splits, marks=() if splits[1] == SPLIT.get((name, tile)) else SLOW)
        for name in ("a16w16", "a8w8_blockscale")
        for tile in ((128, 96), (128, 160), (128, 192), (64, 160))
        for splits in ((2, 1), (3, 3))
    ],
)
def test_splits_of_such_a_tile_compile_within_the_registers(
    name: str, block_m: int, columns: int, splits: int, cluster: int
) -> None:
    kernel, spec = _kernel(name, 256)
    knobs = {**_knobs(spec, block_m), "BLOCK_SIZE_N": columns, "NUM_KSPLIT": splits, "CLUSTER_SIZE": cluster}
    knobs = kernel.normalise(spec, knobs, SM_90)
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    *others, build = kernel.builds(spec, knobs, SM_90)
    facts = compile_build(build, SM_90)
    assert facts.spills is not None
    # Triton 3.9; 3.6 none.
    assert facts.spills <= (8 if name == "a8w8_blockscale" and columns == 96 else 0)
    for other in others:  # registers of the scale warps reduce those of the math warpgroups
        assert (compile_build(other, SM_90).spills or 0) <= 16


NARROW = [
    (128, 80, 8192, 1, 8),
    (64, 160, 8192, 1, 8),
    (128, 80, 1536, 1, 4),  # twelve K blocks: four would be left over
    (128, 80, 8192, 2, 4),
    (128, 96, 8192, 1, 4),
    (128, 64, 8192, 1, 4),
]


def _narrow_builds(block_m: int, columns: int, k: int, splits: int) -> tuple[Build, ...]:
    kernel, spec = _kernel("a8w8_blockscale", 1024)
    knobs = {**_knobs(spec, block_m), "BLOCK_SIZE_N": columns, "NUM_KSPLIT": splits}
    return kernel.builds(replace(spec, k=k), knobs, SM_90)


@pytest.mark.parametrize(("block_m", "columns", "k", "splits", "batch"), NARROW)
def test_narrow_tiles_add_up_as_many_blocks_as_the_registers_allow(
    block_m: int, columns: int, k: int, splits: int, batch: int
) -> None:
    other, build = _narrow_builds(block_m, columns, k, splits)
    assert dict(build.constants)["BATCH"] == batch
    assert dict(other.constants)["BATCH"] == 4  # warps that load the scales hold registers too


@IN_PARTS
@pytest.mark.parametrize(
    ("block_m", "columns", "k", "splits"),
    [pytest.param(*case[:4], marks=SLOW) for case in NARROW],
)
def test_narrow_tiles_do_not_spill(block_m: int, columns: int, k: int, splits: int) -> None:
    other, build = _narrow_builds(block_m, columns, k, splits)
    assert compile_build(build, SM_90).spills == 0
    assert (compile_build(other, SM_90).spills or 0) <= 16


@IN_PARTS
@pytest.mark.parametrize(
    ("name", "columns", "why"),
    [
        ("a16w16", 72, "no multiple of 16 columns"),
        ("a16w16", 240, "16 to 224 fit"),
        ("a8w8_blockscale", 176, "may span three scale blocks"),
        ("a8w8_blockscale", 208, "16 to 192 fit"),
        ("a8w8_bpreshuffle", 96, "the layout of this weight"),
    ],
)
def test_columns_that_no_instruction_or_register_has(name: str, columns: int, why: str) -> None:
    kernel, spec = _kernel(name, 256)
    assert why in str(kernel.unsupported_reason(spec, {**_knobs(spec, 128), "BLOCK_SIZE_N": columns}, SM_90))
    assert kernel.builds(spec, _knobs(spec, 128), SM_90)[0].boxes == ()


@IN_PARTS
@pytest.mark.parametrize(("columns", "loads"), few([*itertools.product((96, 112, 144, 160, 192), LOADS)], 9))
def test_turns_have_barriers_of_their_own(columns: int, loads: str) -> None:
    """Triton, which does not know of them, uses other barriers; each warpgroup waits for the other's arrival."""
    kernel, spec = _kernel("a8w8_blockscale", 256)
    build = _build_of(kernel, spec, {**_knobs(spec, 128), "BLOCK_SIZE_N": columns}, loads)
    _check_turns(compile_kernel(build, SM_90).asm["ptx"], columns)


def _check_turns(ptx: str, columns: int) -> None:
    ours = re.findall(r"bar\.(sync|arrive) (14|15), 256;", ptx)
    given = {(does, turn): ours.count((does, turn)) for does in ("sync", "arrive") for turn in ("14", "15")}
    assert given[("sync", "14")] == given[("arrive", "14")] == (given[("sync", "15")] + 1 if columns > 96 else 0)
    assert given[("sync", "15")] == given[("arrive", "15")]
    everyone = [int(number) for number in re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\s+(\d+)", ptx)]
    assert sum(number >= 14 for number in everyone) == len(ours)
    assert 1 in everyone  # Triton's own barriers are found


def test_host_and_kernel_agree_on_the_width_of_a_part() -> None:
    """Both have the rule, as a kernel's source hash does not cover host functions."""
    for columns in (*range(16, 257, 16), 32, 64, 128, 256):
        assert accumulator_parts(columns) == columns // accumulator_width(columns)


WAVES: list[tuple[int, int, int, bool, int]] = [
    # rows, columns, slots, own pace, columns of a part
    (256, 128, 4, False, 64),
    (256, 112, 4, False, 16),
    (256, 96, 4, False, 32),
    (256, 64, 5, False, 32),
    (128, 128, 6, True, 64),
    (128, 144, 6, True, 16),
    (128, 160, 5, True, 32),
    (128, 192, 4, True, 64),
    (128, 192, 5, True, 64),
]


TWO_IN_FLIGHT = [(64, 8), (96, 7), (112, 6), (128, 5)]
"""Columns and slots of tiles of 128 rows."""


def _wave_knobs(rows: int, columns: int, slots: int, own_pace: bool, constant: bool = False) -> Knobs:
    sides = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    knobs: Knobs = {"kernel_type": "warp_specialised", **sides, "NUM_KSPLIT": 1, "num_stages": slots}
    return {**knobs, **({"OWN_PACE": True} if own_pace else {}), **({"CONSTANT_NK": True} if constant else {})}


@pytest.mark.slow
@IN_PARTS
@pytest.mark.parametrize(
    ("tile", "blocks", "reading"),
    few([(list(tile), *way) for tile in WAVES for way in ((64, "panels"), (64, "copied"), (63, "strided"))], 0, 19),
    ids=str,
)
def test_waves_of_a_tile_compile_within_the_registers(tile: list[Any], blocks: int, reading: str) -> None:
    """`panels` and `strided`: row-major scales, with K blocks a multiple of four or not."""
    kernel, spec = _kernel("a8w8_blockscale", 1024)
    spec = replace(spec, k=128 * blocks)
    knobs = kernel.normalise(spec, _wave_knobs(*tile[:4]), SM_90)
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    assert kernel.boxes(spec, knobs)["w"][1][0] == 8  # a buffer's rows; the launch sets the real box
    assert kernel.boxes(spec, knobs)["out"][1][1] == tile[4]
    assert wave_part_columns(tile[1]) == tile[4]  # the kernel's rule
    builds = [build for build in kernel.builds(spec, knobs, SM_90) if ("READING", reading) in build.constants]
    assert len(builds) == 1 + has_halves(knobs)
    for build in builds:
        assert build.boxes == (("w", (tile[1], 128)),)
        facts, ptx = compile_build(build, SM_90), compile_kernel(build, SM_90).asm["ptx"]
        # Two warps that load scales one by one take registers from a warpgroup with two waves, a row of panels too
        # (Triton 3.9: 14 and 2 bytes).
        assert facts.spills is not None
        most = {"strided": 16, "panels": 2}.get(reading, 0)
        assert facts.spills <= (most if tile[0] == 256 else 0)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= hopper_shared_bytes(knobs)
        assert "@p trap" in ptx  # the check of the rings' address
        # Of two warpgroups each part is copied once, and once more by a store warp if all parts are staged.
        parts = tile[0] // 128 * tile[1] // tile[4]
        copies = 2 * parts * (2 if stage_buffers(knobs) == parts else 1)
        assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", ptx)) == copies
        # The panel warp's threads copy 16 bytes each.
        assert len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)) == (tile[0] // 32 if reading == "panels" else 0)
        assert "256;" not in "".join(re.findall(r"bar\.(?:sync|arrive).*", ptx))  # no turns


@pytest.mark.parametrize(
    ("m", "n", "stages", "more", "buffers"),
    [
        (128, 96, 7, {}, 3),  # all three parts
        (128, 80, 7, {}, 5),
        (128, 80, 8, {}, 3),  # room for three of five: two rounds
        (128, 192, 5, {}, 1),  # no room
        (128, 128, 5, {}, 1),  # one part
        (128, 96, 7, {"NUM_KSPLIT": 2}, 1),  # splits are staged part by part
        (64, 96, 7, {"ONE_WARPGROUP": True}, 3),
        (64, 48, 12, {"ONE_WARPGROUP": True, "CTAS_PER_SM": 1}, 3),
        (64, 48, 7, {"ONE_WARPGROUP": True, "CTAS_PER_SM": 2}, 3),  # in half of the memory
    ],
)
def test_parts_of_a_tile_are_staged_together_where_there_is_room(
    m: int, n: int, stages: int, more: Knobs, buffers: int
) -> None:
    knobs = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "num_stages": stages, "NUM_KSPLIT": 1, **more}
    assert stage_buffers(knobs) == buffers
    assert hopper_shared_bytes(knobs) <= (SM_90.shared_bytes + 1024) // int(str(more.get("CTAS_PER_SM", 1))) - 1024


@IN_PARTS
@pytest.mark.parametrize("columns", [80, 96])
def test_the_parts_of_a_tile_are_copied_after_one_wait(columns: int) -> None:
    kernel, spec = _kernel("a8w8_blockscale", 512)
    knobs = kernel.normalise(spec, _wave_knobs(128, columns, 7, False), SM_90)
    for build in kernel.builds(spec, knobs, SM_90):
        assert ("BUFFERS", stage_buffers(knobs)) in build.constants
        facts, ptx = compile_build(build, SM_90), compile_kernel(build, SM_90).asm["ptx"]
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= hopper_shared_bytes(knobs)
        assert facts.spills == 0
        copies = re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", ptx)
        assert len(copies) == 2 * columns // (columns & -columns)
        # All parts are in one round: each warpgroup waits before it and, for the last copies, at the end.
        assert len(re.findall(r"cp\.async\.bulk\.wait_group\.read", ptx)) == 2 * 2


@pytest.mark.parametrize(
    ("name", "m", "knobs", "why"),
    [
        ("a8w8_blockscale", 255, _wave_knobs(256, 128, 4, False), "no copy of x is partial"),
        ("a8w8_blockscale", 512, {**_wave_knobs(256, 128, 4, False), "NUM_KSPLIT": 3}, "not split along K"),
        ("a8w8_blockscale", 512, {**_wave_knobs(128, 160, 5, True), "NUM_KSPLIT": 3}, "not split along K"),
        ("a8w8_blockscale", 512, _wave_knobs(256, 160, 3, False), "32 to 128 by 16 fit"),
        ("a8w8_blockscale", 512, _wave_knobs(256, 16, 4, False), "at least 32 columns"),
        ("a8w8_blockscale", 512, _wave_knobs(128, 16, 4, True), "at least 32 columns"),
        ("a8w8_blockscale", 512, {**_wave_knobs(128, 32, 4, True), "CTAS_PER_SM": 2}, "one program"),
        ("a8w8_blockscale", 512, _wave_knobs(256, 128, 5, False), "shared memory"),
        ("a8w8_blockscale_bpreshuffle", 512, _wave_knobs(256, 128, 4, False), "only for row-major weights"),
        ("a8w8_blockscale_bpreshuffle", 512, _wave_knobs(128, 128, 4, True), "only for row-major weights"),
        (
            "a8w8_blockscale",
            512,
            {**_wave_knobs(128, 144, 6, True), "TWO_IN_FLIGHT": True},
            "two products of up to 128",
        ),
        ("a8w8", 512, _wave_knobs(256, 128, 4, False), "two warpgroups share 64 or 128"),
    ],
)
def test_waves_that_do_not_fit(name: str, m: int, knobs: Knobs, why: str) -> None:
    kernel, spec = _kernel(name, m)
    assert why in str(kernel.unsupported_reason(spec, knobs, SM_90))


@pytest.mark.slow
@IN_PARTS
@pytest.mark.parametrize(
    ("columns", "slots", "blocks", "reading"),
    few([(*tile, *way) for tile in TWO_IN_FLIGHT for way in ((64, "panels"), (64, "copied"), (63, "strided"))], 3, 10),
    ids=str,
)
def test_two_products_in_flight_fit_into_the_registers(columns: int, slots: int, blocks: int, reading: str) -> None:
    kernel, spec = _kernel("a8w8_blockscale", 1024)
    spec = replace(spec, k=128 * blocks)
    knobs = kernel.normalise(spec, {**_wave_knobs(128, columns, slots, True), "TWO_IN_FLIGHT": True}, SM_90)
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    (build,) = (build for build in kernel.builds(spec, knobs, SM_90) if ("READING", reading) in build.constants)
    spills = compile_build(build, SM_90).spills
    assert spills is not None
    assert spills <= (4 if reading == "panels" else 0)  # Triton 3.9; 3.6, with which they were timed, spills none
    ptx = compile_kernel(build, SM_90).asm["ptx"]
    assert "wgmma.wait_group.sync.aligned 1;" in ptx


def test_knobs_without_effect_are_dropped() -> None:
    kernel, spec = _kernel("a8w8_blockscale", 512)
    plain = kernel.normalise(spec, _wave_knobs(128, 96, 5, False), SM_90)
    for block_m, columns, own in ((64, 192, True), (128, 64, False), (256, 64, False)):
        given = {**_wave_knobs(block_m, columns, 4, own), "CONSTANT_NK": False, "TWO_IN_FLIGHT": True}
        knobs = kernel.normalise(spec, given, SM_90)
        assert {*BLOCK_SCALED_KNOBS} & knobs.keys() == (
            {"OWN_PACE"} if block_m == 256 else set()
        )  # has no other kernel
    assert kernel.kernel_name(plain).startswith("blockscale_warp_specialised@")
    assert kernel.kernel_name(_wave_knobs(128, 160, 5, True)).startswith("blockscale_waves@")


@pytest.mark.slow
@pytest.mark.parametrize(
    "tile",
    [
        pytest.param((128, 128, 5, False), marks=SLOW),
        pytest.param((256, 128, 4, False), marks=SLOW),
        (64, 64, 6, False),
    ],
    ids=str,
)
def test_constant_sizes_are_no_arguments(tile: tuple[int, int, int, bool]) -> None:
    """N and K are in the binary, so that products with other ones have binaries of their own."""
    kernel, spec = _kernel("a8w8_blockscale", 1024)
    knobs = kernel.normalise(spec, _wave_knobs(*tile, constant=True), SM_90)
    for build in kernel.builds(spec, knobs, SM_90):
        assert (dict(build.constants)["N"], dict(build.constants)["blocks"]) == (1280, 64)
        assert (dict(build.signature)["N"], dict(build.signature)["M"]) == ("constexpr", "i32")
        assert (compile_build(build, SM_90).spills or 0) <= 16
    others = kernel.builds(replace(spec, n=1536), knobs, SM_90)
    assert not set(others) & set(kernel.builds(spec, knobs, SM_90))
    plain = {**knobs, "CONSTANT_NK": False}
    assert len(kernel.builds(spec, plain, SM_90)) == len(others) * (1 + has_halves(plain))  # with N, no halves


@pytest.mark.skipif(views_of_parts(), reason="this Triton compiles tiles in parts")
def test_a_triton_without_views_of_parts_of_buffers_has_no_tile_in_parts() -> None:
    kernel, spec = _kernel("a8w8_blockscale", 256)
    assert "views whole buffers only" in str(
        kernel.unsupported_reason(spec, {**_knobs(spec, 128), "BLOCK_SIZE_N": 80}, SM_90)
    )
    assert kernel.unsupported_reason(spec, _knobs(spec, 128), SM_90) is None
