"""Programs run by a process that has imported torch before: a fork per program, which ends as Python does."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = """
import atexit, gc, json, os, runpy, sys, threading, torch
import gemmpipe.runtime.capture.__main__, torch._dynamo  # which torch imports when it is needed
import gemmpipe.cli.job, hydra.main, pandas  # and gemmpipe
gc.collect()
gc.freeze()  # or each fork scans all of torch's objects

def begin(case):
    os.chdir(case["folder"])
    os.environ.clear()
    os.environ.update(case["environment"])
    for number, path in ((0, os.devnull), (1, case["out"]), (2, case["error"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.argv = ["", *case["arguments"]]
    sys.path[0] = case["folder"]
    if case["module"].endswith(".py"):
        sys.argv[0] = case["module"]
        runpy.run_path(case["module"], run_name="__main__")
    else:
        sys.modules.pop(case["module"], None)  # which runpy would warn of
        runpy.run_module(case["module"], run_name="__main__", alter_sys=True)

def code_of(case):
    try:
        begin(case)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0

for line in sys.stdin:
    child = os.fork()
    if not child:
        code = code_of(json.loads(line))
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)  # torch's modules are not taken apart, which takes most of a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(kw_only=True, eq=False)
class Forking:
    """`python -m MODULE WORDS...`, or `python SCRIPT.py WORDS...`, without the seconds that importing torch takes.

    `folder` is for what programs print.

    Good for a process that ends as Python does: it waits for threads and calls what is registered for the exit.
    """

    folder: Path
    process: "subprocess.Popen[str] | None" = None
    runs: int = 0

    def run(
        self, folder: Path, environment: Mapping[str, str], module: str, arguments: Sequence[str]
    ) -> "subprocess.CompletedProcess[str]":
        """The same result as that of subprocess.run."""
        if self.process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, "-c", SERVER], **pipes)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.runs += 1
        out, error = (self.folder / f"{name}{self.runs}" for name in ("out", "error"))
        case = {"folder": str(folder), "environment": dict(environment), "module": module, "arguments": list(arguments)}
        print(json.dumps({**case, "out": str(out), "error": str(error)}), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        return subprocess.CompletedProcess(list(arguments), code, out.read_text(), error.read_text())

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
