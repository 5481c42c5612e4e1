"""The streamed kernels without a GPU: constraints, compiled code, the PTX, their place in the spaces."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.data import Candidate, Scalar
from gemmpipe.core.device import arch_device
from gemmpipe.family import Family, GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import parse_space
from gemmpipe.kernels.linear_fp8_blockscale._few_rows import FusedStreamed
from gemmpipe.launch.build import compile_build, compile_kernel
from gemmpipe.runtime.select import fallback_candidates, usable_candidate
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row
from gemmpipe.templates import streamed_kernel, streamed_rows
from gemmpipe.templates.streamed import Streamed, block_elements, blocks_per_warp, mode, streamed_shared_bytes

Tile = tuple[int, int, int, int]
"""BLOCK_SIZE_M, _N, num_warps, num_stages."""
SM_90 = arch_device("sm_90")
PRODUCT, LINEAR = load_family("a8w8_blockscale"), load_family("linear_fp8_blockscale")
LINEAR_ROW = load_family("linear_fp8_row")
BF16, FP8 = load_family("a16w16"), load_family("a8w8")
MODES = ("fp8_blocks", "bf16_to_fp8", "fp16_to_fp8", "bf16_to_fp8_rows", "fp16_to_fp8_rows", "fp8", "bf16", "fp16")


def case(family: Family, m: int, n: int = 1280, k: int = 8192, gfx: str = "sm_90") -> tuple[Streamed, GemmSpec]:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": n, "K": k}, defaults, gfx, "test"))
    (kernel,) = (each for each in family.implementations if isinstance(each, Streamed))
    return kernel, spec


def knobs_of(tile: Tile) -> dict[str, Scalar]:
    return dict(zip(("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_warps", "num_stages"), tile, strict=True))


def violation(family: Family, tile: Tile, m: int = 1, n: int = 1280, k: int = 8192) -> str | None:
    kernel, spec = case(family, m, n, k)
    return kernel.unsupported_reason(spec, kernel.normalise(spec, knobs_of(tile), SM_90), SM_90)


@pytest.mark.parametrize("family", [PRODUCT, LINEAR, LINEAR_ROW, BF16, FP8], ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("gfx", "k", "tile"),
    [
        ("sm_90", 8192, (1, 16, 16, 3)),
        ("sm_90", 18432, (1, 32, 8, 2)),
        ("sm_90", 1536, (2, 8, 4, 3)),
        ("sm_90", 1024, (8, 32, 8, 1)),
        ("sm_100", 8192, (1, 16, 8, 4)),
        ("sm_90", 3584, (4, 16, 4, 2)),
    ],
)
def test_compiles_to_the_shared_memory_that_is_stated_and_spills_little(
    family: Family, gfx: str, k: int, tile: Tile
) -> None:
    device = arch_device(gfx)
    kernel, spec = case(family, tile[0], k=k, gfx=gfx)
    knobs = kernel.normalise(spec, knobs_of(tile), device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    for build in kernel.builds(spec, knobs, device):
        facts = compile_build(build, device)
        assert facts.shared_bytes == streamed_shared_bytes(spec, knobs)
        assert facts.spills is not None
        assert facts.spills <= 16, "for many rows and columns ptxas keeps to 64 registers, outside the loop"


def test_the_only_allocation_is_all_of_the_shared_memory() -> None:
    """The PTX counts from the beginning of shared memory: nothing else may be there."""
    for family in (PRODUCT, LINEAR, LINEAR_ROW, BF16, FP8):
        kernel, spec = case(family, 2)
        knobs = kernel.normalise(spec, knobs_of((2, 16, 8, 3)), SM_90)
        for build in kernel.builds(spec, knobs, SM_90):
            compiled = compile_kernel(build, SM_90)
            (shape,) = re.findall(r"ttg\.local_alloc.*memdesc<(\d+)x256xi32", str(compiled.asm["ttgir"]))
            assert int(shape) * 1024 == streamed_shared_bytes(spec, knobs) == compiled.metadata.shared


@pytest.mark.parametrize(
    ("family", "tile", "sizes", "rule"),
    [
        (PRODUCT, (1, 64, 8, 2), {}, "tile"),
        (PRODUCT, (16, 16, 8, 2), {}, "tile"),
        (PRODUCT, (2, 16, 8, 2), {"m": 3}, "rows"),
        (PRODUCT, (1, 16, 8, 2), {"n": 1288}, "sizes"),
        (PRODUCT, (1, 16, 8, 2), {"k": 8192 + 64}, "sizes"),
        (PRODUCT, (1, 16, 2, 2), {"k": 18432}, "blocks"),
        (PRODUCT, (8, 32, 8, 4), {"k": 18432}, "shared memory"),
        (PRODUCT, (1, 16, 64, 2), {}, "threads"),
        (PRODUCT, (1, 24, 8, 2), {}, "power of two"),
        (LINEAR, (4, 16, 4, 2), {"k": 16384}, "instructions"),
        (BF16, (8, 16, 2, 2), {"k": 8192}, "instructions"),
        (BF16, (1, 16, 8, 2), {"k": 8192 + 32}, "sizes"),
        (PRODUCT, (1, 16, 0, 2), {}, "power of two"),
    ],
)
def test_reasons_name_their_rule(family: Family, tile: Tile, sizes: dict[str, int], rule: str) -> None:
    assert violation(family, (1, 16, 8, 3)) is None
    assert str(violation(family, tile, **sizes)).split(":")[0] == rule


def test_operands_and_devices_that_they_do_not_compute() -> None:
    tile = (1, 16, 8, 3)
    for family in (PRODUCT, LINEAR):
        kernel, spec = case(family, 1)
        knobs = kernel.normalise(spec, knobs_of(tile), SM_90)
        ampere = replace(SM_90, gfx="sm_80")
        for device, rule in ((arch_device("gfx950"), "vendor"), (ampere, "fp8 format")):
            assert str(kernel.unsupported_reason(spec, knobs, device)).split(":")[0] == rule
        other = case(LINEAR if family is PRODUCT else PRODUCT, 1)[1]
        assert str(kernel.unsupported_reason(other, knobs, SM_90)).startswith("operands:")
        assert str(kernel.unsupported_reason(replace(spec, batch=2), knobs, SM_90)).startswith("batch:")
    assert str(FusedStreamed().unsupported_reason(case(FP8, 1)[1], knobs, SM_90)).startswith("operands:")


@pytest.mark.parametrize(
    ("m", "k", "tile", "rule"),
    [
        (1, 8192, (1, 16, 8, 2), None),
        (3, 8192, (4, 16, 8, 2), None),
        (3, 8192, (8, 16, 8, 2), "tile beyond the problem"),
        (1, 256, (1, 16, 4, 1), "warps"),
    ],
)
def test_padding_and_idle_warps_are_dominated(m: int, k: int, tile: Tile, rule: str | None) -> None:
    kernel, spec = case(PRODUCT, m, k=k)
    reason = kernel.dominated_reason(spec, kernel.normalise(spec, knobs_of(tile), SM_90), SM_90)
    assert (reason and reason.split(":")[0]) == rule


@given(st.integers(1, 140), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 12))
def test_a_warp_has_no_more_slots_than_blocks(blocks: int, warps: int, stages: int) -> None:
    kernel, spec = case(PRODUCT, 1, k=128 * blocks)
    knobs = kernel.normalise(spec, knobs_of((1, 16, warps, stages)), SM_90)
    assert knobs["num_stages"] == min(stages, -(-blocks // warps)) == min(stages, blocks_per_warp(spec, knobs))
    assert knobs["BLOCK_SIZE_K"] == 128 * warps
    assert kernel.normalise(spec, knobs, SM_90) == knobs


@pytest.mark.parametrize("family", [PRODUCT, LINEAR, LINEAR_ROW, BF16, FP8], ids=lambda family: family.name)
def test_the_host_counts_the_blocks_of_the_kernel(family: Family) -> None:
    """The host cannot import the kernel's module where Triton is missing, and has the size of a block itself."""
    _, spec = case(family, 1)
    assert block_elements(spec) == streamed_rows.block_elements(mode(spec))
    assert mode(spec) in MODES


def text_of(rows: int, columns: int, warps: int, stages: int, blocks: int, mode: str) -> str:
    return str(streamed_kernel.streamed_asm(rows, columns, warps, stages, blocks, mode, 448.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "columns", "warps", "stages", "blocks"), [
    (1, 16, 8, 3, 7), (1, 8, 16, 2, 4), (2, 32, 4, 1, 3), (8, 16, 2, 4, 1), (4, 32, 8, 2, 2),
])  # fmt: skip
def test_every_part_of_a_block_is_multiplied_once(
    rows: int, columns: int, warps: int, stages: int, blocks: int, mode: str
) -> None:
    text = text_of(rows, columns, warps, stages, blocks, mode)
    groups, halves = max(1, columns // 16), min(2, columns // 8)
    loop = text.split("next:")[1].split("multiplied:")[0]
    products = re.findall(r"mma\.sync\S+ \{(.*?)\}, \{(.*?)\}, \{(.*?)\}, \{(.*?)\};", loop)
    steps = streamed_rows.block_elements(mode) // 16
    assert len(products) == steps * groups, "instructions of 16 elements along K"
    assert Counter(x for _, _, x, _ in products) == {f"x{i}, x{i + 1}": groups for i in range(0, 2 * steps, 2)}
    pattern = r"mov\.b32 \{low, high\}, (w\d+);" if steps == 8 else r"(w\d+)[,}]"
    used = re.findall(pattern, loop if steps == 8 else " ".join(f"{w}}}" for _, w, _, _ in products))
    assert sorted(used) == sorted({f"w{i}" for i in range(8 * groups * halves)})
    sums = [d for d, *_ in products]
    if streamed_rows.scaled_blocks(mode):
        assert [old for *_, old in products] == ["zero, zero, zero, zero"] * 2 * groups + sums[2 * groups :]
    else:
        assert [old for *_, old in products] == sums, "added to those of the blocks before"
    assert loop.count("cp.async.cg") == columns // 4
    assert text.count("cp.async.cg") == (stages + 1) * columns // 4, "the ring is filled once before the loop"
    assert text.count("cp.async.commit_group") == stages + 1
    assert f"cp.async.wait_group {stages - 1};" in loop
    at_once = max(1, 16 // -(-blocks // 2))
    groups_of_rows = -(-rows // at_once) if streamed_rows.scaled_rows(mode) else 0
    assert text.count("bar.sync 0;") == 1 + groups_of_rows, "once at the end, and for the scales of rows"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("blocks", [1, 3, 7, 18])
def test_rows_of_x_are_kept_once_and_nothing_behind_them(mode: str, rows: int, blocks: int) -> None:
    """A thread keeps its part of each block of each row; a block that the warp does not have is left out."""
    text = text_of(rows, 16, 8, 1, blocks, mode)
    kept = [int(at) for at in re.findall(r"@p st\.shared\.v4\.b32 \[x_at \+ (\d+)\]", text)]
    each = 2 if "_to_" in mode else 4
    pieces = 2 if mode.startswith("fp8") else 1
    reads, block = -(-blocks // each), 2 * streamed_rows.block_elements(mode)
    row_bytes = blocks * block + (64 if block == 128 else 16)
    assert kept == [
        row * row_bytes + read * each * block + 16 * piece
        for row in range(rows) for read in range(reads) for piece in range(pieces)
    ]  # fmt: skip
    assert text.count("@p ld.global.v4.b32") == rows * reads
    x, scales, sums, end = streamed_kernel.shared_places(rows, 16, 8, 1, blocks, mode)
    table = 4 * blocks * (1 if rows == 1 else 8) if streamed_rows.scaled_blocks(mode) else 0
    table += 8 * rows if streamed_rows.scaled_rows(mode) else 0
    assert (scales - x, x) == (8 * rows * row_bytes, 8 * 16 * 128)
    assert (sums - scales, end - sums) == (8 * table, 8 * 16 * rows * 4)


@given(st.integers(1, 8), st.sampled_from([8, 16, 32]), st.sampled_from([1, 2, 4, 8, 16]))
def test_the_threads_store_every_element(rows: int, columns: int, warps: int) -> None:
    count = streamed_kernel.sums_per_thread(rows, columns, warps)
    assert (count - 1) * 32 * warps < rows * columns <= count * 32 * warps


@given(st.integers(0, 15), st.integers(0, 7))
def test_copies_and_reads_of_a_slot_agree_and_use_all_banks(row: int, piece: int) -> None:
    """As the PTX: 16 bytes `piece` of a row are copied with halves exchanged in odd rows, and found there again."""
    copied = row * 128 + (piece ^ (row % 2 * 4)) * 16
    part, chunk = piece % 4, piece // 4
    even = row * 128 + part * 16 + row % 2 * 64
    odd = row * 128 + part * 16 + (row % 2 * 64 ^ 64)
    assert copied == (even, odd)[chunk]
    # Eight threads that are served together read two rows: all 32 banks once.
    together = {(lane // 4 * 128 + lane % 4 * 16 + lane // 4 % 2 * 64) // 4 % 32 for lane in range(8)}
    assert len(together) == 8
    assert max(together) - min(together) == 28


@pytest.mark.parametrize("value", [448.0, 240.0, 1.0, 2.0**-126, 0.75])
def test_constants_have_the_bits_of_fp32(value: float) -> None:
    import struct

    assert streamed_rows._hex(value) == f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


@pytest.mark.parametrize("family", [PRODUCT, LINEAR, LINEAR_ROW, BF16, FP8], ids=lambda family: family.name)
@pytest.mark.parametrize(("m", "rows"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, None)])
def test_the_space_has_tiles_with_as_few_rows_as_hold_all_of_x(family: Family, m: int, rows: int | None) -> None:
    kernel, spec = case(family, m)
    path = Path(__file__).parents[2] / "conf" / "space" / f"{family.name}.yaml"
    space = parse_space(yaml.safe_load(path.read_text()), [])
    found = [kernel.normalise(spec, point, SM_90) for point in kernel.configs(spec, SM_90, space)]
    fit = [
        knobs
        for knobs in found
        if not kernel.unsupported_reason(spec, knobs, SM_90) and not kernel.dominated_reason(spec, knobs, SM_90)
    ]
    assert {knobs["BLOCK_SIZE_M"] for knobs in fit} == ({rows} if rows else set())
    assert not rows or {knobs["BLOCK_SIZE_N"] for knobs in fit} == {8, 16, 32}


def test_a_row_is_stored_and_runs_as_it_is(tmp_path: Path) -> None:
    kernel, spec = case(LINEAR, 1)
    knobs = kernel.normalise(spec, knobs_of((1, 16, 16, 3)), SM_90)
    row: Row = {"gfx": "sm_90", "cu_num": 132, "M": 1, "N": 1280, "K": 8192}
    row |= {"dtype": spec.w_dtype, "outdtype": spec.x_dtype, "libtype": kernel.label}
    row |= {"kernelName": kernel.kernel_name(knobs), "config": json.dumps(knobs), "solidx": 0, "splitK": 1}
    row |= {"us": 5.6, "err_ratio": 0.0, "tflops": 3.7, "bw": 1870.0}
    path = tmp_path / LINEAR.csv_name
    path.write_text(store.render([row], LINEAR, ()))
    (found,) = store.read(path, LINEAR)
    assert str(found["kernelName"]).startswith("linear_streamed@")
    assert usable_candidate(LINEAR, found, spec, SM_90).candidate == Candidate.of("fused_streamed", knobs)


@pytest.mark.parametrize("family", [PRODUCT, LINEAR], ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("n", "k", "warps"),
    [(1280, 8192, 16), (4608, 7168, 8), (8192, 3584, 4), (32768, 512, 2), (7168, 256, 2), (7168, 18432, 8)],
)
def test_one_or_two_rows_run_without_measurements(family: Family, n: int, k: int, warps: int) -> None:
    for m in (1, 2):
        kernel, spec = case(family, m, n, k)
        knobs = kernel.default_config(spec, SM_90)
        assert knobs is not None
        assert (knobs["BLOCK_SIZE_M"], knobs["num_warps"]) == (m, warps)
        assert kernel.normalise(spec, knobs, SM_90) == knobs
        assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    assert kernel.default_config(case(family, 3, n, k)[1], SM_90) is None
    assert kernel.default_config(spec, arch_device("gfx950")) is None


def test_a_call_without_a_row_takes_it_first() -> None:
    for family in (PRODUCT, LINEAR, BF16):
        kernel, spec = case(family, 1)
        first = next(iter(fallback_candidates(family, spec, SM_90)))
        assert first.candidate == Candidate.of(kernel.label, kernel.default_config(spec, SM_90) or {})


def test_families_load_without_triton() -> None:
    """Triton is there on Linux alone; a device without it has other backends."""
    families = ["a16w16", "a8w8", "a8w8_blockscale", "linear_fp8_blockscale", "linear_fp8_row"]
    code = "import sys; sys.modules['triton'] = None; from gemmpipe.family import load_family;"
    code += f" print(len([load_family(name) for name in {families}]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout == "5\n", found.stderr


def test_int8_operands_are_left_to_others() -> None:
    defaults = KernelDefaults(dtype="int8", out_dtype=None, bias=None)
    spec = FP8.spec(make_problem(FP8, {"M": 1, "N": 1280, "K": 8192}, defaults, "sm_90", "test"))
    kernel = case(FP8, 1)[0]
    knobs = kernel.normalise(spec, knobs_of((1, 16, 8, 2)), SM_90)
    assert str(kernel.unsupported_reason(spec, knobs, SM_90)).startswith("operands:")


def test_a_row_without_knobs_gets_some() -> None:
    kernel, spec = case(PRODUCT, 3)
    knobs = kernel.knobs_from_row({}, spec, SM_90)
    assert knobs is not None
    assert kernel.unsupported_reason(spec, knobs, SM_90) is None
    assert kernel.knobs_from_row({}, case(PRODUCT, 9)[1], SM_90) is None
