"""Every code block of the documentation runs, or names the reason why it does not; then its commands still compose."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_programs import Forking
from page_blocks import RECORDED_RUN, RUNNABLE, Block, Command, blocks, commands, missing_line
from pairwise import few

from gemmpipe.cli.main import main
from gemmpipe.core.paths import RUNS
from gemmpipe.pipeline.plan import Plan

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "examples"))

from make_h200_report import unpack  # noqa: E402 - a folder that is no package

PAGES = [path for path in sorted(ROOT.glob("docs/**/*.md")) if "results" not in path.relative_to(ROOT / "docs").parts]
"""All but docs/results/, whose commands and outputs are records of earlier measurements, not instructions."""
IMPLIED = (
    "no such f",
    "not found",
    "no file",
    "no run",
    "no finished run",
    "matches no file",
    "no GPU",
    "is not installed",
)
"""Errors of a command on a page that is not run here: a file of the reader or a GPU is missing."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _of(page: Path) -> list[Block]:
    return list(blocks(page.read_text()))


def _to_run(page: Path) -> list[Block]:
    return [block for block in _of(page) if not block.not_run and not block.run_by]


RUN = [page for page in PAGES if any(block.kind in RUNNABLE for block in _to_run(page))]
ALWAYS = ("five_minutes", "export", "runs", "first_run", "read_a_run", "sources")
"""Pages that are run always: of each kind of command one; the others are slow, as one takes two to six seconds."""


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=_name)
def test_commands_are_in_blocks_that_can_be_run(page: Path) -> None:
    """Commands do not hide in a block of text or in indented code."""
    text = page.read_text()
    for block in _of(page):
        if block.kind not in RUNNABLE:
            assert not re.search(r"^(\$ |gemmpipe \w+=|python -m )", block.text, re.MULTILINE), f"line {block.line}"
        elif block.kind == "console":
            assert commands(block), f"line {block.line}: no line begins with '$ '"
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    if page.name != "README.md":  # its two commands are indented
        assert not re.search(r"\n\n    (\$ |gemmpipe |python |pip )", outside)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_block_that_another_test_runs_is_there(page: Path) -> None:
    for block in _of(page):
        if block.run_by:
            assert page.name in (ROOT / block.run_by).read_text(), f"line {block.line}"


COMPOSED = [page for page in (ROOT / "README.md", *PAGES) if "tracking" not in page.stem]
TRACKING = pytest.param(ROOT / "docs" / "howto" / "tracking.md", marks=pytest.mark.slow)  # it imports mlflow and wandb


@pytest.mark.parametrize("page", [*COMPOSED, TRACKING], ids=_name)
def test_commands_that_are_not_run_compose(
    page: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in _of(page):
        if block.kind != "console" or not (block.not_run or page.name == "README.md"):
            continue
        for command in commands(block):
            if command.is_gemmpipe and "resume" not in command.text and "install=" not in command.text:
                code = main(command.arguments)
                error = capsys.readouterr().err
                assert code == 0 or any(text in error.lower() for text in map(str.lower, IMPLIED)), (
                    f"line {block.line}: {command.text}: {error}"
                )


class Shell:
    """Runs the blocks of a page in one folder and one process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, programs: Forking) -> None:
        self._programs = programs
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self._names: dict[str, object] = {"__name__": "page"}

    def run(self, block: Block) -> None:
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.kind == "python":
            self._python(block)
        elif block.kind in RUNNABLE:
            for command in commands(block):
                printed = self._command(command, (0, 1) if block.may_fail else (0,))
                line = missing_line(command.output, printed)
                assert not line, f"{command.text}\nprinted no line {line!r}, but\n{printed}"

    def _python(self, block: Block) -> None:
        from gemmpipe.runtime import reload

        reload()  # what a new process does: the tables of this moment
        exec(compile(block.text, f"line {block.line}", "exec"), self._names)

    def _command(self, command: Command, codes: tuple[int, ...]) -> str:
        self._capsys.readouterr()
        export = re.fullmatch(r"export (\w+)=(\S+)", command.text)
        if export:
            self._monkeypatch.setenv(export[1], export[2].replace("$PWD", str(Path.cwd())))
            return ""
        if command.is_gemmpipe:
            code = main(command.arguments)
            printed = "\n".join(self._capsys.readouterr())
            assert code in codes, f"{command.text}: exit code {code}\n{printed}"
            return printed
        python = re.fullmatch(r"python (?:-m )?([\w./]+)((?: [\w./=-]+)*)", command.text)
        if python:
            done = self._programs.run(Path.cwd(), os.environ, python[1], python[2].split())
        else:
            text = re.sub(r"^python\b", sys.executable, command.text)
            done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{command.text}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run of an H200, unpacked."""
    return unpack(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def shell(
    folder: Path,
    own_locks: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    forked_programs: Forking,
) -> Iterator[Shell]:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "home"))
    yield Shell(capsys, monkeypatch, forked_programs)
    torch._dynamo.reset()


@pytest.mark.e2e
@pytest.mark.parametrize("page", few(RUN, *(i for i, page in enumerate(RUN) if page.stem in ALWAYS)), ids=_name)
def test_the_blocks_of_a_page_run(page: Path, shell: Shell, request: pytest.FixtureRequest) -> None:
    if RECORDED_RUN in page.read_text():
        run: Path = request.getfixturevalue("recorded_run")
        shutil.copytree(run, RUNS / "tune" / "2026-11-23_14-25-54-369345")
    for block in _to_run(page):
        shell.run(block)
