"""The sliced kernel that quantises x itself: values, constraints, compiled code, its place in the space."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from interpreter_process import INTERPRETED, Interpreter
from pairwise import SLOW

from gemmpipe.core.data import Candidate, Device, Scalar
from gemmpipe.core.device import arch_device
from gemmpipe.family import GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.kernels.linear_fp8_blockscale._few_rows import FusedSliced, fused_sliced_shared_bytes
from gemmpipe.launch.build import compile_build, compile_kernel
from gemmpipe.runtime.select import usable_candidate
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row

Tile = tuple[int, int, int, int, int]
"""BLOCK_SIZE_M, _N, _K, num_warps, num_stages."""
SM_90 = arch_device("sm_90")
FAMILY = load_family("linear_fp8_blockscale")
KERNEL = next(i for i in FAMILY.implementations if isinstance(i, FusedSliced))


def spec_of(m: int = 8, k: int = 8192, gfx: str = "sm_90", name: str = "linear_fp8_blockscale") -> GemmSpec:
    family, defaults = load_family(name), KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return family.spec(make_problem(family, {"M": m, "N": 1280, "K": k}, defaults, gfx, "test"))


def knobs_of(tile: Tile) -> dict[str, Scalar]:
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
    return dict(zip(names, tile, strict=True))


def shipped_space() -> Space:
    axes = yaml.safe_load((Path(__file__).parents[2] / "conf" / "space" / f"{FAMILY.name}.yaml").read_text())
    entries = axes.pop("when")
    listed = [{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()} for entry in entries]
    return Space(axes={k: tuple(v) for k, v in axes.items()}, when=tuple(listed), pinned=())


def violation(spec: GemmSpec, tile: Tile, device: Device = SM_90) -> str | None:
    return KERNEL.unsupported_reason(spec, KERNEL.normalise(spec, knobs_of(tile), device), device)


@pytest.mark.parametrize(
    ("mnk", "rows", "columns", "warps", "x"),
    [
        ([1, 48, 1408], 1, 16, 4, "bfloat16"),
        ([2, 33, 400], 1, 32, 2, "float16"),
        ([7, 40, 1024], 8, 16, 8, "bfloat16"),
        ([9, 17, 700], 8, 32, 2, "float16"),
        ([16, 70, 640], 16, 64, 4, "bfloat16"),
    ],
)
@INTERPRETED
def test_quantises_to_the_same_bits_as_the_quantiser(
    interpreter: Interpreter, mnk: list[int], rows: int, columns: int, warps: int, x: str
) -> None:
    """Equal results of two launches and of one, both summed in the same order, for random x from 2^-12 to 2^14."""
    case = {"mnk": mnk, "rows": rows, "columns": columns, "warps": warps, "x": x}
    found = interpreter.run("fused_sliced", case)
    assert found["equal"]
    assert found["zeros"] < mnk[0] * mnk[1] / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gfx", "tile"),
    [
        pytest.param("sm_90", (1, 32, 512, 4, 5), marks=SLOW),
        ("sm_90", (8, 16, 1024, 8, 3)),
        pytest.param("sm_90", (16, 64, 256, 2, 3), marks=SLOW),
        ("sm_100", (8, 64, 512, 4, 4)),
        pytest.param("sm_100", (1, 16, 256, 2, 4), marks=SLOW),
        pytest.param("sm_100", (16, 32, 1024, 8, 3), marks=SLOW),
    ],
)
def test_compiles_within_the_estimate_and_spills_nothing(gfx: str, tile: Tile) -> None:
    device, (m, n, _, warps, stages) = arch_device(gfx), tile
    spec = spec_of(m, gfx=gfx)
    knobs = KERNEL.normalise(spec, knobs_of(tile), device)
    assert KERNEL.unsupported_reason(spec, knobs, device) is None
    (build,) = KERNEL.builds(spec, knobs, device)
    facts = compile_build(build, device)
    assert facts.shared_bytes is not None
    assert facts.shared_bytes <= fused_sliced_shared_bytes(m, n, warps, stages)
    assert facts.spills == 0


def compiled(m: int) -> tuple[str, str]:
    """(Triton's IR of the loop along K, PTX from the first to the last matrix instruction), for tiles of `m` rows."""
    spec = spec_of(m)
    (build,) = KERNEL.builds(spec, KERNEL.normalise(spec, knobs_of((m, 16, 512, 4, 3)), SM_90), SM_90)
    asm = compile_kernel(build, SM_90).asm
    loop = str(asm["ttgir"]).split("scf.for", 1)[1].split("scf.yield", 1)[0]
    return loop, "mma.sync".join(str(asm["ptx"]).split("mma.sync")[1:-1])


@pytest.mark.parametrize("m", [8, 16])
def test_x_is_read_and_quantised_in_the_registers_of_the_matrix_instruction(m: int) -> None:
    """Both operands are copied asynchronously; a step exchanges magnitudes and scales within warps, nothing else."""
    loop, multiplied = compiled(m)
    assert len(re.findall(r"async_copy_global_to_local.*bf16", loop)) == 1
    assert len(re.findall(r"async_copy_global_to_local.*f8E4M3FN", loop)) == 1
    assert len(re.findall(r'tt\.reduce"', loop)) == 1
    assert "local_alloc" not in loop
    assert multiplied.count("mma.sync") > 4
    assert "st.shared" not in multiplied


def test_a_single_row_is_quantised_once_by_all_threads() -> None:
    loop, _ = compiled(1)
    assert re.search(r"fp_to_fp.*4x128x1xf8E4M3FN", loop), "quantised before it is repeated for further columns"
    assert len(re.findall(r'tt\.reduce"', loop)) == 1


def test_reads_nothing_before_the_previous_kernel_has_ended() -> None:
    spec = spec_of()
    (build,) = KERNEL.builds(spec, KERNEL.normalise(spec, knobs_of((8, 32, 512, 4, 3)), SM_90), SM_90)
    before, waited = compile_kernel(build, SM_90).asm["ptx"].split("griddepcontrol.wait", 1)
    memory = r"(ld|st|prefetch)\.global|cp\.async\.c[ag]"
    assert not re.search(memory, before)
    assert len(re.findall(memory, waited)) > 10
    assert "griddepcontrol.launch_dependents" in waited


@pytest.mark.parametrize(
    ("tile", "rule"),
    [
        ((2, 16, 512, 4, 3), "tile"),
        ((32, 16, 512, 4, 3), "tile"),
        ((16, 8, 512, 4, 3), "tile"),
        ((8, 256, 512, 4, 3), "tile"),
        ((8, 16, 512, 8, 3), "scale group"),
        ((8, 16, 1024, 4, 3), "scale group"),
        ((16, 128, 512, 4, 3), "registers"),
        ((8, 64, 1024, 8, 5), "shared memory"),
        ((8, 24, 512, 4, 3), "power of two"),
    ],
)
def test_tiles_that_it_does_not_compute(tile: Tile, rule: str) -> None:
    reason = violation(spec_of(), tile)
    assert reason is not None
    assert reason.startswith(f"{rule}:")


def test_operands_and_devices_that_it_does_not_compute() -> None:
    spec, tile = spec_of(), (8, 16, 512, 4, 3)
    assert violation(spec, tile) is None
    assert "row" in str(violation(spec_of(name="linear_fp8_row"), tile))
    assert str(violation(spec_of(name="a8w8_blockscale"), tile)).startswith("operands:")
    assert str(violation(replace(spec, batch=2), tile)).startswith("batch:")
    assert str(violation(spec_of(gfx="gfx950"), tile, arch_device("gfx950"))).startswith("vendor:")
    assert str(violation(replace(spec, w_dtype="float8_e4m3fnuz"), tile)).startswith("fp8 format:")


@pytest.mark.parametrize(("m", "rows"), [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16), (17, None)])
def test_the_space_has_tiles_with_as_few_rows_as_hold_all_of_x(m: int, rows: int | None) -> None:
    spec, space = spec_of(m), shipped_space()
    found = {
        Candidate.of(KERNEL.label, KERNEL.normalise(spec, point, SM_90)) for point in KERNEL.configs(spec, SM_90, space)
    }
    fit = [c.knobs for c in found if KERNEL.unsupported_reason(spec, c.knobs, SM_90) is None]
    assert {knobs["BLOCK_SIZE_M"] for knobs in fit} == ({rows} if rows else set())
    assert len(fit) == (0 if rows is None else 26 if rows == 1 else 25 if rows == 8 else 24)
    assert not [knobs for knobs in fit if KERNEL.dominated_reason(spec, knobs, SM_90)]


def test_other_rows_and_more_rows_do_not_pay_off() -> None:
    tile = knobs_of((8, 16, 512, 4, 3))
    assert str(KERNEL.dominated_reason(spec_of(17), tile, SM_90)).startswith("rows:")
    assert str(KERNEL.dominated_reason(spec_of(1), tile, SM_90)).startswith("tile:")


def test_a_row_is_stored_and_runs_as_it_is(tmp_path: Path) -> None:
    spec = spec_of(8)
    knobs = KERNEL.normalise(spec, knobs_of((8, 32, 1024, 8, 3)), SM_90)
    row: Row = {
        "gfx": "sm_90",
        "cu_num": 132,
        "M": 8,
        "N": 1280,
        "K": 8192,
        "dtype": spec.w_dtype,
        "outdtype": spec.x_dtype,
    }
    row |= {"libtype": KERNEL.label, "kernelName": KERNEL.kernel_name(knobs), "config": json.dumps(knobs)}
    row |= {"solidx": 0, "splitK": 1, "us": 4.5, "err_ratio": 0.0, "tflops": 37.3, "bw": 2400.0}
    path = tmp_path / FAMILY.csv_name
    path.write_text(store.render([row], FAMILY, ()))
    (found,) = store.read(path, FAMILY)
    assert str(found["kernelName"]).startswith("linear_sliced@")
    assert usable_candidate(FAMILY, found, spec, SM_90).candidate == Candidate.of("fused_sliced", knobs)
