"""executor=ray on a real cluster of this machine: a worker killed in the middle, the driver killed and resumed."""

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak_runs import Site, Started, nothing_is_lost, nothing_is_repeated, parent_of, table_is_right

from gemmpipe.core.data import Build
from gemmpipe.core.device import arch_device
from gemmpipe.executors.ray import _keep_signal_handlers
from gemmpipe.executors.ray_worker import compile_on_node
from gemmpipe.family import load_family

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MS = tuple(range(1, 9))
ARGS = (
    f"shapes.items=[{{M: [{','.join(map(str, MS))}], N: 32, K: 64}}]",
    "space.PACE_MS=[0,20,21,22,23,24]",
    "search=exhaustive",
    "executor=ray",
    "executor.workers=2",
    "executor.timeout_s=5",
)


@pytest.fixture
def site(folder: Path, faulty_arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    monkeypatch.syspath_prepend(faulty_arguments[0].removeprefix("--config-dir="))
    arguments = tuple(word for word in faulty_arguments if not word.startswith("executor."))
    here = Site(
        folder=folder, arguments=arguments, family=load_family("faulty"), temporary=tempfile.mkdtemp(dir="/tmp")
    )
    yield here
    here.close()


def _actors(started: Started) -> list[int]:
    """The processes of the RayWorker actors, by title and ancestors, since a title overwrites the environment."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::RayWorker") and started.process.pid in _ancestors(pid):
            found.append(pid)
    return found


def _ancestors(pid: int | None) -> Iterator[int]:
    while pid := parent_of(pid) if pid else None:
        yield pid


@pytest.mark.slow
def test_a_worker_killed_during_the_run_is_replaced_and_nothing_is_lost(site: Site) -> None:
    started = site.start(*ARGS)
    assert site.wait_for(started, "trial", 10, within_s=300)
    actors = _actors(started)
    assert len(actors) == 2
    os.kill(actors[0], signal.SIGKILL)
    code, out, error = started.end()
    assert code == 0, error
    assert "lost its node or its Ray worker; its work is repeated" in error
    assert "Traceback" not in error
    assert "place-0 cpu" in out
    assert "place-1 cpu" in out
    assert {row["status"] for row in site.rows("trial")} <= {"ok", "pruned"}, "no candidate is blamed"
    nothing_is_repeated(site.rows())
    table_is_right(site, MS)
    homes = {row["problem"]: row["device"] for row in site.rows("assignment")}
    assert set(homes.values()) == {"place-0", "place-1"}, "both workers had problems"
    assert _gone(started)


@pytest.mark.slow
def test_a_node_lost_during_the_run_is_replaced_by_one_that_joins(site: Site) -> None:
    """On an existing cluster; its head node has no core for tasks."""
    utils = pytest.importorskip("ray.cluster_utils")
    handler = signal.getsignal(signal.SIGTERM)
    cluster = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        args = tuple(arg for arg in ARGS if not arg.startswith("executor.workers"))
        started = site.start(*args, f"executor.address={cluster.address}")
        assert site.wait_for(started, "trial", 10, within_s=300)
        cluster.remove_node(nodes[0], allow_graceful=False)
        cluster.add_node(num_cpus=1)
        code, _, error = started.end()
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)  # replaced by Ray
    assert code == 0, error
    assert "lost its node or its Ray worker; its work is repeated" in error
    assert {row["status"] for row in site.rows("trial")} <= {"ok", "pruned"}, "no candidate is blamed"
    assert {row["device"] for row in site.rows("assignment")} == {"place-0", "place-1"}, "one per node with cores"
    nothing_is_repeated(site.rows())
    table_is_right(site, MS)


@pytest.mark.slow
def test_the_cluster_of_a_killed_driver_ends_and_the_run_is_resumed(site: Site) -> None:
    started = site.start(*ARGS)
    assert site.wait_for(started, "trial", 10, within_s=300)
    started.process.kill()
    started.process.communicate()
    before = site.rows()
    assert _gone(started)
    code, _, error = site.start("resume=last").end()
    assert code == 0, error
    nothing_is_lost(before, site.rows())
    nothing_is_repeated(site.rows())
    table_is_right(site, MS)


@pytest.mark.slow
def test_a_faulty_candidate_is_quarantined_and_ctrl_c_stops_the_run(site: Site) -> None:
    started = site.start(*ARGS, "space.KIND=[right,segfault]", "space.PACE_MS=[0,20]", "batch=1")
    assert site.wait_for(started, "done", 1, within_s=300)
    started.process.send_signal(signal.SIGINT)
    code, _, error = started.end()
    assert code == 130, error
    assert "quarantined faulty" in error
    assert {row["status"] for row in site.rows("trial")} == {"ok", "pruned", "died"}
    assert _gone(started)
    assert len(site.tuned()) == len(site.rows("done"))


def _gone(started: Started) -> bool:
    """True if the cluster that was started for the run ended with it; Ray's agents take a minute to notice."""
    deadline = time.monotonic() + 120
    while (left := _actors(started) or [pid for pid in started.kin() if not _is_agent(pid)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    return not left


def _is_agent(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"))
    except OSError:
        return True


def test_builds_are_compiled_in_a_process_that_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of a compile task, without a cluster."""
    (tmp_path / "odd_kernels.py").write_text("import os\ndef __getattr__(name):\n    os._exit(3)\n")
    build = Build(kernel="odd_kernels:dies", source_hash="", signature=(), constants=(), aligned=(), options=())
    built = compile_on_node(build, arch_device("sm_90"), 30.0, (str(tmp_path),))
    assert built.facts.error == "the compiler died: exit code 3"


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_missing_cluster_is_a_one_line_error(site: Site, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, _, error = site.start("executor=ray", f"executor.address={scheme}127.0.0.1:{port}").end()
    assert (code, f"{scheme}127.0.0.1:{port}: no Ray cluster there: " in error) == (3, True), error
    assert len(error.splitlines()) == 1


def test_sigterm_while_ray_connects_is_an_interrupt() -> None:
    """Ray's own handler, which it sets first, ends the process."""
    before = signal.getsignal(signal.SIGTERM)

    def connect() -> None:
        with _keep_signal_handlers():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        connect()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("device.index=1", "device.index=1: the Ray cluster gives the devices; use executor.workers"),
        ("executor.workers=0", "executor.workers: 0 given, expected at least 1"),
        ("executor.adress=x", "executor.adress: no such key; did you mean 'address'?"),
    ],
)
def test_usage_errors_are_one_line(site: Site, arg: str, message: str) -> None:
    code, _, error = site.start("executor=ray", arg).end()
    assert code == 2, error
    assert message in error
    assert len(error.splitlines()) == 1
