"""Sweeps on a real SLURM cluster of this machine: nothing lost when jobs are cancelled, queued again or killed."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing
from soak_runs import Row, Site, Started, artifacts_are_whole, nothing_is_lost, nothing_is_repeated, table_is_right

from gemmpipe.family import load_family

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
FIRST, SECOND = range(1, 13), range(13, 17)
PACED = ("space.PACE_MS=[15,15.1,15.2]", "search=exhaustive", "batch=1", "backend=[faulty]")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        started = SlurmCluster(folder=Path(folder))
        for node in ("node1", "node2"):  # where locks of devices lie: nodes are not one machine
            (Path(folder) / node).mkdir()
        yield started
        started.close()


@pytest.fixture
def site(
    folder: Path, cluster: SlurmCluster, faulty_arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.syspath_prepend(faulty_arguments[0].removeprefix("--config-dir="))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    slurm = (
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=cpu",
        f"hydra.launcher.cpus_per_task={os.cpu_count() or 1}",  # a job a node
        f'hydra.launcher.setup=["export TMPDIR={cluster.folder}/$SLURMD_NODENAME"]',
    )
    arguments = (*faulty_arguments, "executor.timeout_s=5", "-m", *slurm)
    here = Site(folder=folder, arguments=arguments, family=load_family("faulty"), environment=cluster.environment)
    yield here
    here.close()


def _items(*jobs: range) -> str:
    return "shapes.items=" + ",".join(f"[{{M: [{','.join(map(str, ms))}], N: 32, K: 64}}]" for ms in jobs)


def _journals(site: Site) -> list[Path]:
    return sorted(site.folder.glob("outputs/runs/tune/*/*/trials.jsonl"))


def _rows(journal: Path, kind: str = "") -> list[Row]:
    there = Site(folder=journal.parent, arguments=(), family=load_family("faulty"))
    there.journal = lambda: journal  # type: ignore[method-assign]
    return there.rows(kind)


def _until(ready: Callable[[], object], what: str, within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _at_work(site: Site, started: Started, jobs: int = 2) -> list[Path]:
    """The journals of all jobs, once each has done a problem."""

    def busy() -> bool:
        assert started.process.poll() is None, started.end()
        return len(_journals(site)) == jobs and all(_rows(journal, "done") for journal in _journals(site))

    _until(busy, "the jobs did not begin")
    return _journals(site)


def test_jobs_on_two_nodes_lose_no_row_and_one_is_cancelled_and_goes_on(site: Site, cluster: SlurmCluster) -> None:
    started = site.start(*PACED, _items(FIRST, SECOND))
    first, _ = _at_work(site, started)
    job = sorted(cluster.running())[0]
    cluster.ask("scancel", job)
    _until(lambda: len(cluster.running()) == 0, "a job did not end")
    started.process.send_signal(signal.SIGINT)  # without accounting submitit hears nothing of a cancelled job
    code, out, error = started.end()
    assert (code, "submitted; output of the jobs: " in out) == (130, True)
    assert f"the jobs keep running; 'scancel {job.partition('_')[0]}' cancels them" in error
    before = _rows(first)
    done = [row for row in before if row["row"] == "done"]
    assert len(done) < len(FIRST), "it was stopped in the middle"
    table_is_right(site, [*FIRST[: len(done)], *SECOND])
    printed = (first.parents[1] / ".submitit" / job / f"{job}_0_log.err").read_text()
    assert "Traceback" not in printed
    again = cluster.ask("srun", sys.executable, "-m", "gemmpipe", f"resume={first.parent}")
    assert "resuming: " in again
    nothing_is_lost(before, _rows(first))
    nothing_is_repeated(_rows(first))
    table_is_right(site, [*FIRST, *SECOND])
    artifacts_are_whole(site)


@pytest.mark.slow
def test_a_job_that_is_queued_again_goes_on_in_its_folder(site: Site, cluster: SlurmCluster) -> None:
    started = site.start(*PACED, _items(FIRST))
    [journal] = _at_work(site, started, jobs=1)
    [job] = cluster.running()
    cluster.ask("scontrol", "requeue", job)
    code, out, error = started.end()
    assert (code, f"job {job}: exit code 0" in out) == (0, True), error
    rows = _rows(journal)
    assert [row["row"] for row in rows].count("session") == 2
    assert {row["status"] for row in rows if row["row"] == "trial"} <= {"ok", "pruned"}
    nothing_is_repeated(rows)
    table_is_right(site, FIRST)


@pytest.mark.slow
def test_a_warning_before_the_limit_of_time_ends_a_job_in_time(site: Site, cluster: SlurmCluster) -> None:
    """The signal that SLURM sends then; submitit may queue the job no more."""
    started = site.start(*PACED, _items(FIRST, SECOND), "hydra.launcher.timeout_min=5")
    _at_work(site, started)
    job = sorted(cluster.running())[0]
    cluster.ask("scancel", "--signal=USR2", job)
    code, out, error = started.end()
    assert (code, f"job {job}: exit code 130" in out) == (130, True), error
    printed = (_journals(site)[0].parents[1] / ".submitit" / job / f"{job}_0_log.err").read_text()
    assert "hydra.launcher.max_num_timeout=" in printed
    assert "internal error" not in printed
    done = [len(_rows(journal, "done")) for journal in _journals(site)]
    assert done[0] < len(FIRST) and done[1] == len(SECOND)
    table_is_right(site, [*FIRST[: done[0]], *SECOND])


def test_a_run_is_one_process_on_one_node(site: Site) -> None:
    code, _, error = site.start("hydra.launcher.nodes=2", _items(FIRST)).end()
    assert (code, error) == (
        2,
        "gemmpipe: hydra.launcher.nodes=2: a run is one process on one node; on several nodes: executor=ray\n",
    )
