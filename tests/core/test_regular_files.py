"""What is no regular file is refused before it is opened, whoever reads it."""

import ast
import os
import socket
from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.core.files import open_regular, open_regular_text, read_regular
from gemmpipe.core.paths import PACKAGE, open_no_link

_MAY_OPEN = {
    "files/regular.py",
    "paths.py",  # what is written
    "journal/writing.py",  # the same, by `open_no_link`
    "runtime/captured.py",  # the same
    "cli/streams.py",  # the standard streams
    "online.py",  # the log and the lock in the user's own folder
    "executors/hand.py",  # /proc
    "executors/holding.py",  # locks, which are made where there is none, and /proc
    "launching/source_hash.py",  # a file of this package
    "device.py",  # /proc and /sys
    "search/recording.py",  # lzma, of a stream that is open already
}
"""Modules that call `open` or `read_text` themselves, and what for."""


def _opens(path: Path) -> list[str]:
    """The calls of a module that open a file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    return [n for n in names if n == "open" or n.endswith((".open", ".read_text", ".read_bytes"))]


def test_every_reader_opens_files_by_the_one_function_that_looks_what_they_are() -> None:
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if "kernels" not in p.parts and _opens(p)}
    assert found == _MAY_OPEN


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "device", "link to a fifo"])
def test_what_is_no_regular_file_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("x")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        held = socket.socket(socket.AF_UNIX)
        held.bind(str(path))
        held.close()
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo("y")
        path.symlink_to("y")
    with pytest.raises(UserError, match="x: no regular file, expected a table"):
        open_regular(path, "a table")


def test_another_file_in_its_place_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, there = tmp_path / "x", os.stat(__file__)
    os.mkfifo(path)
    monkeypatch.setattr("gemmpipe.core.files.os.stat", lambda path: there)
    with pytest.raises(UserError, match="no regular file"):
        open_regular(path, "a table")


def test_contents_within_a_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc\n")
    assert read_regular(tmp_path / "x", "a table", 4) == b"abc\n"
    with open_regular_text(tmp_path / "x", "a table") as stream:
        assert stream.read() == "abc\n"
    with pytest.raises(UserError, match="x: larger than 3 bytes, expected a table"):
        read_regular(tmp_path / "x", "a table", 3)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "y", "a table")
    with pytest.raises(UserError, match="no path, expected a table"):
        open_regular(tmp_path / "a\0b", "a table")


def test_what_is_written_goes_to_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    for mode in ("a", "a+"):
        with pytest.raises(OSError, match=r"no regular file|No such device"):
            open(tmp_path / "x", mode, opener=open_no_link)  # noqa: SIM115
