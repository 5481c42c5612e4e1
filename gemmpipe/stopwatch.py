"""Seconds by purpose: what a purpose within another takes is taken off the outer one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

IDLE = "idle"
"""Waiting for others."""


@dataclass(kw_only=True, eq=False)
class Stopwatch:
    """Where one thread's time goes."""

    spent_s: dict[str, float] = field(default_factory=dict)
    _within: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def spending(self, on: str) -> Iterator[None]:
        """Account the time of a block."""
        self._turn()
        self._within.append(on)
        try:
            yield
        finally:
            self._turn()
            self._within.pop()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._within:
            purpose = self._within[-1]
            self.spent_s[purpose] = self.spent_s.get(purpose, 0.0) + now - self._since
        self._since = now
