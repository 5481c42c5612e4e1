"""`python -m gemmpipe.online FOLDER WORDS...`: the process that tunes what running programs missed, beside them.

The run time starts it (`gemmpipe.runtime.online`). It is one a folder of misses, imports no torch, runs the ordinary
pipeline `online` on the misses of each family, most called first, and ends when nothing new comes.
"""

import csv
import fcntl
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gemmpipe.paths import PACKAGE, user_tables, write_atomic

MISSED = "missed.csv"
_LOCK = "tuner.lock"
_LOG = "tuner.log"
_IDLE_S = 20.0  # a program that warms up misses again and again: importing all anew each time would cost more
_LIFE_S = 1800.0
_BUDGET_S = 120  # of a run, that is of one family's misses
_HANG_S = 600.0  # a run that does not end after its budget is stopped
_RUNS_KEPT = 10
_NICE = 10  # the program's own threads come first
_LOG_BYTES = 1_000_000


def start(folder: Path, words: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the process for the misses in `folder`; `words` of the command line name the device. Raises OSError."""
    log = folder / _LOG
    again = log.exists() and log.stat().st_size < _LOG_BYTES
    own = ("GEMMPIPE_ONLINE_TUNING", "GEMMPIPE_CAPTURE", "GEMMPIPE_LOG_SELECTION")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    # The program may have found gemmpipe in a way of its own.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    with log.open("ab" if again else "wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "gemmpipe.online", str(folder), *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # what ends the program must not leave half a run
        )


def running(folder: Path) -> bool:
    """Whether some program's process works on this folder."""
    with alone(folder) as mine:
        return not mine


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether this process is the only one on the folder; it stays so within the block."""
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def work(folder: Path, words: Sequence[str]) -> None:
    """Tune what is missed until nothing new has come for a while."""
    begun = news = time.monotonic()
    done: set[tuple[str, ...]] = set()
    while time.monotonic() < min(begun + _LIFE_S, news + _IDLE_S):
        header, missed = _read(folder / MISSED)
        fresh = {key: count for key, count in missed.items() if key not in done}
        for family in sorted({key[0] for key in fresh}):
            mine = {key: count for key, count in fresh.items() if key[0] == family}
            _tune(folder, family, _table(header, mine), words)
            news = time.monotonic()
        done |= set(fresh)
        if not fresh:
            time.sleep(1)
    _forget_old_runs(folder)


def _read(path: Path) -> tuple[list[str], dict[tuple[str, ...], int]]:
    """(the columns without `count`, rows with their counts), most called first."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except FileNotFoundError:
        rows = []
    columns = [name for name in (rows[0] if rows else {"family": ""}) if name != "count"]
    columns.sort(key=lambda name: name != "family")
    found = {tuple(row.get(name) or "" for name in columns): int(row.get("count") or 1) for row in rows}
    return columns, dict(sorted(found.items(), key=lambda item: -item[1]))


def _table(header: Sequence[str], rows: dict[tuple[str, ...], int]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, "count"])
    writer.writerows([*key, count] for key, count in rows.items())
    return out.getvalue()


def _tune(folder: Path, family: str, table: str, words: Sequence[str]) -> None:
    """One run of the pipeline in the folder, where it leaves its journal; its rows go to the user's own tables."""
    shapes = folder / f"missed_{family}.csv"
    write_atomic(shapes, table)
    output = os.path.relpath(user_tables(), folder)  # relative: nothing in it can be taken for a word of Hydra's
    pipeline = ["online", f"kernel={family}", "shapes=csv", f"shapes.path={shapes.name}", f"output={output}"]
    pipeline += ["batch=1", f"budget_s={_BUDGET_S}"]  # every product is in the table as soon as it is finished
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join([*pipeline, *words])}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "gemmpipe", *pipeline, *words], cwd=folder)
    try:
        process.wait(timeout=_HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its workers end with it
        print(f"stopped after {_HANG_S:g} s", flush=True)


def _forget_old_runs(folder: Path) -> None:
    runs = sorted((folder / "outputs" / "runs" / "online").glob("*"), key=lambda path: path.name)
    for path in runs[:-_RUNS_KEPT]:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "")
    if not place.name or not place.is_dir():
        print(
            "gemmpipe: the run time starts this: GEMMPIPE_ONLINE_TUNING=1, and gemmpipe.runtime.gemm_...",
            file=sys.stderr,
        )
        sys.exit(2)
    with alone(place) as mine:
        if mine:
            os.nice(_NICE)
            work(place, sys.argv[2:])
