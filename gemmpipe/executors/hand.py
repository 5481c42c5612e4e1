"""The process that works at a desk: started, spoken to, listened to, and ended."""

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from gemmpipe import worker
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.forkserver import LOST, Forked, forkserver
from gemmpipe.jobs import SETTING_UP, Flight, Job
from gemmpipe.worker import Answer, Post

_END_S = 30.0  # a killed process is gone long before, unless it hangs in a driver


class Hand:
    """One worker process after another; `start` begins a new one when the last is stopped."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._context = forkserver()
        self._cells = self._context.RawArray("d", [SETTING_UP, time.monotonic()])
        self.flight = Flight(self._cells)
        """In memory that outlives every one of them."""
        self.start()

    def start(self) -> None:
        """Begin a new process. Raises EnvironmentProblem where none can be started."""
        pipe, theirs = self._context.Pipe()
        self.flight.begin(SETTING_UP)
        with theirs:
            self._process = Forked(worker.main, (self._post, theirs, self._cells))
        self._pipe = pipe

    def send(self, job: Job | None) -> None:
        """Give it a job, or None to end it. Raises OSError when it is gone."""
        self._pipe.send(job)

    def answer(self) -> Answer | None:
        """What it said next, if anything; a broken pipe says nothing."""
        try:
            return self._pipe.recv() if not self._pipe.closed and self._pipe.poll() else None
        except (EOFError, OSError):
            return None

    def ears(self) -> Sequence[Connection | int]:
        """What to wait on: its voice and its end."""
        return () if self._pipe.closed else (self._pipe, self._process.ear)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.alive

    def cause_of_death(self) -> str:
        """How it ended, in words."""
        self._process.join(timeout_s=5)
        code = self._process.exitcode
        if code == LOST:
            return "the worker died: the process that knows how was killed"
        return f"the worker died: {'signal ' + str(-code) if code is not None and code < 0 else f'exit code {code}'}"

    def resident_bytes(self) -> int:
        """Memory that it holds (Linux; 0 elsewhere)."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """End it at once; what it has said can still be heard. Raises EnvironmentProblem when it cannot be ended."""
        self._process.kill()
        self._process.join(timeout_s=_END_S)
        if self._process.alive:
            raise EnvironmentProblem(f"{self._post.device.torch_name}: the worker cannot be killed: the driver hangs")

    def stop(self, *, patience_s: float = 0.0) -> None:
        """Wait so long for its end, then kill it; nothing is heard afterwards."""
        if not self._pipe.closed:
            self._process.join(timeout_s=patience_s)
            self.kill()
            self._pipe.close()
            self._process.close()
