"""The writer of a journal: JSON lines, appended by the driver of a run."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from gemmpipe.core.data import BuildFacts, Candidate, Trial
from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.files import open_regular
from gemmpipe.core.paths import make_folder, open_no_link, while_deleted

NAME = "trials.jsonl"
_WITH_TIME = frozenset({"trial", "build", "conditions"})
"""Rows with a `t`: the seconds since the session began."""
_SYNC_EVERY_S = 1.0
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """The writer: one line per row, flushed after every row, fsynced about once a second. Only the driver has one."""

    def __init__(self, folder: Path, clock: Callable[[], float] | None = None) -> None:
        """Open `folder`/trials.jsonl for appending; a line truncated by a kill gets its line break.

        clock: gives the seconds of `t`, from any origin (None: the real time); a replay passes the recorded time.

        Raises EnvironmentProblem if the folder cannot be written, UserError if another run writes this journal.
        """
        self.path = folder / NAME
        self._known: dict[str, tuple[str, ...]] = {}
        self.kernel_names: dict[str, str] = {}
        """Kernel names by candidate id, for the `candidate` rows."""
        self.builds: dict[tuple[str, str], tuple[str, ...]] = {}
        """Build ids by (problem id, candidate id), for the `candidate` rows."""
        self._clock = clock or time.monotonic
        self._began, self._synced = self._clock(), time.monotonic()
        try:
            while_deleted(self._open)
            if not _ends_with_newline(self.path):
                self._file.write("\n")
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{self.path}: another gemmpipe is still at work on this run") from None
        except OSError as error:
            raise EnvironmentProblem(f"{self.path}: cannot write the journal: {error.strerror}") from None

    def _open(self) -> None:
        make_folder(self.path.parent)
        self._file: IO[str] = open(self.path, "a+", encoding="utf-8", opener=open_no_link)  # noqa: SIM115 (as long as the run)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released at the end of the process, also after a kill

    def write(self, row: str, **values: object) -> None:
        """Append one row of the kind `row`. Raises EnvironmentProblem if the disk is full."""
        if row in _WITH_TIME:
            values["t"] = round(self._clock() - self._began, 3)
        elif row == "session":
            self._began = self._clock()
        try:
            self._file.write(_ENCODE({"row": row, **values}) + "\n")
            self._file.flush()
            if time.monotonic() - self._synced > _SYNC_EVERY_S:
                self.sync()
        except OSError as error:
            raise EnvironmentProblem(f"{self.path}: cannot write the journal: {error.strerror}; resume=last") from None

    def launch(self, stage: str, problem: str, candidates: list[Candidate]) -> None:
        """Write a `launch` row, before the first launch of these candidates in a worker."""
        for candidate in candidates:
            self._introduce(candidate, problem)
        self.write("launch", stage=stage, problem=problem, candidates=[c.id for c in candidates])

    def trial(self, trial: Trial) -> None:
        """Write a `trial` row, after an attempt with any outcome."""
        self._introduce(trial.candidate, trial.problem)
        row: dict[str, object] = {
            "stage": trial.stage,
            "problem": trial.problem,
            "candidate": trial.candidate.id,
            "status": str(trial.status),
            "launches": trial.launches,
            "samples_us": list(trial.samples_us),
        }
        if trial.effective_launches != trial.launches:
            row["requested_launches"] = trial.requested_launches
        if trial.full_clocks_us is not None:
            row["full_clocks_us"] = trial.full_clocks_us
        if trial.err_ratio is not None:
            row["err_ratio"] = trial.err_ratio
        if trial.extra_weight_bytes:
            row["extra_weight_bytes"] = trial.extra_weight_bytes
        if trial.shared:
            row["shared"] = True
        if trial.no_dependent_launch:
            row["no_dependent_launch"] = True
        if trial.error:
            row["error"] = trial.error
        if trial.tuning is not None:
            row["tuning"] = asdict(trial.tuning)
        self.write("trial", **row)

    def build(self, build: str, facts: BuildFacts) -> None:
        """Write a `build` row, after a build with any outcome."""
        self.write(
            "build",
            id=build,
            compile_s=round(facts.compile_s, 3),
            shared_bytes=facts.shared_bytes,
            registers=facts.registers,
            spills=facts.spills,
            error=facts.error,
        )

    def _introduce(self, candidate: Candidate, problem: str) -> None:
        """Write a `candidate` row for a new candidate, and again if the problem needs other builds of it."""
        builds = self.builds.get((problem, candidate.id), ())
        if self._known.get(candidate.id) == builds:
            return
        self._known[candidate.id] = builds
        name = self.kernel_names.get(candidate.id, candidate.backend)
        row: dict[str, object] = {"id": candidate.id, "backend": candidate.backend, "knobs": candidate.knobs}
        self.write("candidate", **row, kernel=name, **({"builds": list(builds)} if builds else {}))

    def sync(self) -> None:
        """Put all rows on the disk, in a new file if the old one was deleted."""
        if not self.path.exists():
            self._restore()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _restore(self) -> None:
        """Write all rows to a new file of this name; the deleted one stays open until then."""
        deleted = self._file
        deleted.seek(0)
        text = deleted.read()
        while_deleted(self._open)
        self._file.write(text)
        self._file.flush()
        deleted.close()

    def close(self) -> None:
        """Sync and close; may be called twice. `write` has reported rows that a full disk refused."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._file.flush()
                self.sync()
            with contextlib.suppress(OSError):
                self._file.close()


def _ends_with_newline(path: Path) -> bool:
    with open_regular(path, "a run's journal") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return True
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"
