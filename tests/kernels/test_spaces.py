"""The Triton implementations of both families: knobs, rules, builds, offline compilation."""

import itertools
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pairwise import SLOW, few

from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import shipped
from gemmpipe.family import Family, GemmSpec, Implementation, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space, parse_space
from gemmpipe.kernels.a8w8_blockscale import _gluon
from gemmpipe.launch.build import compile_build, compile_kernel, find_kernel
from gemmpipe.launch.source_hash import source_hash
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store
from gemmpipe.templates.hopper import constraints
from gemmpipe.templates.hopper.constraints import views_of_parts
from gemmpipe.templates.params import BLOCK_SCALED_KNOBS
from gemmpipe.templates.tiled import TiledKernel

ARCHES = ("sm_90", "sm_100", "gfx942", "gfx950")
KNOBS = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 8,
    "NUM_KSPLIT": 1,
    "num_warps": 4,
    "num_stages": 3,
    "waves_per_eu": 2,
    "matrix_instr_nonkdim": 16,
    "kpack": 2,
    "cache_modifier": "",
}
SIDES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")


def spec_of(family: Family, gfx: str, m: int, n: int, k: int, **options: object) -> GemmSpec:
    defaults = KernelDefaults(**{"dtype": None, "out_dtype": None, "bias": None, **options})  # type: ignore[arg-type]
    return family.spec(make_problem(family, {"M": m, "N": n, "K": k}, defaults, gfx, "test"))


def kernel_of(family: Family) -> TiledKernel:
    kernel = family.implementations[0]
    assert isinstance(kernel, TiledKernel)
    return kernel


def shipped_space(name: str) -> Space:
    axes = yaml.safe_load((Path(__file__).parents[2] / "conf" / "space" / f"{name}.yaml").read_text())
    entries = axes.pop("when", [])
    listed = [{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()} for entry in entries]
    return Space(axes={k: tuple(v) for k, v in axes.items()}, when=tuple(listed), pinned=())


@pytest.mark.parametrize(("gfx", "count"), [("sm_90", 1944), ("gfx942", 5832)])
def test_aiters_space_has_its_count(gfx: str, count: int) -> None:
    family, device = load_family("a8w8_blockscale"), arch_device(gfx)
    kernel, spec = kernel_of(family), spec_of(family, gfx, 2048, 4096, 1024)
    points = list(kernel.configs(spec, device, shipped_space("a8w8_blockscale_aiter")))
    assert len(points) == count
    assert len({Candidate.of("triton", kernel.normalise(spec, point, device)) for point in points}) == count


@pytest.mark.parametrize(("m", "least"), [(1, 800), (64, 800), (256, 400)])
def test_default_space_is_as_large_as_the_measured_one(m: int, least: int) -> None:
    family, device = load_family("a8w8_blockscale"), arch_device("sm_90")
    spec = spec_of(family, "sm_90", m, 1280, 8192)
    assert len(list(kernel_of(family).configs(spec, device, shipped_space("a8w8_blockscale")))) >= least


def is_point(
    candidate: Candidate, own: Implementation, spec: GemmSpec, device: Device, space: Space, sides: Sequence[str]
) -> bool:
    """Whether a space has this candidate; points with other `sides` are not normalised."""
    points = (
        point
        for point in own.configs(spec, device, space)
        if all(point[side] == candidate.knobs[side] for side in sides if side in point and side in candidate.knobs)
    )
    return candidate in {Candidate.of(own.label, own.normalise(spec, point, device)) for point in points}


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("name", ["a16w16", "a8w8_blockscale", "fmoe"])
def test_shipped_winners_are_points_of_the_default_space(
    name: str, every: int, h200_tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of a space that removes too much would lose some of them."""
    monkeypatch.setattr(_gluon, "views_of_parts", lambda: True)  # as where the tables come from
    family, space, found = load_family(name), shipped_space(name), 0
    for row in store.read(h200_tables / family.csv_name, family)[::every]:
        candidate, device = candidate_of(str(row["libtype"]), str(row["config"])), arch_device(str(row["gfx"]))
        own = next((i for i in family.implementations if i.label == candidate.backend), None)
        if own is None:
            continue
        spec = family.spec(
            Problem(family=name, key=tuple((column.name, row[column.name]) for column in family.key_columns))
        )
        sides = SIDES[:2] if own.label == "streamed" else SIDES  # its step along K follows from its warps
        assert is_point(candidate, own, spec, device, space, sides), spec
        found += 1
    assert found


@pytest.mark.parametrize("m", [16, 128, 512])
def test_a_triton_without_tiles_at_own_pace_takes_tiles_of_64_rows_without_it(
    m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, device = load_family("a8w8_blockscale"), arch_device("sm_90")
    own = next(each for each in family.implementations if each.label == "gluon")
    spec, space = spec_of(family, "sm_90", m, 7168, 8192), shipped_space("a8w8_blockscale")
    for module in (_gluon, constraints):
        monkeypatch.setattr(module, "views_of_parts", lambda: False)

    def columns(space: Space) -> set[object]:
        points = (own.normalise(spec, point, device) for point in own.configs(spec, device, space))
        left = (point for point in points if own.unsupported_reason(spec, point, device) is None)
        return {point["BLOCK_SIZE_N"] for point in left if point["BLOCK_SIZE_M"] == 64}

    assert {64, 128} <= columns(space)
    assert columns(replace(space, axes={**space.axes, "OWN_PACE": (True,)}, pinned=("OWN_PACE",))) <= {128}


@pytest.mark.parametrize("name", ["a8w8_blockscale", "linear_fp8_blockscale"])
@pytest.mark.parametrize("knobs", [BLOCK_SCALED_KNOBS[:2], BLOCK_SCALED_KNOBS[2:]], ids=str)
def test_a_space_may_have_axes_of_the_block_scaled_kernels_alone(name: str, knobs: tuple[str, ...]) -> None:
    """Two at a time: a space with all of them would have too many points."""
    family, device, plain = load_family(name), arch_device("sm_90"), shipped_space(name)
    spec, further = spec_of(family, "sm_90", 1024, 1280, 8192), dict.fromkeys(knobs, (False, True))
    larger = replace(plain, axes={**plain.axes, **further})
    for kernel in family.implementations:
        if not isinstance(kernel, TiledKernel):
            continue
        found = [
            {Candidate.of(kernel.label, kernel.normalise(spec, point, device)) for point in points}
            for points in (kernel.configs(spec, device, plain), kernel.configs(spec, device, larger))
        ]
        assert found[0] == found[1], kernel.label
    kernel = next(i for i in family.implementations if i.label == "gluon")
    known = {name for point in itertools.islice(kernel.configs(spec, device, larger), 200) for name in point}
    assert set(knobs) <= known & set(kernel.knob_names(spec, device))
    shipped_axes = yaml.safe_load((shipped("conf") / "space" / f"{name}.yaml").read_text())
    assert parse_space({**shipped_axes, "CONSTANT_NK": [False, True]}, ()).axes["CONSTANT_NK"] == (False, True)


@pytest.mark.parametrize("gfx", ["sm_90", "gfx942"])
@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize(
    "name", ["a16w16", "a8w8", "a8w8_blockscale", "a8w8_bpreshuffle", "a8w8_blockscale_bpreshuffle"]
)
def test_a_candidate_has_the_knobs_of_its_kernel_alone(name: str, m: int, gfx: str) -> None:
    """A knob of another kernel would be rejected when the row is looked up, and be written to files for engines."""
    family, device, space = load_family(name), arch_device(gfx), shipped_space(name)
    spec = spec_of(family, gfx, m, 1280, 8192)
    for kernel in family.implementations:
        known = set(kernel.knob_names(spec, device))
        for point in itertools.islice(kernel.configs(spec, device, space), 200):
            assert set(kernel.normalise(spec, point, device)) <= known, kernel.label


def test_one_build_serves_every_m_group_and_number_of_splits() -> None:
    family, device = load_family("a8w8_blockscale"), arch_device("sm_90")
    kernel, builds = kernel_of(family), set()
    for m, n, k, group, splits in ((1, 1280, 8192, 1, 2), (77, 8192, 3584, 8, 4), (16, 7168, 1024, 16, 8)):
        spec = spec_of(family, "sm_90", m, n, k)
        knobs = kernel.normalise(spec, {**KNOBS, "GROUP_SIZE_M": group, "NUM_KSPLIT": splits}, device)
        builds.update(build.id for build in kernel.builds(spec, knobs, device))
    assert len(builds) == 2  # one for each memory order of x's scales


def test_normalises_to_what_runs() -> None:
    family = load_family("a16w16")
    kernel, spec = kernel_of(family), spec_of(family, "sm_90", 64, 1280, 640)
    nvidia = kernel.normalise(spec, {**KNOBS, "NUM_KSPLIT": 8}, arch_device("sm_90"))
    assert "kpack" not in nvidia
    assert nvidia["GROUP_SIZE_M"] == 1
    assert nvidia["NUM_KSPLIT"] == 5  # 10 blocks of K in shares of 2
    assert kernel.normalise(spec, {**KNOBS, "NUM_KSPLIT": 99}, arch_device("sm_90"))["NUM_KSPLIT"] == 10
    assert kernel.normalise(spec, KNOBS, arch_device("gfx942"))["kpack"] == 2
    assert kernel.normalise(spec, KNOBS, arch_device("gfx950"))["kpack"] == 1
    assert kernel.normalise(spec, nvidia, arch_device("sm_90")) == nvidia


@pytest.mark.parametrize(
    ("family", "changes", "rule"),
    [
        ("a8w8_blockscale", {"BLOCK_SIZE_K": 256}, "scale group"),
        ("a8w8_blockscale", {"BLOCK_SIZE_K": 16}, "minimum tile"),
        ("a8w8_blockscale", {"BLOCK_SIZE_N": 256, "num_warps": 2}, "registers"),
        ("a16w16", {"BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128}, "shared memory"),
        ("a16w16", {"BLOCK_SIZE_N": 48}, "power of two"),
        ("a16w16", {"num_stages": 0}, "positive"),
        ("a16w16", {"num_warps": 64}, "threads"),
    ],
)
def test_reasons_name_their_rule(family: str, changes: dict[str, int], rule: str) -> None:
    found = load_family(family)
    kernel, device = kernel_of(found), arch_device("sm_90")
    spec = spec_of(found, "sm_90", 16, 1280, 8192)
    assert kernel.unsupported_reason(spec, kernel.normalise(spec, KNOBS, device), device) is None
    reason = kernel.unsupported_reason(spec, kernel.normalise(spec, {**KNOBS, **changes}, device), device)
    assert reason is not None
    assert reason.split(":")[0] == rule


def test_padding_is_dominated() -> None:
    found, device = load_family("a8w8_blockscale"), arch_device("sm_90")
    kernel, spec = kernel_of(found), spec_of(found, "sm_90", 16, 1280, 8192)
    knobs = kernel.normalise(spec, {**KNOBS, "BLOCK_SIZE_M": 128}, device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    assert str(kernel.dominated_reason(spec, knobs, device)).startswith("tile beyond the problem")
    assert kernel.dominated_reason(spec, kernel.normalise(spec, KNOBS, device), device) is None


def test_is_unsupported_on_a_cpu_and_for_the_other_fp8() -> None:
    family = load_family("a8w8_blockscale")
    kernel, spec = kernel_of(family), spec_of(family, "sm_90", 16, 1280, 8192)
    assert str(kernel.unsupported_reason(spec, KNOBS, cpu_device())).startswith("no GPU")
    assert str(kernel.unsupported_reason(spec, KNOBS, arch_device("gfx942"))).startswith("fp8 format")


def test_an_unknown_axis_is_a_user_error() -> None:
    family, device = load_family("a16w16"), arch_device("sm_90")
    axes = {name: (value,) for name, value in KNOBS.items()}
    spec = spec_of(family, "sm_90", 16, 1280, 8192)
    with pytest.raises(UserError, match=r"space.BLOCKSIZE_M: .*did you mean 'BLOCK_SIZE_M'"):
        kernel_of(family).configs(spec, device, Space(axes={**axes, "BLOCKSIZE_M": (1,)}, when=(), pinned=()))
    del axes["num_warps"]
    with pytest.raises(UserError, match=r"space\.num_warps: missing"):
        kernel_of(family).configs(spec, device, Space(axes=axes, when=(), pinned=()))


def test_contradicting_keys_are_rejected() -> None:
    family = load_family("a16w16")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    sizes = {"M": 1, "N": 16, "K": 16}
    with pytest.raises(UserError, match="bpreshuffle"):
        family.spec(make_problem(family, {**sizes, "bpreshuffle": True}, defaults, "sm_90", "test"))
    with pytest.raises(UserError, match="scaleAB=True"):
        family.spec(make_problem(family, {**sizes, "scaleAB": True}, defaults, "sm_90", "test"))
    with pytest.raises(UserError, match=r"kernel.dtype: 'bflot16'.*did you mean 'bfloat16'"):
        family.key_defaults(replace(defaults, dtype="bflot16"), "sm_90")


def test_builds_and_implementations_travel_between_processes() -> None:
    family, device = load_family("a16w16"), arch_device("sm_90")
    kernel, spec = kernel_of(family), spec_of(family, "sm_90", 16, 1280, 8192)
    (build,) = kernel.builds(spec, kernel.normalise(spec, KNOBS, device), device)
    assert pickle.loads(pickle.dumps(build)) == build
    assert pickle.loads(pickle.dumps(kernel)) == kernel
    assert build.source_hash == source_hash(find_kernel(build.kernel))


@pytest.mark.parametrize(
    ("name", "gfx", "m", "n", "k", "splits", "stages"),
    few(
        [
            (name, gfx, *tile)
            for name in ("a16w16", "a8w8_blockscale")
            for gfx in ARCHES
            for tile in ((16, 32, 128, 4, 3), (64, 64, 64, 1, 2), (16, 256, 32, 1, 1))
        ],
        4,  # sm_100
        18,  # gfx942
    ),
)
def test_compiles_without_a_gpu_within_the_estimate(
    name: str, gfx: str, m: int, n: int, k: int, splits: int, stages: int
) -> None:
    from gemmpipe.templates.constraints import shared_bytes

    family, device = load_family(name), arch_device(gfx)
    kernel, spec = kernel_of(family), spec_of(family, gfx, 64, 1280, 8200, bias=True if name == "a16w16" else None)
    sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}
    knobs = {**KNOBS, **sizes, "NUM_KSPLIT": splits, "num_stages": stages, "cache_modifier": ".cg"}
    knobs = dict(kernel.normalise(spec, knobs, device))
    assert kernel.unsupported_reason(spec, knobs, device) is None
    builds = kernel.builds(spec, knobs, device)
    assert len(builds) == (1 if name == "a16w16" else 2)  # one for each memory order of x's scales
    for build in builds:
        facts = compile_build(build, device)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= shared_bytes(spec, m, n, k, stages, device)
        if gfx.startswith("gfx"):
            assert facts.spills == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "m", "n", "k", "stages", "splits"),
    [
        ("a16w16", 128, 256, 64, 4, 1),
        pytest.param("a8w8_blockscale", 64, 128, 128, 6, 4, marks=SLOW),
        ("a8w8_bpreshuffle", 64, 32, 128, 8, 3),
        pytest.param("a8w8_blockscale", 128, 128, 128, 6, 1, marks=SLOW),
        pytest.param("a8w8", 64, 128, 128, 6, 8, marks=SLOW),
        pytest.param("a8w8_bpreshuffle", 128, 256, 128, 4, 1, marks=SLOW),
        pytest.param("a8w8_blockscale_bpreshuffle", 64, 128, 128, 6, 4, marks=SLOW),
    ],
)
def test_warp_specialised_kernels_compile_within_the_estimate(
    name: str, m: int, n: int, k: int, stages: int, splits: int
) -> None:
    family, device = load_family(name), arch_device("sm_90")
    kernel = next(i for i in family.implementations if i.label == "gluon")
    spec = spec_of(family, "sm_90", 256, 7168, 8192)
    sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "num_stages": stages}
    options = {"kernel_type": "warp_specialised", "NUM_KSPLIT": splits}
    knobs = kernel.normalise(spec, {**KNOBS, **sizes, **options}, device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    columns = n if m == 128 else n // 2
    for build in kernel.builds(spec, knobs, device):
        facts = compile_build(build, device)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= stages * ((m + n) * 128 + 4 * m) + 256 * columns + 1024
        assert not facts.spills, dict(build.constants).get("READING")


@pytest.mark.parametrize("name", ["a8w8_blockscale", "a8w8_blockscale_bpreshuffle"])
@pytest.mark.parametrize(
    ("m", "k", "order", "readings"),
    [
        (256, 8192, None, ["fours", "copied"]),
        (256, 8192, "row", ["fours"]),
        (256, 8192, "column", ["copied"]),
        (255, 8192, "column", ["copied", "strided"]),  # padded to fours, or not
        (255, 8192 - 128, "row", ["strided"]),
        (1, 8192, "column", ["fours"]),  # a single row has both orders
        (256, 128, None, ["strided"]),
    ],
)
def test_builds_for_the_memory_orders_that_scales_may_have(
    name: str, m: int, k: int, order: str | None, readings: list[str]
) -> None:
    family, device = load_family(name), arch_device("sm_90")
    kernel = next(i for i in family.implementations if i.label == "gluon")
    spec = spec_of(family, "sm_90", m, 7168, k)
    spec = replace(spec, x_scale=replace(spec.x_scale, order=order))
    options = {"kernel_type": "warp_specialised", "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128}
    knobs = kernel.normalise(spec, {**KNOBS, **options, "num_stages": 4}, device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    builds = kernel.builds(spec, knobs, device)
    assert [dict(build.constants)["READING"] for build in builds] == readings
    fours = [name for build in builds for name, kind in build.signature if name == "scales" and kind == "*fp32"]
    assert len(fours) == sum(reading != "copied" for reading in readings)
    triton = family.implementations[0]
    plain = triton.normalise(spec, KNOBS, device)
    orders = [dict(build.constants)["M_MAJOR"] for build in triton.builds(spec, plain, device)]
    assert orders == ([False] if m == 1 or k == 128 else [False, True] if order is None else [order == "column"])


@pytest.mark.parametrize(
    ("columns", "splits", "clusters", "reading"),
    [
        (192, 1, 1, "fours"),
        pytest.param(64, 3, 3, "strided", marks=SLOW),
        *(pytest.param(*case, marks=SLOW) for case in ((192, 1, 1, "strided"), (64, 3, 3, "fours"))),
        *(pytest.param(128, 1, 1, reading, marks=SLOW) for reading in ("fours", "strided")),
    ],
)
def test_two_scale_warps_arrive_once_per_slot(reading: str, columns: int, splits: int, clusters: int) -> None:
    """Roles of a program: barriers with two arrivals, one load of 16 bytes per row for four K blocks."""
    family, device = load_family("a8w8_blockscale"), arch_device("sm_90")
    kernel = next(i for i in family.implementations if i.label == "gluon")
    spec = spec_of(family, "sm_90", 256, 1280, 8192 if reading == "fours" else 8192 - 128)
    spec = replace(spec, x_scale=replace(spec.x_scale, order="row"))
    options = {"kernel_type": "warp_specialised", "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 128}
    options |= {"NUM_KSPLIT": splits, "CLUSTER_SIZE": clusters, "num_stages": 4}
    knobs = kernel.normalise(spec, {**KNOBS, **options}, device)
    if columns == 192 and not views_of_parts():
        pytest.skip("this Triton views whole buffers of shared memory only")
    assert kernel.unsupported_reason(spec, knobs, device) is None
    (build,) = kernel.builds(spec, knobs, device)
    kept = compile_kernel(build, device).asm
    assert len(re.findall(r"init_barrier.*, 2 :", kept["ttgir"])) == 2 * 4  # full and empty of each slot
    role = kept["ttgir"].split("partition3")[1].split("warp_return")[0]
    assert role.count("arrive_barrier") == role.count("local_store") == 4  # of four K blocks, each where it is one
    assert ("ld.global.v4.b32" in kept["ptx"]) == (reading == "fours")
    arrivals = len(re.findall(r"barrier\.cluster\.arrive", role))
    assert arrivals == (1 if clusters > 1 else 0)


def test_int8_has_no_warpgroup_instruction_of_256_columns() -> None:
    family, device = load_family("a8w8"), arch_device("sm_90")
    kernel = next(i for i in family.implementations if i.label == "gluon")
    sizes = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_stages": 4}
    options = {"kernel_type": "warp_specialised", **sizes}
    for dtype, reason in (("int8", "registers"), ("float8_e4m3fn", "None")):
        spec = spec_of(family, "sm_90", 256, 7168, 8192, dtype=dtype)
        assert str(
            kernel.unsupported_reason(spec, kernel.normalise(spec, {**KNOBS, **options}, device), device)
        ).startswith(reason)


@pytest.mark.parametrize(
    ("gfx", "name"), few([(gfx, name) for gfx in ARCHES for name in ("a16w16", "a8w8", "a8w8_blockscale")], 0, 8)
)
def test_skinny_kernels_compile(name: str, gfx: str) -> None:
    family, device = load_family(name), arch_device(gfx)
    kernel = next(i for i in family.implementations if i.label == "skinny")
    spec = spec_of(family, gfx, 2, 1280, 8192)
    sizes = {"BLOCK_SIZE_M": 2, "BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 512, "num_warps": 1}
    knobs = kernel.normalise(spec, {**KNOBS, **sizes}, device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    assert compile_build(kernel.builds(spec, knobs, device)[0], device).shared_bytes is not None
    assert kernel.dominated_reason(spec, knobs, device) is None
    assert str(kernel.dominated_reason(spec_of(family, gfx, 17, 1280, 8192), knobs, device)).startswith("rows")
    assert str(kernel.dominated_reason(spec, {**knobs, "BLOCK_SIZE_M": 4}, device)).startswith("tile beyond")
    assert str(kernel.unsupported_reason(spec, {**knobs, "BLOCK_SIZE_N": 64}, device)).startswith("registers")


@pytest.mark.parametrize(
    ("gfx", "name"),
    few([(gfx, name) for gfx in ARCHES for name in ("a8w8_bpreshuffle", "a8w8_blockscale_bpreshuffle")], 1, 4),
)
def test_skinny_kernels_of_tiles_compile_and_convert_no_layout_in_their_loop(name: str, gfx: str) -> None:
    family, device = load_family(name), arch_device(gfx)
    kernel = next(i for i in family.implementations if i.label == "skinny")
    spec = spec_of(family, gfx, 2, 1280, 8192)
    sizes = {"BLOCK_SIZE_M": 2, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 1024, "num_warps": 4, "num_stages": 1}
    knobs = kernel.normalise(spec, {**KNOBS, **sizes}, device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    assembly = compile_kernel(kernel.builds(spec, knobs, device)[0], device).asm
    loop = assembly["ttgir"].split("scf.for")[-1].split("scf.yield")[0]
    assert loop.count("load ") >= 4  # two rows of x, two halves of a row of tiles
    assert "convert_layout" not in loop
    assert str(kernel.unsupported_reason(spec, {**knobs, "BLOCK_SIZE_N": 4}, device)).startswith("tile")
    assert str(kernel.unsupported_reason(spec, {**knobs, "BLOCK_SIZE_M": 16}, device)).startswith("registers")
    assert str(kernel.dominated_reason(spec_of(family, gfx, 17, 1280, 8192), knobs, device)).startswith("rows")


@pytest.mark.parametrize(
    ("gfx", "name"),
    few(
        [
            (gfx, name)
            for gfx in ("gfx942", "gfx950")
            for name in ("a16w16", "a8w8", "a8w8_blockscale", "a8w8_bpreshuffle", "a8w8_blockscale_bpreshuffle")
        ],
        0,
        9,
    ),
)
def test_amd_kernels_load_through_buffers_and_order_tiles_by_xcd(name: str, gfx: str) -> None:
    family, device = load_family(name), arch_device(gfx)
    kernel, spec = kernel_of(family), spec_of(family, gfx, 256, 7168, 8192)
    builds = kernel.builds(spec, kernel.normalise(spec, KNOBS, device), device)
    assert len(builds) == len(kernel.scale_orders(spec))
    for build in builds:
        assembly = compile_kernel(build, device).asm["amdgcn"]
        assert dict(build.constants)["XCDS"] == 8
        assert "buffer_load_dwordx4" in assembly
        assert "v_mfma_f32_16x16" in assembly
        assert "global_load_dwordx4" not in assembly  # no operand of the loop is addressed by 64 bits


@pytest.mark.parametrize("programs", [1, 7, 8, 9, 64, 1000])
def test_the_order_of_xcds_has_every_tile_once(programs: int) -> None:
    """The arithmetic of device_fns.xcd_swizzle and its purpose: an XCD's tiles are consecutive."""
    count = 8
    order = [p % count * (programs // count) + min(p % count, programs % count) + p // count for p in range(programs)]
    assert sorted(order) == list(range(programs))
    for xcd in range(min(count, programs)):
        mine = order[xcd::count]
        assert mine == list(range(mine[0], mine[0] + len(mine)))
