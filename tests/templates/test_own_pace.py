"""The PTX of own_pace.py, read line by line; its results are checked on a GPU (tests/kernels/test_on_gpu.py)."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.templates.hopper import own_pace, own_pace_memory
from gemmpipe.templates.hopper.constraints import _ring_bytes
from gemmpipe.templates.hopper.scale_panels import scale_panels
from gemmpipe.templates.hopper.waves import wave_part_columns

SCALE_BLOCK = 128
WIDTHS = [columns for columns in range(32, 193, 16) if columns <= SCALE_BLOCK + gcd(columns, SCALE_BLOCK)]
TILES = [
    *[(128, columns, stages) for columns, stages in zip(WIDTHS, (8, 8, 8, 8, 7, 7, 6, 6, 5, 4), strict=True)],
    *[(256, columns, 3) for columns in WIDTHS if columns <= 128],
]
FORMS = [*((*tile, False) for tile in TILES), (256, 128, 3, True)]
"""The last one: a work tile may be half of a tile, which has one wave."""
ADDITION = re.compile(r"fma\.rn\.f32 \$(\d+), d(\d+), (\w)(\d), \$(\d+);")


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "bfe.u32": lambda value, first, bits: value >> first & (1 << bits) - 1,
    "and.b32": lambda a, b: a & b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
}


def _text(block_m: int, columns: int, stages: int, in_panels: bool, row: int = 0, halves: bool = False) -> str:
    parts = columns // wave_part_columns(columns)
    return str(own_pace.loop_asm(columns, parts, block_m, stages, row, SCALE_BLOCK, in_panels, halves, False))


def _loops(text: str) -> dict[tuple[int, int], str]:
    """By waves and columns before the edge: a loop, from its label to its branch back."""
    found = re.findall(r"next_(\d+)_(\d+): (.*?) @more bra\.uni next_\1_\2;", text)
    return {(int(waves), int(low)): body for waves, low, body in found}


def _expected(block_m: int, columns: int, halves: bool) -> set[tuple[int, int]]:
    counts = (block_m // 128, 1) if halves else (block_m // 128,)
    return {(waves, low) for waves in counts for low in own_pace.low_columns(columns, SCALE_BLOCK)}


@given(st.sampled_from(WIDTHS), st.integers(0, 200))
def test_there_is_a_loop_for_every_edge_of_a_tile(columns: int, tile: int) -> None:
    first = tile * columns
    edge = (first // SCALE_BLOCK + 1) * SCALE_BLOCK - first
    of_first = sum(column // SCALE_BLOCK == first // SCALE_BLOCK for column in range(first, first + columns))
    assert of_first == min(edge, columns)
    lows = own_pace.low_columns(columns, SCALE_BLOCK)
    assert of_first in lows
    # The loops are tried in this order: the first whose columns the edge does not cut.
    assert next((low for low in lows[:-1] if edge >= low), lows[-1]) == of_first


@pytest.mark.parametrize(("block_m", "columns", "stages", "halves"), FORMS)
@pytest.mark.parametrize("in_panels", [False, True])
def test_every_product_is_added_once_with_the_scales_of_its_row_and_column(
    block_m: int, columns: int, stages: int, in_panels: bool, halves: bool
) -> None:
    """A thread's register i of a product is in column i // 4 * 8 + i % 2 (and two further on for the next thread)."""
    registers = columns // 2
    loops = _loops(_text(block_m, columns, stages, in_panels, halves=halves))
    assert loops.keys() == _expected(block_m, columns, halves)
    for (waves, low), loop in loops.items():
        additions = ADDITION.findall(loop)
        blocks = own_pace.unrolled(columns)
        assert Counter(target for target, *_ in additions) == {str(i): blocks for i in range(waves * registers)}
        for target, product, side, row, again in additions:
            i = int(product)
            assert target == again
            assert int(target) % registers == i
            assert side == ("l" if i // 4 * 8 + i % 2 < low else "h")
            assert int(row) == i // 2 % 2


@pytest.mark.parametrize(("block_m", "columns", "stages", "halves"), FORMS)
@pytest.mark.parametrize("in_panels", [False, True])
def test_a_k_block_waits_multiplies_and_releases_once(
    block_m: int, columns: int, stages: int, in_panels: bool, halves: bool
) -> None:
    text = _text(block_m, columns, stages, in_panels, halves=halves)
    assert "bar.sync" not in text
    assert text.count("@p bra.uni one_wave;") == text.count(" one_wave: ") == int(halves)
    loops, blocks = _loops(text), own_pace.unrolled(columns)
    assert loops.keys() == _expected(block_m, columns, halves)
    for (waves, low), loop in loops.items():
        assert loop.count("@!ready bra.uni wait_") == blocks
        assert loop.count("[freed];") == blocks  # the slot's release
        assert loop.count("mbarrier.arrive") == blocks + in_panels  # and that of a panel
        assert loop.count("@!panel_ready bra.uni wait_") == int(in_panels)
        assert loop.count("wgmma.mma_async") == 4 * loop.count("wgmma.wait_group.sync.aligned 0;") == 4 * waves * blocks
        for i in range(blocks):
            assert text.count(f" wait_{waves}_{low}_{i}: ") == text.count(f" full_{waves}_{low}_{i}: ") == 1
        assert loop.count("ld.shared.f32") == 2 * waves * blocks
    labels = re.findall(r" (\w+):(?= )", text)
    assert len(labels) == len(set(labels))
    assert set(re.findall(r"bra\.uni (\w+);", text)) <= set(labels)


@given(st.sampled_from([*TILES, *((64, columns, stages) for columns in (32, 48, 96) for stages in range(2, 14))]))
def test_scales_and_barriers_lie_between_the_slots(tile: tuple[int, int, int]) -> None:
    block_m, columns, stages = tile
    control, first_w = own_pace_memory.control_bytes(block_m, stages), own_pace_memory.first_row_of_w(block_m, stages)
    slots, lines = stages * block_m * 128, own_pace_memory.scale_lines(block_m, stages)
    # Views in units of a line, of a slot's scales and of a panel reach the end of the slots of x.
    assert slots % own_pace_memory.line_bytes() == slots % (4 * block_m) == slots % (16 * block_m) == 0
    assert lines * own_pace_memory.line_bytes() >= max(4 * stages * block_m, scale_panels() * 16 * block_m)
    assert control % 1024 == 0  # to which w's slots are aligned
    assert control >= (lines + 3) * own_pace_memory.line_bytes()
    assert 8 * stages + 8 * 2 * scale_panels() <= own_pace_memory.line_bytes()
    assert first_w * 128 == slots + control
    knobs = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": columns, "num_stages": stages, "OWN_PACE": True}
    knobs["ONE_WARPGROUP"] = block_m == 64
    assert _ring_bytes(knobs) == slots + control + stages * columns * 128 + 288


def _evaluated(text: str, registers: dict[str, int]) -> dict[str, int]:
    """The registers after integer instructions of PTX."""
    for line in text.split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name:
            continue
        target, *given = (each.strip() for each in rest.split(","))
        values = [registers[each] if each in registers else int(each) for each in given]
        registers[target] = INSTRUCTIONS[name](*values)
    return registers


@pytest.mark.parametrize(("block_m", "columns", "stages"), TILES)
def test_an_iteration_reads_its_k_blocks_of_the_box_that_has_them(block_m: int, columns: int, stages: int) -> None:
    tile = own_pace._Tile(block_m, columns, stages, in_panels=True, two=False)
    each = own_pace.unrolled(columns)
    for iteration in range(4 * scale_panels() * 4 // each):
        panel, place = divmod(iteration * each, 4)
        known = {"iteration": iteration, "first_scales": 1 << 16, "panel_fulls": 1 << 20}
        found = _evaluated(own_pace._panel_addresses(tile), known)
        assert found["scales"] == (1 << 16) + panel % scale_panels() * 16 * block_m + 4 * place
        assert found["panel_full"] == (1 << 20) + 8 * (panel % scale_panels())
        assert found["panel_phase"] == panel // scale_panels() % 2


@pytest.mark.parametrize(("block_m", "columns", "stages"), TILES)
def test_a_warpgroup_reads_the_scales_of_its_rows(block_m: int, columns: int, stages: int) -> None:
    rows = [64 * wave + half for wave in range(block_m // 128) for half in (0, 8)]
    for group, in_panels in itertools.product((0, 1), (False, True)):
        row, size = group * block_m // 2, 16 if in_panels else 4
        text = _text(block_m, columns, stages, in_panels, row=row)
        assert f"add.u32 first_scales, first_scales, {stages * block_m * 128 + size * row};" in text
        offsets = {int(offset) for offset in re.findall(r"ld\.shared\.f32 r\d, \[scales \+ (\d+)\]", text)}
        blocks = range(own_pace.unrolled(columns) if in_panels else 1)
        assert offsets == {size * each + 4 * block for each in rows for block in blocks}


@pytest.mark.parametrize(("block_m", "columns", "stages", "halves"), FORMS)
@pytest.mark.parametrize("in_panels", [False, True])
def test_operands_are_those_of_the_constraints(
    block_m: int, columns: int, stages: int, in_panels: bool, halves: bool
) -> None:
    """A part's registers of each kind of operand, of which the first is read."""
    width = wave_part_columns(columns)
    parts = block_m // 128 * columns // width
    kinds = own_pace._constraints(parts, width, in_panels, halves).split(",")
    numbers = {
        int(number) for number in re.findall(r"\$(\d+)", _text(block_m, columns, stages, in_panels, halves=halves))
    }
    sums = block_m // 128 * columns // 2
    assert kinds[:sums] == ["=&f"] * sums
    assert numbers == {*range(sums), *range(sums, len(kinds), width // 2)}
