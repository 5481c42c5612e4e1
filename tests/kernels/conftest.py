"""Fixtures of kernel tests: one process with Triton's interpreter."""

from collections.abc import Iterator

import pytest
from interpreter_process import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs cases under Triton's interpreter."""
    running = Interpreter()
    yield running
    running.close()
