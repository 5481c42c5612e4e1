"""A signal ends a run also where its driver looks at nothing any more."""

import os
import subprocess
import sys

import pytest

_STUCK = """
import os, signal, threading, time
from gemmpipe import interrupt
from gemmpipe.events import Events
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
interrupt._PATIENCE_S = 0.2
os.mkfifo("pipe")
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    with interrupt.listening(Events()) as stop:
        stop.has_workers = {workers}
        {act}
except KeyboardInterrupt:
    print("at once")
except interrupt.Interrupted:
    print("after the work in hand")
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
"""


@pytest.mark.parametrize(
    ("workers", "act", "said"),
    [
        (False, "open('pipe')", "at once\n"),
        (False, "while not stop.asked: time.sleep(0.01)\n        stop.check()", "after the work in hand\n"),
        (True, "time.sleep(1.5)\n        stop.check()", "after the work in hand\n"),
    ],
    ids=["hangs", "looks", "waits for devices"],
)
def test_a_signal_ends_a_run_that_looks_at_nothing_any_more(workers: bool, act: str, said: str, folder: object) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = _STUCK.format(workers=workers, act=act)
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert (ended.stdout, ended.returncode) == (said, 0), ended.stderr
