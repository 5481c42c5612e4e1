"""Anything but a regular file is refused before it is opened, by every reader."""

import ast
import os
import socket
from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.core.files import open_regular, open_regular_text, read_regular
from gemmpipe.core.paths import PACKAGE, open_no_link

_MAY_OPEN = {
    "core/files.py",
    "core/paths.py",  # output files
    "journal/writer.py",  # output, by `open_no_link`
    "runtime/capture/recorder.py",  # the same
    "cli/__init__.py",  # the standard streams
    "online.py",  # the log and the lock in the user's own folder
    "executors/supervisor.py",  # /proc
    "executors/local.py",  # lock files, which it creates, and /proc
    "launch/source_hash.py",  # a file of this package
    "core/device.py",  # /proc and /sys
    "core/cpu_load.py",  # /proc
    "core/torch_build.py",  # files of the installed torch
    "charts/page.py",  # files of this package
    "charts/style.py",  # the same
    "backends/deepgemm_package.py",  # headers of the installed DeepGEMM
    "backends/deepgemm_build.py",  # the same, and binaries that it compiles
    "sources/routing_counts.py",  # a lock file, which it creates
    "cli/browser.py",  # a browser, not a file
    "cli/progress.py",  # the live display, not a file
    "report/provisional.py",  # a file of this package
    "core/renamed.py",  # a file of this package
    "search/recorded.py",  # lzma, of a stream that is open already
    "stages/screen/search_pool.py",  # SearchContext.open, not a file
    "stages/screen/search_worker.py",  # the same
}
"""Modules that call `open` or `read_text` themselves, with the purpose."""


def _opens(path: Path) -> list[str]:
    """The calls of a module that open a file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    return [n for n in names if n == "open" or n.endswith((".open", ".read_text", ".read_bytes"))]


def test_readers_open_files_by_open_regular_alone() -> None:
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if "kernels" not in p.parts and _opens(p)}
    assert found == _MAY_OPEN


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "device", "link to a fifo"])
def test_anything_but_a_regular_file_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UserError, match="x: not a regular file, expected a table"):
        open_regular(path, "a table")


def test_a_file_replaced_before_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, regular = tmp_path / "x", os.stat(__file__)
    os.mkfifo(path)
    monkeypatch.setattr("gemmpipe.core.files.os.stat", lambda path: regular)
    with pytest.raises(UserError, match="not a regular file"):
        open_regular(path, "a table")


def test_content_within_a_limit(tmp_path: Path) -> None:
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


def test_nothing_is_written_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    for mode in ("a", "a+"):
        with pytest.raises(OSError, match=r"not a regular file|No such device"):
            open(tmp_path / "x", mode, opener=open_no_link)  # noqa: SIM115
