"""`last` of each command: the newest run that has what the command needs."""

import fcntl
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmpipe import api
from gemmpipe.cli import report as report_command
from gemmpipe.cli.export import find_choices
from gemmpipe.cli.runs import find_run
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import RUNS
from gemmpipe.report.choices import read_choices
from gemmpipe.report.last_run import WITH_CHOICES, find_finished, last_run

pytestmark = pytest.mark.usefixtures("folder")

_SESSION = {"row": "session", "time": "2026-11-23T09:00:00+00:00", "pipeline": "tune"}
_PROBLEM = {"row": "problem", "id": "a16w16 M=0"}
_DONE = {"row": "done", "stage": "bench", "problem": "a16w16 M=0"}
_COLUMNS = "M,problem,format,us,libtype,config\n"
_CHOICE = f"{_COLUMNS}1,a16w16 M=0,,1.5,torch,\n"

KINDS: dict[str, tuple[list[dict[str, str]], dict[str, str]]] = {
    "chosen": (
        [_SESSION, _PROBLEM, _DONE],
        {"problems.csv": "M\n1\n", "selections.csv": _CHOICE, "manifest.json": "0"},
    ),
    "bucketed": (
        [_SESSION, _PROBLEM],
        {"problems.csv": "M\n1\n", "selections.csv": f"{_COLUMNS}1,,vllm,1.5,triton,\n", "manifest.json": "0"},
    ),
    "failed": (
        [_SESSION, _PROBLEM],
        {"problems.csv": "M\n1\n", "selections.csv": _COLUMNS, "manifest.json": "1"},
    ),
    "listed": ([_SESSION, _PROBLEM], {"problems.csv": "M\n1\n", "manifest.json": "0"}),
    "reused": ([_SESSION], {"problems.csv": "M\n", "reused.csv": "M\n1\n", "manifest.json": "0"}),
    "too late": ([_SESSION, _PROBLEM], {"problems.csv": "M\n1\n", "manifest.json": "0"}),
    "verified": ([_SESSION, _PROBLEM], {"problems.csv": "M\n1\n", "manifest.json": "0"}),
    "refused": ([_SESSION], {"manifest.json": "2"}),
    "stopped": ([_SESSION], {"manifest.json": "130"}),
    "interrupted": ([_SESSION, _PROBLEM], {"problems.csv": "M\n1\n", "manifest.json": "130"}),
    "killed": ([_SESSION, _PROBLEM], {}),
    "running": ([_SESSION], {}),
}
"""Kinds of runs: the rows of the journal, and the other files; of the manifest the exit code."""
CHAINS = {"listed": ["capture"], "verified": ["load", "bench", "verify_report"]}
"""Chains of kinds that do not tune."""


def _write(kind: str, root: Path = RUNS / "tune") -> Path:
    """A run of a kind; each is newer than those before it."""
    rows, files = KINDS[kind]
    folder = root / f"{len(list(root.glob('*')))}_{kind}"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("[]\n")
    (folder / ".hydra" / "hydra.yaml").write_text(
        "hydra:\n  job:\n    config_name: tune\n  runtime:\n    config_sources: []\n"
    )
    chain = CHAINS.get(kind, ["capture", "screen", "bench", "select", "merge"])
    manifest = {"pipeline": "tune", "files": [], "unsolved": [], "wall_s": 1.0, "config": {"chain": chain}}
    texts = {"trials.jsonl": "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows), **files}
    if "manifest.json" in files:
        texts["manifest.json"] = json.dumps({**manifest, "exit_code": int(files["manifest.json"])})
    second = len(list(RUNS.glob("*/*")))
    for name, text in texts.items():
        (folder / name).write_text(text)
        os.utime(folder / name, (second, second))
    return folder


def _reported(name: str, watch: bool) -> Path:
    ((folder,), _) = report_command._sources((name,), watch=watch)
    return folder


def _exported(name: str) -> Path:
    """The folder that the export reads: these manifests name no kernel, so that reading ends at them."""
    with pytest.raises(UserError) as raised:
        find_choices("export", name, "", None)
    return Path(str(raised.value).partition(":")[0]).parent


COMMANDS: dict[str, tuple[Callable[[str], Path], set[str]]] = {
    "show": (lambda name: find_finished(name, "show"), {"chosen"}),
    "diff": (lambda name: read_choices(name, "diff").path, {"chosen"}),
    "export": (_exported, {"chosen", "bucketed"}),
    "report": (lambda name: _reported(name, watch=False), {"chosen", "interrupted", "killed"}),
    "report --watch": (lambda name: _reported(name, watch=True), {"chosen", "interrupted", "killed", "running"}),
    "load": (
        lambda name: api.load(name).folder,
        {"chosen", "bucketed", "failed", "too late", "verified"},
    ),
    "reuse=": (
        lambda name: find_run("reuse", name, None, False).folder,
        {"chosen", "bucketed", "failed", "too late", "stopped", "interrupted", "killed", "running"},
    ),
    "resume=": (
        lambda name: find_run("resume", name, None, False).folder,
        {"chosen", "bucketed", "failed", "too late", "verified", "stopped", "interrupted", "killed", "running"},
    ),
}
"""The run that a command takes as `last` (or an earlier one), and the kinds of runs that it may be."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_last_is_the_newest_run_that_meets_the_condition(command: str, kind: str) -> None:
    """A run that the command cannot use, or that is older, does not hide the one that it can."""
    find, usable = COMMANDS[command]
    oldest, older, newest = _write("chosen"), _write("chosen"), _write(kind)
    with (newest / "trials.jsonl").open() as stream:
        if kind == "running":
            fcntl.flock(stream, fcntl.LOCK_EX)
        found, before = find("last"), find("last~1")
    assert found.resolve() == (newest if kind in usable else older).resolve()
    assert before.resolve() == (older if kind in usable else oldest).resolve()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_earlier_run_that_does_not_exist_is_one_line(command: str) -> None:
    find: Callable[[str], object] = COMMANDS[command][0]
    if command == "export":
        find = lambda name: find_choices("export", name, "", None)  # noqa: E731
    where = f"{command}last~2: " if command.endswith("=") else f"{command.split()[0]}: last~2: "
    for number, oldest in enumerate(("last", "last~1"), 1):
        _write("chosen")
        with pytest.raises(UserError) as raised:
            find("last~2")
        some = rf"only {number} (finished )?run{'s' * (number > 1)}( \w+)* under outputs/runs"
        assert re.fullmatch(rf"{where}{some}; expected at most {oldest}, or .+", str(raised.value))
    for wrong in ("", "x", "-1", "1.5", "\u0661", "9" * 30):
        with pytest.raises(UserError, match=re.escape("expected such as last~1, the run before the last one")):
            find(f"last~{wrong}")


def test_load_takes_a_run_of_tuned_problems_if_there_is_no_other() -> None:
    reused = _write("reused")
    assert api.load("last").folder == reused.absolute()


def test_last_may_be_of_a_sweep_and_of_one_pipeline() -> None:
    sweep = RUNS / "quick" / "2026-11-23_10-00-00"
    job = _write("chosen", sweep)
    (sweep / "multirun.yaml").write_text("")
    newer = _write("chosen")
    os.utime(newer / "manifest.json", (10**6, 10**6))
    assert last_run("last", (WITH_CHOICES,), "show", "a run") == newer
    assert last_run("last", (WITH_CHOICES,), "show", "a run", "quick") == job
    assert last_run("last~1", (WITH_CHOICES,), "show", "a run") == job


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (COMMANDS["show"][0], "show: last: no finished run with choices under outputs/runs; expected the folder"),
        (COMMANDS["diff"][0], "diff: last: no finished run with choices under outputs/runs; expected the folder"),
        (
            lambda name: find_choices("export", name, "", None),
            "export: last: no finished run with choices under outputs/runs; expected the folder of a run, or a tuned",
        ),
        (COMMANDS["report"][0], "report: last: no run with products under outputs/runs; expected the folder of a run"),
        (COMMANDS["load"][0], "load: last: no finished run under outputs/runs; expected the folder of a run"),
        (COMMANDS["resume="][0], "resume=last: no run that can be resumed under outputs/runs; expected resume=DIR"),
        (
            lambda name: find_run("reuse", name, "quick", False),
            "reuse=last: no run that can be reused under outputs/runs/quick; expected reuse=DIR",
        ),
    ],
)
def test_each_command_has_one_error_if_there_is_none(find: Callable[[str], object], message: str) -> None:
    with pytest.raises(UserError) as raised:
        find("last")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("kind", ["interrupted", "killed", "running", "listed"])
@pytest.mark.parametrize("command", ["show", "diff"])
def test_the_error_names_the_command_that_continues_what_was_stopped(command: str, kind: str) -> None:
    folder = _write(kind)
    if kind == "running":
        stream = (folder / "trials.jsonl").open()
        fcntl.flock(stream, fcntl.LOCK_EX)
    with pytest.raises(UserError) as raised:
        COMMANDS[command][0]("last")
    clause = f"; {folder} was {kind}, and gemmpipe resume=last continues it"
    assert str(raised.value).endswith(clause) == (kind in ("interrupted", "killed"))
    assert ("resume=last" in str(raised.value)) == (kind in ("interrupted", "killed"))


def test_a_folder_is_taken_by_its_path_or_its_name_in_the_list() -> None:
    chosen, killed = _write("chosen"), _write("killed")
    sweep = RUNS / "tune" / "2026-11-23_10-00-00"
    _write("chosen", sweep)
    (sweep / "multirun.yaml").write_text("")
    assert find_finished(str(chosen), "show") == find_finished(f"tune/{chosen.name}", "show") == chosen
    for folder, message in (
        (killed, rf"no manifest.json: the run has not ended; gemmpipe resume={killed} continues it"),
        (sweep, "the folder of a sweep; expected one of its runs, such as"),
        (RUNS, "no manifest.json: not the folder of a run"),
        (RUNS / "none", "no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            find_finished(str(folder), "show")
