"""The driver's side of a process that hunts: started, spoken to, listened to, and ended."""

import contextlib
import pickle
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from gemmpipe.data import Build
from gemmpipe.executors import Usage
from gemmpipe.forkserver import Forked, forkserver
from gemmpipe.search.lore import Lore
from gemmpipe.stages.hunting import Ground, Quarry
from gemmpipe.stages.hunting.hunter import Asked, Failed, Told, main
from gemmpipe.stopwatch import IDLE


class HunterProcess:
    """One process after another; `start` begins a new one when the last is ended."""

    def __init__(self, ground: Ground, lore: Lore) -> None:
        self._ground, self._lore = ground, lore
        self.hunted: dict[str, Quarry] = {}
        """By problem id, what it has been given and has not ended."""
        self.unlisted = 0
        """Of these, problems that it has not answered for the first time."""
        self.losses = 0
        """Deaths since it last ended a hunt."""
        self._builds: dict[str, Build] = {}
        self._past: list[Usage] = []
        self.start()

    def start(self) -> None:
        """A process that knows what the driver does. Raises EnvironmentProblem where none can be started."""
        self.pipe: Connection
        pipe, theirs = forkserver().Pipe()
        self._begun = time.monotonic()
        self._spent_s: dict[str, float] = {}
        self._builds = {}
        arguments = (self._ground, self._lore, self._begun, theirs)
        with theirs:
            self._process = Forked(main, arguments)
        self.pipe = pipe

    def send(self, message: Quarry | Told) -> None:
        """Tell it something; whether it lives is looked at elsewhere."""
        self.send_pickled(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_pickled(self, message: bytes) -> None:
        """The same, pickled once for all hunters."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(message)

    def answers(self) -> Iterator[Asked | Failed | None]:
        """What it said since the last look; None at the end when it is gone."""
        try:
            while self.pipe.poll():
                yield self.pipe.recv()
        except (EOFError, OSError):
            yield None

    def builds_of(self, asked: Asked) -> dict[str, tuple[Build, ...]]:
        """The builds of whom it asks for."""
        self._builds |= {build.id: build for build in asked.new_builds}
        self._spent_s = dict(asked.spent_s)
        return {name: tuple(self._builds[b] for b in builds) for name, builds in asked.builds.items()}

    def end(self) -> str:
        """End it; how it ended."""
        now = time.monotonic()
        self._past.append(self._usage(now))
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()
        return f"exit code {self._process.exitcode}"

    def usage(self) -> Usage:
        """Where its time went, and that of those before it."""
        whole = Usage(name="")
        for part in [*self._past, self._usage(time.monotonic())]:
            whole.take_in(part)
        return whole

    def _usage(self, now: float) -> Usage:
        busy = dict(self._spent_s)
        idle_s = busy.pop(IDLE, 0.0)
        idle_s += max(0.0, now - self._begun - idle_s - sum(busy.values()))
        return Usage(name="", wall_s=now - self._begun, busy_s=busy, idle=[(0.0, idle_s)])
