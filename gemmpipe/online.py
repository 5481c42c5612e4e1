"""`python -m gemmpipe.online FOLDER OVERRIDES...`: the process that tunes the missed products of running programs.

The runtime starts it (`gemmpipe.runtime.online`), one per folder of misses. It does not import torch, runs the ordinary
pipeline `online` on the misses of each family, most called first, and ends when no new ones come.
"""

import csv
import fcntl
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.capture_file import read_captures, shown_cell
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import PACKAGE, PRIVATE_MODE, open_private, user_tables, write_atomic
from gemmpipe.family import shipped_families

MISSED = "missed.csv"
_LOCK = "tuner.lock"
_LOG = "tuner.log"
_IDLE_S = 20.0  # wait for further misses: a program that warms up has many, and a new process would import all again
_MAX_LIFE_S = 1800.0
_BUDGET_S = 120  # per run, i.e. for the misses of one family
_TIMEOUT_S = 600.0  # a run that does not end after its budget is killed
_KEPT_RUNS = 10
_NICE = 10  # lower priority than the program's own threads
_LOG_BYTES = 1_000_000


def start_tuner(folder: Path, overrides: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the process for the misses in `folder`; the `overrides` select the device. Raises OSError."""
    log = folder / _LOG
    append = log.exists() and log.stat().st_size < _LOG_BYTES
    own = ("GEMMPIPE_ONLINE_TUNING", "GEMMPIPE_CAPTURE", "GEMMPIPE_LOG_SELECTION")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    # The program may have imported gemmpipe from a folder that is not in PYTHONPATH.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    with open(log, "ab" if append else "wb", opener=open_private) as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "gemmpipe.online", str(folder), *overrides],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # signals that end the program do not interrupt a run
        )


def is_running(folder: Path) -> bool:
    """True if a process tunes the misses of this folder."""
    with exclusively(folder) as acquired:
        return not acquired


@contextmanager
def exclusively(folder: Path) -> Iterator[bool]:
    """Lock the folder for the block; yields False if another process has the lock."""
    with open(folder / _LOCK, "w", opener=open_private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def tune_until_idle(folder: Path, overrides: Sequence[str]) -> None:
    """Tune the misses until no new ones have come for _IDLE_S."""
    begun = last_miss = time.monotonic()
    done: set[tuple[str, ...]] = set()
    printed: set[str] = set()
    while time.monotonic() < min(begun + _MAX_LIFE_S, last_miss + _IDLE_S):
        queue = _read(folder / MISSED)
        _print_once(queue.skipped, printed)
        fresh = {key: count for key, count in queue.rows.items() if key not in done}
        for family in shipped_families():  # the command line is made of these names, never of cells
            own = {key: count for key, count in fresh.items() if key[0] == family}
            if own:
                _tune(folder, family, _table(queue.header, own), overrides)
                last_miss = time.monotonic()
        done |= set(fresh)
        if not fresh:
            time.sleep(1)
    _remove_old_runs(folder)


@dataclass(frozen=True, kw_only=True)
class _Queue:
    """The missed products, most called first."""

    header: tuple[str, ...]
    """The columns without `count`, `family` first."""
    rows: Mapping[tuple[str, ...], int]
    """Number of calls by cells in the order of the header."""
    skipped: tuple[str, ...]
    """One line for each row that is not tuned, with the reason."""


def _read(path: Path) -> _Queue:
    """The rows of known families; no row of the file raises an error."""
    try:
        captures = read_captures(path)
    except UserError as error:
        return _Queue(header=(), rows={}, skipped=(str(error),) if path.exists() else ())
    columns = sorted((name for name in captures.header if name != "count"), key=lambda name: name != "family")
    known = set(shipped_families())
    skipped = [f"{row.reason}: {shown_cell(row.text)}" for row in captures.bad_rows]
    found: dict[tuple[str, ...], int] = {}
    for row in captures.rows:
        if (family := row.cells["family"]) in known:
            found[tuple(row.cells[name] for name in columns)] = row.count
        else:
            skipped.append(f"column family: '{shown_cell(family)}', expected one of {', '.join(sorted(known))}")
    rows = dict(sorted(found.items(), key=lambda item: -item[1]))
    return _Queue(header=tuple(columns), rows=rows, skipped=tuple(skipped))


def _print_once(skipped: Sequence[str], printed: set[str]) -> None:
    """Print the lines that are not printed yet."""
    for line in skipped:
        if line not in printed:
            printed.add(line)
            print(f"{MISSED}: a row is skipped: {line}", flush=True)


def _table(header: Sequence[str], rows: dict[tuple[str, ...], int]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, "count"])
    writer.writerows([*key, count] for key, count in rows.items())
    return out.getvalue()


def _tune(folder: Path, family: str, table: str, overrides: Sequence[str]) -> None:
    """Run the pipeline in the folder, which gets its journal; tuned rows go to the user's own tables."""
    shapes = folder / f"missed_{family}.csv"
    write_atomic(shapes, table, mode=PRIVATE_MODE)
    output = os.path.relpath(user_tables(), folder)  # relative: no character in it has a meaning in Hydra's grammar
    pipeline = ["online", f"kernel={family}", "shapes=csv", f"shapes.path={shapes.name}", f"output={output}"]
    pipeline.append("shapes.skip_bad_rows=true")
    # Every product is stored as soon as it is tuned.
    pipeline += ["batch=1", f"budget_s={_BUDGET_S}", "cpu_budget_s=null"]
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join([*pipeline, *overrides])}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "gemmpipe", *pipeline, *overrides], cwd=folder)
    try:
        process.wait(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its workers end with it
        print(f"stopped after {_TIMEOUT_S:g} s", flush=True)


def _remove_old_runs(folder: Path) -> None:
    runs = sorted((folder / "outputs" / "runs" / "online").glob("*"), key=lambda path: path.name)
    for path in runs[:-_KEPT_RUNS]:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    misses = Path(sys.argv[1] if len(sys.argv) > 1 else "")
    if not misses.name or not misses.is_dir():
        print(
            "gemmpipe: started by the runtime: set GEMMPIPE_ONLINE_TUNING=1 and call gemmpipe.runtime.gemm_...",
            file=sys.stderr,
        )
        sys.exit(2)
    with exclusively(misses) as acquired:
        if acquired:
            os.nice(_NICE)
            tune_until_idle(misses, sys.argv[2:])
