"""How a session runs: who imports what, garbage collection, the order of tests, the summary.

What tests share is in shared_fixtures.py: it imports torch and the package, which the process that only distributes
tests to others (`-n 2`) need not wait for.
"""

import atexit
import gc
import importlib
import multiprocessing.util
import os
import sys
from typing import Any

import pytest

# Importing and collecting make objects that stay: looking for garbage among them takes a part of the time, and two
# fifths of that of a command.
gc.set_threshold(100_000, 20, 50)

# Workers and the processes that they start share the cores: threads that wait for each other within a product of a few
# rows take five times as long as one thread (2 cores, -n 2).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without bytecode each process would compile the package, and each worker rewrite the assertions of all tests; workers
# and what they start inherit it from the process that starts them.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

pytest.register_assert_rewrite("shared_fixtures")


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures where tests run; the interpreter checks integers for overflow with other marks (`-m slow`)."""
    if config.option.markexpr != "not slow":
        os.environ["CHECK_OVERFLOW"] = "1"  # read by Triton
    if hasattr(config, "workerinput"):
        _end_as_multiprocessing_does()
    distributes = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not distributes:
        config.pluginmanager.register(importlib.import_module("shared_fixtures"))


def pytest_collection_finish() -> None:
    """Freeze what is imported and collected."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the exit clean up, but for a worker's."""
    if not hasattr(config, "workerinput"):
        gc.unfreeze()


def _end_as_multiprocessing_does() -> None:
    """Let this process end after multiprocessing's exit functions: taking torch's modules apart takes seconds."""
    atexit.unregister(multiprocessing.util._exit_function)
    atexit.register(os._exit, 0)
    atexit.register(multiprocessing.util._exit_function)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbours go to one worker, so that what they share starts once; with `--dist` the scheduler asked for."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the measurements of tests that compare one with a limit: `record_property("measured", text)`."""
    for report in terminalreporter.stats.get("passed", []):
        for name, text in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {text}")
