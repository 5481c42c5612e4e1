"""A run as a stream of JSON: one object per line, for `events=json`. docs/howto/tracking.md has the schema."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from gemmpipe.core.events import Event
from gemmpipe.listeners import Listener, RunOutcome, RunStart
from gemmpipe.report.progress import RunProgress

VERSION = 1
"""The version of the schema; raised when a field changes its meaning or is removed, not for new fields and events."""


class JsonStream(Listener):
    """Writes each event as one line; `write` takes the line without its break."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._began_s = time.monotonic()
        self._stage, self._total = "", 0
        self._progress = RunProgress(self._began_s)
        self._lock = threading.Lock()  # events may come from several threads

    def require(self) -> None:
        """Needs no package."""

    def __call__(self, event: Event) -> None:
        """Write one event; of another one than those of the schema its kind and text."""
        self.event(event)

    def start(self, run: RunStart) -> None:
        self._emit(
            "run", version=VERSION, time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **_plain(asdict(run))
        )

    def event(self, event: Event) -> None:
        self._progress.take(event, time.monotonic())
        if event.kind == "stage":
            self._stage, self._total = event.text, event.total
            self._emit("stage", stage=event.text, total=event.total)
        elif event.kind == "progress":
            more: dict[str, object] = {"text": event.text} if event.text else {}
            if self._progress.of_run is not None:
                more["share"] = round(self._progress.of_run, 3)
            if (left_s := self._progress.left_s(time.monotonic())) is not None:
                more["left_s"] = round(left_s, 1)
            if (between := self._progress.range_s(time.monotonic())) is not None:
                more["left_range_s"] = [round(end_s, 1) for end_s in between]
            self._total = event.total or self._total
            self._emit("progress", stage=self._stage, done=event.done, total=self._total, **more)
        elif event.text:
            self._emit(event.kind, text=event.text)

    def finish(self, outcome: RunOutcome) -> None:
        self._emit("result", **_plain(asdict(outcome)))

    def _emit(self, event: str, **values: object) -> None:
        t_s = round(time.monotonic() - self._began_s, 3)
        with self._lock:
            self._write(json.dumps({"event": event, "t": t_s, **values}, default=str, allow_nan=False))


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """Values for JSON: paths as text, tuples as lists."""
    return {name: _value(value) for name, value in values.items()}


def _value(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return value
