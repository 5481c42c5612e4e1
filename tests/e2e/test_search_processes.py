"""Whole runs on modelled GPUs, where searches live beside the driver: the journal, a resume, Ctrl-C and a death."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.data import Trial
from gemmpipe.stages.screen.search_processes import ProcessSearchPool

MODELLED = Path(__file__).parents[1] / "modelled"
WORDS = (
    f"--config-dir={MODELLED}",
    "kernel=a8w8_blockscale",
    "shapes=list",
    "shapes.items=[{M: [1, 16, 64, 256], N: 1280, K: 8192}]",
    "executor=modelled",
    "executor.compile_workers=2",
    "format=[csv]",
    "retune=true",
    "space.BLOCK_SIZE_K=[128]",
    "space.num_stages=[3,4]",
)
FOLDER = "hydra.run.dir=run"


@pytest.fixture
def started(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Runs that are ended with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def _start(started: list[subprocess.Popen[str]], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gemmpipe", *arguments]
    started.append(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    )
    return started[-1]


def _rows(folder: Path) -> list[dict[str, object]]:
    """Rows of a journal that may be written meanwhile: a last line without an end is half a row."""
    whole, _, _ = (folder / "run" / "trials.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _screened(folder: Path) -> "Counter[tuple[object, ...]]":
    """How often each (problem, candidate, launches) was screened."""
    rows = [row for row in _rows(folder) if row["row"] == "trial" and row["stage"] == "screen"]
    return Counter((row["problem"], row["candidate"], row["launches"]) for row in rows)


def _wait_for(folder: Path, trials: int, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 600
    while not (folder / "run" / "trials.jsonl").exists() or sum(_screened(folder).values()) < trials:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.01)


def _whole(folder: Path) -> None:
    """Every problem is through, nothing was timed twice, and each stayed on one device."""
    rows, screened = _rows(folder), _screened(folder)
    assert {row["problem"] for row in rows if row["row"] == "done"} == {p for p, _, _ in screened}
    assert max(screened.values()) == 1
    homes = {(row["problem"], row["device"]) for row in rows if row["row"] == "assignment"}
    assert len(homes) == len({problem for problem, _ in homes}) == 4
    assert len((folder / "outputs" / "tuned" / "a8w8_blockscale_tuned_gemm.csv").read_text().splitlines()) == 5


@pytest.mark.slow
def test_candidates_are_introduced_with_their_builds(folder: Path) -> None:
    assert main([*WORDS, FOLDER, "executor.workers=2"]) == 0
    _whole(folder)
    rows = _rows(folder)
    known: dict[object, dict[str, object]] = {}
    for row in rows:
        if row["row"] == "candidate":
            known[row["id"]] = row
        if row["row"] == "trial":
            introduced = known[row["candidate"]]
            own = introduced["backend"] in ("triton", "gluon", "skinny", "sliced", "streamed")
            assert own == ("@" in str(introduced["kernel"])) == bool(introduced.get("builds"))
    resources = json.loads((folder / "run" / "manifest.json").read_text())["resources"]
    assert {r["name"] for r in resources} >= {"driver", "cuda:0", "cuda:1"}
    assert [set(r["busy_s"]) for r in resources if r["name"].startswith("search processes")] == [
        {"start", "listing", "search"}
    ]


@pytest.mark.slow  # tests/e2e/test_faults.py stops and resumes a run whose searches are in the driver
@pytest.mark.parametrize("end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_goes_on(
    folder: Path, started: list[subprocess.Popen[str]], end: signal.Signals
) -> None:
    run = _start(started, *WORDS, FOLDER)
    _wait_for(folder, 60, run)
    run.send_signal(end)
    printed = run.communicate(timeout=600)[0]
    assert run.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL), printed
    assert main(["resume=run", f"--config-dir={MODELLED}"]) == 0
    _whole(folder)


@pytest.mark.slow  # tests/stages/test_search_pool.py kills one too
def test_a_search_process_that_is_killed_is_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, heard = ProcessSearchPool.learn, []

    def learn_and_kill(pool: ProcessSearchPool, trial: Trial) -> None:
        heard.append(trial)
        if len(heard) == 30:  # none of the four searches has ended
            os.kill(pool._workers[0]._process.pid or 0, signal.SIGKILL)
        learn(pool, trial)

    monkeypatch.setattr(ProcessSearchPool, "learn", learn_and_kill)
    assert main([*WORDS, FOLDER]) == 0
    assert "search worker died (exit code -9); restarting its 4 searches" in capsys.readouterr().err
    _whole(folder)
