"""Copying tuned files into an engine's package, with a backup of replaced files, and undoing it.

The folder gets a record of what was written, so that only these files are removed or restored.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.artifact import locked
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import parse_object, read_object, read_regular
from gemmpipe.core.paths import write_atomic

RECORD = "gemmpipe_installed.json"
"""The record of installed files: no engine looks for this name."""
BACKUP_SUFFIX = ".before_gemmpipe"
"""The end of a backup's name, after `.json`: no engine looks for it."""
_MAX_BYTES = 1_000_000
_MAX_RECORD_BYTES = 10_000_000
_EXPECTED = "an engine's JSON file"


@dataclass(frozen=True, kw_only=True)
class InstalledFile:
    """The result for one file in the engine's folder."""

    path: Path
    action: str
    """`added`, `replaced`, `unchanged`; after undoing `removed`, `restored`, `kept`."""
    backup: Path | None = None
    """The engine's own file, where one was replaced."""
    kept_keys: int = 0
    """The number of the engine's own keys outside of the tuned ones, which the installed file has too."""


def install(files: Iterable[Path], folder: Path) -> list[InstalledFile]:
    """Copy files into an engine's folder; the engine's own version of a replaced file is kept as a backup.

    The engine's entries for M below the first and above the last tuned one are copied: without them the nearest tuned
    entry would serve these M.


    Raises UserError for a file that cannot be read, EnvironmentProblem if the folder cannot be written.
    """
    texts = {path.name: _text(path) for path in files}
    with locked(folder / RECORD):
        record = dict(_record(folder))
        results: list[InstalledFile] = []
        for name, text in texts.items():
            target, backup = folder / name, folder / f"{name}{BACKUP_SUFFIX}"
            old = _text(target) if target.exists() else None
            ours = name in record and old is not None and _digest(old) == record[name]["digest"]
            if old is not None and not ours:  # the engine's own, or changed by another program
                write_atomic(backup, old)
            own = _text(backup) if backup.is_file() else None
            text, kept = (text, 0) if own is None else with_outer_keys(text, own)
            replaced = backup.is_file() and (old is not None or name in record)
            record[name] = {"digest": _digest(text), "replaced": replaced}
            _write_record(folder, record)  # first: an interrupted copy can then be undone
            if old != text:
                write_atomic(target, text)
            action = "unchanged" if old == text else "added" if old is None else "replaced"
            results.append(
                InstalledFile(path=target, action=action, backup=backup if replaced else None, kept_keys=kept)
            )
        return results


def with_outer_keys(text: str, own: str) -> tuple[str, int]:
    """(the tuned file with the engine's entries outside of its range of M, their number).

    A file that is not a plain map from M to knobs is returned unchanged: it is not read for anything else.
    """
    try:
        tuned, engine = parse_object(text, "tuned"), parse_object(own, "own")
        keys = {int(key) for key in tuned}
        outer = {key: value for key, value in engine.items() if not min(keys) <= int(key) <= max(keys)}
    except (UserError, ValueError):
        return text, 0
    if not outer:
        return text, 0
    merged = sorted({**tuned, **outer}.items(), key=lambda item: int(item[0]))
    return json.dumps(dict(merged), indent=4) + "\n", len(outer)


def undo(folder: Path) -> list[InstalledFile]:
    """Restore replaced files and remove added ones; a file that changed since is kept, with its backup.

    Raises UserError for a damaged record, EnvironmentProblem if the folder cannot be written.
    """
    with locked(folder / RECORD):
        record = _record(folder)
        results: list[InstalledFile] = []
        left: dict[str, Mapping[str, object]] = {}
        for name, facts in record.items():
            target, backup = folder / name, folder / f"{name}{BACKUP_SUFFIX}"
            present = target.is_file()
            if present and _digest(_text(target)) != facts["digest"]:
                left[name] = facts
                results.append(InstalledFile(path=target, action="kept", backup=backup if backup.is_file() else None))
            elif facts["replaced"] and backup.is_file():
                write_atomic(target, _text(backup))
                backup.unlink()
                results.append(InstalledFile(path=target, action="restored"))
            else:
                target.unlink(missing_ok=True)
                results.append(InstalledFile(path=target, action="removed"))
        if left:
            _write_record(folder, left)
        else:
            (folder / RECORD).unlink(missing_ok=True)
    (folder / f".{RECORD}.lock").unlink(missing_ok=True)
    return results


def installed_names(folder: Path) -> frozenset[str]:
    """The names of the files that were installed in an engine's folder. Raises UserError for a damaged record."""
    return frozenset(_record(folder))


def _record(folder: Path) -> dict[str, Mapping[str, object]]:
    """File name -> digest of the installed text, and whether a file was replaced. Raises UserError if it is damaged."""
    path = folder / RECORD
    if not path.exists():
        return {}
    files = read_object(path, _MAX_RECORD_BYTES).get("files")
    valid = isinstance(files, dict) and all(
        Path(name).name == name and isinstance(facts, dict) and {"digest", "replaced"} <= set(facts)
        for name, facts in files.items()
    )
    if not valid or not isinstance(files, dict):
        raise UserError(f"{path}: damaged; expected the record that 'gemmpipe export ... install=true' writes")
    return dict(files)


def _write_record(folder: Path, record: Mapping[str, Mapping[str, object]]) -> None:
    write_atomic(folder / RECORD, json.dumps({"files": dict(record)}, indent=2, sort_keys=True) + "\n")


def _text(path: Path) -> str:
    try:
        return read_regular(path, _EXPECTED, _MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text in UTF-8, expected {_EXPECTED}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
