"""Figures of a run: speed-ups over libraries that have the product, regimes of M, winners, near ties."""

from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.family import load_family
from gemmpipe.family.roofline import Roofline
from gemmpipe.report import results
from gemmpipe.report.results import product_results, regime_results, run_figures, spread

BLOCKSCALE = load_family("a8w8_blockscale")


def _selection(m: int, us: float, baseline_us: float | None, **cells: object) -> dict[str, object]:
    key = {"M": m, "N": 1280, "K": 8192, "dtype": "torch.float8_e4m3fn", "outdtype": "torch.bfloat16"}
    shared = {"format": "", "gfx": "sm_90", "libtype": "gluon", "kernelName": "k@1", "config": "{}", "near_ties": 0}
    return {**key, **shared, "us": us, "baseline_us": baseline_us, **cells}


def _products(*rows: dict[str, object]) -> pd.DataFrame:
    return product_results(pd.DataFrame(rows), BLOCKSCALE)


CONVERTED = {"baseline": "torch", "baseline_config": '{"method":"bfloat16_convert"}'}
DIRECT = {"baseline": "scaled_mm", "baseline_config": '{"use_fast_accum":false}'}


def test_a_conversion_by_torch_is_no_library_path() -> None:
    found = run_figures(_products(_selection(7, 5, 90, **CONVERTED), _selection(8, 5, 10, **DIRECT)))
    (regime,) = found.regimes
    assert regime.speedup == spread([2.0, 2.0])
    assert (regime.products, regime.padded, regime.converted) == (2, 1, 0)  # at M = 7 the library pads to 8


def test_without_the_padded_size_a_conversion_is_counted_apart() -> None:
    found = run_figures(_products(_selection(1, 5, 90, **CONVERTED), _selection(8, 5, 10, **DIRECT)))
    assert found.regimes[0].speedup == spread([2.0])
    assert found.regimes[0].converted == 1
    assert found.converted == spread([18.0])


def test_the_paired_ratio_counts_more_than_the_medians() -> None:
    row = _products(_selection(8, 5, 10, **DIRECT, ratio=0.4, ratio_low=0.35, ratio_high=0.42)).iloc[0]
    assert row["speedup"] == pytest.approx(2.5)
    assert (row["speedup_low"], row["speedup_high"]) == (pytest.approx(1 / 0.42), pytest.approx(1 / 0.35))


def test_regimes_without_rows_are_absent_and_the_others_end_where_they_say() -> None:
    rows = [_selection(m, 5, 10, **DIRECT) for m in (1, 64, 65, 256, 1024)]
    found = regime_results(_products(*rows))
    assert [(r.label, r.products) for r in found] == [("M <= 64", 2), ("M 65 to 256", 2), ("M >= 1024", 1)]


def test_buckets_of_formats_are_no_products() -> None:
    bucket = {**_selection(1, 50, None), "M": None, "format": "triton_json"}
    assert run_figures(_products(_selection(8, 5, 10, **DIRECT), bucket)).products == 1


def test_products_without_any_library_are_counted() -> None:
    found = run_figures(_products(_selection(8, 5, None), _selection(16, 5, float("nan"))))
    assert found.without_library == 2
    assert found.regimes[0].speedup is None


def test_noise_near_ties_and_winners() -> None:
    rows = [
        _selection(8, 5, 10, **DIRECT, noise_pct=1.0, near_ties=2, p20_us=5, p80_us=9),
        _selection(16, 5, 10, **DIRECT, noise_pct=3.0, libtype="scaled_mm", p20_us=5, p80_us=6),
        _selection(32, 5, 10, **DIRECT, noise_pct=None),
    ]
    found = run_figures(_products(*rows))
    assert (found.noise_pct, found.near_ties, found.noisy, found.own) == (2.0, 1, 1, 2)
    assert found.winners == (("gluon", 2), ("scaled_mm", 1))


def test_a_16_bit_product_always_has_a_library() -> None:
    key = {"M": 4, "N": 64, "K": 64, "bias": False, "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16"}
    row = {**key, "format": "", "gfx": "cpu_avx2", "libtype": "onednn", "us": 5.0, "baseline_us": 6.0}
    row |= {"baseline": "torch", "baseline_config": '{"method":"float32_convert"}'}
    found = product_results(pd.DataFrame([row]), load_family("a16w16"))
    assert found["library"].tolist() == [results.DIRECT]


@pytest.mark.parametrize("cell", ["not json", "[1]", "{}", '{"method": 7}'])
def test_a_damaged_configuration_of_the_baseline_leaves_the_rule_by_its_name(cell: str) -> None:
    row = _products(_selection(1, 5, 90, baseline="torch", baseline_config=cell)).iloc[0]
    assert row["library"] == results.CONVERTED


def test_a_shipped_table_names_no_baseline_and_the_rules_of_operands_decide(h200_tables: Path) -> None:
    table = pd.read_csv(h200_tables / "a8w8_blockscale_tuned_gemm.csv")
    products = product_results(table, BLOCKSCALE)
    assert len(products) == len(table)
    assert set(products.loc[products["library"] == results.DIRECT, "rows"] % 4) == {0}
    assert set(products.loc[products["library"] != results.DIRECT, "rows"]) == {1, 2}
    padded = products[products["library"] == results.PADDED]
    assert len(padded) > 0
    assert padded["speedup"].max() < 5  # over the conversion it would be more than 10


def test_an_empty_table_has_no_regime() -> None:
    found = run_figures(product_results(pd.DataFrame(columns=["format", "M", "N", "K", "us"]), BLOCKSCALE))
    assert (found.products, found.regimes, found.converted, found.noise_pct) == (0, (), None, None)


@pytest.mark.parametrize("cell", ["fast", -1.0, 0.0, float("inf")])
def test_a_time_that_is_none_gives_no_speed_up(cell: object) -> None:
    row = _products(_selection(8, 5, 10, **DIRECT) | {"baseline_us": cell}).iloc[0]
    assert (row["library"], row["speedup"]) == (results.NO_LIBRARY, None)


def test_the_share_of_the_floor_is_that_of_the_rates() -> None:
    rates = {"sm_90": Roofline(bytes_per_s=1e12, flops_16_per_s=1e15, flops_8_per_s=1e15, launch_us=2.0)}
    key = _selection(16, 40, 80, **DIRECT)
    products = product_results(pd.DataFrame([key, {**key, "M": 32, "us": 20.0}]), BLOCKSCALE, rates)
    spec_bytes = 1280 * 8192 + 16 * 8192 + 16 * 1280 * 2  # without scales
    assert products["floor_us"].iloc[0] == pytest.approx(spec_bytes / 1e6 + 2.0, rel=0.01)
    found = run_figures(products)
    assert found.worst == (products["problem"].iloc[0], products["floor_share"].iloc[0])
    assert found.regimes[0].floor_share is not None
    assert found.regimes[0].floor_share.least == products["floor_share"].iloc[0]


def test_without_rates_of_the_device_there_is_no_floor() -> None:
    products = product_results(pd.DataFrame([_selection(16, 40, 80, **DIRECT)]), BLOCKSCALE, {})
    found = run_figures(products)
    assert (found.worst, found.regimes[0].floor_share) == (None, None)
