"""The end of a command: exit codes, interrupts, lost streams; progress lines."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pairwise import few

from gemmpipe.cli.main import main
from gemmpipe.cli.progress import Terminal
from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.events import Events
from gemmpipe.core.signals import _StartupInterrupt, handle_signals
from gemmpipe.pipeline.plan import Plan


@pytest.mark.parametrize(
    ("failure", "code"),
    [(UserError("no"), 2), (EnvironmentProblem("full"), 3), (OSError(28, "No space left"), 3), (ValueError("bug"), 3)],
)
def test_exit_codes_of_failures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception, code: int
) -> None:
    def run(plan: Plan, events: Events) -> int:
        raise failure

    monkeypatch.setattr("gemmpipe.pipeline.runner.run", run)
    assert main(["kernel=a16w16"]) == code
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("GEMMPIPE_DEBUG", "1")
    assert main(["kernel=a16w16"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_the_worst_code_of_a_sweep_is_returned_and_an_interrupt_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [1, 0, 130, 0]
    monkeypatch.setattr("gemmpipe.pipeline.runner.run", lambda plan, events: codes.pop(0))
    assert main(["-m", "kernel=a16w16,a8w8_blockscale"]) == 1
    assert main(["-m", "kernel=a16w16,a8w8_blockscale"]) == 130
    assert codes == [0]


_INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may run where a shell has it ignored
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "gemmpipe.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
from gemmpipe.cli import entry
entry()
"""


def test_ctrl_c_before_anything_is_imported_is_silent() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED_WHILE_IMPORTING], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_heartbeat_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Terminal(verbose=False) as terminal:
        events = Events(listeners=[terminal])
        events.emit("step", "screen", done=2, total=6)
        events.emit("stage", "screen", total=400, unit="problems")
        events.emit("progress", done=0)
        for now[0], done in ((4.0, 40), (11.0, 110), (12.0, 120), (22.0, 220)):
            events.emit("progress", done=done)
        events.emit("detail", "unseen")
        events.emit("warning", "hot")
        events.emit("line", "seen")
    out, error = capsys.readouterr()
    assert out == "seen\n"
    assert error.splitlines() == [
        "2 of 6: screen, 28 %, 110 of 400 problems, 11 s, about 30 s left",
        "2 of 6: screen, 55 %, 220 of 400 problems, 22 s, about 18 s left",
        "warning: hot",
    ]


@pytest.mark.slow
def test_a_caller_that_closed_all_streams_gets_its_run(folder: Path) -> None:
    """Without replacements the journal would be stdout."""
    args = ["capture", "kernel=a16w16", "shapes=list", "shapes.items=[[1,256,512]]"]
    closing = f"exec 0<&- 1>&- 2>&-; exec {shlex.quote(sys.executable)} -m gemmpipe {shlex.join(args)}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(["bash", "-c", closing], env=environment, check=False).returncode == 0
    (journal,) = folder.glob("outputs/runs/capture/*/trials.jsonl")
    assert [json.loads(line)["row"] for line in journal.read_text().splitlines()] == ["session", "problem"]


@pytest.mark.parametrize(
    ("limits", "args", "message", "buffered"),
    few(
        [
            (*case, buffered)
            for case in (
                ("exec >/dev/full", "--help", "standard output: No space left on device"),
                ("exec >/dev/full", "--version", "standard output: No space left on device"),
                ("exec >/dev/full", "doctor", "standard output: No space left on device"),
                ("exec >/dev/full", "--cfg job", "standard output: No space left on device"),
                ("ulimit -f 0", "capture kernel=a16w16", "outputs/runs/capture: File too large"),
                ("ulimit -f 0", "-m capture kernel=a16w16,a8w8", "outputs/runs/capture: File too large"),
                ("ulimit -f 0", "capture hydra.run.dir=here", "here: File too large"),
            )
            for buffered in ("", "1")
        ],
        0,
        7,
        8,
    ),
)
def test_a_full_output_is_named(folder: Path, limits: str, args: str, message: str, buffered: str) -> None:
    """Write errors do not name a file; those of Hydra are in the run's folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": buffered}
    command = f"{limits}; exec {shlex.quote(sys.executable)} -m gemmpipe {args}"
    ended = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, f"gemmpipe: {message}\n")


@pytest.mark.slow  # tests/cli/test_output.py closes the pipes of the other commands
def test_the_reader_of_info_may_close_the_pipe(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = f"{shlex.quote(sys.executable)} -m gemmpipe --info | head -1"
    ended = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout.startswith("Hydra"), ended.stderr) == (True, "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
@pytest.mark.parametrize(("when", "code"), [("dispatch", 130), ("exit", 0), ("ignored", 0)])
def test_a_signal_outside_a_run_keeps_the_exit_code(name: str, when: str, code: int) -> None:
    """After a run's handlers were removed, a closing terminal gave exit code -1, though all was written."""
    if when == "ignored" and name != "SIGHUP":
        pytest.skip("nohup ignores only SIGHUP")
    script = f"""
import atexit, os, signal, sys, time
import gemmpipe.cli.main as command
from gemmpipe.cli import entry
when, number = {when!r}, signal.{name}
usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
signal.signal(number, signal.SIG_IGN if when == "ignored" else usual)  # these tests may run under nohup, or behind `&`
def strike(argv=()):
    os.kill(os.getpid(), number)
    time.sleep(0.2)
    return 0
command._dispatch = (lambda argv: 0) if when == "exit" else strike
if when == "exit":
    atexit.register(strike)
sys.argv = ["gemmpipe"]
entry()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, "gemmpipe: interrupted\n" if code else "")


_A_MODULE = """
import os, signal, time
for _ in range({times}):
    try:
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.1)
    except BaseException:  # as torch does with whatever numpy raises
        pass
print("whole", flush=True)
"""
_IN_AN_IMPORT = """
import os, signal, sys, time
import gemmpipe.cli.main as command
from gemmpipe.cli import entry
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these tests may run under nohup, or behind `&`
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
def dispatch(argv):
    import heavy
    time.sleep(5)
    return 0
command._dispatch = dispatch
entry()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize(("times", "message"), [(1, "whole\n"), (2, "")])
def test_a_signal_while_a_module_is_imported_ends_the_command_when_that_is_done(
    tmp_path: Path, name: str, times: int, message: str
) -> None:
    """A second signal ends it at once: an import may take long."""
    (tmp_path / "heavy.py").write_text(_A_MODULE.format(name=name, times=times))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", _IN_AN_IMPORT], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, message, "gemmpipe: interrupted\n")


def test_a_swallowed_signal_ends_the_run_when_it_installs_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    start = _StartupInterrupt()
    monkeypatch.setattr("gemmpipe.core.signals.startup_interrupt", start)
    with pytest.raises(KeyboardInterrupt):
        start.on_signal(signal.SIGINT, None)
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), handle_signals(Events()):
        pytest.fail("the run went on")
    assert signal.getsignal(signal.SIGINT) is usual


def test_a_run_stopped_before_it_began_has_no_resume_hint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stopped(plan: Plan, events: Events) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("gemmpipe.pipeline.runner.run", stopped)
    assert main(["kernel=a16w16"]) == 130
    assert capfd.readouterr().err == "gemmpipe: interrupted\n"
    assert not list(folder.glob("outputs/runs/tune/*"))


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("outputs/runs/tune/a", "'gemmpipe resume=last'"),
        ("else where", "\"gemmpipe --config-dir={0}/mine 'resume={0}/else where'\""),
    ],
)
def test_an_interrupted_run_names_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], place: str, line: str
) -> None:
    """In the runs folder `last` would be another run."""

    def stopped(plan: Plan, events: Events) -> int:
        plan.run_dir.joinpath("trials.jsonl").write_text("1\n2\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("gemmpipe.pipeline.runner.run", stopped)
    (folder / "mine").mkdir()
    assert main(["--config-dir=mine", f"hydra.run.dir='{place}'"]) == 130
    assert capfd.readouterr().err == f"gemmpipe: interrupted; resume with {line.format(folder)}\n"
