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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import util as mp_util
from pathlib import Path

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError
from gemmpipe.files.csvfile import read_cells
from gemmpipe.paths import make_folder, no_link, write_atomic
from gemmpipe.sources.header import capture_columns

DEFAULT_FILE = "gemmpipe_captured.csv"
_FLUSH_S = 5.0  # what a killed process loses at most
_LOG = logging.getLogger("gemmpipe.runtime")


columns = cache(capture_columns)
"""The columns of the file, in order."""


@dataclass(kw_only=True)
class Recorder:
    """Counts products by what they are and adds them to `path`; rows of other processes and runs stay."""

    path: Path
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _written: float = field(default_factory=time.monotonic)
    _said: set[str] = field(default_factory=set)

    def add(self, family: str, values: Mapping[str, Scalar], layer: str, count: int = 1) -> None:
        """Count a product; `values` are key columns, `op` and `layout`."""
        row = {**values, "family": family, "layer": layer}
        with self._lock:
            self.counts[tuple(str(row.get(name, "")) for name in columns() if name != "count")] += count
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
                _merge(self.path, self.counts)
            except (OSError, UserError) as error:
                self._say(f"{self.path}: captured products are not written: {getattr(error, 'strerror', error)}")
            else:
                self.counts.clear()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _LOG.warning("gemmpipe: %s", text)


def captured_before(path: Path) -> Counter[tuple[str, ...]]:
    """What a file of captured products holds; nothing where there is none.

    Raises UserError for any other file, which must not be written over.
    """
    found: Counter[tuple[str, ...]] = Counter()
    if not path.exists():
        return found
    lines = read_cells(path)
    _, header = next(lines, (1, []))
    if header and (set(header) - set(columns()) or not {"family", "count"} <= set(header)):
        raise UserError(f"{path}: no file of captured products, which begins with family; left as it is")
    for line, cells in lines:
        row = dict(zip(header, cells, strict=False))
        if not row.get("count", "").isdecimal():
            raise UserError(f"{path}:{line}: column count: {row.get('count')!r}, expected a number; left as it is")
        found[tuple(row.get(name, "") for name in columns() if name != "count")] += int(row["count"])
    return found


def _merge(path: Path, counts: Mapping[tuple[str, ...], int]) -> None:
    names = [name for name in columns() if name != "count"]
    make_folder(path.parent)
    with open(path.with_name(f".{path.name}.lock"), "a", opener=no_link) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = captured_before(path)
        merged.update(counts)
        out = io.StringIO()
        writer = csv.DictWriter(out, columns(), lineterminator="\n")
        writer.writeheader()
        for values, count in merged.items():
            writer.writerow({**dict(zip(names, values, strict=True)), "count": count})
        write_atomic(path, out.getvalue())


_RECORDERS: dict[Path, Recorder] = {}


def asked_for() -> Recorder | None:
    """The recorder that `GEMMPIPE_CAPTURE` (1, or a file) asks for, or None."""
    word = os.environ.get("GEMMPIPE_CAPTURE", "")
    return None if word in ("", "0") else recorder(file_of(word))


def file_of(word: str) -> Path:
    """The file that the variable's value names."""
    return Path(DEFAULT_FILE if word in ("", "0", "1") else word).expanduser().absolute()


def recorder(path: Path) -> Recorder:
    """The process's recorder for a file; it writes the rest when the process ends, or one that it forked."""
    if path not in _RECORDERS:
        kept = _RECORDERS[path] = Recorder(path=path)
        atexit.register(kept.flush)
        os.register_at_fork(after_in_child=kept.begin_anew)
        # A process of multiprocessing ends without what atexit knows.
        mp_util.register_after_fork(kept, lambda mine: mp_util.Finalize(None, mine.flush, exitpriority=0))
    return _RECORDERS[path]
