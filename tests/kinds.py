"""The kinds of tests, given at collection; a unit test that does more fails.

`unit` starts no process and compiles nothing; `compile` compiles kernels offline, interprets them or traces them;
`e2e` starts processes; `slow` is left out of the README's command. Tests of a GPU are marked `gpu` and have no other
kind.
"""

import multiprocessing.process
import multiprocessing.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from triton.compiler import ASTSource

KINDS = ("unit", "compile", "e2e", "slow")
KIND_OF_FOLDER = {"e2e": "e2e", "pipeline": "e2e", "kernels": "compile", "launch": "compile", "templates": "compile"}
KIND_OF_FILE = {
    **dict.fromkeys(("test_call_options", "test_engine_compile", "test_entry_points"), "compile"),
    **dict.fromkeys(
        (
            "test_capture",
            "test_compile_pool",
            "test_docs",
            "test_exit_codes",
            "test_imports",
            "test_public_api",
            "test_ray",
            "test_renamed",
            "test_search_pool",
            "test_several_devices",
            "test_signals",
            "test_slots",
            "test_supervisor",
        ),
        "e2e",
    ),
}
"""By the name of a file without its suffix, then of its folder. A mark in the file has precedence."""
KIND_OF_FIXTURE = {"interpreter": "compile", "forked_programs": "e2e"}
"""By a fixture with a process that another test may have started."""

_STARTS: tuple[tuple[Any, str], ...] = (
    (subprocess.Popen, "__init__"),
    (multiprocessing.process.BaseProcess, "start"),
    (multiprocessing.util, "spawnv_passfds"),  # multiprocessing's forkserver and resource tracker
    (os, "fork"),
    (os, "system"),
)
_COMPILES: tuple[tuple[Any, str], ...] = ((ASTSource, "__init__"), (torch, "compile"))


def kind_of(item: pytest.Item) -> str:
    """The kind of a test; "" where its own marks name it."""
    marks = {mark.name for mark in item.iter_markers()}
    if marks & {*KINDS, "gpu"}:
        return ""
    for fixture, kind in KIND_OF_FIXTURE.items():
        if fixture in getattr(item, "fixturenames", ()):
            return kind
    return KIND_OF_FILE.get(item.path.stem) or KIND_OF_FOLDER.get(item.path.parent.name, "unit")


@contextmanager
def nothing_started() -> Iterator[list[str]]:
    """Within the block no process is started and nothing compiled; yields the refused calls."""
    refused: list[str] = []

    def refusal(name: str) -> Any:
        def refuse(*arguments: object, **named: object) -> None:
            refused.append(name)
            raise RuntimeError(f"a unit test calls {name}")

        return refuse

    with ExitStack() as stack:
        for owner, name in (*_STARTS, *_COMPILES):
            stack.enter_context(mock.patch.object(owner, name, refusal(f"{owner.__name__}.{name}")))
        yield refused
