"""Files that several runs write: one writer at a time, atomic writes, and provenance in a sidecar file."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.files import read_object, read_regular
from gemmpipe.core.paths import make_folder, write_atomic

LOCK_TIMEOUT_S = 120
SIDECAR_BYTES = 50_000_000


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path` (a hidden file in the same folder) against other processes.

    Raises EnvironmentProblem if another process holds it for over LOCK_TIMEOUT_S, and for any OSError in the block.
    """
    from filelock import FileLock, Timeout  # not at the top: the runtime reads tables and never locks

    try:
        make_folder(path.parent)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout:
        raise EnvironmentProblem(f"{path}: locked by another process for over {LOCK_TIMEOUT_S} s") from None
    except OSError as error:
        raise EnvironmentProblem(f"{path}: cannot be written: {error.strerror or error}") from None


def sidecar_path(path: Path) -> Path:
    """Path of the file with an artifact's provenance."""
    return path.with_name(f"{path.name}.meta.json")


def read_runs(path: Path) -> dict[str, Mapping[str, object]]:
    """Provenance by run id from the sidecar file `path`; empty without one. Raises UserError if it is broken."""
    if not path.exists():
        return {}
    runs = read_object(path, limit=SIDECAR_BYTES).get("runs")
    if not isinstance(runs, dict) or not all(isinstance(facts, dict) for facts in runs.values()):
        raise UserError(f"{path}: no object 'runs' of objects, expected a sidecar file written by gemmpipe")
    return dict(runs)


def record_run(
    path: Path, run_id: str, provenance: Mapping[str, object], used: Iterable[str] | None, warn: Callable[[str], object]
) -> None:
    """Add a run to the sidecar file `path`; of the older runs those in `used` stay (None: all).

    A sidecar that cannot be read is renamed to `.broken` and reported through `warn`: it must not prevent an artifact
    from being written.
    """
    runs = read_runs_or_reset(path, warn)
    if used is not None:
        kept = set(used)
        runs = {name: facts for name, facts in runs.items() if name in kept}
    write_runs(path, {**runs, run_id: dict(provenance)})


def read_runs_or_reset(path: Path, warn: Callable[[str], object]) -> dict[str, Mapping[str, object]]:
    """Like `read_runs`, but a broken sidecar is renamed to `.broken` and reported through `warn`."""
    try:
        return read_runs(path)
    except UserError as error:
        aside = path.with_name(f"{path.name}.broken")
        path.replace(aside)
        warn(f"{error}; set aside as {aside.name}")
        return {}


def write_runs(path: Path, runs: Mapping[str, Mapping[str, object]]) -> None:
    """Write a sidecar file, unless it has this content already."""
    text = json.dumps({"runs": runs}, indent=2, sort_keys=True, default=str) + "\n"
    if not _has_text(path, text):
        write_atomic(path, text)


def _has_text(path: Path, text: str) -> bool:
    """True if the file exists with exactly this text."""
    try:
        return read_regular(path, "a sidecar", SIDECAR_BYTES) == text.encode()
    except FileNotFoundError:
        return False
