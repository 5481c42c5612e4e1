"""What runs PTX lane by lane: the matrix instruction, faults, and what is no fault."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ptx_lanes import run
from ptx_memory import SHARED_BASE, Fault, Memory, Region

BEGIN = (
    ".reg .pred p; .reg .b32 lane, warp, at, next, base, value, other, v<4>; .reg .b64 from, wide;"
    " and.b32 lane, $1, 31; shr.u32 warp, $1, 5; mov.u32 base, global_smem; mad.lo.u32 at, $1, 16, base;"
    " xor.b32 next, at, 16; mul.wide.u32 from, $1, 16; add.s64 from, from, $2; mov.f32 $0, 0f3F800000;"
)
"""at: 16 bytes of shared memory of this thread; next: of its neighbour; from: of the operand [threads, 16 bytes]."""
COPY = "cp.async.cg.shared.global [at], [from], 16; cp.async.commit_group;"
STORE, LOAD = "st.shared.b32 [at], lane;", "ld.shared.b32 value, [next];"


def run_two_warps(text: str, regions: tuple[Region, ...] = ()) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    memory = Memory()
    operand = memory.place(np.arange(256, dtype=np.uint32).reshape(64, 4))
    return run("{" + BEGIN + text + "}", 1, [np.arange(64), operand], 2, memory, 64 * 16 + 16, regions)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("st.shared.b32 [base], lane;", "two lanes write the same bytes"),
        (STORE + LOAD, "reads what another lane writes"),
        (LOAD + STORE, "writes what another lane reads"),
        (STORE + "st.shared.b32 [next], lane;", "writes what another lane writes"),
        (STORE + "bar.warp.sync -1; xor.b32 at, at, 512; ld.shared.b32 value, [at];", "writes what another lane reads"),
        (
            "ld.shared.b32 value, [base]; bar.warp.sync -1; setp.eq.u32 p, $1, 32; @p st.shared.b32 [base], lane;",
            "reads",
        ),
        (COPY + "ld.shared.b32 value, [at];", "reads what a copy still writes"),
        (COPY + "cp.async.wait_group 1; ld.shared.b32 value, [at];", "reads what a copy still writes"),
        (COPY + STORE, "writes what a copy still writes"),
        (COPY + COPY, "writes what a copy still writes"),
        (COPY + "cp.async.wait_group 0;" + LOAD, "reads what another lane writes"),
        (COPY, "never waited for"),
        ("ld.shared.b32 value, [other];", "an address depends on what was never written"),
        ("ld.shared.b32 at, [at]; ld.shared.b32 value, [at];", "an address depends on what was never written"),
        ("@p mov.b32 value, 0;", "the guard depends on what was never written"),
        ("ld.shared.b32 value, [at + 2];", "no multiple of 4"),
        ("ld.shared.v4.b32 {v0, v1, v2, v3}, [at + 8];", "no multiple of 16"),
        ("ld.shared.b32 value, [at + 1024];", "outside of memory"),
        ("ld.shared.b32 value, [lane];", "no multiple of 4"),
        ("ld.global.v4.b32 {v0, v1, v2, v3}, [from + 16];", "outside of an operand"),
        ("mov.b64 wide, 0; ld.global.b32 value, [wide];", "outside of memory"),
        ("setp.lt.s32 p, lane, 9; @p bra.uni end; end:", "not all lanes"),
        ("setp.lt.s32 p, lane, 9; @p bar.warp.sync -1;", "not all lanes"),
        ("again: bra.uni again;", "no end"),
        ("setp.eq.u32 p, warp, 0; @p bar.sync 0;", "some warps end"),
    ],
)
def test_a_fault_names_what_is_wrong(text: str, fault: str) -> None:
    with pytest.raises(Fault, match=fault):
        run_two_warps(text)


def test_a_fault_names_the_warp_and_the_instruction() -> None:
    with pytest.raises(Fault, match=r"warp 1: @p st\.shared\.b32 \[at\], lane: writes outside of the warp's regions"):
        run_two_warps("setp.eq.u32 p, $1, 40; @p" + STORE.replace("st", " st", 1), (Region(0, 128),))


@pytest.mark.parametrize(
    "text",
    [
        STORE + "bar.warp.sync -1;" + LOAD + "bar.warp.sync -1;" + STORE,
        STORE + "bar.sync 0; xor.b32 at, at, 512; ld.shared.b32 value, [at];",
        COPY + "cp.async.wait_group 0; bar.warp.sync -1;" + LOAD,
        COPY + "cp.async.wait_group 0; ld.shared.b32 value, [at];",
        COPY + "cp.async.commit_group; cp.async.wait_group 1; ld.shared.b32 value, [at];",
        "setp.eq.u32 p, warp, 0; @p bra.uni end; bar.warp.sync -1; end:",
        "setp.lt.s32 p, lane, 32; @!p bra.uni end; mov.b32 value, 0; mov.f32 $0, value; end:",
    ],
)
def test_what_barriers_order_is_no_fault(text: str) -> None:
    _, defined = run_two_warps(text, (Region(0, 512),))
    assert defined.all()


def test_undefined_values_are_flagged_in_the_lanes_that_depend_on_them() -> None:
    text = "setp.lt.s32 p, lane, 4; @p mov.b32 value, 0; shfl.sync.bfly.b32 value, value, 8, 31, -1; mov.f32 $0, value;"
    _, defined = run_two_warps(text)
    assert np.flatnonzero(defined).tolist() == [8, 9, 10, 11, 40, 41, 42, 43]


def test_copies_and_offsets() -> None:
    assert SHARED_BASE > 0
    values, _ = run_two_warps(COPY + "cp.async.wait_group 0; ld.shared.b32 value, [at + 8]; mov.b32 $0, value;")
    assert values.view(np.uint32)[0].tolist() == [4 * thread + 2 for thread in range(64)]


def test_an_unknown_instruction_is_no_fault_of_the_text() -> None:
    with pytest.raises(NotImplementedError, match="ex2"):
        run_two_warps("ex2.approx.f32 $0, $0;")


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("undefined", [False, True])
def test_the_matrix_instruction(kind: str, dtype: torch.dtype, undefined: bool) -> None:
    """Fragments as the PTX manual has them: a of 16 by 16, b of 16 by 8, the accumulator also the output."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, columns, generator=generator).to(dtype) for columns in (16, 8))
    a_bits, b_bits = (each.view(torch.int16).numpy() for each in (a, b))
    fragments = np.zeros((32, 12), np.int16)
    for lane in range(32):
        group, part = lane // 4, lane % 4
        for i in range(8):
            row = group + (8 if i in (2, 3, 6, 7) else 0)
            fragments[lane, i] = a_bits[row, part * 2 + i % 2 + (8 if i >= 4 else 0)]
        for i in range(4):
            fragments[lane, 8 + i] = b_bits[part * 2 + i % 2 + (8 if i >= 2 else 0), group]
    memory = Memory()
    operand = memory.place(fragments, 32)
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{d0, d1, d2, d3}}, {{a0, a1, a2, a3}}, {{b0, b1}},"
    text = (
        ".reg .b64 from; .reg .b32 a<4>, b<2>; .reg .f32 zero, d<4>; .reg .pred p; mov.f32 zero, 0f00000000;"
        " mul.wide.u32 from, $4, 32; add.s64 from, from, $5; ld.global.v4.b32 {a0, a1, a2, a3}, [from];"
        f" setp.ne.u32 p, $4, {9 if undefined else 99}; @p ld.global.v2.b32 {{b0, b1}}, [from + 16];"
        f" {mma} {{zero, zero, zero, zero}}; {mma} {{d0, d1, d2, d3}};"
        + " ".join(f"mov.f32 ${i}, d{i};" for i in range(4))
    )
    values, defined = run(text, 4, [np.arange(32), operand], 1, memory, 0)
    expected = 2 * (a.double() @ b.double()).numpy()
    for (i, lane), value in np.ndenumerate(values):
        row, column = lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + i % 2
        assert defined[i, lane] == (not undefined or column != 9 // 4)
        assert not defined[i, lane] or value == pytest.approx(expected[row, column], rel=1e-5, abs=1e-5)
