"""The sliced-K kernel without a GPU: constraints, compiled code, and the wait for the previous kernel."""

import re

import pytest
from pairwise import few

from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import arch_device
from gemmpipe.family import GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import compile_build, compile_kernel
from gemmpipe.templates.small_m import Sliced, sliced_shared_bytes

Tile = tuple[int, int, int, int, int]
"""BLOCK_SIZE_M, _N, _K, num_warps, num_stages."""
SM_90 = arch_device("sm_90")
TILES: list[Tile] = [(8, 32, 512, 4, 6), (16, 8, 512, 8, 3), (16, 32, 512, 4, 3), (32, 32, 512, 8, 4)]


def _case(name: str, m: int = 16, k: int = 8192, **options: object) -> tuple[Sliced, GemmSpec]:
    family = load_family(name)
    defaults = KernelDefaults(**{"dtype": None, "out_dtype": None, "bias": None, **options})  # type: ignore[arg-type]
    spec = family.spec(make_problem(family, {"M": m, "N": 1280, "K": k}, defaults, "sm_90", "test"))
    (kernel,) = (i for i in family.implementations if isinstance(i, Sliced))
    return kernel, spec


def _knobs(tile: Tile) -> dict[str, Scalar]:
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
    return dict(zip(names, tile, strict=True))


def _violation(kernel: Sliced, spec: GemmSpec, tile: Tile, device: Device = SM_90) -> str | None:
    return kernel.unsupported_reason(spec, kernel.normalise(spec, _knobs(tile), device), device)


PRODUCTS = [("a16w16", 8192, {"bias": True}), ("a8w8", 1040, {"dtype": "int8"}), ("a8w8_blockscale", 7168, {})]


@pytest.mark.parametrize(
    ("name", "k", "options", "gfx", "tile"),
    few(
        [(*each, gfx, list(tile)) for each in PRODUCTS for gfx in ("sm_90", "sm_100") for tile in TILES],
        0,
        3 * len(TILES),
    ),
)
def test_compiles_within_the_estimate_and_spills_nothing(
    name: str, k: int, options: dict[str, object], gfx: str, tile: list[int]
) -> None:
    (kernel, spec), device = _case(name, k=k, **options), arch_device(gfx)
    m, n, deep, warps, stages = tile
    knobs = kernel.normalise(spec, _knobs((m, n, deep, warps, stages)), device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    for build in kernel.builds(spec, knobs, device):
        facts = compile_build(build, device)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= sliced_shared_bytes(spec, m, n, deep, warps, stages)
        assert facts.spills == 0


@pytest.mark.parametrize("name", ["a16w16", "a8w8", "a8w8_blockscale"])
def test_reads_nothing_before_the_previous_kernel_has_ended(name: str) -> None:
    kernel, spec = _case(name)
    build, *_ = kernel.builds(spec, kernel.normalise(spec, _knobs(TILES[2]), SM_90), SM_90)
    before, waited = compile_kernel(build, SM_90).asm["ptx"].split("griddepcontrol.wait", 1)
    memory = r"(ld|st|prefetch)\.global|cp\.async\.c[ag]"
    assert not re.search(memory, before)
    assert len(re.findall(memory, waited)) > 10
    assert "griddepcontrol.launch_dependents" not in before
    assert "griddepcontrol.launch_dependents" in waited


@pytest.mark.parametrize(
    ("name", "tile", "rule"),
    [
        ("a16w16", (8, 8, 512, 4, 3), "minimum tile"),
        ("a16w16", (16, 4, 512, 4, 3), "minimum tile"),
        ("a8w8", (16, 16, 128, 8, 3), "minimum tile"),
        ("a8w8_blockscale", (16, 16, 1024, 4, 3), "scale group"),
        ("a8w8_blockscale", (8, 256, 512, 8, 3), "scale group"),
        ("a8w8_blockscale", (64, 64, 512, 8, 3), "registers"),
        ("a16w16", (64, 64, 512, 8, 3), "registers"),
        ("a16w16", (64, 32, 512, 4, 3), "registers"),
        ("a16w16", (16, 32, 512, 8, 6), "shared memory"),
        ("a16w16", (16, 24, 512, 8, 6), "power of two"),
        ("a16w16", (16, 16, 4096, 64, 3), "threads"),
    ],
)
def test_reasons_name_their_rule(name: str, tile: Tile, rule: str) -> None:
    kernel, spec = _case(name)
    assert _violation(kernel, spec, TILES[2]) is None
    assert str(_violation(kernel, spec, tile)).split(":")[0] == rule


def test_is_unsupported_on_amd() -> None:
    kernel, spec = _case("a16w16")
    assert str(_violation(kernel, spec, TILES[2], arch_device("gfx942"))).startswith("vendor")


@pytest.mark.parametrize(
    ("m", "tile", "rule"),
    [
        (1, (8, 16, 512, 4, 3), None),
        (1, (16, 8, 512, 4, 3), None),
        (1, (16, 16, 512, 4, 3), "tile beyond the problem"),
        (9, (16, 16, 512, 4, 3), None),
        (32, (32, 32, 512, 8, 3), None),
        (33, (32, 32, 512, 8, 3), "rows"),
    ],
)
def test_padding_and_many_rows_are_dominated(m: int, tile: Tile, rule: str | None) -> None:
    kernel, spec = _case("a16w16", m)
    reason = kernel.dominated_reason(spec, kernel.normalise(spec, _knobs(tile), SM_90), SM_90)
    assert (reason and reason.split(":")[0]) == rule
