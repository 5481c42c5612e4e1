"""A real run on this CPU: runs, show, diff, report in Python, listeners and the stream of JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_programs import Forking

import gemmpipe
from gemmpipe.cli.main import main
from gemmpipe.core.paths import RUNS
from gemmpipe.tables.merge import SHARED_CPU

LINE = ["kernel=a16w16", "shapes=list", "shapes.items=[{M:[1,16],N:64,K:128}]", "device=cpu", "backend=[torch]"]
KEYS = {"M": 16, "N": 64, "K": 128}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, forked_programs: Forking) -> Iterator[Path]:
    """A folder with one run, which logs to MLflow's file store and writes its events as JSON."""
    folder = tmp_path_factory.mktemp("site")
    pytest.importorskip("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        typed = (*LINE, "output=tuned", "listener=mlflow", "events=json", "report=true")
        ended = forked_programs.run(folder, os.environ, "gemmpipe", typed)
        assert ended.returncode == 0, ended.stderr
        (folder / "events.jsonl").write_text(ended.stdout)
        yield folder


@pytest.fixture(autouse=True)
def _there(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site)


def _out(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capfd.readouterr()
    assert main(arguments) == code
    out, error = capfd.readouterr()
    assert not _mistakes(error)
    return out


def _mistakes(error: str) -> list[str]:
    """The lines on stderr but for what a command says that it reads and writes."""
    told = ("show: reading ", "report: reading ", "report: writing ", "reading ")
    return [line for line in error.splitlines() if not line.startswith(told)]


def test_the_run_is_listed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    header, row = _out(capfd, "runs").splitlines()
    assert header.split()[0] == "folder"
    assert {"kernel=a16w16", "2/2", "finished"} <= set(row.split())
    (found,) = json.loads(_out(capfd, "runs", "json=true", "pipeline=tune"))
    assert (found["state"], found["solved"], found["problems"]) == ("finished", 2, 2)
    assert (found["kernel"], found["shapes"]) == ("a16w16", "list")


def test_the_run_is_shown_again_and_nothing_is_written(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    text = _out(capfd, "show")
    assert "a16w16" in text
    assert "tried" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    content = json.loads(_out(capfd, "show", "last", "json=true"))
    selections = gemmpipe.load("last").selections
    times = dict(zip(selections["M"], selections["us"], strict=True))
    assert {each["M"]: each["us"] for each in content["products"]} == times
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == before


def test_one_product_has_its_finals_and_candidates(capfd: pytest.CaptureFixture[str]) -> None:
    assert "finals: " in _out(capfd, "show", "last", *(f"{name.lower()}={size}" for name, size in KEYS.items()))
    content = json.loads(_out(capfd, "show", "last", "m=16", "json=true"))
    finals = [trial for trial in content["trials"] if trial["stage"] == "bench"]
    assert content["choice"]["backend"] == "torch"
    of_choice = [trial for trial in finals if trial["config"] == content["choice"]["config"]]
    assert [trial["us"] for trial in of_choice] == pytest.approx([content["choice"]["us"]], 1e-3)


def test_the_run_against_itself_and_its_table_is_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    table = "tuned/bf16_tuned_gemm.csv"
    for sides in (("last", "last"), (table, "last"), ("last", table)):
        found = json.loads(_out(capfd, "diff", *sides, "json=true", "fail_above=0"))
        assert found["counts"] == {"faster": 0, "slower": 0, "same": 2, "unsure": 0}
        assert found["gate"]["failed"] == []


def test_a_slower_table_fails_the_gate(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone = (site / "tuned/bf16_tuned_gemm.csv").read_text().replace(f" {SHARED_CPU}", "")  # on a busy machine, too
    (site / "alone.csv").write_text(alone)
    lines = alone.splitlines()
    column = lines[0].split(",").index("us")
    cells = [line.split(",") for line in lines[1:]]  # no cell before the time has a comma
    slow = [",".join([*row[:column], str(float(row[column]) * 500), *row[column + 1 :]]) for row in cells]
    (site / "slow.csv").write_text("\n".join([lines[0], *slow]) + "\n")
    text = _out(capfd, "diff", "alone.csv", "slow.csv", "fail_above=2", code=1)
    assert text.splitlines()[-1] == "gate: FAILED: 2 of 2 products slower by more than 2 % for certain"
    text = _out(capfd, "diff", "slow.csv", "alone.csv", "fail_above=2", "markdown=true")
    assert "2 products compared: 2 faster, 0 slower" in text
    assert text.splitlines()[-1] == "gate: passed: none of 2 products slower by more than 2 % for certain"


def test_the_result_in_python(site: Path) -> None:
    found = gemmpipe.load("last")
    assert list(found.problems["M"]) == [1, 16]
    assert set(found.trials["libtype"]) == {"torch"}
    assert found.selections is found.table
    assert len(found.products) == 2
    page = found.report(site / "page.html")
    assert page.read_text().startswith("<!doctype html>")
    difference = found.diff(found)
    assert list(difference.frame["verdict"]) == ["same", "same"]
    assert "2 same" in str(difference)
    for html in (found._repr_html_(), difference._repr_html_()):
        assert html.count("<table>") == html.count("</table>") > 0


def test_every_text_in_a_notebook_is_escaped(site: Path, tmp_path: Path) -> None:
    run = tmp_path / "<script>x"
    run.mkdir()
    for path in gemmpipe.load("last").folder.iterdir():
        if path.is_file():
            (run / path.name).write_bytes(path.read_bytes().replace(b'""method""', b'""<img>""'))
    html = gemmpipe.load(run)._repr_html_()
    assert "<script>" not in html
    assert "<img>" not in html
    assert "&lt;script&gt;" in html


def test_a_command_makes_no_run() -> None:
    with pytest.raises(gemmpipe.UserError, match="show: makes no run; expected on the command line"):
        gemmpipe.run("show")


def test_the_stream_of_json(site: Path) -> None:
    events = [json.loads(line) for line in (site / "events.jsonl").read_text().splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["run", "result"]
    assert events[0]["options"]["shapes"] == "list"
    stages = [event["stage"] for event in events if event["event"] == "stage"]
    assert stages[:2] == ["screen", "bench"]
    assert all(event["t"] >= 0 for event in events)
    assert {"progress", "line"} <= {event["event"] for event in events}
    result = events[-1]
    assert (result["state"], result["exit_code"], len(result["products"])) == ("finished", 0, 2)
    assert result["products"][0]["key"]["N"] == 64
    assert all(Path(name).is_file() for name in (*result["files"], *result["tables"], result["report"]))
    folder = Path(result["report"]).parent
    place = f"mlflow  {site / 'mlruns'} (experiment gemmpipe, run {folder.name})"
    assert [event["text"] for event in events if event.get("text", "").startswith("mlflow")] == [place]


def test_mlflow_has_parameters_metrics_and_files(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(site / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("gemmpipe")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert {"kernel": "a16w16", "shapes": "list", "pipeline": "tune"}.items() <= run.data.params.items()
    assert {"device", "version.torch", "command"} <= set(run.data.params)
    selections = gemmpipe.load("last").selections
    for m, time_us in zip(selections["M"], selections["us"], strict=True):
        assert run.data.metrics[f"time_us/M{m}_N64_K128"] == time_us
    assert {"stage_s/bench", "wall_s", "products"} <= set(run.data.metrics)
    # A choice that is the library itself is in no speed-up.
    assert ("geomean/M_le_64/speedup" in run.data.metrics) == bool((selections["ratio"] != 1).any())
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"tables", "tuned", "report.html"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "n=x"], "n: 'x' given; expected a whole number from 0"),
        (["runs", "pipeline=tuen"], "pipeline: no runs of 'tuen' under outputs/runs; did you mean 'tune'?"),
        (["runs", "jsn=true"], "runs: jsn: no such option; did you mean 'json'?"),
        (["show", "nope"], "show: nope: no such folder; expected the folder of a run, or 'last'"),
        (["show", "lst"], "expected the folder of a run, or 'last'; did you mean 'last'?"),
        (["show", "outputs/runs/tune"], "not the folder of a run, such as outputs/runs/tune/2"),
        (["show", "nope.csv"], "show: nope.csv: no such file"),
        (["show", "tuned/bf16_tuned_gem.csv"], "did you mean 'tuned/bf16_tuned_gemm.csv'?"),
        (["show", "last", "N=96"], "show: no product with N=96"),
        (["diff", "last", "lst"], "did you mean 'last'?"),
        (["show", "lst~1"], "did you mean 'last~1'?"),
        (["diff", "last~1", "last"], "diff: last~1: only 1 finished run with choices under outputs/runs; expected at"),
        (["show", "last~"], "show: last~: no whole number after ~; expected such as last~1"),
        (["resume=last~1"], "resume=last~1: only 1 run that can be resumed under outputs/runs; expected at most last,"),
        (["diff", "last", "shiped"], "did you mean 'shipped'?"),
        (["merge", "kernel=a16w16", "inputs=[tuned/nope.csv]"], "known: bf16_tuned_gemm.csv"),
        (["report", "lst"], "did you mean 'last'?"),
        (["export", "tuned/bf16_tuned_gem.csv", "plugin"], "did you mean 'tuned/bf16_tuned_gemm.csv'?"),
        (["lint", "tunde"], "lint: tunde: no such file or folder; expected configuration files of an engine, or"),
        (["resume=lst"], "resume=lst: no such folder; expected the folder of a run, or 'last'; did you mean 'last'?"),
        (["runs", "pipeline=tun"], "under outputs/runs; did you mean 'tune'?"),
        (["show", "last", "q=4"], "show: q: no option or key column of a16w16"),
        (["show", "last", "n=64"], "show: 2 products with n=64"),
        (["show", "last", "m=5"], "show: no product with m=5"),
        (["show", "last", "last"], "show: last: a second run"),
        (["show", "last", "1x1280x8192"], "show: 1x1280x8192: a second run; expected m=1 n=1280 k=8192 for a product"),
        (["show", "last", "m="], "show: m=: no value"),
        (["diff"], "diff: 0 sides given; expected two runs or tables"),
        (["diff", "shipped", "shipped"], "diff: shipped: twice"),
        (["diff", "last", "last", "fail_above=-1"], "fail_above: '-1' given; expected a percentage"),
        (["diff", "last", "last", "markdown=true", "json=true"], "diff: markdown=true and json=true given"),
        (["diff", "shipped", "last", "fail_above=2"], "fail_above: no product was compared"),
        (["demo", "folder=."], "folder: . exists; expected the name of a new folder"),
        ([*LINE, "events=xml"], "events: 'xml' given, expected one of terminal, json"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    (line,) = _mistakes(capfd.readouterr().err)
    assert line.startswith("gemmpipe: ")
    assert message in line


def test_the_commands_load_no_torch() -> None:
    code = (
        "import sys; from gemmpipe.cli.main import main\n"
        "for line in (['runs'], ['show'], ['show', 'last', 'm=1'], ['diff', 'last', 'last']): assert main(line) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_runs_of_other_folders_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert f"no runs under {RUNS}" in _out(capfd, "runs")


def test_a_run_that_had_nothing_to_time_says_where_the_choices_are(
    site: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last: it adds a run to the list."""
    monkeypatch.setenv("COLUMNS", "120")
    timed = gemmpipe.load("last").folder.relative_to(site)
    shown = _out(capfd, *LINE, "output=tuned").splitlines()
    assert shown[-1] == "see   gemmpipe show tuned/bf16_tuned_gemm.csv; gemmpipe report tuned/bf16_tuned_gemm.csv"
    (folder,) = [line.split()[1] for line in shown if line.startswith("run ")]
    _, row, _ = _out(capfd, "runs").splitlines()
    assert "  2 reused  " in row
    reason = "nothing was timed there, all 2 problems were tuned already; expected the run that timed them"
    commands = ["show RUN", "report RUN", "diff RUN last", "diff last RUN", "export RUN vllm"]
    for command in (*commands, "doctor engine=vllm target=sm_90 run=RUN"):
        assert main(command.replace("RUN", folder).split()) == 2
        (error,) = _mistakes(capfd.readouterr().err)
        assert f"{reason} ({timed}) or their table (tuned/bf16_tuned_gemm.csv)" in error
    assert main([f"reuse={folder}"]) == 2
    assert reason in capfd.readouterr().err
    assert str(timed) in _out(capfd, "show", "last"), "the last run with choices"
    assert _out(capfd, *shown[-1].removeprefix("see   gemmpipe ").split("; ")[0].split()).startswith("a16w16")


def test_the_next_commands_give_the_kernel_of_a_table_whose_name_does_not(
    site: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all others: it adds a run to the list."""
    monkeypatch.setenv("COLUMNS", "120")
    for path in (site / "tuned").glob("bf16_tuned_gemm.csv*"):
        (site / path.name.replace("bf16_tuned_gemm", "small")).write_bytes(path.read_bytes())
    line = _out(capfd, *LINE, "output=small.csv").splitlines()[-1]
    assert line == "see   gemmpipe show small.csv kernel=a16w16; gemmpipe report small.csv kernel=a16w16"
    for command in line.removeprefix("see").split(";"):
        _out(capfd, *command.split()[1:])
