"""The demo: its run folder is complete, marked as a replay, and taken by no table and no later run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import gemmpipe
from gemmpipe import journal
from gemmpipe.cli.main import main
from gemmpipe.core.data import median
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import DEMOS
from gemmpipe.family import load_family
from gemmpipe.pipeline.demo_run import RECORDING, near_best, option_values, replay_demo
from gemmpipe.search import recorded
from gemmpipe.search.simulator import NEAR_BEST
from gemmpipe.tables import store


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        assert main(["demo", f"folder={folder}", "open=false"]) == 0
    return folder


def test_the_recording_is_small_and_is_part_of_the_tested_one() -> None:
    assert RECORDING.stat().st_size <= 150_000
    part = recorded.read(RECORDING)
    whole = recorded.read(Path(__file__).parents[1] / "data/recorded/h200_a8w8_blockscale.jsonl.xz")
    assert part.recorded_at == whole.recorded_at
    for problem, outcomes in part.problems.items():
        full = whole.problems[problem]
        assert {c: o.samples_us for c, o in outcomes.items()} == {c: o.samples_us for c, o in full.items()}


def test_the_choices_are_those_of_recorded_times(run: Path) -> None:
    recording = recorded.read(RECORDING)
    by_id = {problem.id: outcomes for problem, outcomes in recording.problems.items()}
    record = journal.read(run)
    assert not record.skipped
    trials = record.at("screen")
    assert len(trials) > 100
    for trial in trials:
        known = {round(s, 4) for s in by_id[trial.problem][trial.candidate].samples_us}
        assert {round(s, 4) for s in trial.samples_us} <= known
    ends = [entry.t_s for entry in record.log if entry.t_s is not None]
    assert ends == sorted(ends)
    table = gemmpipe.load(run).table
    assert len(table) == len(recording.problems)
    near = 0
    for name, config in zip(table["problem"], table["config"], strict=True):
        times = {json.dumps(c.knobs, sort_keys=True): o.time_us for c, o in by_id[name].items() if o.time_us}
        chosen = times[json.dumps(json.loads(config), sort_keys=True)]
        near += chosen <= NEAR_BEST * min(times.values())
        assert chosen < median(times.values())
    assert near >= len(table) - 1  # the default search on this recording, seed 0: all 9


def test_it_is_marked_as_a_replay_everywhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["replayed"]["device"] == "NVIDIA H200"
    session = journal.read(run).sessions[0]
    assert session["replayed"] == manifest["replayed"]["recorded"]
    assert set(gemmpipe.load(run).table["policy"]) == {"replayed 2026-11-21"}
    assert main(["show", str(run)]) == 0
    note = "A replay: all times were recorded on an NVIDIA H200 on 2026-11-21; nothing was measured in this run."
    assert note in " ".join(capsys.readouterr().out.split())
    assert note in (run / "report.html").read_text()


@pytest.mark.usefixtures("folder")
def test_it_is_named_after_the_list_of_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert "demo, never" not in capsys.readouterr().out
    shutil.copytree(run, DEMOS / "2026-11-26_09-00-00-000001")
    assert main(["runs"]) == 0
    listed, demo = capsys.readouterr().out.splitlines()
    assert listed.startswith("no runs under outputs/runs")
    assert demo == f"replayed by gemmpipe demo, never 'last': gemmpipe show {DEMOS}/2026-11-26_09-00-00-000001"
    assert main(["show", "last"]) == 2
    assert f"such as that of gemmpipe demo, {DEMOS}/2026" in capsys.readouterr().err
    assert main(shlex.split(demo.partition(": gemmpipe ")[2])) == 0


def test_its_times_and_counts_are_those_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    assert main(["demo", f"folder={folder}", "open=false"]) == 0
    printed = capsys.readouterr().out
    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    page = (folder / "report.html").read_text()

    def choices(text: str) -> list[str]:
        return re.findall(r"^ *(\d+ +\d+ +\d+ +\S+ us) ", text, re.MULTILINE)

    assert len(choices(printed)) == 9
    assert choices(printed) == choices(shown)
    (recorded_count,) = re.findall(r"9 products, ([\d,]+) configurations", printed)
    (timed,) = re.findall(r": ([\d,]+) configurations timed", printed)
    assert f"space: {recorded_count} configurations over all products" in shown
    assert f"  {recorded_count} -> {timed}  recorded, but not requested by the search" in shown
    assert f">{recorded_count}<" in page
    assert f">{timed}<" in page
    wall = re.findall(r"replayed here in (\S+ s)", printed) + re.findall(r"finished in (\S+ s)", shown)
    assert wall[0] == wall[1]
    assert wall[0] in page


def test_no_table_takes_its_rows(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"selections.csv:2: a row of a replay \(gemmpipe demo\)"):
        store.load(run / "selections.csv", load_family("a8w8_blockscale"))
    assert main(["merge", f"inputs=[{run}/selections.csv]", "output=out.csv", "kernel=a8w8_blockscale"]) == 2
    assert not Path("out.csv").exists()
    assert main([f"reuse={run}", "chain=[select,merge]", "output=tuned"]) == 2
    assert not Path("tuned").exists()


def test_it_is_not_compared_with_measured_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "shipped", str(run)]) == 0
    assert "0 products compared" in capsys.readouterr().out
    assert main(["diff", "shipped", str(run), "fail_above=2"]) == 2


def test_options_are_merged_with_those_that_they_include() -> None:
    found = option_values("search", "gaussian")
    assert found["rungs"]["cutoff"] == 1.5
    assert found["rungs"]["keep_fraction"] == 0.25
    assert "defaults" not in found


@pytest.mark.slow
def test_the_same_search_again_gives_the_same_choices(run: Path, tmp_path: Path) -> None:
    again = replay_demo(tmp_path / "again")
    assert near_best(again.products) >= len(again.products) - 1
    assert list(gemmpipe.load(again.folder).table["config"]) == list(gemmpipe.load(run).table["config"])
