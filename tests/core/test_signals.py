"""A signal ends a run even if its driver does not check for it."""

import os
import subprocess
import sys

import pytest

_STUCK = """
import os, signal, threading, time
from gemmpipe.core import signals
from gemmpipe.core.events import Events
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
signals._GRACE_S = 0.2
os.mkfifo("pipe")
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    with signals.handle_signals(Events()) as stop:
        stop.has_workers = {workers}
        {act}
except KeyboardInterrupt:
    print("at once")
except signals.Interrupted:
    print("after running jobs")
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
"""


@pytest.mark.parametrize(
    ("workers", "act", "output"),
    [
        (False, "open('pipe')", "at once\n"),
        (False, "while not stop.requested: time.sleep(0.01)\n        stop.check()", "after running jobs\n"),
        (True, "time.sleep(1.5)\n        stop.check()", "after running jobs\n"),
    ],
    ids=["hangs", "checks", "waits for devices"],
)
def test_a_signal_ends_a_run_that_does_not_check(workers: bool, act: str, output: str, folder: object) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = _STUCK.format(workers=workers, act=act)
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert (ended.stdout, ended.returncode) == (output, 0), ended.stderr
