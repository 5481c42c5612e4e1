"""The kernel of the engines' form: right for ragged sizes, the engines' knobs alone, compiled for each architecture."""

from collections.abc import Mapping

import pytest
import yaml
from interpreter_process import INTERPRETED, Interpreter
from pairwise import SLOW, few

from gemmpipe.backends.engine_compile import compile_only_for, empty_meta
from gemmpipe.core.data import Build, Device, Scalar
from gemmpipe.core.device import arch_device
from gemmpipe.core.paths import shipped
from gemmpipe.family import Family, GemmSpec, Implementation, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space, parse_space
from gemmpipe.kernels.a8w8_blockscale._engine import EngineBlockscale
from gemmpipe.launch.build import compile_build, compile_kernel, find_kernel, read_code

ENGINES = ("vllm", "sglang")
KNOBS = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 16,
    "num_warps": 4,
    "num_stages": 3,
}
CASES = [
    {"mnk": [32, 128, 256], "knobs": [16, 64, 128]},
    {"mnk": [33, 160, 400], "knobs": [16, 64, 64]},
    {"mnk": [1, 144, 333], "knobs": [16, 32, 64], "out": "float16"},
    {"mnk": [50, 300, 130], "knobs": [16, 256, 128], "out": "float32"},
    {"mnk": [3, 1, 16], "knobs": [16, 16, 32]},
    {"mnk": [70, 129, 257], "knobs": [32, 128, 128], "m_major": True},
    {"mnk": [16, 128, 256], "knobs": [16, 128, 128], "gfx": "gfx942"},
    {"mnk": [1, 144, 128], "knobs": [16, 32, 64], "exact": True},
    {"mnk": [50, 300, 130], "knobs": [16, 256, 128], "exact": True},
]

HOPPER_CASES = [
    {"mnk": [32, 128, 256], "knobs": [16, 64, 128], "more": {"SWAP_AB": True}},
    {"mnk": [33, 160, 400], "knobs": [16, 64, 64], "more": {"SWAP_AB": True, "SPLIT_K": 4}},
    {"mnk": [1, 144, 333], "knobs": [16, 32, 64], "out": "float16", "more": {"SPLIT_K": 2}},
    {"mnk": [5, 48, 130], "knobs": [16, 64, 128], "out": "float32", "more": {"SWAP_AB": True, "SPLIT_K": 16}},
    {"mnk": [7, 128, 1024], "knobs": [16, 128, 64], "m_major": True, "more": {"SWAP_AB": True, "SPLIT_K": 8}},
    {"mnk": [7, 128, 1024], "knobs": [16, 128, 64], "exact": True, "more": {"SWAP_AB": True, "SPLIT_K": 8}},
]
"""With the knobs of SGLang's kernel for sm_90: ragged K, splits without work, odd numbers of K tiles per split."""
ALTERNATELY = [{**case, "engine": ENGINES[number % 2]} for number, case in enumerate(CASES)]
ALTERNATELY += [{**case, "engine": "sglang"} for case in HOPPER_CASES]
THE_OTHERS = [{**case, "engine": ENGINES[(number + 1) % 2]} for number, case in enumerate(CASES)]
"""Each case with the other engine, whose kernel has the same code for it."""


@pytest.fixture(scope="module")
def family() -> Family:
    return load_family("a8w8_blockscale")


def _spec(family: Family, gfx: str = "sm_90", m: int = 64, n: int = 512, k: int = 1024) -> GemmSpec:
    options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return family.spec(make_problem(family, {"M": m, "N": n, "K": k}, options, gfx, "test"))


@INTERPRETED
@pytest.mark.parametrize("listed", [ALTERNATELY, pytest.param(THE_OTHERS, marks=SLOW)], ids=["some", "others"])
def test_interpreted_it_matches_the_reference(interpreter: Interpreter, listed: list[dict[str, object]]) -> None:
    for case in listed:
        assert interpreter.run("engine form", case) == {"reason": None, "error": 0.0, "same": True}, case


COMPILED = [("sm_90", 1), ("sm_90", 39), ("sm_100", 64), ("gfx942", 16)]


@pytest.mark.parametrize(
    ("gfx", "m", "engine"),
    few([(*each, engine) for each in COMPILED for engine in ENGINES], 3, 6),
)
def test_it_compiles(family: Family, gfx: str, m: int, engine: str) -> None:
    kernel, device = family.engine_kernels[engine], arch_device(gfx)
    spec = _spec(family, gfx, m=m)
    knobs = kernel.normalise(spec, {**KNOBS, "num_stages": 2, "waves_per_eu": 0}, device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    (build,) = kernel.builds(spec, knobs, device)
    assert dict(build.constants).get("M") == (1 if m == 1 else None)
    assert compile_build(build, device).error == ""


def _called(build: Build, sizes: Mapping[str, int], device: Device) -> bytes:
    """The instructions that Triton's own call of the build's kernel generates, as an engine's call does."""
    dtypes = {"*fp8e4nv": "float8_e4m3fn", "*fp32": "float32", "*bf16": "bfloat16"}
    pointers = {name: empty_meta((16,), dtypes[kind]) for name, kind in build.signature if kind.startswith("*")}
    given = {**dict(build.constants), **sizes, **pointers, **dict(build.options)}
    with compile_only_for(device):
        compiled = find_kernel(build.kernel).warmup(**given, grid=(1,))
    return read_code(compiled.asm["cubin"])


@pytest.mark.parametrize(
    ("engine", "sizes", "more"),
    [
        ("vllm", (1, 512, 1024), {}),
        pytest.param("vllm", (39, 3000, 8192), {}, marks=SLOW),
        pytest.param("sglang", (48, 300, 128), {}, marks=SLOW),
        pytest.param("sglang", (39, 3000, 8192), {"SWAP_AB": True}, marks=SLOW),
    ],
)
def test_the_exact_form_is_specialised_as_in_tritons_own_call(
    family: Family, engine: str, sizes: tuple[int, int, int], more: dict[str, Scalar]
) -> None:
    kernel, device = family.engine_kernels[engine].finals_implementation(), arch_device("sm_90")
    spec = _spec(family, "sm_90", *sizes)
    assert isinstance(kernel, EngineBlockscale)
    # A call takes the integer 1 as a constant: here it is the height of a group of tiles too.
    (build,) = kernel.builds(spec, {**KNOBS, "GROUP_SIZE_M": 1, **more}, device)
    exact = read_code(compile_kernel(build, device).asm["cubin"])
    assert exact == _called(build, kernel.integers(spec), device)
    (plain,) = family.engine_kernels[engine].builds(spec, {**KNOBS, "GROUP_SIZE_M": 1, **more}, device)
    assert exact != read_code(compile_kernel(plain, device).asm["cubin"])


@pytest.mark.parametrize("engine", ENGINES)
def test_screening_has_one_build_for_all_groups_and_the_finals_one_each(family: Family, engine: str) -> None:
    kernel, device = family.engine_kernels[engine], arch_device("sm_90")
    knobs = [{**KNOBS, "GROUP_SIZE_M": group} for group in (1, 16, 32)]
    specs = [_spec(family, m=m) for m in (48, 64, 100)]

    def count(form: Implementation) -> int:
        return len({build.id for spec in specs for each in knobs for build in form.builds(spec, each, device)})

    assert count(kernel) == 1
    assert count(kernel.finals_implementation()) == 6, "Triton compiles another one where 16 divides M"


@pytest.mark.parametrize("more", few([{"SWAP_AB": True}, {"SPLIT_K": 4}, {"SWAP_AB": True, "SPLIT_K": 16}], 2))
def test_sglangs_kernel_for_hopper_compiles(family: Family, more: dict[str, object]) -> None:
    kernel, device = family.engine_kernels["sglang"], arch_device("sm_90")
    spec = _spec(family, m=8)
    knobs = kernel.normalise(spec, {**KNOBS, "BLOCK_SIZE_M": 16, **more}, device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    builds = kernel.builds(spec, knobs, device)
    assert len(builds) == (2 if "SPLIT_K" in more else 1)
    assert [compile_build(build, device).error for build in builds] == [""] * len(builds)
    assert str(kernel.unsupported_reason(spec, knobs, arch_device("sm_100"))).startswith("form: only sglang's kernel")


def test_the_space_has_these_knobs_for_sglang_on_hopper_alone(family: Family) -> None:
    listed = yaml.safe_load((shipped("conf") / "space" / "engine_dense.yaml").read_text())
    space, spec = parse_space(listed, []), _spec(family, m=16, n=2112, k=7168)

    def swapped(engine: str, gfx: str) -> int:
        kernel, device = family.engine_kernels[engine], arch_device(gfx)
        found = [kernel.normalise(spec, knobs, device) for knobs in kernel.configs(spec, device, space)]
        assert len({tuple(sorted(each.items())) for each in found}) == len(found)
        return sum(each.get("SWAP_AB") is True for each in found)

    assert swapped("sglang", "sm_90") == 180
    assert swapped("vllm", "sm_90") == swapped("sglang", "sm_100") == swapped("sglang", "gfx942") == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_it_has_the_engines_knobs_and_no_others(family: Family, engine: str) -> None:
    kernel, device, spec = family.engine_kernels[engine], arch_device("sm_90"), _spec(family)
    ours = {**KNOBS, "NUM_KSPLIT": 1, "cache_modifier": "", "SWAP_AB": False, "kpack": 1}
    assert kernel.normalise(spec, ours, device) == KNOBS
    own = [{"SWAP_AB": True}, {"SPLIT_K": 2}]
    for odd in ({"NUM_KSPLIT": 4}, {"cache_modifier": ".cg"}, *(own if engine == "vllm" else [])):
        knobs = kernel.normalise(spec, {**KNOBS, **odd}, device)
        assert str(kernel.unsupported_reason(spec, knobs, device)).startswith(
            f"form: {engine}'s kernel has no {next(iter(odd))}="
        )
    assert "scale group" in str(kernel.unsupported_reason(spec, {**KNOBS, "BLOCK_SIZE_K": 256}, device))


@pytest.mark.parametrize("engine", ENGINES)
def test_one_row_of_tiles_has_one_order(family: Family, engine: str) -> None:
    kernel, device = family.engine_kernels[engine], arch_device("sm_90")
    axes = {**{name: (value,) for name, value in KNOBS.items()}, "GROUP_SIZE_M": (1, 16, 32)}
    space = Space(axes=axes, when=(), pinned=())

    def groups(kernel: Implementation, m: int) -> list[object]:
        return [point["GROUP_SIZE_M"] for point in kernel.configs(_spec(family, m=m), device, space)]

    assert groups(kernel, 64) == [1], "one row of tiles"
    assert groups(kernel, 65) == [1, 16, 32]
    entry = {**KNOBS, "GROUP_SIZE_M": 32}
    assert kernel.normalise(_spec(family, m=1), entry, device) == entry, "a file's entry is used for other M too"
