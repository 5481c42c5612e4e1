"""The roofline: rates and floors of a model of device, for problems, table rows and finished runs."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from shipped_rows import SHIPPED_DEVICE, copy_rows

from gemmpipe.cli.main import main
from gemmpipe.core import renamed
from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import Family, KernelDefaults, load_family, shipped_families
from gemmpipe.family.problem import make_problem
from gemmpipe.family.roofline import (
    Roofline,
    find_roofline,
    floor_us,
    reaches_power_limit,
    roofline_or_reference,
    rooflines_of,
    shipped_rooflines,
)
from gemmpipe.pipeline.plan import Plan

WORDS = ["kernel=a16w16", "shapes=list", "shapes.items=[[1,64,64]]", "device=cpu", "backend=[torch]", "output=tuned"]
RATES = Roofline(bytes_per_s=1e9, flops_16_per_s=2e9, flops_8_per_s=4e9, launch_us=0.5)

EXPERTS = ("token", "model_dim", "inter_dim", "expert", "topk")
MIXTRAL, QWEN3_NEXT = (4096, 7168, 8, 2), (2048, 512, 512, 10)


@pytest.fixture
def fresh_notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(renamed, "_reported", set())
    monkeypatch.setattr(renamed, "_notices", [])
    return


@pytest.mark.unit
@pytest.mark.parametrize(
    ("key", "limited"),
    [
        ({"M": 512, "N": 1280, "K": 8192}, False),
        ({"M": 512, "N": 7168, "K": 8192}, True),
        ({"M": 4096, "N": 4608, "K": 7168}, True),
        ({"M": 16, "N": 32768, "K": 8192}, False),
        (dict(zip(EXPERTS, (1024, *MIXTRAL), strict=True)), True),
        (dict(zip(EXPERTS, (4096, *QWEN3_NEXT), strict=True)), True),
        (dict(zip(EXPERTS, (1024, *QWEN3_NEXT), strict=True)), False),
    ],
    ids=lambda value: "x".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_products_that_an_h200_computes_at_lower_clocks_are_known(key: dict[str, int], limited: bool) -> None:
    """In fp8, as measured (docs/results/tuning.md, docs/results/products.md)."""
    family = load_family("fmoe" if "token" in key else "a8w8_blockscale")
    defaults = KernelDefaults(dtype="float8_e4m3fn", out_dtype=None, bias=None)
    problem = make_problem(family, key, defaults, "sm_90", "case")
    assert reaches_power_limit(family, family.spec(problem)) == limited


@pytest.mark.unit
def test_bytes_or_operations_and_a_launch(blockscale: Family) -> None:
    few = blockscale.problem((("M", 1), ("N", 1000), ("K", 1000)))
    many = blockscale.problem((("M", 1000), ("N", 1000), ("K", 1000)))
    thin, full = blockscale.spec(few), blockscale.spec(many)
    assert RATES.bound_us(blockscale, thin) == pytest.approx(blockscale.bytes_moved(thin) / 1e3)
    assert RATES.bound_us(blockscale, full) == pytest.approx(2e9 / 4e3), "8-bit operands"
    assert RATES.floor_us(blockscale, full) == RATES.bound_us(blockscale, full) + 0.5
    assert RATES.floor_us(blockscale, full, 0.75) == RATES.bound_us(blockscale, full) + 0.75, "as measured with it"
    unmeasured = Roofline(bytes_per_s=1e9, flops_16_per_s=2e9, flops_8_per_s=4e9)
    assert unmeasured.floor_us(blockscale, full) == unmeasured.bound_us(blockscale, full)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("dtype", "rate"),
    [("bfloat16", 2e9), ("float32", 2e9), ("float8_e4m3fnuz", 4e9), ("int8", 4e9), ("float4_e2m1fn_x2", 2e9)],
)
def test_rates_by_the_width_of_operands(dtype: str, rate: float) -> None:
    assert RATES.flops_per_s(dtype) == rate
    with_fp4 = Roofline(bytes_per_s=1e9, flops_16_per_s=2e9, flops_8_per_s=4e9, flops_4_per_s=8e9)
    assert with_fp4.flops_per_s(dtype) == (8e9 if dtype.startswith("float4") else rate)


@pytest.mark.unit
@pytest.mark.parametrize(("tag", "model"), [("", SHIPPED_DEVICE), ("_h100", "NVIDIA H100 80GB HBM3")])
def test_recorded_times_of_the_shipped_tables_reach_the_floor_at_best(tag: str, model: str, tmp_path: Path) -> None:
    """The rows are text, as read from CSV. Experts count as many as the routing of their operands has rows for."""
    copy_rows(shipped_tables(), tmp_path, model)
    rows = 0
    for name in shipped_families():
        family = load_family(name)
        path = tmp_path / f"{Path(family.csv_name).stem}{tag}.csv"
        for row in csv.DictReader(path.open()) if path.is_file() else ():
            floor = floor_us(row["gfx"], family, row, device=row["device"])
            assert floor is not None
            assert 0.55 < floor < float(row["us"]), row
            rows += 1
    assert rows > 100


@pytest.mark.unit
def test_rates_are_those_of_the_model_of_device() -> None:
    """An H100 and an H200 have the same gfx; of other models of it, and of rows that name none, nothing is known."""
    h100, h200 = (find_roofline("sm_90", name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    assert h100 is shipped_rooflines()["h100"]
    assert h200 is shipped_rooflines()["h200"]
    assert h100.bytes_per_s < h200.bytes_per_s
    assert [find_roofline("sm_90", name) for name in ("NVIDIA H20", "NVIDIA H100 PCIe", "", None)] == [None] * 4


@pytest.mark.unit
def test_an_entry_without_a_model_is_of_all_models_of_its_architecture() -> None:
    mine = replace(RATES, device="NVIDIA H20")
    rates = {"sm_90": RATES, "mine": mine, "h200": shipped_rooflines()["h200"]}
    assert find_roofline("sm_90", "NVIDIA H20", rates) is mine
    assert find_roofline("sm_90", "NVIDIA H200", rates) is rates["h200"]
    assert [find_roofline("sm_90", name, rates) for name in ("NVIDIA GH200 480GB", "", None)] == [RATES] * 3
    assert find_roofline("sm_90", "NVIDIA H200", {"sm_90": mine}) is None, "an entry of another model"
    assert find_roofline("sm_90", "NVIDIA H20", {**rates, "later": RATES, "last": mine}) is mine
    assert find_roofline("sm_100", "NVIDIA B200", rates) is None


@pytest.mark.unit
def test_devices_without_rates_have_no_floor(blockscale: Family) -> None:
    problem = Problem(family="smallblock", key=(("M", 1), ("N", 64), ("K", 64)))
    assert floor_us("gfx942", blockscale, problem, device=None) is None
    assert floor_us("gfx942", blockscale, problem, device="AMD MI300X", rooflines={"gfx942": RATES}) == pytest.approx(
        RATES.floor_us(blockscale, blockscale.spec(problem))
    )
    assert roofline_or_reference("gfx942", "AMD MI300X") is shipped_rooflines()["h200"]
    assert roofline_or_reference("gfx942", "AMD MI300X", {"gfx942": RATES}) is RATES


@pytest.mark.unit
def test_a_row_without_the_key_is_one_error() -> None:
    with pytest.raises(UserError, match="row: column N: no value, expected a whole number from 1"):
        floor_us("sm_90", load_family("a16w16"), {"M": 1, "K": 64}, device="NVIDIA H200")


@pytest.mark.unit
def test_shipped_rates_have_a_source_and_a_date() -> None:
    for name, rates in shipped_rooflines().items():
        assert rates.source, name
        assert rates.date, name
        assert rates.launch_us is not None, name
        assert rates.device, name
        assert rates.measured != ("specification" in rates.source), name
    devices = [rates.device for rates in shipped_rooflines().values()]
    assert len(set(devices)) == len(devices)


@pytest.mark.unit
def test_rates_of_a_recorded_configuration() -> None:
    node = {"_target_": "x", "bytes_per_s": 1e9, "flops_16_per_s": 2e9, "flops_8_per_s": 4e9, "launch_us": 0.5}
    old = {name: value for name, value in node.items() if name != "launch_us"}
    assert rooflines_of({"roofline": {"sm_90": node}}) == {"sm_90": RATES}
    assert rooflines_of({"stages": {"compare": {"rates": {"sm_90": old}}}})["h200"].bytes_per_s == 1e9
    assert rooflines_of({"stages": {}}) == {}


def test_the_options_reach_the_plan(plans: list[Plan]) -> None:
    new = "+roofline.gfx942={bytes_per_s:1e12,flops_16_per_s:1e15,flops_8_per_s:2e15}"
    assert main(["compare", *WORDS, new, "roofline.h200.launch_us=0.6"]) == 0
    [plan] = plans
    assert plan.rooflines["gfx942"] == Roofline(bytes_per_s=1e12, flops_16_per_s=1e15, flops_8_per_s=2e15)
    assert plan.rooflines["h200"].launch_us == 0.6
    assert plan.rooflines["h200"].bytes_per_s == shipped_rooflines()["h200"].bytes_per_s
    assert rooflines_of(plan.config) == plan.rooflines, "as in the manifest"


@pytest.mark.usefixtures("fresh_notices")
def test_old_keys_of_a_command_line(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *WORDS, "stages.compare.rates.sm_90.bytes_per_s=5e12"]) == 0
    assert plans[0].rooflines["h200"].bytes_per_s == 5e12
    assert plans[0].rooflines["h200"].flops_8_per_s == shipped_rooflines()["h200"].flops_8_per_s
    [line] = [line for line in capsys.readouterr().err.splitlines() if "renamed" in line]
    assert "stages.compare.rates.sm_90.bytes_per_s: renamed; use roofline.h200.bytes_per_s" in line


@pytest.mark.usefixtures("fresh_notices")
def test_old_keys_of_a_users_file(folder: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    rates = {
        "sm_90": {"bytes_per_s": 5e12},
        "gfx942": {
            "_target_": "gemmpipe.stages.compare.stage.Rates",
            "bytes_per_s": 1e12,
            "flops_16_per_s": 1e15,
            "flops_8_per_s": 2e15,
        },
    }
    (folder / "mine" / "stage").mkdir(parents=True)
    tree = {"defaults": ["compare", "_self_"], "rates": rates}
    (folder / "mine" / "stage" / "own_rates.yaml").write_text(yaml.safe_dump(tree))
    assert main(["compare", "--config-dir=mine", *WORDS, "stage@stages.compare=own_rates"]) == 0
    [plan] = plans
    assert plan.rooflines["h200"].bytes_per_s == 5e12
    assert plan.rooflines["h200"].flops_8_per_s == shipped_rooflines()["h200"].flops_8_per_s
    assert plan.rooflines["gfx942"].bytes_per_s == 1e12
    lines = [line for line in capsys.readouterr().err.splitlines() if "renamed" in line]
    assert lines == [
        "warning: stages.compare.rates: renamed; use roofline",
        "warning: gemmpipe.stages.compare.stage.Rates: renamed; use gemmpipe.family.roofline.Roofline",
    ]


def test_a_wrong_rate_is_one_line(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *WORDS, "roofline.h200.bytes_per_s=0"]) == 2
    assert capsys.readouterr().err == "gemmpipe: roofline.h200.bytes_per_s: 0 given, expected at least 1\n"
