"""The loader of the kernels at own pace: no fence before the copies of a slot, the barriers and bytes of each slot."""

import inspect
import re
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from gemmpipe.core.device import arch_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import compile_kernel
from gemmpipe.templates.hopper import own_pace, own_pace_loader, own_pace_memory, pipeline

SM_90 = arch_device("sm_90")
ONE = {"ONE_WARPGROUP": True}
TILES = [(64, 64, 8, ONE), (64, 64, 8, {**ONE, "EARLY_COPIES": True})]
TILES += [(128, 96, 7, {}), (128, 144, 6, {}), (256, 128, 3, {})]


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
        assert ptx.count("expect_tx") == (2 if knobs.get("EARLY_COPIES") else 1)
        for after in ptx.split("expect_tx")[1:]:
            loop = after[: after.index("bra")]
            assert "fence" not in loop, reading
            assert loop.count("cp.async.bulk.tensor") == (3 if reading == "copied" else 2)


@pytest.mark.parametrize(("reading", "fillers"), [("copied", 1), ("fours", 2)])
def test_the_first_copies_wait_for_no_other_role(reading: str, fillers: int) -> None:
    early, late = (_ptx(64, 64, 64, 8, {**ONE, "EARLY_COPIES": value})[reading] for value in (True, False))
    copy = "cp.async.bulk.tensor.2d.shared"
    begin, copied = early.index(own_pace_memory._init_full_asm(64, 8, fillers)[40:-40]), early.index(copy)
    assert begin < copied
    assert reading != "copied" or "try_wait" not in early[begin:copied]  # else the scale warps are between them
    assert (early.count(copy), late.count(copy)) == (4, 2)
    for ptx, arrivals in ((early, 2), (late, 1)):
        (ready, count) = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], (\d+);", ptx)[0]
        assert int(count) == arrivals, ready


@pytest.mark.parametrize(("block_m", "stages", "fillers"), [(64, 12, 1), (64, 8, 2), (128, 7, 1)])
def test_each_barrier_is_initialised_once(block_m: int, stages: int, fillers: int) -> None:
    def inits(text: str) -> list[str]:
        return re.findall(r"mbarrier\.init\S+ (\[at \+ \d+\], \d+);", text)

    whole = inits(own_pace_memory._init_asm(block_m, stages, fillers, True))
    rest, full = (
        inits(own_pace_memory._init_asm(block_m, stages, fillers, False)),
        inits(own_pace_memory._init_full_asm(block_m, stages, fillers)),
    )
    *_, end = own_pace_memory._init_full_asm(block_m, stages, fillers).split("others: ")
    assert end.startswith("fence.mbarrier_init.release.cluster; bar.warp.sync -1;")  # of all lanes, after the branch
    assert len(full) == stages
    assert sorted(rest + full) == sorted(whole)
    assert len(set(whole)) == len(whole)


@pytest.mark.parametrize(("block_m", "stages"), [(64, 12), (128, 7), (256, 3)])
def test_the_announced_barriers_are_those_of_own_pace_memory(block_m: int, stages: int) -> None:
    first = stages * block_m * 128 + own_pace_memory.scale_lines(block_m, stages) * own_pace_memory.line_bytes()
    text = own_pace_loader._begin_slot_asm(block_m, stages)
    waited, announced = re.findall(r"\[at \+ (\d+)\]", text)
    assert (int(announced), int(waited)) == (first, first + own_pace_memory.line_bytes())
    assert f"[at + {first}], " in own_pace_memory._init_asm(block_m, stages, 1, True)
    assert re.findall(r"\[at \+ (\d+)\], \$2;", own_pace_loader._announce_asm(block_m, stages)) == [announced]
    assert "mad.lo.u32 at, $1, 8, at;" in text
    assert re.search(r"try_wait\S+ p, \[at \+ \d+\], \$2; @!p bra\.uni waiting;", text)
    assert re.search(r"setp\.eq\.u32 p, lane, 0; @p mbarrier\.arrive\.expect_tx\S+ _, \[at \+ \d+\], \$3;", text)


@pytest.mark.parametrize(("block_m", "columns", "two"), [(64, 64, True), (128, 96, True), (128, 192, False)])
def test_slots_are_tested_without_waiting_and_then_waited_for(block_m: int, columns: int, two: bool) -> None:
    text = own_pace.loop_asm(columns, 1, block_m, 4, 128, 128, False, False, two)
    tests, waits = text.count("@more mbarrier.test_wait"), text.count("bra.uni wait_")
    assert tests > 0
    assert waits >= tests  # a slot that was not full is waited for


class _Box:
    """A buffer of x: rows of 128 bytes."""

    def __init__(self, rows: int) -> None:
        self.shape, self.bytes = (rows, 128), rows * 128

    def slice(self, _first: int, rows: int) -> "_Box":
        return _Box(rows)


def _loaded(m: int, box: int, tile: tuple[int, int, int], scaled: bool, early: bool, tiles: int = 3) -> list[Any]:
    """What the loader does, run as Python: (instructions, operands ...), (barrier, bytes) ...

    It is program 1 of 2; its tiles are 1, 3, ... of 7 K blocks each, from the tile's number on.
    """
    (block_m, columns, stages), done, copied = tile, list[Any](), list[int]()
    buffers = {
        "x": _Box(block_m),
        "w": SimpleNamespace(bytes=columns * 128),
        "scales": SimpleNamespace(bytes=4 * block_m),
    }

    def slots(name: str, shape: tuple[int, ...]) -> SimpleNamespace:
        return SimpleNamespace(shape=shape, index=lambda slot: buffers.get(name, (name, slot)))

    def copy(_operand: object, _at: object, barrier: object, place: Any, pred: bool = True) -> None:
        done.extend([(barrier, place.bytes)] if pred else [])

    def load_w(w: object, ring: Any, slot: int, _column: int, k: int, barrier: object, _columns: int) -> None:
        copied.append(k // 128)
        copy(w, None, barrier, ring.w.index(slot))

    def nothing(*_arguments: object) -> None:
        pass

    language = {
        "minimum": min,
        "maximum": max,
        "cdiv": lambda a, b: -(-a // b),
        "constexpr": int,
        "static_range": range,
    }
    language |= {"program_id": lambda _axis: 1, "int32": None, "where": lambda given, a, b: a if given else b}
    language |= {"inline_asm_elementwise": lambda text, _as, given, **_more: done.append((text, *given))}
    names: dict[str, Any] = {"gl": SimpleNamespace(**language), "mbarrier": SimpleNamespace(wait=nothing)}
    names |= {"tma_load": copy, "load_w": load_w, "gdc_launch_dependents": nothing}
    names |= {"gdc_wait": lambda row: (done.append(("wait",)), row)[1]}
    names |= {"init_full_barriers": lambda *_ring: done.append(("init",))}
    names |= {"cluster_arrive": nothing, "work_tile_count": lambda _work: 2 * tiles + (tiles > 0)}
    names |= {"_begin_slot_asm": lambda *_tile: "begin", "_announce_asm": lambda *_tile: "announce"}
    names |= {"tile_coord": lambda _work, tile, *_rest: SimpleNamespace(row=0, column=0, begin=tile, end=tile + 7)}
    ours = (getattr(own_pace_loader, name) for name in ("_slot_bytes", "_copy", "_first_copies", "loader_warp"))
    for function in (pipeline.advance, pipeline.load_x, *ours):
        source = textwrap.dedent(inspect.getsource(function.fn))
        exec(source.removeprefix("@gluon.jit\n"), names)
    ring = {"x": slots("x", (stages, block_m, 128)), "w": slots("w", ()), "full": slots("full", ()), "ready": None}
    ring["scales"] = slots("scales", (stages + 5, block_m)) if scaled else None
    fp8 = SimpleNamespace(primitive_bitwidth=8)
    x, w = SimpleNamespace(block_type=SimpleNamespace(shape=(box, 128)), dtype=fp8), SimpleNamespace(dtype=fp8)
    work = SimpleNamespace(M=m, programs=2)
    names["loader_warp"](x, w, None, 1, SimpleNamespace(**ring), work, columns, stages, "none", early)
    assert copied == [block for tile in range(1, 2 * tiles + 1, 2) for block in range(tile, tile + 7)]
    assert done[: early + 1] == [("init",)] * early + [("wait",)]
    assert done.count(("init",)) == early
    return [each for each in done if each[0] not in ("init", "wait")]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("m", "box", "tile"),
    [(m, 16, (64, 96, 10)) for m in (1, 15, 16, 17, 48, 63)]
    + [(m, rows, (rows, 96, 7)) for m in (64, 65, 130, 1000) for rows in (64, 128, 256)]
    + [(100, 16, (128, 96, 7)), (64, 64, (64, 64, 6))],
)
def test_a_slot_is_full_after_the_bytes_that_are_copied_into_it(
    m: int, box: int, tile: tuple[int, int, int], scaled: bool, early: bool
) -> None:
    done, stages = _loaded(m, box, tile, scaled, early), tile[2]
    first = min(stages, 7) if early else 0  # of the first tile's K blocks
    for use in range(21):
        if use < first:
            kind, slot, announced = done.pop(0)
            assert (kind, slot) == ("announce", use)
        else:
            kind, slot, phase, announced = done.pop(0)
            assert (kind, slot, phase) == ("begin", use % stages, 1 - use // stages % 2)
        copied = 0
        while done and done[0][0] not in ("begin", "announce"):
            barrier, size = done.pop(0)
            assert barrier == ("full", use % stages)
            copied += size
        assert copied == announced
    assert not done


def test_a_program_without_a_work_tile_copies_nothing() -> None:
    assert _loaded(64, 64, (64, 64, 8), True, True, 0) == []
