"""A process pool with really killed processes: no task is lost or blamed; endless kills are a one-line error."""

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from multiprocessing import forkserver as server
from pathlib import Path
from typing import Any

import pytest

from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.executors import slots
from gemmpipe.executors.slots import ProcessSlots

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _square(number: int) -> int:
    time.sleep(0.05)
    return number * number


def _server() -> int:
    return int(vars(server)["_forkserver"]._forkserver_pid or 0)


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()] if parent else []


@pytest.fixture
def pool() -> Iterator[ProcessSlots]:
    made = ProcessSlots(2, ())
    yield made
    made.close(kill=True)


def _schedule(pool: ProcessSlots, count: int) -> "queue.SimpleQueue[Future[Any]]":
    found: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    for number in range(count):
        pool.schedule(partial(_square, number), 30.0, found.put)
    return found


def _all(found: "queue.SimpleQueue[Future[Any]]", count: int) -> list[int]:
    # A process that is killed while it takes a task holds pebble's lock, for which the others wait for 60 s.
    return sorted(found.get(timeout=180).result() for _ in range(count))


@pytest.mark.slow
def test_a_forkserver_that_is_killed_repeatedly_loses_no_task(pool: ProcessSlots) -> None:
    found = _schedule(pool, 40)
    for pause_s in (0.0, 0.3, 1.5):
        time.sleep(pause_s)
        if pid := _server():  # pid 0 would be this group of processes
            os.kill(pid, signal.SIGKILL)
    assert _all(found, 40) == [number * number for number in range(40)]
    assert found.empty(), "each ends once"


def test_processes_that_are_killed_as_they_start_or_work_lose_no_task(pool: ProcessSlots) -> None:
    found, killed = _schedule(pool, 40), 0
    deadline = time.monotonic() + 30
    while killed < 4 and time.monotonic() < deadline:
        for pid in _children(_server()):
            with contextlib.suppress(ProcessLookupError):  # it ended since the list was read
                os.kill(pid, signal.SIGKILL)
                killed += 1
                time.sleep(0.2)
    assert _all(found, 40) == [number * number for number in range(40)]
    assert killed >= 4


def test_processes_that_never_start_are_an_environment_error(
    pool: ProcessSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "RETRY_PAUSES_S", (0.0, 0.1))
    monkeypatch.setattr(slots, "_initialise", _die)
    found = _schedule(pool, 3)
    for _ in range(3):
        with pytest.raises(EnvironmentProblem, match="compile processes are killed repeatedly as they start"):
            found.get(timeout=60).result()


def _die(python_path: tuple[str, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
