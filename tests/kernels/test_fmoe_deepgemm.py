"""DeepGEMM's grouped products among our launches, without a GPU: the plan, the rules, the source of the kernels."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from moe_problems import FMOE, QWEN, spec_of

from gemmpipe.backends import NO_SPACE, deepgemm_package, library_implementation
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.deepgemm_build import KERNEL, grouped_problem
from gemmpipe.backends.deepgemm_tiles import GROUPED, Tile, source
from gemmpipe.core.data import Scalar
from gemmpipe.core.device import arch_device
from gemmpipe.family import load_family
from gemmpipe.kernels.fmoe import aiter_cells
from gemmpipe.kernels.fmoe._deepgemm import DeepGemmExperts, _planned
from gemmpipe.runtime.select import find_implementation

HOPPER, EXPERTS = arch_device("sm_90"), DeepGemmExperts()
NAMES = [
    "SHAPE_M",
    "SHAPE_N",
    "SHAPE_K",
    "kNumGroups",
    "BLOCK_M",
    "BLOCK_N",
    "BLOCK_K",
    "kNumStages",
    "kNumSMs",
    "kGemmType",
]
PARAMETERS = ", ".join(f"uint32_t {name}" for name in NAMES)
ARGUMENTS = (
    "float* sfb, int* grouped_layout, uint32_t shape_m, uint32_t shape_n, uint32_t shape_k, "
    "TmaDescriptor tensor_map_a, TmaDescriptor tensor_map_b, TmaDescriptor tensor_map_d, TmaDescriptor tensor_map_sfa"
)
HEADER = f"template <{PARAMETERS}>\nCUTLASS_GLOBAL void\nsm90_fp8_gemm_1d2d_impl({ARGUMENTS}) {{\n}}\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package that has these headers."""
    folder = tmp_path / "deep_gemm"
    for name, text in (("impls/sm90_fp8_gemm_1d2d.cuh", HEADER), ("common/types.cuh", f"{GROUPED} = 5,")):
        (folder / "include" / "deep_gemm" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "include" / "deep_gemm" / name).write_text(text)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    deepgemm_package.find_package.cache_clear()
    yield folder / "include" / "deep_gemm"
    deepgemm_package.find_package.cache_clear()


def test_the_backend_has_these_launches_for_experts_and_itself_for_products() -> None:
    (experts,) = DeepGemm().implementations(FMOE)
    assert isinstance(experts, DeepGemmExperts)
    (product,) = DeepGemm().implementations(load_family("a8w8_blockscale"))
    assert isinstance(product, DeepGemm)
    assert isinstance(find_implementation(FMOE, "deepgemm"), DeepGemmExperts)
    assert library_implementation(FMOE, "no library") is None


@pytest.mark.parametrize("token", [1, 64, 4096])
def test_the_products_of_ours_are_replaced_in_their_places(token: int) -> None:
    planned = _planned(spec_of((token, *QWEN[1:]), dtype="fp8"), 64, HOPPER)
    names = [step.kernel if build else "product" for step, build in planned]
    order = ["order_pairs"] if token < 193 else ["rank_pairs", "place_pairs"]
    around = ["sorted_rows", "product", "sorted_rows", "product", "total_of_places"]
    assert names == [*order, "ends_of_experts", *around]


@pytest.mark.parametrize("token", [1, 256, 4096])
def test_candidates_are_tiles_of_both_numbers_of_rows(token: int, package: Path) -> None:
    spec = spec_of((token, *QWEN[1:]), dtype="fp8")
    found = list(EXPERTS.configs(spec, HOPPER, NO_SPACE))
    assert {knobs["BLOCK_SIZE_M"] for knobs in found} == {64, 128}
    assert len({tuple(knobs.items()) for knobs in found}) == len(found) >= 4
    for knobs in found:
        assert EXPERTS.unsupported_reason(spec, knobs, HOPPER) is None
        builds = [build for build in EXPERTS.builds(spec, knobs, HOPPER) if build.kernel == KERNEL]
        sizes = [dict(build.constants) for build in builds]
        assert [(each["n"], each["k"], each["groups"]) for each in sizes] == [(1536, 2048, 128), (2048, 768, 128)]
    assert len({EXPERTS.kernel_name(knobs) for knobs in found}) == len(found)


def test_a_row_of_it_is_stored_under_its_kernels_name() -> None:
    knobs: dict[str, Scalar] = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 160, "BLOCK_SIZE_N_2": 128}
    name = EXPERTS.kernel_name(knobs)
    cells = aiter_cells({"config": json.dumps(knobs), "kernelName": name})
    assert cells == {"block_m": 128, "kernelName1": name, "kernelName2": name}
    assert name == "deepgemm_grouped_128x160_128"


@pytest.mark.parametrize(
    ("dtype", "sizes", "key", "knobs", "rule"),
    [
        (None, QWEN, {}, {}, "scales"),
        ("fp8", QWEN, {"q_type": "per_token"}, {}, "scales"),
        ("float16", QWEN, {"q_type": "per_1x128"}, {}, "types"),
        ("fp8", (64, 2048, 704, 128, 8), {}, {}, "sizes"),
        ("fp8", (64, 2048 + 64, 768, 128, 8), {}, {}, "sizes"),
        ("fp8", QWEN, {}, {"BLOCK_SIZE_M": 32}, "tile"),
        ("fp8", QWEN, {}, {"BLOCK_SIZE_N_2": 200}, "tile"),
        ("fp8", QWEN, {}, {"num_stages": 4}, "knobs"),
    ],
)
def test_reasons_name_their_rule(
    dtype: str | None,
    sizes: tuple[int, ...],
    key: dict[str, object],
    knobs: dict[str, Scalar],
    rule: str,
    package: Path,
) -> None:
    spec = spec_of(sizes, dtype=dtype, key=key)
    tile: dict[str, Scalar] = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_N_2": 128}
    assert EXPERTS.unsupported_reason(spec_of(QWEN, dtype="fp8"), tile, HOPPER) is None
    assert str(EXPERTS.unsupported_reason(spec, {**tile, **knobs}, HOPPER)).split(":")[0] == rule
    if rule in ("scales", "sizes", "types"):
        assert not list(EXPERTS.configs(spec, HOPPER, NO_SPACE))


def test_without_the_package_it_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its kernels are compiled for a device that is not here, which asks for no availability."""
    monkeypatch.setattr("gemmpipe.kernels.fmoe._deepgemm.find_package", lambda: None)
    knobs: dict[str, Scalar] = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_N_2": 128}
    reason = EXPERTS.unsupported_reason(spec_of(QWEN, dtype="fp8"), knobs, HOPPER)
    assert reason == deepgemm_package.no_package_reason()


def test_tall_tiles_are_left_out_for_few_tokens(package: Path) -> None:
    for token, taken in ((64, {64}), (65, {64, 128}), (4096, {64, 128})):
        spec = spec_of((token, *QWEN[1:]), dtype="fp8")
        found = [
            k for k in EXPERTS.configs(spec, HOPPER, NO_SPACE) if EXPERTS.dominated_reason(spec, k, HOPPER) is None
        ]
        assert {knobs["BLOCK_SIZE_M"] for knobs in found} == taken


def test_it_is_hoppers_alone() -> None:
    spec = spec_of(QWEN, dtype="fp8")
    assert str(EXPERTS.unsupported_reason(spec, {}, arch_device("sm_100"))).startswith("architecture")


def test_headers_without_this_kind_of_product_are_a_reason(package: Path) -> None:
    assert grouped_problem() is None
    types = package / "common" / "types.cuh"
    types.write_text("MGroupedContiguous = 1,")
    assert GROUPED in str(grouped_problem())
    types.unlink()
    assert GROUPED in str(grouped_problem())


def test_the_source_names_the_kind_and_the_number_of_groups() -> None:
    tile = Tile(rows=128, columns=160)
    grouped = source(HEADER, tile, n=512, k=256, stages=4, programs=132, groups=9)
    assert f"<0, 512, 256, 9, 128, 160, 128, 4, 132, GemmType::{GROUPED}>" in grouped
    plain = source(HEADER, tile, n=512, k=256, stages=4, programs=132)
    assert "<0, 512, 256, 1, 128, 160, 128, 4, 132, GemmType::Normal>" in plain
