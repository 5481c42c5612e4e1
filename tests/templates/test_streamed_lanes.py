"""The PTX of the streamed kernels run lane by lane (ptx_lanes.py): its product, and that mutants are caught."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ptx_lanes import run
from ptx_memory import Memory, Region
from ptx_values import E4M3, e4m3_bits

from gemmpipe.templates.streamed_kernel import shared_places, streamed_asm, sums_per_thread
from gemmpipe.templates.streamed_rows import (
    block_bytes,
    block_elements,
    scale_bytes,
    scaled_blocks,
    scaled_rows,
    x_row_bytes,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MODES = ("fp8_blocks", "bf16_to_fp8", "fp16_to_fp8", "bf16_to_fp8_rows", "fp16_to_fp8_rows", "fp8", "bf16", "fp16")
TINIEST = np.float32(2.0**-126)


@dataclass(frozen=True)
class Case:
    """A program of the kernel; k_blocks: of all warps; mode: see Shape; m: rows of x; special: of SPECIALS, for x."""

    rows: int
    columns: int
    warps: int
    stages: int
    k_blocks: int
    mode: str
    m: int
    m_major: bool = False
    special: str = ""

    @property
    def blocks(self) -> int:
        return -(-self.k_blocks // self.warps)

    @property
    def size(self) -> int:
        """K."""
        return self.k_blocks * int(block_elements(self.mode))

    def text(self) -> str:
        return str(streamed_asm(self.rows, self.columns, self.warps, self.stages, self.blocks, self.mode, 448.0))

    def regions(self) -> list[Region]:
        """What each warp has of shared memory: its ring, its blocks of x, their scales, its sums."""
        x, scales, sums, _ = shared_places(self.rows, self.columns, self.warps, self.stages, self.blocks, self.mode)
        return [
            Region(0, self.stages * self.columns * block_bytes()),
            Region(x, self.rows * x_row_bytes(self.blocks, self.mode)),
            Region(scales, scale_bytes(self.rows, self.blocks, self.mode)),
            Region(sums, self.columns * self.rows * 4),
        ]


@dataclass(frozen=True)
class Operands:
    """x and w as they lie in memory, block scales if they have any, and their values [rows, K blocks, elements]."""

    x: NDArray[Any]
    x_scale: NDArray[np.float32] | None
    x_values: NDArray[np.float64]
    w: NDArray[Any]
    w_scale: NDArray[np.float32] | None
    w_values: NDArray[np.float64]

    def product(self, magnitude: bool = False) -> NDArray[np.float64]:
        """The product in fp64, or that of the magnitudes."""
        x, w = (self.x_values, self.w_values)
        x, w = (np.abs(x), np.abs(w)) if magnitude else (x, w)
        product: NDArray[np.float64] = x.reshape(len(x), -1) @ w.reshape(len(w), -1).T
        return product


def fp8_bytes(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    values = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    return np.where(values & 0x7F == 0x7F, np.uint8(0x7E), values)  # no NaN


def quantised(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """The values [M, K blocks, elements] that are left of x: as the kernel, by the reciprocal of the scale."""
    scale = np.maximum(np.abs(values).max(2, keepdims=True) / np.float32(448), TINIEST)
    kept: NDArray[np.float64] = E4M3[e4m3_bits(values * (np.float32(1) / scale))].astype(np.float64) * scale
    return kept


def greatest(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, :128], x[0, 5] = 65504.0, -65504.0
    return x


def zero_block(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, :128], x[-1, -128:] = 0.0, -0.0
    return x


SPECIALS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "greatest": greatest,
    "zero block": zero_block,
    "zeros": torch.zeros_like,
    "tiny": lambda x: x * 2.0**-120,
    "subnormal": lambda x: x * 0 + 2.0**-24,
    "large": lambda x: x * 2.0**100,
}


def values_of(case: Case, rng: np.random.Generator, rows: int, special: str = "") -> torch.Tensor:
    """Values in 16 bits [rows, K], of another size in each K block."""
    shape = rows, case.k_blocks, int(block_elements(case.mode))
    blocks = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, (*shape[:2], 1))
    wide = SPECIALS[special](torch.from_numpy(blocks.reshape(rows, case.size).astype(np.float32)))
    return wide.to(DTYPES[case.mode.split("_")[0]])


def in_blocks(case: Case, values: NDArray[Any]) -> NDArray[np.float64]:
    return values.astype(np.float64).reshape(len(values), case.k_blocks, -1)


def operands_of(case: Case, seed: int) -> Operands:
    rng = np.random.default_rng(seed)
    if case.mode in DTYPES:
        x, w = values_of(case, rng, case.m, case.special), values_of(case, rng, case.columns)
        kept = [in_blocks(case, each.float().numpy()) for each in (x, w)]
        return Operands(x.view(torch.int16).numpy(), None, kept[0], w.view(torch.int16).numpy(), None, kept[1])
    w8, w_scale = fp8_bytes(rng, case.columns, case.size), None
    w_values = in_blocks(case, E4M3[w8])
    if scaled_blocks(case.mode):
        w_scale = rng.uniform(0.5, 2, case.k_blocks).astype(np.float32)
        w_values *= w_scale[:, None]
    if case.mode.startswith("fp8"):
        x8, x_scale = fp8_bytes(rng, case.m, case.size), None
        x_values = in_blocks(case, E4M3[x8])
        if scaled_blocks(case.mode):
            x_scale = rng.uniform(0.5, 2, (case.m, case.k_blocks)).astype(np.float32)
            x_values *= x_scale[:, :, None]
        return Operands(x8, x_scale, x_values, w8, w_scale, w_values)
    x = values_of(case, rng, case.m, case.special)
    in_scales = (case.m, 1, case.size) if scaled_rows(case.mode) else (case.m, case.k_blocks, -1)
    x_values = quantised(x.float().numpy().reshape(in_scales)).reshape(case.m, case.k_blocks, -1)
    return Operands(x.view(torch.int16).numpy(), None, x_values, w8, w_scale, w_values)


def placed(case: Case, operands: Operands, memory: Memory) -> list[int | NDArray[np.int64]]:
    """The text's operands after the sums; rows are padded, each operand by another number of bytes."""
    x_stride, w_stride = operands.x.nbytes // case.m + 48, operands.w.nbytes // case.columns + 16
    w, x = memory.place(operands.w, w_stride), memory.place(operands.x, x_stride)
    w_scale = 0 if operands.w_scale is None else memory.place(operands.w_scale[None])
    x_scale, scale_row, scale_block = w_scale, 0, 0
    if operands.x_scale is not None and case.m_major:
        scale_row, scale_block = 1, case.m + 3
        x_scale = memory.place(operands.x_scale.T, 4 * scale_block)
    elif operands.x_scale is not None:
        scale_row, scale_block = case.k_blocks + 5, 1
        x_scale = memory.place(operands.x_scale, 4 * scale_row)
    x_elements = x_stride // operands.x.itemsize
    thread = np.arange(32 * case.warps)
    return [thread, w, x, x_scale, w_scale, w_stride, x_elements, scale_row, scale_block, case.m, case.k_blocks]


def check(case: Case, text: str | None = None, seed: int = 0) -> None:
    """Run the text, and compare the sums of the rows of x with the product in fp64."""
    operands, memory = operands_of(case, seed), Memory()
    sums = sums_per_thread(case.rows, case.columns, case.warps)
    size = shared_places(case.rows, case.columns, case.warps, case.stages, case.blocks, case.mode)[3]
    given_values = placed(case, operands, memory)
    values, defined = run(text or case.text(), sums, given_values, case.warps, memory, size, case.regions())
    count = case.m * case.columns
    assert defined.reshape(-1)[:count].all(), "a sum depends on what was never written"
    error = np.abs(values.reshape(-1)[:count].reshape(case.m, -1) - operands.product())
    assert (error <= 1e-5 * operands.product(magnitude=True) + 1e-40).all(), f"off by up to {error.max()}"


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 8, 1, 1, 1, "fp8_blocks", 1),
        Case(1, 16, 4, 3, 14, "fp8_blocks", 1, m_major=True),
        Case(2, 16, 4, 2, 9, "fp8_blocks", 2, m_major=True),
        Case(4, 32, 2, 4, 8, "fp8_blocks", 3),
        Case(8, 8, 8, 1, 5, "fp8_blocks", 5),
        Case(8, 32, 1, 3, 5, "fp8_blocks", 8),
        Case(1, 32, 2, 2, 6, "bf16_to_fp8", 1),
        Case(8, 32, 2, 1, 5, "bf16_to_fp8", 5),
        Case(4, 8, 1, 4, 5, "bf16_to_fp8", 4),
        Case(1, 8, 4, 3, 13, "fp16_to_fp8", 1),
        Case(2, 16, 8, 2, 3, "fp16_to_fp8", 1),
        Case(8, 16, 1, 2, 4, "fp16_to_fp8", 7),
        Case(1, 32, 2, 2, 6, "bf16_to_fp8_rows", 1),
        Case(8, 32, 2, 1, 5, "bf16_to_fp8_rows", 5),
        Case(4, 8, 1, 4, 5, "bf16_to_fp8_rows", 4),
        Case(8, 16, 4, 2, 37, "bf16_to_fp8_rows", 7),
        Case(1, 8, 8, 3, 3, "fp16_to_fp8_rows", 1),
        Case(2, 16, 8, 2, 21, "fp16_to_fp8_rows", 1),
        Case(1, 16, 4, 3, 14, "fp8", 1),
        Case(8, 8, 2, 1, 5, "fp8", 5),
        Case(1, 8, 8, 2, 17, "bf16", 1),
        Case(4, 32, 2, 4, 8, "bf16", 3),
        Case(8, 16, 1, 3, 5, "fp16", 8),
    ],
    ids=str,
)
def test_is_the_product(case: Case) -> None:
    check(case)


@st.composite
def cases(draw: st.DrawFn, blocks: int = 4) -> Case:
    """Cases of up to `blocks` K blocks a warp, and one more."""
    rows, warps = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 2, 4, 8)))
    return Case(
        rows,
        columns=draw(st.sampled_from((8, 16, 32))),
        warps=warps,
        stages=draw(st.integers(1, 4)),
        k_blocks=draw(st.integers(1, blocks * warps + 1)),
        mode=draw(st.sampled_from(MODES)),
        m=draw(st.integers(1, rows)),
        m_major=draw(st.booleans()),
    )


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_is_the_product_of_any_small_case(case: Case, seed: int) -> None:
    check(case, seed=seed)


@pytest.mark.slow
@given(case=cases(blocks=20), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=600)
def test_is_the_product_of_any_case(case: Case, seed: int) -> None:
    check(case, seed=seed)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("special", [name for name in SPECIALS if name])
def test_quantises_special_values(kind: str, special: str) -> None:
    if (kind, special) == ("fp16", "large"):
        pytest.skip("out of fp16's range")
    modes = (f"{kind}_to_fp8", f"{kind}_to_fp8_rows", *((kind,) if special not in ("tiny", "large") else ()))
    for mode in modes:
        check(Case(2, 16, 2, 2, 5, mode, 2, special=special))


FP8, BF16 = Case(2, 16, 4, 2, 11, "fp8_blocks", 1, m_major=True), Case(8, 32, 2, 1, 5, "bf16_to_fp8", 5)
FP16, ONE_ROW = Case(1, 8, 2, 3, 7, "fp16_to_fp8", 1), Case(1, 16, 2, 2, 5, "fp8_blocks", 1)
ROW_ZEROS = Case(1, 8, 1, 1, 1, "bf16_to_fp8_rows", 1, special="zeros")
ZEROS = Case(1, 8, 1, 1, 1, "bf16_to_fp8", 1, special="zeros")
PLAIN = Case(4, 32, 2, 2, 7, "bf16", 3)
ROWS, ROW = Case(8, 16, 4, 2, 37, "bf16_to_fp8_rows", 7), Case(1, 8, 2, 3, 7, "fp16_to_fp8_rows", 1)

MUTANTS: dict[str, tuple[Case, str, str, int | None]] = {
    "no barrier before a block is read": (FP8, r"bar\.warp\.sync -1;", "", 0),
    "no barrier before a slot is filled again": (FP8, r"bar\.warp\.sync -1;", "", 1),
    "no barrier before the sums are added up": (FP8, r"bar\.sync 0;", "", 0),
    "one group of copies more on the way": (FP8, r"wait_group 1;", "wait_group 2;", 0),
    "one group of copies more on the way, one slot": (BF16, r"wait_group 0;", "wait_group 1;", 0),
    "no wait": (FP16, r"cp\.async\.wait_group \d;", "", 0),
    "no group of copies in the loop": (FP8, r"copied: cp\.async\.commit_group;", "copied:", 0),
    "copies beyond K": (FP8, r"@p bra\.uni copied;", "", 0),
    "copies of other blocks": (FP8, r"add\.s64 copy_from, copy_from, 512", "add.s64 copy_from, copy_from, 384", 0),
    "a slot too many": (FP8, r"setp\.eq\.u32 q, to_slot, 2;", "setp.eq.u32 q, to_slot, 3;", 1),
    "slots that are read in another order": (FP16, r"setp\.eq\.u32 q, slot, 3;", "setp.eq.u32 q, slot, 2;", 0),
    "swizzle of the copies": (FP8, r"shl\.b32 at, at, 2;", "shl.b32 at, at, 1;", 0),
    "swizzle of the reads": (FP8, r"shl\.b32 at, at, 6;", "shl.b32 at, at, 5;", 0),
    "no swizzle of the reads": (FP8, r"and\.b32 at, row, 1;", "mov.b32 at, 0;", 0),
    "rings from zero": (FP8, r"mad\.lo\.u32 ring, warp, 4096, base;", "mul.lo.u32 ring, warp, 4096;", 0),
    "rings that overlap": (FP8, r"mad\.lo\.u32 ring, warp, 4096", "mad.lo.u32 ring, warp, 2048", 0),
    "rows of x that overlap": (FP8, r"mad\.lo\.u32 rows, warp, \d+", "mad.lo.u32 rows, warp, 768", 0),
    "x without the 16 bytes between rows": (BF16, r"mad\.lo\.u32 x_at, at, 784", "mad.lo.u32 x_at, at, 768", 0),
    "rows beyond x": (FP8, r"min\.s32 at, at, 1;", "mov.b32 at, 1;", 0),
    "a single row of x is multiplied": (BF16, r"min\.s32 at, at, row;", "mov.b32 at, 0;", 0),
    "strides of x and w exchanged": (Case(2, 16, 4, 2, 11, "fp8_blocks", 2), r"\$7;", "$6;", 0),
    "scales beyond K": (FP8, r"min\.s32 at, at, i;", "", 0),
    "scales of more blocks than a warp has": (FP8, r"within, lane, 3;", "within, lane, 4;", 0),
    "strides of x's scales exchanged": (Case(2, 16, 4, 2, 11, "fp8_blocks", 2), r"\$8;", "$9;", 0),
    "scales of another block": (FP8, r"add\.u32 scale_at, scale_at, 32;", "add.u32 scale_at, scale_at, 0;", 0),
    "scales of a single row by lane": (ONE_ROW, r"mov\.b32 scale_at, scales;", "mov.b32 scale_at, ring;", 0),
    "mask of the magnitude": (BF16, r"0x7fff7fff", "0xffffffff", None),
    "mask of the magnitude's low half": (FP16, r"0x7fff7fff", "0x7fffffff", None),
    "distance of a shuffle": (BF16, r"scale, 8, 31", "scale, 4, 31", 0),
    "last distance of a shuffle": (FP16, r"scale, 1, 31", "scale, 0, 31", 0),
    "order of two fp8 values": (FP16, r"low, value1, value0", "low, value0, value1", 0),
    "mask of a bf16 value": (BF16, r"0xffff0000", "0x7fff0000", 2),
    "no least scale": (ZEROS, r"max\.f32 scale, scale, 0f00800000;", "", 0),
    "greatest fp8 value": (BF16, r"0f43E00000", "0f43000000", 0),
    "w's scale is left out": (FP16, r"mul\.f32 scale, scale, w_scale0;", "", 0),
    "begin of the sums": (FP8, r"\{zero, zero, zero, zero\}", "{d0, d1, d2, d3}", 0),
    "sums of a step begin again": (FP8, r"\{d0, d1, d2, d3\};", "{zero, zero, zero, zero};", 1),
    "order of w in the instruction": (FP8, r"half0, half1, half2, half3\}, \{x", "half0, half2, half1, half3}, {x", 0),
    "order of x in the instruction": (FP8, r"\{x0, x1\}", "{x1, x0}", 0),
    "halves of a block are not added": (FP8, r"add\.f32 d0, d0, d4;", "", 0),
    "a block too many": (FP8, r"setp\.gt\.s32 p, left, 0;", "setp.gt.s32 p, left, -1;", 0),
    "a block too few": (FP8, r"setp\.gt\.s32 p, left, 0;", "setp.gt.s32 p, left, 1;", 0),
    "stride of the sums": (BF16, r"mad\.lo\.u32 at, part, 256, at;", "mad.lo.u32 at, part, 128, at;", 0),
    "sums of rows that are padding": (FP8, r"setp\.lt\.u32 p, part, 1;", "setp.lt.u32 p, part, 2;", 0),
    "16 bits: sums of a block alone": (PLAIN, r"\{d0, d1, d2, d3\};", "{zero, zero, zero, zero};", 0),
    "16 bits: order of x": (PLAIN, r"\{x2, x3\}", "{x3, x2}", 0),
    "16 bits: step of x": (PLAIN, r"add\.u32 x_at, x_at, 128;", "add.u32 x_at, x_at, 256;", 0),
    "rows: no barrier before greatest values are read": (ROWS, r"bar\.sync 0;", "", 0),
    "rows: no barrier in a later group of rows": (ROWS, r"bar\.sync 0;", "", 2),
    "rows: mask of the magnitude": (ROWS, r"0x7fff7fff", "0xffffffff", None),
    "rows: values that are not read": (ROW, r"mov\.b32 loaded\d+, 0;", "", None),
    "rows: a distance of a warp's shuffle": (ROWS, r"scale, 16, 31", "scale, 8, 31", None),
    "rows: a distance of the shuffle over warps": (ROWS, r"2, 31, -1(?=;[^;]+; div)", "1, 31, -1", None),
    "rows: greatest value of the own warp alone": (ROWS, r"and\.b32 at, lane, 3;", "mov.b32 at, warp;", None),
    "rows: greatest value of another row": (ROWS, r"f32 scale, \[at \+ 4\];", "f32 scale, [at];", 0),
    "rows: places of greatest values": (ROWS, r"at, at, 64, largest;", "at, at, 32, largest;", 0),
    "rows: no least scale": (ROW_ZEROS, r"max\.f32 scale, scale, 0f00800000;", "", None),
    "rows: sums are not scaled": (ROWS, r"mul\.f32 total, total, scale;", "", 0),
    "rows: scale of another row of the sums": (ROWS, r"shr\.u32 at, at, 4;", "shr.u32 at, at, 3;", 0),
    "a warp's sums are left out": (FP8, r"add\.f32 total, total, read;", "", 3),
    "a warp's sums twice": (FP8, r"\[at \+ 256\]", "[at + 128]", -1),
}
"""By name: the case, a pattern in its text, what replaces it, and which match of it (None: all)."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    case, pattern, replacement, which = MUTANTS[name]
    text = case.text()
    matches = list(re.finditer(pattern, text))
    mutant = text
    for match in reversed(matches if which is None else [matches[which]]):
        mutant = mutant[: match.start()] + replacement + mutant[match.end() :]
    assert mutant != text
    with pytest.raises(AssertionError):
        check(case, mutant)


@pytest.mark.parametrize("case", sorted({mutant[0] for mutant in MUTANTS.values()}, key=str), ids=str)
def test_what_mutants_are_made_of_is_the_product(case: Case) -> None:
    check(case)
