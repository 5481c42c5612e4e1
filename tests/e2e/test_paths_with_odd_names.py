"""Folders whose names shells, streams and GEMMPIPE_CONFIG_* read in another way: what is printed can be pasted."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pairwise import few

from gemmpipe.cli.main import main
from gemmpipe.family import load_family
from gemmpipe.pipeline.summary import use_line

ROOT = Path(__file__).parents[2]
WORDS = ("kernel=a16w16", "device=cpu", "shapes=list", "shapes.items=[[8,64,64]]", "timer@stages.bench.timer=quick")


@pytest.fixture
def tuned(tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    """A run in a folder with a blank, into one that ASCII cannot say."""
    folder = tmp_path / "sp ace"
    folder.mkdir()
    arguments = [sys.executable, "-m", "gemmpipe", *WORDS, "output=ünï", "format=[csv,aiter]"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow  # the test below starts a run in a folder that no locale names
def test_no_name_ends_a_run_and_what_is_printed_can_be_pasted(
    tuned: "subprocess.CompletedProcess[str]", tmp_path: Path
) -> None:
    assert tuned.returncode == 0, tuned.stderr
    folder = tmp_path / "sp ace" / "ünï"
    assert (folder / "bf16_tuned_gemm.csv").is_file()
    assert "merge: csv: " in tuned.stdout
    # All formats, though the stream cannot say where; whether aiter has the fastest kernel depends on the machine.
    assert "merge: aiter: " in tuned.stdout or "aiter: 1 of 1 selection left out" in tuned.stderr
    assert _exported(tuned.stdout) == os.fsencode(folder / "bf16_tuned_gemm.csv")


def _exported(printed: str, shell: str = "sh") -> bytes:
    """The value of the variable after the printed line, in a real shell."""
    (line,) = [line for line in printed.splitlines() if line.startswith("export ")]
    arguments = [shell, "-c", f'{line}\nprintf %s "$GEMMPIPE_CONFIG_A16W16"']
    return subprocess.run(arguments, capture_output=True, check=True).stdout


STRANGE = (b"by\xfcte", "ünï".encode(), b"it's $HOME `x` \\ %d", b"li\nne", b"es\x1b[2Jc", b"plain")
ENCODINGS = ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"})


SAYING = """
import csv
import os
import shlex
from pathlib import Path
from gemmpipe.cli.progress import Terminal
from gemmpipe.cli import escape_unencodable as any_text_may_be_said
from gemmpipe.core.events import Event
from gemmpipe.family import load_family
from gemmpipe.pipeline.summary import resume_line, use_line
any_text_may_be_said()
for folder in sorted(os.listdir(b".")):
    place = Path.cwd() / os.fsdecode(folder)
    for text in (use_line(load_family("a16w16"), place / "t.csv"), resume_line(place, ())):
        Terminal(verbose=False)(Event(kind="line", text=text))
"""


@pytest.mark.parametrize("environment", few(ENCODINGS, 0), ids=["ascii", "C", "UTF-8"])
def test_what_is_printed_is_used_by_a_shell_whatever_the_name_and_the_locale(
    environment: dict[str, str], tmp_path: Path
) -> None:
    root = os.fsencode(tmp_path)
    for name in STRANGE:
        os.mkdir(os.path.join(root, name))
    given = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SAYING], cwd=tmp_path, env=given, capture_output=True, check=True)
    printed = done.stdout.decode().splitlines()
    assert len(printed) == 2 * len(STRANGE)
    for name, use, resume in zip(sorted(STRANGE), printed[::2], printed[1::2], strict=True):
        folder = os.path.join(root, name)
        for shell in filter(shutil.which, ("sh", "bash", "zsh")):
            assert _exported(use, shell) == os.path.join(folder, b"t.csv")
        arguments = subprocess.run(["sh", "-c", f"printf '%s\\n' {resume}"], capture_output=True, check=True).stdout
        assert arguments == b"gemmpipe\nresume=" + folder + b"\n"
        if name.isascii() and name.decode().isprintable():
            assert "$(printf" not in use


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"by\xfcte", pytest.param("ünï".encode(), marks=pytest.mark.slow)])
def test_a_run_in_a_folder_that_no_locale_names_ends_well(name: bytes, tmp_path: Path) -> None:
    folder = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(folder)
    given = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **ENCODINGS[0]}
    arguments = [sys.executable, "-m", "gemmpipe", *WORDS, "output=out"]
    done = subprocess.run(arguments, cwd=folder, env=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    table = _exported(done.stdout.decode())
    assert table == os.path.join(folder, b"out/bf16_tuned_gemm.csv")
    assert os.path.isfile(table)


def test_a_path_that_the_variable_would_take_apart_is_told() -> None:
    printed = use_line(load_family("a16w16"), Path("/runs/12:30/bf16_tuned_gemm.csv"))
    assert printed.startswith("GEMMPIPE_CONFIG_A16W16 separates tables by ':'; copy /runs/12:30/bf16_tuned_gemm.csv")


def test_the_command_that_tunes_stale_rows_again_runs_in_a_shell_from_a_folder_with_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / """it's a "test" dir"""
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main([*WORDS, "output=t.csv"]) == 0
    rows = list(csv.DictReader((folder / "t.csv").read_text().splitlines()))
    rows[0]["config"] = '{"method": "gone"}'  # stale whatever times this machine takes
    with open(folder / "t.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    capsys.readouterr()
    main(["verify", "kernel=a16w16", "device=cpu", f"table='{folder / 't.csv'}'".replace("it's", r"it\'s")])
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "to tune these again: " in line]
    typed = f"gemmpipe() {{ printf '%s\\0' \"$@\"; }}\n{line.partition('again: ')[2]}"
    understood = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True).stdout
    assert main(understood.split("\0")[:-1]) == 0
    assert "1 of 1 problem tuned" in capsys.readouterr().out
