"""Online tuning (`GEMMPIPE_ONLINE_TUNING`): misses are queued for a separate tuner process, its rows are reloaded.

Calls with a bound kernel have no cost: a key is queued at its first call without a row, and a thread checks every few
seconds if tables have changed.
"""

import logging
import os
import subprocess
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gemmpipe import online
from gemmpipe.core.data import Device, Problem
from gemmpipe.core.device import gpu_device
from gemmpipe.core.errors import GemmpipeError
from gemmpipe.core.paths import make_private_folder, user_data
from gemmpipe.family import shipped_families
from gemmpipe.runtime.capture.recorder import Recorder, recorder_for
from gemmpipe.runtime.select import EXACT_M, finely_padded
from gemmpipe.runtime.selection_log import LOG, UntunedKey

_LOG = logging.getLogger("gemmpipe.runtime")
PERIOD_S = 2.0
"""Seconds between checks of the tables."""
_BATCH_S = 0.2  # a first forward pass misses many keys at once
_MAX_TRIES = 3  # a key without a row after three processes has no candidate here
_VARIABLE = "GEMMPIPE_ONLINE_TUNING"


class ReloadableDispatch(Protocol):
    """A dispatch with tables that can be read again."""

    def tables_changed(self) -> bool: ...

    def reload_tables(self) -> int: ...

    def has_row(self, problem: Problem, device: Device) -> bool: ...


@dataclass(kw_only=True, eq=False)
class _PendingProblem:
    """A problem without a row, and the number of its queued calls."""

    dispatch: ReloadableDispatch
    problem: Problem
    untuned: UntunedKey
    queued: int = 0
    tries: int = 0


@dataclass(kw_only=True, eq=False)
class OnlineTuner:
    """The misses of this process on one kind of device."""

    device: Device
    folder: Path
    overrides: tuple[str, ...]
    """Overrides of the command line: the device to tune on."""
    _recorder: Recorder
    _missed: dict[Problem, _PendingProblem] = field(default_factory=dict)
    _dispatches: dict[int, ReloadableDispatch] = field(default_factory=dict)
    """The dispatches with misses: eager and compiled calls have separate ones."""
    _wakeup: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _process: "subprocess.Popen[bytes] | None" = None

    def add(self, dispatch: ReloadableDispatch, problem: Problem, untuned: UntunedKey) -> None:
        """Queue a problem without a row."""
        rows = problem.rows_column
        key = tuple((name, _padded_m(value) if name == rows else value) for name, value in problem.key)
        padded = replace(problem, key=key)
        with self._lock:
            self._dispatches[id(dispatch)] = dispatch
            if padded not in self._missed:
                self._missed[padded] = _PendingProblem(dispatch=dispatch, problem=padded, untuned=untuned)
                self._queue(self._missed[padded])
        self._wakeup.set()

    def run(self) -> None:
        """The thread's loop, until the process ends."""
        while True:
            if self._wakeup.wait(PERIOD_S):
                self._wakeup.clear()
                threading.Event().wait(_BATCH_S)
            try:
                self.check_once()
            except (OSError, GemmpipeError) as error:
                LOG.warn(f"online {error}", f"online tuning: {error}")

    def check_once(self) -> None:
        """Reload changed tables, and start a tuner for the problems that still have no row."""
        with self._lock:
            missed, dispatches = list(self._missed.values()), list(self._dispatches.values())
        for dispatch in dispatches:
            if dispatch.tables_changed():
                untuned = dispatch.reload_tables()
                _LOG.info("gemmpipe: tables have changed; %d untuned keys are looked up again", untuned)
        ended = self._process is not None and self._process.poll() is not None
        for each in missed:
            each.tries += ended
            if each.tries >= _MAX_TRIES or each.dispatch.has_row(each.problem, self.device):
                with self._lock:
                    self._missed.pop(each.problem, None)
        if ended:
            self._process = None
        idle = bool(self._missed) and self._process is None and not online.is_running(self.folder)
        for each in missed if idle else ():
            self._queue(each)
        self._recorder.flush()  # a running tuner reads the new problems
        if idle:
            self._process = online.start_tuner(self.folder, self.overrides)

    def _queue(self, missed: _PendingProblem) -> None:
        """Record its new calls: the most called problems are tuned first."""
        calls = max(1, missed.untuned.calls)
        if calls > missed.queued:
            values = dict(missed.problem.key)
            self._recorder.add(missed.problem.family, values, missed.problem.layer, calls - missed.queued)
            missed.queued = calls


def _padded_m(m: object) -> int:
    """The M to tune for: beyond EXACT_M the next padded M of the look-up, which serves the M between as well."""
    assert isinstance(m, int)
    return m if m <= EXACT_M else finely_padded(m)


_TUNERS: dict[tuple[int, str, int], OnlineTuner | None] = {}
_LOCK = threading.Lock()


def missed(dispatch: ReloadableDispatch, problem: Problem, device: Device, untuned: UntunedKey) -> None:
    """Queue a key without a row, if online tuning is enabled."""
    setting = os.environ.get(_VARIABLE, "").strip()
    if setting in ("", "0"):
        return
    if problem.family not in shipped_families():
        LOG.warn(
            f"online {problem.family}",
            f"{_VARIABLE}: {problem.family} is your own family: tune it with gemmpipe --config-dir DIR kernel=...; "
            "only shipped families are tuned online",
        )
        return
    # A forked process has the parent's memory without its threads.
    place = (os.getpid(), device.gfx, device.cu_num)
    with _LOCK:
        if place not in _TUNERS:
            _TUNERS[place] = _start_tuner(setting, device)
        found = _TUNERS[place]
    if found is not None:
        found.add(dispatch, problem, untuned)


def _start_tuner(setting: str, device: Device) -> OnlineTuner | None:
    overrides = _device_overrides(setting, device)
    if overrides is None:
        return None
    folder = user_data() / "online" / f"{device.gfx}-{device.cu_num}"
    try:
        make_private_folder(folder)
    except OSError as error:
        LOG.warn("online folder", f"{_VARIABLE}: {folder}: {error.strerror}: nothing is tuned")
        return None
    made = OnlineTuner(
        device=device, folder=folder, overrides=overrides, _recorder=recorder_for(folder / online.MISSED)
    )
    threading.Thread(target=made.run, name="gemmpipe-online", daemon=True).start()
    return made


def _device_overrides(setting: str, device: Device) -> tuple[str, ...] | None:
    """The overrides that name the device to tune on, or None (with a warning) if there is none."""
    if setting == "1":
        return ("device.kind=cpu",) if device.kind == "cpu" else (f"device.index={device.index}",)
    number = setting.removeprefix("cuda:")
    if not number.isdecimal():
        LOG.warn("online word", f"{_VARIABLE}={setting}: expected 1, 0 or a spare GPU such as cuda:3: nothing is tuned")
        return None
    if device.kind == "cpu":
        LOG.warn("online cpu", f"{_VARIABLE}={setting}: a GPU's times are not valid for {device.gfx}: nothing is tuned")
        return None
    return _spare_gpu_overrides(setting, int(number), device)


def _spare_gpu_overrides(setting: str, index: int, device: Device) -> tuple[str, ...] | None:
    import torch

    if index == device.index:
        LOG.warn("online self", f"{_VARIABLE}={setting}: this program uses that GPU itself: its rows are provisional")
        return (f"device.index={index}",)
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        LOG.warn("online index", f"{_VARIABLE}={setting}: this process has {count} GPUs: nothing is tuned")
        return None
    spare = gpu_device(index)
    if (spare.gfx, spare.cu_num) != (device.gfx, device.cu_num):
        LOG.warn("online spare", f"{_VARIABLE}={setting}: {spare.name} is not a {device.name}: nothing is tuned")
        return None
    # No other work runs there: its rows are timed alone.
    return (f"device.index={index}", "device.shared=false")
