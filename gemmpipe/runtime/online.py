"""Tuning beside the program (`GEMMPIPE_ONLINE_TUNING`): misses are queued for a process of its own, its rows picked up.

Nothing of this is on the way of a call that was answered before: a key is queued when its first call is missed, and a
thread looks every few seconds whether tables have changed.
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
"""How often tables are looked at."""
_BATCH_S = 0.2  # a first forward pass misses many keys at once
_MAX_TRIES = 3  # a key that three processes leave without a row has no candidate here
_VARIABLE = "GEMMPIPE_ONLINE_TUNING"


class ReloadableDispatch(Protocol):
    """What answers calls from tables, and can read them again."""

    def tables_changed(self) -> bool: ...

    def reload_tables(self) -> int: ...

    def has_row(self, problem: Problem, device: Device) -> bool: ...


@dataclass(kw_only=True, eq=False)
class _PendingProblem:
    """A problem that waits for a row, and what was queued of its calls."""

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
    """Of the command line: where to tune."""
    _recorder: Recorder
    _missed: dict[Problem, _PendingProblem] = field(default_factory=dict)
    _dispatches: dict[int, ReloadableDispatch] = field(default_factory=dict)
    """All that missed something: eager calls and compiled ones have their own."""
    _wakeup: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _process: "subprocess.Popen[bytes] | None" = None

    def add(self, dispatch: ReloadableDispatch, problem: Problem, untuned: UntunedKey) -> None:
        """Queue a problem that no row answered."""
        rows = problem.rows_column
        key = tuple((name, _padded_m(value) if name == rows else value) for name, value in problem.key)
        asked = replace(problem, key=key)
        with self._lock:
            self._dispatches[id(dispatch)] = dispatch
            if asked not in self._missed:
                self._missed[asked] = _PendingProblem(dispatch=dispatch, problem=asked, untuned=untuned)
                self._queue(self._missed[asked])
        self._wakeup.set()

    def run(self) -> None:
        """The thread's work, for as long as the process lives."""
        while True:
            if self._wakeup.wait(PERIOD_S):
                self._wakeup.clear()
                threading.Event().wait(_BATCH_S)
            try:
                self.check_once()
            except (OSError, GemmpipeError) as error:
                LOG.warn(f"online {error}", f"online tuning: {error}")

    def check_once(self) -> None:
        """Pick up what is new, and have somebody work on what is still missed."""
        with self._lock:
            missed, dispatches = list(self._missed.values()), list(self._dispatches.values())
        for dispatch in dispatches:
            if dispatch.tables_changed():
                again = dispatch.reload_tables()
                _LOG.info("gemmpipe: tables have changed; %d untuned keys are looked up again", again)
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
        self._recorder.flush()  # one that is at work sees what is new
        if idle:
            self._process = online.start_tuner(self.folder, self.overrides)

    def _queue(self, missed: _PendingProblem) -> None:
        """Add its calls so far: the most called are tuned first."""
        calls = max(1, missed.untuned.calls)
        if calls > missed.queued:
            values = dict(missed.problem.key)
            self._recorder.add(missed.problem.family, values, missed.problem.layer, calls - missed.queued)
            missed.queued = calls


def _padded_m(m: object) -> int:
    """The M to tune for: beyond EXACT_M the next that look-up pads to, which answers its neighbours too."""
    assert isinstance(m, int)
    return m if m <= EXACT_M else finely_padded(m)


_TUNERS: dict[tuple[int, str, int], OnlineTuner | None] = {}
_LOCK = threading.Lock()


def missed(dispatch: ReloadableDispatch, problem: Problem, device: Device, untuned: UntunedKey) -> None:
    """A key that no row answered; does nothing unless the user asked for online tuning."""
    word = os.environ.get(_VARIABLE, "").strip()
    if word in ("", "0"):
        return
    if problem.family not in shipped_families():
        LOG.warn(
            f"online {problem.family}",
            f"{_VARIABLE}: {problem.family} is a family of your own: gemmpipe --config-dir DIR kernel=... tunes it; "
            "only shipped ones are tuned beside a program",
        )
        return
    # A forked process has the parent's memory without its threads.
    place = (os.getpid(), device.gfx, device.cu_num)
    with _LOCK:
        if place not in _TUNERS:
            _TUNERS[place] = _start_tuner(word, device)
        found = _TUNERS[place]
    if found is not None:
        found.add(dispatch, problem, untuned)


def _start_tuner(word: str, device: Device) -> OnlineTuner | None:
    overrides = _device_overrides(word, device)
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


def _device_overrides(word: str, device: Device) -> tuple[str, ...] | None:
    """What tells the pipeline where to tune for this device, or None (and a warning) where that cannot be."""
    if word == "1":
        return ("device.kind=cpu",) if device.kind == "cpu" else (f"device.index={device.index}",)
    number = word.removeprefix("cuda:")
    if not number.isdecimal():
        LOG.warn("online word", f"{_VARIABLE}={word}: expected 1, 0 or a spare GPU such as cuda:3: nothing is tuned")
        return None
    if device.kind == "cpu":
        LOG.warn("online cpu", f"{_VARIABLE}={word}: a GPU's times say nothing about {device.gfx}: nothing is tuned")
        return None
    return _spare_gpu_overrides(word, int(number), device)


def _spare_gpu_overrides(word: str, index: int, device: Device) -> tuple[str, ...] | None:
    import torch

    if index == device.index:
        LOG.warn("online self", f"{_VARIABLE}={word}: this program computes there itself: its rows are provisional")
        return (f"device.index={index}",)
    if index >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        LOG.warn("online index", f"{_VARIABLE}={word}: this process sees {there} GPUs: nothing is tuned")
        return None
    spare = gpu_device(index)
    if (spare.gfx, spare.cu_num) != (device.gfx, device.cu_num):
        LOG.warn("online spare", f"{_VARIABLE}={word}: {spare.name} is no {device.name}: nothing is tuned")
        return None
    # Nobody else works there: what it finds was timed alone.
    return (f"device.index={index}", "device.shared=false")
