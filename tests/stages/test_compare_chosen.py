"""The tuned entries of a comparison of experts: rows of the problem's routing, else those that calls take."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.data import Device, Problem, Scalar
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.runtime.tables import load_tables
from gemmpipe.stages.compare.chosen import other_conditions, table_rows
from gemmpipe.tables import store

FAMILY = load_family("fmoe")
SIZES: dict[str, Scalar] = {"token": 4, "model_dim": 128, "inter_dim": 128, "expert": 8, "topk": 2}
EXPERTS = ("kernel=fmoe", "shapes=list", "device=cpu", "timer@stages.bench.timer=quick", "output=experts")
ROUTED = "shapes.items=[{token: 4, model_dim: 128, inter_dim: 128, expert: 8, topk: 2, routing: [uniform,skewed]}]"
PLAIN = "shapes.items=[{token: 4, model_dim: 128, inter_dim: 128, expert: 8, topk: 2}]"


def _problem(device: Device, routing: str | None) -> Problem:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    given = SIZES if routing is None else {**SIZES, "routing": routing}
    return make_problem(FAMILY, given, defaults, device.gfx, "case")


def _table(path: Path, device: Device, *routings: str | None) -> Path:
    """A table with a row of each routing, which names its routing as the kernel."""
    rows = [
        {
            "gfx": device.gfx,
            "cu_num": device.cu_num,
            **dict(_problem(device, routing).key),
            "libtype": "torch",
            "us": 10.0,
            "kernelName": str(routing),
            "config": '{"method":"grouped_mm"}',
            "device": device.name,
            "policy": "host interleaved",
        }
        for routing in routings
    ]
    path.write_text(store.render(rows, FAMILY, ()))
    return path


@pytest.mark.parametrize(
    ("routings", "asked", "found"),
    [
        (("uniform", "skewed", None), None, "None"),
        (("uniform", "skewed"), "skewed", "skewed"),
        (("skewed",), None, "skewed"),
        ((None,), "one_hot", "None"),
        (("skewed",), "one_hot", "skewed"),
    ],
)
def test_a_problem_takes_the_row_of_its_routing_else_that_of_a_call(
    tmp_path: Path, h200: Device, routings: tuple[str | None, ...], asked: str | None, found: str
) -> None:
    context: Any = SimpleNamespace(family=FAMILY, device=h200)
    tuned = table_rows(_table(tmp_path / FAMILY.csv_name, h200, *routings), context)
    problem = _problem(h200, asked)
    row = tuned.find(problem)[0]
    assert row["kernelName"] == found
    told = {"None": "no routing", str(asked): ""}.get(found, f"routing={found}")
    assert other_conditions(row, problem, FAMILY) == told


def test_without_its_own_routing_it_is_the_row_that_the_run_time_finds(tmp_path: Path, h200: Device) -> None:
    path = _table(tmp_path / FAMILY.csv_name, h200, "skewed", "uniform")
    context: Any = SimpleNamespace(family=FAMILY, device=h200)
    problem = _problem(h200, None)
    run_time = load_tables(FAMILY, only=path).find(h200, [value for _, value in problem.key])
    assert [row["kernelName"] for row in table_rows(path, context).find(problem)] == [
        found.row["kernelName"] for found in run_time
    ]


def test_a_family_without_conditions_has_rows_of_whole_keys_alone(h200: Device, tmp_path: Path) -> None:
    family = load_family("a16w16")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problem = make_problem(family, {"M": 4, "N": 64, "K": 128}, defaults, h200.gfx, "case")
    row = {"gfx": h200.gfx, "cu_num": h200.cu_num, **dict(problem.key), "libtype": "torch", "us": 1.0, "config": "{}"}
    (tmp_path / family.csv_name).write_text(store.render([row], family, ()))
    context: Any = SimpleNamespace(family=family, device=h200)
    tuned = table_rows(tmp_path / family.csv_name, context)
    assert not tuned.tables
    assert len(tuned.find(problem)) == 1
    assert not tuned.find(make_problem(family, {"M": 8, "N": 64, "K": 128}, defaults, h200.gfx, "case"))


@pytest.mark.e2e
def test_experts_tuned_under_routings_are_compared_without_one(
    folder: Path, capfd: pytest.CaptureFixture[str], own_locks: None
) -> None:
    assert main((*EXPERTS, ROUTED, "backend=[torch]", "format=[csv]")) == 0
    capfd.readouterr()
    assert main(("compare", *EXPERTS, PLAIN, "backend=[torch,deepgemm]")) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "as nothing is tuned here" not in text
    assert "takes that of calls: routing=" in text
    (path,) = folder.glob("outputs/runs/compare/*/compared.csv")
    compared = pd.read_csv(path).set_index("name")
    assert compared["condition"]["tuned"] in ("routing=uniform", "routing=skewed")
    assert compared["us"]["tuned"] > 0
    assert compared["condition"].notna().sum() == 1
    assert "deepgemm" in compared.index, "named, so it has a row with a reason"
    assert "not timed: deepgemm: " in text
