"""Devices are locked exclusively, and those of one run have equal properties."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemmpipe.core.data import Device
from gemmpipe.core.device import cpu_device
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import Event, Events
from gemmpipe.core.nvml import ForeignProcesses, conditions, limits
from gemmpipe.core.signals import Interrupted
from gemmpipe.executors.local import device_lock, lock_path, require_alike


def _after(calls: int) -> Callable[[], None]:
    """A check that raises Interrupted at the given number of calls."""
    left = [calls]

    def check() -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise Interrupted("interrupted")

    return check


@pytest.mark.usefixtures("own_locks")
def test_waiting_for_a_device_can_be_interrupted() -> None:
    device = cpu_device()
    events: list[Event] = []
    with device_lock(device, Events(), _after(1)):
        with pytest.raises(Interrupted), device_lock(device, Events(listeners=[events.append]), _after(2)):
            pytest.fail("two hold one device")
        assert [event.text for event in events if event.kind == "line"] == [
            f"waiting for {device.name}: another gemmpipe run is timing on it"
        ]
    with device_lock(device, Events(), _after(1)):
        assert lock_path(device).exists()


OTHER = """
import os, sys, time
from pathlib import Path
from gemmpipe.core.device import cpu_device
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import Events
from gemmpipe.executors.local import device_lock
device = cpu_device()  # it imports torch, which the other user may not be allowed to read
os.umask(0o077)
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
def check():
    raise TimeoutError
def show(event):
    if event.kind == "line":
        print(event.text, flush=True)
try:
    with device_lock(device, Events(listeners=[show]), check):
        print("held", flush=True)
        sys.stdin.readline()
except (EnvironmentProblem, TimeoutError) as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.fixture
def another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Callable[..., subprocess.Popen[str]]]":
    """Starts a process of another user that holds the lock, in a folder like /tmp, until it reads a line."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    temporary = Path(tempfile.mkdtemp())  # the test's own folder is in one that only the user may enter
    temporary.chmod(0o1777)
    monkeypatch.setattr("gemmpipe.executors.local.tempfile", SimpleNamespace(gettempdir=lambda: str(temporary)))
    started: list[subprocess.Popen[str]] = []

    def start(uid: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", OTHER, str(uid)]
        environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[2])}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd="/"))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()
    shutil.rmtree(temporary)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.e2e
def test_another_users_run_is_reported_and_its_lock_is_free_after_it(
    another: "Callable[..., subprocess.Popen[str]]",
) -> None:
    device, events = cpu_device(), list[Event]()
    theirs = another(12345)
    assert _line(theirs) == "held"
    with pytest.raises(Interrupted), device_lock(device, Events(listeners=[events.append]), _after(2)):
        pytest.fail("two hold one device")
    assert [event.text for event in events if event.kind == "line"] == [
        f"waiting for {device.name}: a gemmpipe run of uid 12345 (process {theirs.pid}) is timing on it"
    ]
    third = another(12346)
    assert _line(third) == events[0].text
    assert _line(third) == "TimeoutError: "
    theirs.communicate("\n")
    assert _line(another(12346)) == "held", "although another user owns the file"


@pytest.mark.e2e
def test_an_inaccessible_lock_of_another_user_is_reported(another: "Callable[..., subprocess.Popen[str]]") -> None:
    device = cpu_device()
    path = lock_path(device)
    path.touch()
    os.chown(path, 12345, -1)
    message = f"EnvironmentProblem: {path}: the lock of {device.name} "
    for mode, end in (
        (0o644, "held"),
        (0o600, f"{message}belongs to uid 12345, and no other user may open it; TMPDIR names"),
    ):
        path.chmod(mode)
        assert _line(another(12346)).startswith(end)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(EnvironmentProblem, match="is a link; TMPDIR names another folder"), _lock(device):
        pass
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(EnvironmentProblem, match="is not a regular file"), _lock(device):
        pass


def _lock(device: Device) -> "AbstractContextManager[None]":
    return device_lock(device, Events(), _after(1))


def test_a_lock_is_by_uuid(h200: Device) -> None:
    one, other = replace(h200, uuid="a", index=0), replace(h200, uuid="a", index=3)
    assert lock_path(one) == lock_path(other)
    assert lock_path(one) != lock_path(replace(h200, uuid="b"))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"name": "NVIDIA H100"}, "name NVIDIA H100 instead of NVIDIA H200"),
        ({"cu_num": 114}, "cu_num 114 instead of 132"),
        ({"gfx": "sm_100"}, "gfx sm_100 instead of sm_90"),
    ],
)
def test_different_devices_are_refused(h200: Device, change: dict[str, object], difference: str) -> None:
    alike = (h200, replace(h200, index=1, uuid="b"))
    require_alike(alike)
    with pytest.raises(EnvironmentProblem, match=f"cuda:2 differs from cuda:0: {difference}; tune them separately"):
        require_alike((*alike, replace(h200, index=2, **change)))


def test_a_cpu_has_no_conditions_and_no_foreign_processes() -> None:
    cpu = cpu_device()
    assert set(conditions(cpu).values()) == {None}
    assert set(limits(cpu)) == {"name", "gfx", "cu_num"}
    assert not ForeignProcesses(cpu).detect()


@pytest.mark.usefixtures("own_locks")
def test_the_wait_for_a_device_is_measured_and_shown_as_what_runs_now(monkeypatch: pytest.MonkeyPatch) -> None:
    device, events, now_s = cpu_device(), list[Event](), [100.0]
    held = device_lock(device, Events(), _after(1))

    def sleep(seconds: float) -> None:
        now_s[0] += 30
        held.__exit__(None, None, None)

    monkeypatch.setattr("gemmpipe.executors.local.time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    held.__enter__()
    with device_lock(device, Events(listeners=[events.append]), _after(2)) as waited_s:
        assert waited_s == 30
    text = f"waiting for {device.name}: another gemmpipe run is timing on it"
    assert [(event.kind, event.text) for event in events] == [
        ("line", text),
        ("progress", text),
        ("progress", "starting workers"),
    ]
    with device_lock(device, Events(), _after(1)) as waited_s:
        assert waited_s == 0
