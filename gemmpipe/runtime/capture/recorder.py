"""The file of captured products: counts in memory, added to one CSV that any number of processes share.

Processes that multiprocessing starts by `spawn` or `forkserver` count their products like forked ones.
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
_FLUSH_S = 5.0  # a killed process loses at most the counts of this time
_LOG = logging.getLogger("gemmpipe.runtime")


columns = cache(capture_columns)
"""The columns of the file, in order."""


@dataclass(kw_only=True)
class Recorder:
    """Counts equal products and adds them to `path`; rows of other processes and runs are kept.

    Its methods never raise: they run inside the captured program.
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
        """In a forked process: drop the parent's counts, which the parent writes."""
        self._lock = threading.Lock()
        self.counts.clear()

    def flush(self) -> None:
        """Add the counts since the last flush to the file; on an error they are kept, with a warning."""
        with self._lock:
            self._written = time.monotonic()
            if not self.counts:
                return
            try:
                bad = _merge(self.path, self.counts)
            except (OSError, UserError) as error:
                self.warn_once(f"{self.path}: captured products are not written: {getattr(error, 'strerror', error)}")
            except Exception as error:  # noqa: BLE001 - must not end the captured program
                self.warn_once(f"{self.path}: captured products are not written: {one_line(error)}")
            else:
                self.counts.clear()
                for row in bad:
                    self.warn_once(f"{self.path}:{row.line}: {row.reason}; the row is kept and not counted", row.text)

    @contextmanager
    def logging_errors(self) -> Iterator[None]:
        """Exceptions within the block become warnings: they must not end the captured program."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any error of an operator's unexpected arguments
            self.warn_once(f"{self.path}: a product is not captured: {one_line(error)}")

    def warn_once(self, text: str, subject: str = "") -> None:
        """A warning, once per text, or once per `subject` if given."""
        if (subject or text) not in self._warned:
            self._warned.add(subject or text)
            _LOG.warning("gemmpipe: %s", text)


def _cell(value: Scalar) -> str:
    return "" if value is None else str(value)


def check_capture_file(path: Path) -> None:
    """Raises UserError for a file with other contents than captured products, which must not be overwritten."""
    if path.exists():
        _read_existing(path)


def _read_existing(path: Path) -> tuple[Counter[tuple[str, ...]], tuple[BadRow, ...]]:
    """(counts by product, unreadable rows) of a file of captured products; empty if there is no file."""
    found: Counter[tuple[str, ...]] = Counter()
    if not path.exists():
        return found, ()
    captures = read_captures(path)
    if set(captures.header) - set(columns()):
        raise UserError(
            f"{path}: not a file of captured products, unchanged; expected a header that begins with family"
        )
    for row in captures.rows:
        found[tuple(row.cells.get(name, "") for name in columns() if name != "count")] += row.count
    return found, captures.bad_rows


def _merge(path: Path, counts: Mapping[tuple[str, ...], int]) -> tuple[BadRow, ...]:
    """Add to the file; its unreadable rows are kept at its end and returned."""
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
    """The recorder requested by `GEMMPIPE_CAPTURE` (1, or a file) or aiter's equivalent variable, or None.

    None also if it names no valid file.
    """
    own, *aiter_values = (os.environ.get(name, "") for name in CAPTURE)
    value = own or ("1" if any(each not in ("", "0") for each in aiter_values) else "")
    if value in ("", "0"):
        return None
    try:
        return recorder_for(capture_file(value))
    except UserError as error:
        _LOG.warning("gemmpipe: %s; nothing is captured", error)
        return None


def capture_file(value: str) -> Path:
    """The file that the variable's value names. Raises UserError for an impossible path."""
    try:
        return Path(DEFAULT_FILE if value in ("", "0", "1") else value).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # unknown home folder; deleted current folder
        raise UserError(f"GEMMPIPE_CAPTURE={value}: not a valid path: {one_line(error)}; expected a file") from None


def recorder_for(path: Path) -> Recorder:
    """The process's recorder for a file; it flushes when the process ends, in forked processes too."""
    if path not in _RECORDERS:
        recorder = _RECORDERS[path] = Recorder(path=path)
        atexit.register(recorder.flush)
        os.register_at_fork(after_in_child=recorder.reset)
        # Processes of multiprocessing end without atexit's functions.
        mp_util.register_after_fork(recorder, lambda copy: mp_util.Finalize(None, copy.flush, exitpriority=0))
    return _RECORDERS[path]


CaptureContext = Callable[[Recorder], AbstractContextManager[object]]
"""A context that counts products into a recorder; its module is imported in the new process."""


@contextmanager
def capturing_spawned(path: Path, counting: CaptureContext) -> Iterator[None]:
    """Within the block every spawned process runs under `counting` and adds to the file `path`."""
    own = "__reduce_ex__" in vars(BaseProcess)
    before = BaseProcess.__reduce_ex__

    def reduced(process: BaseProcess, protocol: Any) -> tuple[object, ...]:
        # A process is pickled only to be spawned.
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
    """In the new process: the original process, with its `run` counted."""
    process = make(*arguments)
    restore = getattr(process, "__setstate__", None) or vars(process).update
    restore(state or {})
    run = process.run

    def counted() -> None:
        recorder = recorder_for(path)
        try:
            with counting(recorder):
                run()
        finally:
            recorder.flush()

    process.run = counted  # type: ignore[method-assign]
    return process
