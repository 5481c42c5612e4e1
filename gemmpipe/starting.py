"""Ctrl-C while no run listens: kept while a module is imported, which would swallow it or stay half made."""

import os
import signal
from types import FrameType

_LOOK_S = 0.02
_IMPORTING = "<frozen importlib._bootstrap"
_STOPPED = 130


class _Start:
    """Whether the user asked to stop in this process while no run listened."""

    def __init__(self) -> None:
        self.asked = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: raises KeyboardInterrupt, after the import in hand is done; the second time ends at once.

        torch clears what is raised while it imports numpy, and C++ in the midst of its own import ends the process.
        """
        again = self.asked and number != signal.SIGALRM
        self.asked = True
        if not _is_importing(frame):
            self.settle()
            raise KeyboardInterrupt
        if again:
            os.write(2, b"gemmpipe: interrupted\n")
            os._exit(_STOPPED)
        signal.signal(signal.SIGALRM, self.hear)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S)

    def settle(self) -> None:
        """Look no more whether an import is done."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        """Raises KeyboardInterrupt where the user asked before and somebody swallowed it, or an import was in hand."""
        if self.asked:
            self.settle()
            raise KeyboardInterrupt


start = _Start()
"""Of this process: what its command line has the signals call, and a run asks when it begins to listen itself."""


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False
