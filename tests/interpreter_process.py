"""One process that interprets Triton's kernels for a session's tests: its start takes longer than most of the cases."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import triton

# Triton 3.6's interpreter loops over one-element arrays, which numpy 2.4 no longer turns into integers.
INTERPRETED = pytest.mark.skipif(
    triton.__version__.startswith("3.6") and int(numpy.__version__.split(".")[1]) >= 4,
    reason="triton 3.6 interprets with numpy before 2.4 only",
)
"""Marks tests that need an interpreter."""
# What Triton 3.7's interpreter says of fp8 for gfx942 and of its own dot_scaled; other versions interpret both.
_LACKING: tuple[str, ...] = ()
if triton.__version__.startswith("3.7."):
    _LACKING = ("fail to convert fp8e4b8 to ir type", "semantic.dot_scaled")


class Interpreter:
    """The process, from its first case on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, program: str, case: dict[str, Any]) -> Any:
        """The result of a program of _interpret.py for a case; an error in it fails the test.

        Skips the test where the installed Triton's interpreter lacks what the kernel uses.
        """
        if self._process is None or self._process.poll() is not None:
            script = Path(__file__).parent / "kernels" / "_interpret.py"
            self._process = subprocess.Popen(
                [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([program, case]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the interpreter ended with exit code {self._process.wait()} in {case}"
        result, error = json.loads(line)
        if error is not None and any(each in error for each in _LACKING):
            pytest.skip(f"triton {triton.__version__} cannot interpret it: {error.splitlines()[-1]}")
        assert error is None, f"{case}: {error}"
        return result

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
