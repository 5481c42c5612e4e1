"""The file of captured products: counts in memory, added to one CSV that any number of processes share.

Processes that multiprocessing starts anew (`spawn`, `forkserver`) count their products as forked ones do.
"""

import atexit
import csv
import fcntl
import io
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import util as mp_util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gemmpipe.core.capture_file import MAX_COUNT, BadRow, read_captures
from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError, one_line, printable
from gemmpipe.core.paths import PRIVATE_MODE, make_folder, open_private, write_atomic
from gemmpipe.family.environment import CAPTURE
from gemmpipe.sources import capture_columns

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
    _warned: set[str] = field(default_factory=set)

    def add(self, family: str, values: Mapping[str, Scalar], layer: str, count: int = 1) -> None:
        """Count a product; `values` are key columns, `op` and `layout`."""
        row = {**values, "family": family, "layer": printable(layer)}  # a line break would be two rows
        with self._lock:
            self.counts[tuple(_cell(row.get(name)) for name in columns() if name != "count")] += count
            due = time.monotonic() - self._written > _FLUSH_S
        if due:
            self.flush()

    def reset(self) -> None:
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
                self.warn_once(f"{self.path}: captured products are not written: {getattr(error, 'strerror', error)}")
            except Exception as error:  # noqa: BLE001 - the program that is watched must not end of it
                self.warn_once(f"{self.path}: captured products are not written: {one_line(error)}")
            else:
                self.counts.clear()
                for row in bad:
                    self.warn_once(
                        f"{self.path}:{row.line}: {row.reason}; the row is left as it is and not counted", row.text
                    )

    @contextmanager
    def logging_errors(self) -> Iterator[None]:
        """What is raised within the block is said, not raised: the program that is watched must not end of it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever reading an operator's arguments meets
            self.warn_once(f"{self.path}: a product is not captured: {one_line(error)}")

    def warn_once(self, text: str, subject: str = "") -> None:
        """A warning, once a text, or once a `subject` where one is given."""
        if (subject or text) not in self._warned:
            self._warned.add(subject or text)
            _LOG.warning("gemmpipe: %s", text)


def _cell(value: Scalar) -> str:
    return "" if value is None else str(value)


def check_capture_file(path: Path) -> None:
    """Raises UserError for a file that holds anything but captured products, which must not be written over."""
    if path.exists():
        _read_existing(path)


def _read_existing(path: Path) -> tuple[Counter[tuple[str, ...]], tuple[BadRow, ...]]:
    """What a file of captured products holds, and its rows that cannot be read; nothing where there is none."""
    found: Counter[tuple[str, ...]] = Counter()
    if not path.exists():
        return found, ()
    captures = read_captures(path)
    if set(captures.header) - set(columns()):
        raise UserError(f"{path}: no file of captured products, which begins with family; left as it is")
    for row in captures.rows:
        found[tuple(row.cells.get(name, "") for name in columns() if name != "count")] += row.count
    return found, captures.bad_rows


def _merge(path: Path, counts: Mapping[tuple[str, ...], int]) -> tuple[BadRow, ...]:
    """Add to the file; its rows that cannot be read are returned, and stand at its end as they were."""
    names = [name for name in columns() if name != "count"]
    make_folder(path.parent)
    with open(path.with_name(f".{path.name}.lock"), "a", opener=open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged, bad = _read_existing(path)
        merged.update(counts)
        out = io.StringIO()
        writer = csv.DictWriter(out, columns(), lineterminator="\n")
        writer.writeheader()
        for values, count in merged.items():
            writer.writerow({**dict(zip(names, values, strict=True)), "count": min(count, MAX_COUNT)})
        out.writelines(f"{row.text}\n" for row in bad)
        write_atomic(path, out.getvalue(), mode=PRIVATE_MODE)
    return bad


_RECORDERS: dict[Path, Recorder] = {}


def requested_recorder() -> Recorder | None:
    """The recorder that `GEMMPIPE_CAPTURE` (1, or a file), or aiter's variable of that meaning, asks for, or None.

    None also where it names no file.
    """
    own, *theirs = (os.environ.get(name, "") for name in CAPTURE)
    word = own or ("1" if any(each not in ("", "0") for each in theirs) else "")
    if word in ("", "0"):
        return None
    try:
        return recorder_for(capture_file(word))
    except UserError as error:
        _LOG.warning("gemmpipe: %s; nothing is captured", error)
        return None


def capture_file(word: str) -> Path:
    """The file that the variable's value names. Raises UserError where there can be none."""
    try:
        return Path(DEFAULT_FILE if word in ("", "0", "1") else word).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user's home; the current folder is deleted
        raise UserError(f"GEMMPIPE_CAPTURE={word}: names no file here: {one_line(error)}; expected a path") from None


def recorder_for(path: Path) -> Recorder:
    """The process's recorder for a file; it writes the rest when the process ends, or one that it forked."""
    if path not in _RECORDERS:
        kept = _RECORDERS[path] = Recorder(path=path)
        atexit.register(kept.flush)
        os.register_at_fork(after_in_child=kept.reset)
        # A process of multiprocessing ends without what atexit knows.
        mp_util.register_after_fork(kept, lambda mine: mp_util.Finalize(None, mine.flush, exitpriority=0))
    return _RECORDERS[path]


CaptureContext = Callable[[Recorder], AbstractContextManager[object]]
"""What counts into a recorder within its block; its module is imported in the new process."""


@contextmanager
def capturing_spawned(path: Path, counting: CaptureContext) -> Iterator[None]:
    """Within the block every process that is started anew runs under `counting` and adds to the file of `path`."""
    own = "__reduce_ex__" in vars(BaseProcess)
    before = BaseProcess.__reduce_ex__

    def reduced(process: BaseProcess, protocol: Any) -> tuple[object, ...]:
        # A process is pickled only to be started anew.
        make, arguments, state = (*before(process, protocol), None)[:3]
        return _run_captured, (path, counting, make, arguments, state)

    setattr(BaseProcess, "__reduce_ex__", reduced)  # noqa: B010  mypy knows it as a method
    try:
        yield
    finally:
        if own:
            setattr(BaseProcess, "__reduce_ex__", before)  # noqa: B010
        else:
            delattr(BaseProcess, "__reduce_ex__")


def _run_captured(
    path: Path, counting: CaptureContext, make: Callable[..., BaseProcess], arguments: tuple[Any, ...], state: Any
) -> BaseProcess:
    """In the new process: the same, with what it runs counted."""
    process = make(*arguments)
    restore = getattr(process, "__setstate__", None) or vars(process).update
    restore(state or {})
    run = process.run

    def counted() -> None:
        kept = recorder_for(path)
        try:
            with counting(kept):
                run()
        finally:
            kept.flush()

    process.run = counted  # type: ignore[method-assign]
    return process
