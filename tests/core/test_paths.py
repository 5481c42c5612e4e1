"""Files are written atomically, and leftovers of killed processes are removed."""

import errno
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gemmpipe.core.paths import make_folder, write_atomic
from gemmpipe.journal import NAME, Journal

_KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from gemmpipe.core import paths
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
paths.write_atomic(Path(sys.argv[1]), "half")
"""


@pytest.mark.e2e
def test_temporaries_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    other = tmp_path / f".other.csv.{platform.node()}-{os.getpid()}-x.tmp"
    mine = tmp_path / f".table.csv.{platform.node()}-{os.getpid()}-x.tmp"
    elsewhere = tmp_path / ".table.csv.another-machine-1-x.tmp"
    for each in (other, mine, elsewhere):
        each.touch()
    done = subprocess.run([sys.executable, "-c", _KILLED_WHILE_WRITING, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))) >= 4
    write_atomic(path, "new")
    assert path.read_text() == "new"
    # Temporaries of running processes, other machines and other files stay.
    assert {each.name for each in tmp_path.iterdir()} == {path.name, other.name, mine.name, elsewhere.name}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


_WITHIN_TEN_BYTES = """
import resource, signal, sys
from pathlib import Path
from gemmpipe.core import paths
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    paths.write_atomic(Path(sys.argv[1]), "x" * 100)
except OSError as error:
    print(type(error).__name__, error.filename, error.strerror)
"""


@pytest.mark.e2e
def test_a_full_disk_error_has_the_file_name(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    command = [sys.executable, "-c", _WITHIN_TEN_BYTES, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"OSError {path} File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    """Neither a file nor the journal fails while another process deletes the folder; no row is lost."""
    folder = tmp_path / "outputs" / "runs" / "one"
    journal = Journal(folder)
    finished, deletions = threading.Event(), threading.Semaphore(0)

    def delete() -> None:
        while not finished.is_set():
            if deletions.acquire(timeout=0.01):
                shutil.rmtree(tmp_path / "outputs", ignore_errors=True)

    other = threading.Thread(target=delete)
    other.start()
    try:
        for number in range(200):
            while deletions.acquire(blocking=False):
                pass
            deletions.release(5)  # fewer than the tries
            write_atomic(folder / "table.csv", "a,b\n")
            journal.write("cut_short", problem=str(number))
            journal.sync()
    finally:
        finished.set()
        other.join()
    journal.close()
    assert len((folder / NAME).read_text().splitlines()) == 200


def test_a_folder_deleted_during_mkdir_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mkdir raises FileExistsError, and the folder is deleted before the check that it is a folder."""
    folder, make, deleted = tmp_path / "outputs" / "runs", os.mkdir, []

    def mkdir_of_a_deleted_folder(path: Path, mode: int = 0o777) -> None:
        if Path(path) == folder and len(deleted) < 3:
            deleted.append(path)
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir_of_a_deleted_folder)
    make_folder(folder)
    assert folder.is_dir()
    assert len(deleted) == 3


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "outputs")


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, link, shown = tmp_path / "pipe", tmp_path / "stdout", tmp_path / "shown"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, "text")
    assert os.read(reader, 100) == b"text"
    assert pipe.is_fifo()
    os.close(reader)
    with shown.open("w") as stream:
        link.symlink_to(f"/proc/self/fd/{stream.fileno()}")
        write_atomic(link, "page")
    assert link.is_symlink()
    assert shown.read_text() == "page"
