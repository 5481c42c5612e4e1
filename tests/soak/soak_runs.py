"""Runs of gemmpipe in processes of their own, what they leave behind, and what must hold of it whatever happened."""

import collections
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe.family import Family
from gemmpipe.tables import store

Row = dict[str, object]
NEEDED = {
    "trial": {"stage", "problem", "candidate", "status", "launches", "samples_us"},
    "done": {"stage", "problem"},
    "problem": {"id", "key"},
    "candidate": {"id", "knobs"},
}
"""Fields of rows that gemmpipe wrote; other rows are foreign."""
COMMAND_LINE = """
import sys
from gemmpipe.cli import entry
sys.argv[0] = "gemmpipe"
entry()
"""
"""As `python -m gemmpipe`."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run in a process of its own, and everything that it starts."""

    process: "subprocess.Popen[str]"
    mark: str

    def end(self, timeout_s: float = 600) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr."""
        out, error = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, error

    def kin(self) -> list[int]:
        """Processes of this run that are still there."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._mine(pid)]

    def _mine(self, pid: int) -> bool:
        try:
            return self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def workers(self) -> list[int]:
        """Its worker and compile processes: those whose parent is neither the driver nor outside."""
        kin = set(self.kin()) - {self.process.pid}
        return [pid for pid in kin if parent_of(pid) in kin]

    def gone(self, within_s: float = 60) -> bool:
        """True once none of its processes is left, within a time limit."""
        deadline = time.monotonic() + within_s
        while self.kin() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.kin()


def parent_of(pid: int) -> int | None:
    """The parent's number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return None


@dataclass(kw_only=True)
class Site:
    """A folder in which runs of one family are started."""

    folder: Path
    arguments: tuple[str, ...]
    """Arguments of every new run; a resumed one has them in its folder."""
    family: Family
    environment: Mapping[str, str] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    # Locks of devices lie there: a run elsewhere on this machine is none of ours. Short, for names of sockets.
    temporary: str = field(default_factory=tempfile.mkdtemp)

    def start(
        self, *arguments: str, most_bytes: int = 0, environment: Mapping[str, str] | None = None, before: str = ""
    ) -> Started:
        """Start `gemmpipe` with these arguments.

        `most_bytes` is the largest file that it may write; `before` is Python that its process executes first.
        """
        mark = f"run-{uuid.uuid4()}"
        known = () if arguments and arguments[0].startswith("resume=") else self.arguments
        process = subprocess.Popen(
            [sys.executable, *(["-c", before + COMMAND_LINE] if before else ["-m", "gemmpipe"]), *known, *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "SOAK_MARK": mark,
                "TMPDIR": self.temporary,
                **self.environment,
                **(environment or {}),
            },
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes,) * 2)) if most_bytes else None,
        )
        self.started.append(Started(process=process, mark=mark))
        return self.started[-1]

    def close(self) -> None:
        """Kill what is left of its runs."""
        for each in self.started:
            for pid in each.kin():
                os.kill(pid, signal.SIGKILL)
            if each.process.stdout is not None and not each.process.stdout.closed:
                each.process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)

    # Files in the folder

    @property
    def table(self) -> Path:
        """The tuned table."""
        return self.folder / "outputs" / "tuned" / self.family.csv_name

    def journal(self) -> Path | None:
        """The newest journal."""
        found = self.folder.glob("outputs/runs/*/*/trials.jsonl")
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)

    def rows(self, kind: str = "") -> list[Row]:
        """The rows of the newest journal that are whole, all or those of one kind."""
        path = self.journal()
        rows: list[Row] = []
        for line in path.read_bytes().splitlines() if path else ():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(row, dict) or kind not in ("", row.get("row")):
                continue
            if NEEDED.get(str(row.get("row")), {"row"}) <= row.keys():
                rows.append(row)
        return rows

    def tuned(self) -> list[store.Row]:
        """The rows of the tuned table; raises for one that is half-written."""
        return store.read(self.table, self.family) if self.table.exists() else []

    def wait_for(self, started: Started, kind: str, count: int = 1, within_s: float = 300) -> bool:
        """Wait until the journal holds so many rows of a kind; False when the run ended before."""
        deadline = time.monotonic() + within_s
        while len(self.rows(kind)) < count:
            if started.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"no {count} rows '{kind}' within {within_s:g} s"
            time.sleep(0.02)
        return True


# Invariants


def nothing_is_repeated(rows: Iterable[Row]) -> None:
    """No trial of screen twice, no finals after they were done, none done twice."""
    screened: collections.Counter[tuple[object, ...]] = collections.Counter()
    done: set[object] = set()
    for row in rows:
        if row["row"] == "trial" and row["stage"] == "screen":
            screened[row["problem"], row["candidate"], row["launches"]] += 1
        elif row["row"] == "trial":
            assert row["problem"] not in done, f"{row['problem']}: timed again after its finals were done"
        elif row["row"] == "done":
            assert row["problem"] not in done, f"{row['problem']}: done twice"
            done.add(row["problem"])
    twice = [key for key, times in screened.items() if times > 1]
    assert not twice, f"screened twice: {twice[:3]}"


def nothing_is_lost(before: list[Row], after: list[Row]) -> None:
    """The trials that were finished stand where they stood."""
    old, new = ([row for row in rows if row["row"] == "trial"] for rows in (before, after))
    assert new[: len(old)] == old, "finished trials are lost or changed"


def artifacts_are_whole(site: Site) -> None:
    """Every artifact can be read, and nothing half-written lies beside them."""
    site.tuned()
    for path in site.folder.glob("outputs/**/*.json"):
        json.loads(path.read_text(encoding="utf-8"))


def table_is_right(site: Site, ms: Iterable[int]) -> None:
    """A row a problem with a time that was measured, and nothing left of whoever was killed while writing."""
    rows = site.tuned()
    assert sorted(int(str(row["M"])) for row in rows) == sorted(ms), "the table's rows are not the problems"
    assert all(float(str(row["us"])) > 0 for row in rows)
    left = [*site.table.parent.glob("*.tmp"), *site.table.parent.glob(".*.tmp")]
    assert not left, f"left behind: {left}"


def knob_of(site: Site, name: str) -> dict[str, object]:
    """The value of a knob, by candidate id."""
    return {str(row["id"]): row["knobs"].get(name) for row in site.rows("candidate")}  # type: ignore[attr-defined]


def kill_after(chance: random.Random, started: Started, most_s: float, act: Callable[[], object]) -> bool:
    """Wait a random while, then act unless the run has ended; whether it acted."""
    time.sleep(chance.uniform(0, most_s))
    if started.process.poll() is not None:
        return False
    act()
    return True
