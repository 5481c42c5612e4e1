"""A run on a CPU whose budget ends: finished problems are tuned, the others are left, and the next run goes on."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.cli.main import main
from gemmpipe.family import load_family
from gemmpipe.tables import store

Run = Callable[..., str]

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("own_locks")]

ITEMS = "shapes.items=[{M: [16, 4, 8], N: 32, K: 64}]"


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str], faulty_arguments: tuple[str, ...]) -> Run:
    """Runs the faulty family on three problems with a budget that is over at once, unless another is given."""

    def typed(*arguments: str, pipeline: tuple[str, ...] = ()) -> str:
        capfd.readouterr()
        assert main([*pipeline, *faulty_arguments, ITEMS, "cpu_budget_s=0.001", *arguments]) == 0
        return re.sub(r"\n  +(?=\S)", " ", capfd.readouterr().out)  # lines of the last screen are folded

    return typed


def _rows() -> list[object]:
    return sorted(row["M"] for row in store.read(Path("outputs/tuned/faulty_tuned_gemm.csv"), load_family("faulty")))


def _last() -> Path:
    return max(Path("outputs/runs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)


def test_the_same_command_goes_on_with_more_rows(run: Run) -> None:
    out = run()
    assert "1 of 3 problems tuned in cpu_budget_s=0.001" in out
    assert "left: 2 with M 8 to 16" in out
    assert out.count("resume with: gemmpipe resume=") == out.count("resume=") == 1, "one way to go on"
    assert _rows() == [4], "a run tunes at least one problem, that with the fewest rows"
    manifest = json.loads((_last() / "manifest.json").read_text())
    assert [name.split()[1] for name in manifest["left"]] == ["M=8", "M=16"]
    assert manifest["undecided"] == manifest["unsolved"] == []
    assert len(pd.read_csv(_last() / "problems.csv")) == 3
    assert set(pd.read_csv(_last() / "selections.csv")["M"]) == {4}
    run()
    assert _rows() == [4, 8]
    assert "left" not in run()
    assert _rows() == [4, 8, 16]


def test_the_list_and_the_run_name_its_state_with_one_word(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    items = "shapes.items=[{M: [1, 8], N: 32, K: 64}]"
    arguments = ["kernel=a16w16", "shapes=list", items, "device=cpu", "backend=[torch]", "cpu_budget_s=0.001"]
    assert main([*arguments, "timer@stages.bench.timer=quick"]) == 0
    capfd.readouterr()
    assert main(["runs"]) == main(["show"]) == 0
    out = capfd.readouterr().out
    assert "partial       1/2" in out
    assert "run, partial: 1 of 2 problems in" in out


def test_a_resumed_run_goes_on_and_repeats_nothing(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run()
    first = _last()
    assert main([f"resume={first}"]) == 0
    out = capfd.readouterr().out
    assert "cpu_budget_s=0.001 begins anew for what is left" in out
    assert _rows() == [4, 8], "as much as in a new run"
    assert "2 of 3 problems tuned in cpu_budget_s=0.001" in out, "the finished one counts, though it comes last"
    assert set(pd.read_csv(first / "selections.csv")["M"]) == {4, 8}
    assert main([f"resume={first}", "cpu_budget_s=null"]) == 0
    assert _rows() == [4, 8, 16]
    trials = [json.loads(line) for line in (first / "trials.jsonl").read_text().splitlines()]
    finals = [t for t in trials if t["row"] == "trial" and t["stage"] == "bench" and "M=4 " in t["problem"]]
    assert finals
    assert len({t["candidate"] for t in finals}) == len(finals), "the finals of a finished problem are not repeated"


def _trials(folder: Path, stage: str) -> list[str]:
    """The candidates of a stage, in the order of the journal."""
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    return [t["candidate"] for t in trials if t["row"] == "trial" and t["stage"] == stage]


@pytest.mark.slow
def test_one_product_that_takes_longer_than_the_budget_is_cut_short_and_the_next_run_goes_on(run: Run) -> None:
    """Twenty candidates of 0.3 s: the search ends after the first ones, and their finals take what needs a choice."""
    slow = ["shapes.items=[{M: 8, N: 32, K: 64}]", f"space.PACE_MS=[{','.join(map(str, range(300, 320)))}]"]
    out = run(*slow, "cpu_budget_s=1")
    assert "screen: 1 search cut short by the budget; its row is provisional" in out
    first = _last()
    screened = _trials(first, "screen")
    assert 0 < len(screened) < 12
    assert len(_trials(first, "bench")) <= 4
    assert _rows() == [8]
    assert "resume with" in out
    run(*slow, "cpu_budget_s=3")
    assert _last() != first
    assert not set(_trials(_last(), "screen")) & set(screened), "finished trials are not repeated"


def test_a_choice_that_the_budget_left_out_is_undecided_and_not_unsolved(run: Run) -> None:
    """The only finalist that fits is wrong: the search goes on another time."""
    slow = ["shapes.items=[{M: 8, N: 32, K: 64}]", f"space.PACE_MS=[{','.join(map(str, range(300, 320)))}]"]
    out = run(*slow, "backend=[faulty]", "space.KIND=[wrong_at_8]", "cpu_budget_s=1")
    assert "select: cpu_budget_s=1 left 1 problem without a valid candidate so far: faulty M=8 N=32 K=64" in out


def test_a_large_product_is_left_where_one_of_its_trials_would_overrun(run: Run) -> None:
    """A product of 2^44 operations after one of 2^14: its operands alone would take minutes."""
    out = run("shapes.items=[{M: 8, N: 32, K: 64}, {M: 16777216, N: 1024, K: 1024}]", "cpu_budget_s=20")
    assert "1 of 2 problems tuned in cpu_budget_s=20 (null: no limit), small M first; left: 1 with M 16,777,216" in out
    assert _rows() == [8]


def test_a_comparison_ends_too_and_begins_with_few_rows(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run()  # M 4 is tuned
    events = [json.loads(line) for line in run("events=json", pipeline=("compare",)).splitlines()]
    assert any(str(event.get("text")).endswith("2 problems do not fit into cpu_budget_s") for event in events)
    out = run(pipeline=("compare",))
    assert "1 of 3 problems timed in cpu_budget_s=0.001 (null: no limit), small M first; left: 2 with M 8 to 16" in out
    first = _last()
    assert main(["runs", "n=1"]) == 0
    assert {"partial", "1/3"} <= set(capfd.readouterr().out.split())
    assert set(pd.read_csv(first / "compared.csv")["M"]) == {4}
    assert f"resume with: gemmpipe resume={first.resolve()}" in out
    assert main([f"resume={first}", "cpu_budget_s=null"]) == 0
    assert "left:" not in capfd.readouterr().out
    compared = pd.read_csv(first / "compared.csv")
    assert set(compared["M"]) == {4, 8, 16}
    assert set(compared[compared["name"] == "tuned"]["status"]) == {"ok", "unsupported"}


def test_null_is_no_limit_and_the_default_is_visible(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert "left" not in run("cpu_budget_s=null")
    assert _rows() == [4, 8, 16]
    assert main(["--cfg", "job"]) == 0
    assert "cpu_budget_s: 60\n" in capfd.readouterr().out


def test_no_time_at_all_is_an_error(refusal: Callable[..., str]) -> None:
    assert refusal("cpu_budget_s=0") == "cpu_budget_s: 0.0 given, expected more than 0 seconds, or null"
