"""Output without a run: help, version, completion, the configuration."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from gemmpipe import __version__
from gemmpipe.cli import announced
from gemmpipe.cli.commands import COMMANDS, load_command
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.main import main
from gemmpipe.core.paths import shipped_tables


def test_help_version_and_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == main(["--help"]) == 0
    assert "exhaustive" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gemmpipe {__version__}\n"
    assert main(["-sc", "install=bash"]) == 0
    assert "hydra_bash_completion" in capsys.readouterr().out
    for line, expected in {
        "gemmpipe qu": "quick",
        "gemmpipe quick kernel=a16": "kernel=a16w16",
        "gemmpipe quick stages.scr": "stages.screen.",
        "gemmpipe --config-dir . -m shapes=llama7": "shapes=llama70b",
    }.items():
        monkeypatch.setenv("COMP_LINE", line)
        assert main(["-sc", "query=bash"]) == 0
        assert expected in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gemmpipe --cfg ", ["all", "hydra", "job"]),
        ("gemmpipe --cf", ["--cfg"]),
        ("gemmpipe search=ga", ["search=gaussian"]),
        ("gemmpipe search=_", []),
        ("gemmpipe replay search@search.algorithm=ran", ["search@search.algorithm=random"]),
        ("gemmpipe timer@stages.bench.timer=a", ["timer@stages.bench.timer=accurate"]),
    ],
)
def test_completions(
    line: str, offered: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    out, error = capsys.readouterr()
    assert (out.split(), error) == (offered, "")


def test_help_on_an_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = folder / "own"
    (own / "search").mkdir(parents=True)
    (own / "search" / "short.yaml").write_text("# Ten seconds\ndefaults:\n  - halving\n  - _self_\nbudget_s: 10\n")
    assert main(["--help", "search", "--config-dir", str(own)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        f"search={name}" for name in ConfigFolders(config_dir=own).options["search"]
    ]
    assert "  Ten seconds" in next(line for line in lines if "search=short" in line)
    assert main(["search=short", "stages.screen.keep=3", "--help", "--config-dir", str(own)]) == 0
    out = capsys.readouterr().out
    for key in ("budget_s: 10", "keep_fraction: 0.25 # fraction", "budget_trials: null # new candidates"):
        assert key in out, "also the options that it includes"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_on_a_command_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_command(command).HELP
    monkeypatch.setattr("gemmpipe.cli.help.terminal_width", lambda: 80)
    assert main(["--help", command]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80 and not line.startswith("gemmpipe ")] == []
    assert shown.split() == whole.split()


@pytest.mark.parametrize("topic", ["search=gaussian", "stage=engine", "search", "shapes", "tune"])
def test_help_on_files_fits_80_columns_of_a_terminal_and_means_the_same(
    topic: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--help", topic]) == 0
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 80, "nothing is broken for programs"
    monkeypatch.setattr("gemmpipe.cli.help.fold_width", lambda stream: 80)
    assert main(["--help", topic]) == 0
    shown = capsys.readouterr().out
    paths = [line for line in whole.splitlines() if line.startswith("# /")]
    assert [line for line in shown.splitlines() if len(line) > 80 and line not in paths] == []
    assert [word for word in shown.split() if word != "#"] == [word for word in whole.split() if word != "#"]
    if "=" in topic:
        assert yaml.safe_load(shown) == yaml.safe_load(whole)


def test_help_on_doctor_has_the_options_for_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("args=", "log=", "run=", "target=", "version=", "package="):
        assert f"\n  {option}" in shown


def test_help_on_a_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "--help"]) == main(["--help", "merge"]) == 0
    once, again = capsys.readouterr().out.split("# Merge of tuned tables")[1:]
    assert "chain: [load, merge]" in once
    assert once.index("# Keys of every pipeline") < once.index("output: outputs/tuned # folder of the artifacts")
    assert once.count("chain:") == 1
    assert "hydra" not in once.partition("# Keys of every pipeline")[2]
    assert "gemmpipe merge --cfg job prints every key" in again
    assert main(["merge", "search=halving", "--help"]) == 0
    assert "keep_fraction" in capsys.readouterr().out, "the more specific topic is meant"


@pytest.mark.e2e
def test_showing_the_configuration_loads_nothing_heavy(folder: Path) -> None:
    code = (
        "import json, sys\nfrom gemmpipe.cli.main import main\ncode = main(['--cfg', 'job'])\n"
        "heavy = [m for m in ('torch', 'triton', 'pandas', 'numpy') if m in sys.modules]\n"
        "print(json.dumps([code, heavy]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exit_code, heavy = json.loads(done.stderr)
    assert (exit_code, heavy) == (0, [])
    assert "family: a8w8_blockscale" in done.stdout


FIRST_LINES = """
import io, json, os, sys

class Stream(io.StringIO):
    def write(self, text):
        print(json.dumps([text, sorted({"pandas", "torch"} & set(sys.modules))]), file=out, flush=True)
        os._exit(0)

out, sys.stdout, sys.stderr = sys.stdout, Stream(), Stream()
from gemmpipe.cli.main import main
for line in sys.stdin:
    child = os.fork()
    if not child:
        main(line.split())
        os._exit(1)  # it printed nothing
    os.waitpid(child, 0)
"""
"""Begins the command of each line, up to its first line of output, in a fork of a process that imported main alone."""
SHIPPED = shipped_tables() / "a8w8_blockscale_tuned_gemm.csv"
RECORDED = Path(__file__).parents[2] / "docs" / "examples" / "h200_run.tar.xz"


@pytest.fixture(scope="module")
def with_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of an H200 and its selections as a table."""
    folder = tmp_path_factory.mktemp("with_run")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder


FIRST = {
    "demo open=false": "demo: a search is replayed",
    "doctor": "doctor",
    "show h200_run": "show: reading h200_run",
    "report h200_run": "report: reading h200_run",
    "report a8w8_blockscale_tuned_gemm.csv": "report: reading a8w8_blockscale_tuned_gemm.csv",
    "show a8w8_blockscale_tuned_gemm.csv": "show: reading a8w8_blockscale_tuned_gemm.csv",
    "export h200_run plugin output=written": "reading h200_run",
}
"""The first line of commands that take a while."""


@pytest.mark.e2e
def test_the_first_line_comes_before_slow_imports(with_run: Path) -> None:
    (with_run / "a8w8_blockscale_tuned_gemm.csv").write_bytes(SHIPPED.read_bytes())
    command = [sys.executable, "-c", FIRST_LINES]
    lines = "".join(f"{line}\n" for line in FIRST)
    ended = subprocess.run(command, cwd=with_run, input=lines, capture_output=True, text=True, timeout=300, check=True)
    firsts = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(firsts) == len(FIRST)
    for (line, printed), (text, imported) in zip(FIRST.items(), firsts, strict=True):
        assert printed in text, line
        assert imported == [], line


def test_a_terminal_forgets_what_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with announced("show: reading " + "x" * 80):
        assert len(stream.getvalue()) < 40 and stream.getvalue().startswith("show: reading x")
    assert stream.getvalue().endswith("\r\x1b[K")
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with announced("show: reading it"):
        pass
    assert stream.getvalue() == "show: reading it\n"
