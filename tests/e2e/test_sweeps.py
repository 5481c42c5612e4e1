"""Sweeps by Hydra's launchers, in real processes: one table of all their rows, and the worst exit code."""

import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak_runs import Site, artifacts_are_whole, table_is_right

from gemmpipe.cli.main import main
from gemmpipe.family import load_family

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
ITEMS = "shapes.items=[[1,32,64]],[[2,32,64]],[[3,32,64]]"

BRIEF = "stages.bench.timer.budget_ms=100"
"""Finals of slow candidates in half the time."""


@pytest.fixture
def site(folder: Path, faulty_arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(faulty_arguments[0].removeprefix("--config-dir="))
    here = Site(folder=folder, arguments=(*faulty_arguments, "space.PACE_MS=[0]"), family=load_family("faulty"))
    yield here
    here.close()


def _launcher(name: str) -> str:
    package = "hydra_joblib_launcher" if name == "joblib" else "hydra_submitit_launcher"
    try:
        importlib.import_module(f"hydra_plugins.{package}")
    except ModuleNotFoundError:
        pytest.skip(f"{package} is not installed")
    return f"hydra/launcher={name}"


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_beside_each_other_lose_no_row(site: Site, launcher: str) -> None:
    code, out, error = site.start("-m", _launcher(launcher), ITEMS).end()
    assert code == 0, (out, error)
    artifacts_are_whole(site)
    table_is_right(site, (1, 2, 3))
    assert len(list(site.folder.glob("outputs/runs/tune/*/*/manifest.json"))) == 3


@pytest.mark.parametrize("launcher", ["", "joblib"])
def test_the_worst_exit_code_is_returned_wherever_the_jobs_ran(site: Site, launcher: str) -> None:
    arguments = [_launcher(launcher)] if launcher else []
    only_wrong_at_8 = ("space.KIND=[wrong_at_8]", "backend=[faulty]", "shapes.items=[[8,32,64]],[[1,32,64]]")
    if launcher:
        code, _, error = site.start("-m", *arguments, *only_wrong_at_8).end()
        assert code == 1, error
    else:
        assert main([*site.arguments, "-m", *only_wrong_at_8]) == 1
    table_is_right(site, (1,))


def test_jobs_end_with_a_sweep_that_is_killed_and_go_on_when_resumed(site: Site) -> None:
    items = "shapes.items=[{M: [1,2,3,4], N: 32, K: 64}],[{M: [5,6,7,8], N: 32, K: 64}]"
    paced = ("space.PACE_MS=[0,30,31,32]", "search=exhaustive", "batch=1", BRIEF)
    started = site.start("-m", _launcher("joblib"), "hydra.launcher.n_jobs=2", *paced, items)
    deadline = time.monotonic() + 300
    while len(_journals(site)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    started.process.kill()
    started.process.wait()
    assert started.gone(), "jobs outlive their sweep"
    journals = _journals(site)
    assert len(journals) == 2
    for journal in journals:
        assert main([f"resume={journal.parent}"]) == 0
    table_is_right(site, range(1, 9))


def test_a_job_that_is_killed_takes_neither_the_sweep_nor_the_others_along(site: Site) -> None:
    items = "shapes.items=[{M: [1,2,3,4], N: 32, K: 64}],[{M: [5,6,7,8], N: 32, K: 64}]"
    paced = ("space.PACE_MS=[15,15.1,15.2]", "search=exhaustive", "batch=1", "backend=[faulty]", BRIEF)
    started = site.start("-m", _launcher("submitit_local"), *paced, items)
    deadline = time.monotonic() + 300
    while not (journals := _journals(site)) and time.monotonic() < deadline:
        time.sleep(0.05)
    [run] = {journal.parent for journal in journals}  # the other waits for the device
    [job] = [pid for pid in started.kin() if _holds(pid, run / "trials.jsonl")]
    os.kill(job, signal.SIGKILL)
    code, out, error = started.end()
    assert code == 3, error
    assert "exit code 0; " in out
    [printed] = [line for line in error.splitlines() if line.startswith("job ")]
    assert "ended without a result" in printed
    assert f"resume with: gemmpipe resume={run}" in printed
    other = (5, 6, 7, 8) if run.name.startswith("0_") else (1, 2, 3, 4)
    table_is_right(site, other)
    assert main([f"resume={run}"]) == 0
    table_is_right(site, range(1, 9))


@pytest.mark.slow
def test_a_sweep_that_is_stopped_says_how_the_rest_is_done(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    items = "shapes.items=[{M: [1,2,3,4], N: 32, K: 64}],[{M: [5,6,7,8], N: 32, K: 64}]"
    line = ("-m", items, "space.PACE_MS=[15,15.1,15.2]", "search=exhaustive", "batch=1", "backend=[faulty]", BRIEF)
    started = site.start(*line)
    deadline = time.monotonic() + 300
    while not _journals(site) and time.monotonic() < deadline:
        time.sleep(0.05)
    started.process.send_signal(signal.SIGINT)
    code, _, error = started.end()
    assert code == 130, error
    ways = "resume this run with 'gemmpipe resume=last', then run the same command for the rest of the sweep"
    assert error.endswith(f"gemmpipe: interrupted; {ways}\n")
    assert len(_journals(site)) == 1, "the sweep's next run did not begin"
    assert main(["resume=last"]) == 0
    table_is_right(site, range(1, 5))
    capfd.readouterr()
    assert main([*site.arguments, *line]) == 0
    assert "4 already tuned" in capfd.readouterr().out
    table_is_right(site, range(1, 9))


def _holds(pid: int, path: Path) -> bool:
    """True if a process has a file open."""
    try:
        return any(Path(f"/proc/{pid}/fd/{number}").resolve() == path for number in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _journals(site: Site) -> list[Path]:
    """Those of a sweep's jobs that have timed a candidate."""
    found = site.folder.glob("outputs/runs/tune/*/*/trials.jsonl")
    return [path for path in found if '"row":"trial"' in path.read_text()]


def test_the_documented_line_for_slurm_fits_the_launcher(site: Site) -> None:
    """It composes, and ends in a line where there is no SLURM; a cluster has not run it."""
    if shutil.which("srun"):
        pytest.skip("there is a SLURM: this would start jobs")
    slurm = (_launcher("submitit_slurm"), "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8")
    code, _, error = site.start("-m", *slurm, "hydra.launcher.timeout_min=240", ITEMS).end()
    assert (code, error.startswith("gemmpipe: hydra/launcher=submitit_slurm: Could not detect")) == (3, True), error
    assert len(error.splitlines()) == 1
    code, _, error = site.start("-m", *slurm, "hydra.launcher.timeout=240", ITEMS).end()
    assert (code, "timeout" in error) == (2, True), error
