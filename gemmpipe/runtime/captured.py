"""The file of captured products: counts in memory, added to one CSV that any number of processes share."""

import atexit
import csv
import fcntl
import io
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import util as mp_util
from pathlib import Path

from gemmpipe.aiter_environment import CAPTURE
from gemmpipe.data import Scalar
from gemmpipe.errors import UserError, one_line, printable
from gemmpipe.files.captures import MAX_COUNT, BadRow, read_captures
from gemmpipe.paths import PRIVATE, make_folder, private_file, write_atomic
from gemmpipe.sources.header import capture_columns

DEFAULT_FILE = "gemmpipe_captured.csv"
_FLUSH_S = 5.0  # what a killed process loses at most
_LOG = logging.getLogger("gemmpipe.runtime")


columns = cache(capture_columns)
"""The columns of the file, in order."""


@dataclass(kw_only=True)
class Recorder:
    """Counts products by what they are and adds them to `path`; rows of other processes and runs stay.

    Nothing of it raises: it works inside a program that is watched.
    """

    path: Path
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _written: float = field(default_factory=time.monotonic)
    _said: set[str] = field(default_factory=set)

    def add(self, family: str, values: Mapping[str, Scalar], layer: str, count: int = 1) -> None:
        """Count a product; `values` are key columns, `op` and `layout`."""
        row = {**values, "family": family, "layer": printable(layer)}  # a line break would be two rows
        with self._lock:
            self.counts[tuple(_cell(row.get(name)) for name in columns() if name != "count")] += count
            due = time.monotonic() - self._written > _FLUSH_S
        if due:
            self.flush()

    def begin_anew(self) -> None:
        """In a forked process: what the parent counted is the parent's to write."""
        self._lock = threading.Lock()
        self.counts.clear()

    def flush(self) -> None:
        """Add what was counted since the last time to the file; what cannot be written is kept and said."""
        with self._lock:
            self._written = time.monotonic()
            if not self.counts:
                return
            try:
                bad = _merge(self.path, self.counts)
            except (OSError, UserError) as error:
                self.say(f"{self.path}: captured products are not written: {getattr(error, 'strerror', error)}")
            except Exception as error:  # noqa: BLE001 - the program that is watched must not end of it
                self.say(f"{self.path}: captured products are not written: {one_line(error)}")
            else:
                self.counts.clear()
                for row in bad:
                    self.say(f"{self.path}:{row.line}: {row.why}; the row is left as it is and not counted", row.text)

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """What is raised within the block is said, not raised: the program that is watched must not end of it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever reading an operator's arguments meets
            self.say(f"{self.path}: a product is not captured: {one_line(error)}")

    def say(self, text: str, subject: str = "") -> None:
        """A warning, once a text, or once a `subject` where one is given."""
        if (subject or text) not in self._said:
            self._said.add(subject or text)
            _LOG.warning("gemmpipe: %s", text)


def _cell(value: Scalar) -> str:
    return "" if value is None else str(value)


def check_captured(path: Path) -> None:
    """Raises UserError for a file that holds anything but captured products, which must not be written over."""
    if path.exists():
        _before(path)


def _before(path: Path) -> tuple[Counter[tuple[str, ...]], tuple[BadRow, ...]]:
    """What a file of captured products holds, and its rows that cannot be read; nothing where there is none."""
    found: Counter[tuple[str, ...]] = Counter()
    if not path.exists():
        return found, ()
    captures = read_captures(path)
    if set(captures.header) - set(columns()):
        raise UserError(f"{path}: no file of captured products, which begins with family; left as it is")
    for row in captures.rows:
        found[tuple(row.cells.get(name, "") for name in columns() if name != "count")] += row.count
    return found, captures.bad


def _merge(path: Path, counts: Mapping[tuple[str, ...], int]) -> tuple[BadRow, ...]:
    """Add to the file; its rows that cannot be read are returned, and stand at its end as they were."""
    names = [name for name in columns() if name != "count"]
    make_folder(path.parent)
    with open(path.with_name(f".{path.name}.lock"), "a", opener=private_file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged, bad = _before(path)
        merged.update(counts)
        out = io.StringIO()
        writer = csv.DictWriter(out, columns(), lineterminator="\n")
        writer.writeheader()
        for values, count in merged.items():
            writer.writerow({**dict(zip(names, values, strict=True)), "count": min(count, MAX_COUNT)})
        out.writelines(f"{row.text}\n" for row in bad)
        write_atomic(path, out.getvalue(), mode=PRIVATE)
    return bad


_RECORDERS: dict[Path, Recorder] = {}


def asked_for() -> Recorder | None:
    """The recorder that `GEMMPIPE_CAPTURE` (1, or a file), or aiter's variable of that meaning, asks for, or None.

    None also where it names no file.
    """
    own, *theirs = (os.environ.get(name, "") for name in CAPTURE)
    word = own or ("1" if any(each not in ("", "0") for each in theirs) else "")
    if word in ("", "0"):
        return None
    try:
        return recorder(file_of(word))
    except UserError as error:
        _LOG.warning("gemmpipe: %s; nothing is captured", error)
        return None


def file_of(word: str) -> Path:
    """The file that the variable's value names. Raises UserError where there can be none."""
    try:
        return Path(DEFAULT_FILE if word in ("", "0", "1") else word).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user's home; the current folder is deleted
        raise UserError(f"GEMMPIPE_CAPTURE={word}: names no file here: {one_line(error)}; expected a path") from None


def recorder(path: Path) -> Recorder:
    """The process's recorder for a file; it writes the rest when the process ends, or one that it forked."""
    if path not in _RECORDERS:
        kept = _RECORDERS[path] = Recorder(path=path)
        atexit.register(kept.flush)
        os.register_at_fork(after_in_child=kept.begin_anew)
        # A process of multiprocessing ends without what atexit knows.
        mp_util.register_after_fork(kept, lambda mine: mp_util.Finalize(None, mine.flush, exitpriority=0))
    return _RECORDERS[path]
