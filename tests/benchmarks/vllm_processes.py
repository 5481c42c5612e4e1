"""The processes of vllm_plugin.py: all started together, then asked one at a time while the others wait."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TAIL_LINES, TAIL_WIDTH = 12, 240
"""The lines of a log that are shown."""
POLL_S, END_S = 0.2, 5.0
OUT_OF_MEMORY = ("out of memory", "Free memory on device")


class Failed(Exception):
    """A process ended, answered with an error, or took too long."""


class Child:
    """A process that answers lines of JSON with lines of JSON, on a pipe of their own.

    Its output goes to a log. It is the first of a process group, so that what it starts ends with it.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it; `command` gets `--reply-fd N`."""
        self.name, self.log, self.ready = name, log, False
        self.start, self.buffer = time.monotonic(), b""
        self.replies, writer = os.pipe()
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [*command, "--reply-fd", str(writer)],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)

    def ask(self, command: dict[str, Any], limit_s: float) -> Any:
        """The result of a command. Raises Failed; after the limit the process is ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps(command) + "\n").encode())
            self.process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: it was ended, its input is closed
            raise Failed(f"{self.name}: {error}") from None
        answer = self.read(time.monotonic() + limit_s)
        if "error" in answer:
            raise Failed(f"{self.name}: {command['do']}: {answer['error']}")
        return answer["result"]

    def read(self, until: float) -> dict[str, Any]:
        """The next answer, at most until this time. Raises Failed."""
        while True:
            found = self.poll(POLL_S)
            if found is not None:
                return found
            if time.monotonic() > until:
                self.end()
                raise Failed(f"{self.name}: no answer in the time allowed")

    def poll(self, wait_s: float) -> dict[str, Any] | None:
        """The next answer if it arrives within `wait_s`. Raises Failed if the process ended without one."""
        line, found, rest = self.buffer.partition(b"\n")
        if not found:
            ended = self.process.poll() is not None
            if select.select([self.replies], [], [], wait_s)[0]:
                part = os.read(self.replies, 1 << 16)
                ended = ended or not part
                self.buffer += part
                line, found, rest = self.buffer.partition(b"\n")
            if not found:
                if ended:
                    self.end()
                    raise Failed(f"{self.name}: ended with {self.process.returncode}")
                return None
        self.buffer = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End it with all that it started."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S if self.ready else 0)  # one that is ready ends at the end of its input
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.ready = False

    def log_end(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return "\n".join(f"    {line[:TAIL_WIDTH]}" for line in lines[-TAIL_LINES:])

    def lacked_memory(self) -> bool:
        """True if its log says that the device had no memory left."""
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        return any(each in text for each in OUT_OF_MEMORY)


class Starting:
    """Starts children, at most `parallel` at a time and `stagger_s` apart, and waits until they are ready.

    One that lacked memory is started once more after the others: what they need to start is free again.
    """

    def __init__(self, commands: Mapping[str, tuple[Sequence[str], Mapping[str, str], Path]]) -> None:
        """`commands`: name -> (command, environment, log)."""
        self.commands = dict(commands)
        self.ready: dict[str, Child] = {}
        self.running: dict[str, Child] = {}
        self.again: list[str] = []
        self.repeated: set[str] = set()

    def run(self, until: float, parallel: int, stagger_s: float) -> dict[str, Child]:
        """The children that are ready at this time; the others are ended and reported."""
        waiting, last = list(self.commands), 0.0
        while waiting or self.running or self.again:
            now = time.monotonic()
            if now > until:
                self._give_up(waiting)
                break
            if not waiting and not self.running:
                waiting, self.again = self.again, []
            if waiting and len(self.running) < parallel and now - last >= stagger_s:
                self._start(waiting.pop(0))
                last = now
            for name in list(self.running):
                self._look(name)
            time.sleep(POLL_S / 4)
        return self.ready

    def _start(self, name: str) -> None:
        command, environment, log = self.commands[name]
        self.running[name] = Child(name, command, environment, log)

    def _look(self, name: str) -> None:
        child = self.running[name]
        try:
            answer = child.poll(0)
        except Failed as error:
            del self.running[name]
            again = child.lacked_memory() and name not in self.repeated and bool(self.running or self.ready)
            print(f"{error}{', started again later' if again else ''}; the end of {child.log}:", flush=True)
            print(child.log_end(), flush=True)
            if again:
                self.again.append(name)
                self.repeated.add(name)
                child.log.rename(child.log.with_suffix(".first.log"))
            return
        if answer is not None:
            child.ready = True
            self.ready[name] = self.running.pop(name)
            used = answer.get("device_used_gib", 0.0)
            print(
                f"{name}: ready after {time.monotonic() - child.start:.0f} s, device {used:.1f} GiB in use", flush=True
            )

    def _give_up(self, waiting: Sequence[str]) -> None:
        for child in self.running.values():
            print(f"{child.name}: not ready in time; the end of {child.log}:\n{child.log_end()}", flush=True)
            child.end()
        for name in (*waiting, *self.again):
            print(f"{name}: not started", flush=True)
        self.running.clear()
