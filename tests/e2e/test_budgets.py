"""A search cut short: its rows are provisional, and the next run, or the same one resumed, goes on with it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pairwise import few

from gemmpipe import journal
from gemmpipe.cli.main import main
from gemmpipe.family import load_family
from gemmpipe.tables import store
from gemmpipe.tables.merge import is_provisional

Run = Callable[..., str]
TABLE = Path("outputs/tuned/faulty_tuned_gemm.csv")

pytestmark = pytest.mark.usefixtures("own_locks")


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str], faulty_arguments: tuple[str, ...]) -> Run:
    """Types arguments after those of the faulty family; its output."""

    def typed(*arguments: str) -> str:
        capfd.readouterr()
        assert main([*faulty_arguments, "space.PACE_MS=[0,1,2,3,4,5]", "stages.screen.keep=3", *arguments]) == 0
        return capfd.readouterr().out

    return typed


def _policies() -> list[str]:
    return [str(row["policy"]) for row in store.read(TABLE, load_family("faulty"))]


def _screened(folder: Path) -> set[tuple[str, str]]:
    rows = [json.loads(line) for line in (folder / journal.NAME).read_text().splitlines()]
    return {(r["problem"], r["candidate"]) for r in rows if r["row"] == "trial" and r["stage"] == "screen"}


def _runs() -> list[Path]:
    return sorted(Path("outputs/runs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)


SEARCHES = ["exhaustive", "halving", "random", "gaussian", "forest"]


def _timed(folder: Path) -> list[tuple[str, str, int]]:
    """(problem, candidate, launches) of every screening trial, in the order of the journal."""
    rows = [json.loads(line) for line in (folder / journal.NAME).read_text().splitlines()]
    screened = [r for r in rows if r["row"] == "trial" and r["stage"] == "screen"]
    return [(r["problem"], r["candidate"], r["launches"]) for r in screened]


@pytest.mark.slow
@pytest.mark.parametrize("search", few(SEARCHES, 0))
def test_each_search_resumed_goes_on_and_repeats_nothing(
    run: Run, search: str, faulty_arguments: tuple[str, ...]
) -> None:
    """Six candidates and three of torch a problem, fewer than any search looks at: in the end all are timed."""
    if search == "forest":
        pytest.importorskip("sklearn")
    run(f"search={search}", "search.budget_trials=4")
    for _ in range(2):
        assert main([faulty_arguments[0], "resume=last"]) == 0
    timed = _timed(_runs()[-1])
    assert len(timed) == len(set(timed)), "no finished trial is made again"
    assert len(_screened(_runs()[-1])) == 2 * 9
    assert not any(is_provisional(policy) for policy in _policies())


@pytest.mark.parametrize("search", few(SEARCHES, 0, 3))
def test_a_budget_of_trials_makes_rows_provisional(run: Run, search: str) -> None:
    if search == "forest":
        pytest.importorskip("sklearn")
    out = run(f"search={search}", "search.budget_trials=3")
    assert "2 searches cut short by the budget; their rows are provisional" in out
    assert len(_screened(_runs()[-1])) == 2 * 3
    assert all(is_provisional(policy) for policy in _policies())


@pytest.mark.slow
def test_a_budget_too_small_for_anything_valid_says_so_and_can_go_on(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    out = run("search=exhaustive", "backend=[faulty]", "space.KIND=[wrong_at_8]", "search.budget_trials=2")
    assert "screen: 2 searches cut short by the budget" in out
    assert (
        "select: search.budget_trials=2 left 1 problem without a valid candidate so far: faulty M=8 N=32 K=64"
        in " ".join(out.split())
    )
    assert "resume with: gemmpipe resume=" in out
    manifest = json.loads((_runs()[-1] / "manifest.json").read_text())
    assert (manifest["unsolved"], manifest["undecided"]) == ([], ["faulty M=8 N=32 K=64"])
    assert [row["M"] for row in store.read(TABLE, load_family("faulty"))] == [16]
    codes = [main(["resume=last"]) for _ in range(3)]
    assert codes[0] == 0
    assert codes[-1] == 1, "nobody is left to try: now it is known that there is none"
    assert "no valid candidate for faulty M=8 N=32 K=64: " in capfd.readouterr().err


def test_the_next_run_goes_on_and_repeats_nothing(run: Run) -> None:
    run("search=exhaustive", "search.budget_trials=3")
    first = _screened(_runs()[-1])
    out = run("search=exhaustive")
    assert "already tuned" not in out
    later = _screened(_runs()[-1])
    assert later
    assert not first & later
    assert not any(is_provisional(policy) for policy in _policies())
    assert "2 already tuned" in run("search=exhaustive")


def test_the_same_run_resumed_goes_on(run: Run) -> None:
    arguments = ("search=exhaustive", "search.budget_trials=4")
    run(*arguments)
    before = _screened(_runs()[-1])
    assert main(["resume=last"]) == 0
    after = _screened(_runs()[-1])
    assert before < after
    assert len(after) - len(before) <= 2 * 4


def test_a_budget_of_seconds_leaves_what_it_did_not_reach(run: Run) -> None:
    out = run("search=exhaustive", "search.budget_s=1e-9")
    assert "cut short" in out
    assert "resume with: gemmpipe resume=" in out
    assert "2 of 2 problems tuned" in out, "the libraries are looked at in any case"
    assert any(is_provisional(policy) for policy in _policies()), "but for a problem that was through before the clock"


@pytest.mark.parametrize(("budget_s", "tried"), [("3600", True), ("1e-9", False)])
def test_nothing_is_tried_of_other_ms_when_the_time_is_over(
    run: Run, monkeypatch: pytest.MonkeyPatch, budget_s: str, tried: bool
) -> None:
    exchanged: list[object] = []
    monkeypatch.setattr(
        "gemmpipe.stages.screen.stage.cross_evaluate", lambda *arguments: exchanged.append(arguments) or ()
    )
    run("search=exhaustive", f"search.budget_s={budget_s}")
    assert bool(exchanged) is tried


def test_a_budget_that_leaves_nobody_out_cuts_nothing_short(run: Run) -> None:
    out = run("search=exhaustive", "backend=[torch,onednn]", "device=cpu", "search.budget_s=1e-9")
    assert "cut short" not in out, "libraries are looked at in any case, and there is nobody else"
    assert "resume with:" not in out
    assert not any(is_provisional(policy) for policy in _policies())


def test_journals_teach_the_same_and_other_problems(run: Run) -> None:
    run("search=exhaustive")
    first = _runs()[-1]
    arguments = ("output=other", f"search.journals=[{first}]", "search=exhaustive")
    run(*arguments)
    assert not _screened(_runs()[-1]), "the same kernels, versions and device: nothing is timed again but the finals"


def test_a_journal_that_is_none_is_refused(refusal: Callable[..., str]) -> None:
    line = refusal("kernel=a16w16", "shapes=list", "shapes.items=[[8,32,64]]", "search.journals=[nowhere]")
    assert line.startswith("search.journals: nowhere: no trials.jsonl there")
