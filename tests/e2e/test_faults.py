"""Faults injected for real into runs started as a user starts them: nothing lost, nothing repeated, nothing left."""

import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from every_fault import Begun
from soak_runs import Site, Started, nothing_is_repeated, parent_of, table_is_right

from gemmpipe.cli.main import main
from gemmpipe.core.device import cpu_device
from gemmpipe.core.events import Events
from gemmpipe.executors.local import device_lock
from gemmpipe.family import load_family

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

MANY = "shapes.items=[{M: [1, 2, 3, 4, 5, 6, 7, 8], N: 32, K: 64}]"
PROBLEMS = 8
FEW = "shapes.items=[{M: [1, 2], N: 32, K: 64}]"
BRIEF = "stages.bench.timer.budget_ms=50"
"""Finals of many slow candidates that take seconds, not half a minute."""
SHORT_PAUSES = """
from gemmpipe.bench import forkserver
forkserver.RETRY_PAUSES_S = tuple(pause / 10 for pause in forkserver.RETRY_PAUSES_S)
"""
"""As many tries to start a process as ever, with a tenth of the pauses between them."""

Start = Callable[..., Started]


@pytest.fixture
def site(folder: Path, faulty_arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Where runs are started; what is left of them when the test ends is killed."""
    monkeypatch.syspath_prepend(faulty_arguments[0].removeprefix("--config-dir="))
    here = Site(folder=folder, arguments=faulty_arguments, family=load_family("faulty"))
    yield here
    here.close()


@pytest.fixture
def start(site: Site) -> Start:
    """Starts a run."""
    return site.start


@pytest.mark.slow
def test_a_run_that_is_still_at_work_is_not_resumed(every_fault: Begun, refusal: Callable[..., str]) -> None:
    site, started = every_fault
    site.wait_for(started, "launch")
    journal = site.journal()
    assert journal is not None
    refused = refusal(site.arguments[0], f"resume={journal.parent}")
    assert refused.endswith("trials.jsonl: another gemmpipe is still at work on this run")


@pytest.mark.usefixtures("every_fault")
def test_ctrl_c_finishes_the_work_in_hand_and_resume_goes_on(start: Start, site: Site) -> None:
    started = start(MANY, BRIEF, "space.PACE_MS=[0,10,11,12,13,14,15]", "search=exhaustive", "batch=1")
    site.wait_for(started, "done")
    started.process.send_signal(signal.SIGINT)
    code, out, error = started.end()
    assert code == 130
    assert "interrupted: running jobs get 10 s to finish, then results are saved; Ctrl-C again stops at once" in error
    assert error.endswith("gemmpipe: interrupted; resume with 'gemmpipe resume=last'\n")
    assert "gemmpipe resume=" not in out, "the error names the command"
    assert re.search(r"^saved \d+ finished trials in \S+/trials.jsonl$", out, re.MULTILINE)
    assert started.gone()
    # Finished problems are in the table already.
    done = [row["problem"] for row in site.rows() if row["row"] == "done"]
    assert 0 < len(site.tuned()) == len(done)
    finished = [row for row in site.rows() if row["row"] == "trial"]

    assert main(["resume=last"]) == 0
    assert [row for row in site.rows() if row["row"] == "trial"][: len(finished)] == finished
    nothing_is_repeated(site.rows())
    table_is_right(site, range(1, PROBLEMS + 1))
    selections = pd.read_csv(next(Path("outputs/runs").glob("*/*/selections.csv")))
    assert sorted(selections["M"]) == list(range(1, PROBLEMS + 1)), "the run's own table holds all of it"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param("screen", marks=pytest.mark.slow), "bench"])
def test_a_stopped_batch_keeps_its_finished_finals(start: Start, site: Site, stage: str) -> None:
    started = start(MANY, BRIEF, "space.PACE_MS=[0,10,11,12,13,14,15]", "search=exhaustive")
    site.wait_for(started, "done" if stage == "bench" else "trial")
    started.process.send_signal(signal.SIGTERM)
    code, _, error = started.end()
    assert code == 130, error
    done = [row for row in site.rows() if row["row"] == "done"]
    assert site.table.exists() == bool(done) == (stage == "bench")
    assert not done or len(site.tuned()) == len(done)
    assert main(["resume=last"]) == 0
    nothing_is_repeated(site.rows())
    table_is_right(site, range(1, PROBLEMS + 1))


@pytest.fixture
def hung_up() -> Iterator[None]:
    """Processes started here end with their terminal, also when these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.usefixtures("hung_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_to_all_processes_of_a_run_blames_nobody(start: Start, site: Site, number: signal.Signals) -> None:
    """As SLURM and terminals send it: the driver decides, its workers finish the work in hand."""
    slow = ("space.KIND=[right,compile_hang]", "space.PACE_MS=[0,10]", "search=exhaustive", "batch=1")
    started = start(MANY, BRIEF, *slow, "executor.compile_timeout_s=2")
    site.wait_for(started, "trial", 2)
    for pid in started.kin():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    code, out, error = started.end()
    assert code == 130, error
    assert "lost" not in out.partition("driver:")[2], "no worker died"
    assert "died" not in error
    assert started.gone()
    assert main(["resume=last"]) == 0
    assert {row["status"] for row in site.rows("trial")} <= {"ok", "pruned", "compile_error"}
    late = "compiling took longer than executor.compile_timeout_s=2"
    assert {row["error"] for row in site.rows("build")} == {late}, "no compiler died"
    nothing_is_repeated(site.rows())
    table_is_right(site, range(1, PROBLEMS + 1))


def _wait_until_it_hangs(site: Site) -> None:
    deadline = time.monotonic() + 300
    while not [*Path(site.temporary).glob("faulty-*-hang")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_twice_stops_at_once(start: Start, site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    started = start("space.KIND=[right,hang]", "executor.timeout_s=3600")
    _wait_until_it_hangs(site)
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    assert started.process.poll() is None, "it waits for the work in hand"
    started.process.send_signal(signal.SIGINT)
    code, _, error = started.end()  # gives up long before the limit of a candidate
    assert code == 130
    assert "Traceback" not in error
    assert error.endswith("gemmpipe: interrupted; resume with 'gemmpipe resume=last'\n")
    assert started.gone()
    assert main(["runs", "json=true"]) == 0
    (run,) = json.loads(capfd.readouterr().out)
    assert (run["state"], run["exit_code"], run["solved"]) == ("interrupted", 130, 0)
    assert run["problems"] == len(site.rows("problem")) > 0
    assert main(["diff", "shipped", run["folder"]]) == 2
    resume = f"the run has not ended; gemmpipe resume={run['folder']} continues it"
    assert capfd.readouterr().err == f"gemmpipe: diff: {run['folder']}: no selections.csv: {resume}\n"


@pytest.mark.slow
def test_ctrl_c_ends_a_run_that_waits_for_its_device(start: Start, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", site.temporary)
    with device_lock(cpu_device(), Events(), lambda: None):
        waiting = start("space.PACE_MS=[0]")
        assert waiting.process.stdout is not None
        for line in waiting.process.stdout:
            if line.startswith("waiting for "):
                break
        waiting.process.send_signal(signal.SIGINT)
        code, _, error = waiting.end()
    assert code == 130, error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_hanging_worker_does_not_outlive_a_killed_driver(start: Start, site: Site) -> None:
    started = start("space.KIND=[right,hang]", "executor.timeout_s=3600")
    _wait_until_it_hangs(site)
    assert len(started.kin()) > 1
    started.process.kill()
    assert started.gone()


def _killed_at_random(start: Start, site: Site, rounds: int, arguments: tuple[str, ...]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(rounds):
        resuming = site.journal() is not None and any(row["row"] == "problem" for row in site.rows())
        started = start(*(("resume=last",) if resuming else arguments))
        # Most of a run's life lies behind the imports: kill it at a moment after its session began.
        sessions = sum(row["row"] == "session" for row in site.rows())
        deadline = time.monotonic() + 120
        while sum(row["row"] == "session" for row in site.rows()) == sessions and time.monotonic() < deadline:
            if started.process.poll() is not None:
                break
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 2.5))
        started.process.kill()
        started.process.communicate()
        assert started.gone(), f"round {number}: workers are left"
        nothing_is_repeated(site.rows())
    finished = [row for row in site.rows() if row["row"] == "trial"]
    code, _, error = start("resume=last").end()
    assert code == 0, error
    assert [row for row in site.rows() if row["row"] == "trial"][: len(finished)] == finished
    nothing_is_repeated(site.rows())
    table_is_right(site, range(1, PROBLEMS + 1))


@pytest.mark.slow
def test_killed_at_random_and_resumed(start: Start, site: Site) -> None:
    _killed_at_random(start, site, 1, (MANY, BRIEF, "space.PACE_MS=[0,5,6,7,8,9,10]", "search=exhaustive", "batch=1"))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 100])
def test_killed_at_random_again_and_again(start: Start, site: Site, batch: int) -> None:
    arguments = (MANY, "space.PACE_MS=[0,5,6,7,8,9,10]", "space.KIND=[right,kill,spoil_row]", "search=exhaustive")
    _killed_at_random(start, site, 10, (*arguments, f"batch={batch}"))


def _forkservers(started: Started) -> list[int]:
    """The processes from which the driver forks."""
    own = [pid for pid in started.kin() if parent_of(pid) == started.process.pid]
    return [pid for pid in own if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims", [_forkservers, pytest.param(Started.workers, marks=pytest.mark.slow)], ids=["forkserver", "workers"]
)
def test_what_is_killed_as_it_starts_is_started_again(
    victims: Callable[[Started], list[int]], start: Start, site: Site
) -> None:
    started, killed = start(FEW, "space.PACE_MS=[0]", before=SHORT_PAUSES), set[int]()
    deadline = time.monotonic() + 300
    while len(killed) < 4 and started.process.poll() is None and time.monotonic() < deadline:
        for pid in set(victims(started)) - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.05)
    code, _, error = started.end()
    assert code == 0, error
    assert len(killed) >= 4
    assert "Traceback" not in error
    assert started.gone()
    table_is_right(site, (1, 2))


@pytest.mark.slow
def test_workers_that_are_killed_for_ever_end_the_run_in_a_line(start: Start, site: Site) -> None:
    started = start(FEW, "space.PACE_MS=[0]", before=SHORT_PAUSES)
    while started.process.poll() is None:
        for pid in started.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    code, _, error = started.end()
    assert code == 3
    assert (
        error.splitlines()[-1] == "gemmpipe: cpu: the worker cannot start: the worker died: signal 9, 6 times in a row"
    )
    assert "Traceback" not in error
    assert started.gone()


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line_and_loses_nothing(start: Start, site: Site) -> None:
    paces = f"space.PACE_MS=[{','.join(str(i / 100) for i in range(120))}]"
    few_finals = "stages.screen.margin_pct=10"
    code, _, error = start(FEW, paces, few_finals, "search=exhaustive", most_bytes=50_000).end()
    assert code == 3
    (line,) = error.splitlines()
    assert line.startswith("gemmpipe: ")
    assert "trials.jsonl: cannot write the journal: File too large; resume=last" in line
    finished = [row for row in site.rows() if row["row"] == "trial"]
    assert len(finished) > 50
    assert main(["resume=last"]) == 0
    assert [row for row in site.rows() if row["row"] == "trial"][: len(finished)] == finished
    nothing_is_repeated(site.rows())
    table_is_right(site, (1, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("own_locks")
def test_runs_that_merge_at_once_lose_no_row(start: Start, site: Site, faulty_arguments: tuple[str, ...]) -> None:
    for m in (1, 2):
        assert main([*faulty_arguments, f"shapes.items=[[{m},32,64]]", "space.PACE_MS=[0]", f"output=own{m}"]) == 0
    folders = sorted(Path("outputs/runs/tune").iterdir())
    runs = [start(f"reuse={folder}", "chain=[select,merge]", "output=outputs/tuned") for folder in folders]
    for each in runs:
        code, _, error = each.end()
        assert code == 0, error
    table_is_right(site, range(1, 3))
