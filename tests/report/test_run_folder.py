"""Runs on disk: their states, sweeps, and folders that are damaged or untrusted."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from gemmpipe.cli.export import find_choices
from gemmpipe.cli.run_list import lines
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import RUNS
from gemmpipe.report.last_run import find_finished
from gemmpipe.report.run_folder import (
    FINISHED,
    INTERRUPTED,
    KILLED,
    RUNNING,
    describe_run,
    groups,
    read_manifest,
    run_folders,
)

SESSION = {"row": "session", "time": "2026-11-23T09:00:00+00:00", "pipeline": "tune", "overrides": ["kernel=a16w16"]}


def _run(name: str, exit_code: int | None = 0, root: Path = RUNS / "tune", rows: int = 2) -> Path:
    folder = root / name
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "hydra.yaml").write_text("hydra:\n    choices:\n      shapes: llama8b\n      kernel: a16w16\n")
    problems = [{"row": "problem", "id": f"a16w16 M={m}"} for m in range(rows)]
    done = [{"row": "done", "stage": "bench", "problem": "a16w16 M=0"}]
    lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in [SESSION, *problems, *done])
    (folder / "trials.jsonl").write_text("".join(lines))
    if exit_code is not None:
        manifest = {"pipeline": "tune", "exit_code": exit_code, "wall_s": 12.5, "overrides": ["kernel=a16w16"]}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("code", "state"), [(0, FINISHED), (1, FINISHED), (130, INTERRUPTED), (None, KILLED)])
def test_the_state_follows_from_the_manifest(code: int | None, state: str) -> None:
    found = describe_run(_run("2026-11-23_09-00-00", code))
    assert (found.state, found.exit_code) == (state, code)
    assert (found.kernel, found.shapes, found.pipeline) == ("a16w16", "llama8b", "tune")
    assert found.command == "gemmpipe tune kernel=a16w16"
    assert (found.solved, found.problems) == (1, 2)
    assert found.wall_s == 12.5 if code is not None else found.wall_s > 0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_list_keeps_the_command_at_every_width(width: int) -> None:
    for number, pipeline in enumerate(("tune", "compare", "capture")):
        folder = _run(f"2026-11-23_09-00-00-12345{number}", root=RUNS / pipeline)
        typed = ["kernel=a8w8_blockscale", "device=cpu", "shapes=list", "shapes.items=[{M: [1, 64], N: 512, K: 1024}]"]
        manifest = {"pipeline": pipeline, "exit_code": 0, "wall_s": 61.6, "overrides": typed}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    sweep = RUNS / "tune" / "2026-11-23_10-00-00-123456"
    job = _run("0_a8w8_blockscale_list", root=sweep)
    (job / "manifest.json").write_text(json.dumps({**manifest, "pipeline": "tune"}))
    (sweep / "multirun.yaml").write_text("")
    rows = lines({folder: describe_run(folder) for folder in run_folders()}, width)
    assert all(len(row) <= width for row in rows)
    text = "\n".join(rows)
    assert text.count("  kernel=a8w8_blockscale d") == text.count("finished") == 4


@pytest.mark.usefixtures("folder")
def test_a_run_of_a_table_has_no_source_of_shapes() -> None:
    folder = _run("2026-11-23_09-00-00", root=RUNS / "verify")
    content = {"pipeline": "verify", "exit_code": 0, "overrides": ["table=a.csv"]}
    for chain, shapes in ((["capture", "bench"], "llama8b"), (["load", "bench"], "")):
        (folder / "manifest.json").write_text(json.dumps({**content, "config": {"chain": chain}}))
        assert describe_run(folder).shapes == shapes


@pytest.mark.usefixtures("folder")
def test_a_run_with_a_locked_journal_is_running() -> None:
    path = _run("2026-11-23_09-00-00", None)
    with (path / "trials.jsonl").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert describe_run(path).state == RUNNING
        with pytest.raises(UserError, match="the run is still at work; expected a finished run"):
            find_finished(str(path), "diff")
        with pytest.raises(UserError, match=r"expected the folder of a finished run; the run is still at work$"):
            find_choices("export", f"tune/{path.name}", "", None)
    assert describe_run(path).state == KILLED


@pytest.mark.usefixtures("folder")
def test_rows_after_the_manifest_are_of_a_session_that_was_killed() -> None:
    path = _run("2026-11-23_09-00-00", 130)
    later = (path / "manifest.json").stat().st_mtime + 3600
    os.utime(path / "trials.jsonl", (later, later))
    assert describe_run(path).state == KILLED


@pytest.mark.usefixtures("folder")
def test_newest_first_and_sweeps_together() -> None:
    old, new = _run("2026-11-23_09-00-00"), _run("2026-11-23_11-00-00", root=RUNS / "quick")
    sweep = RUNS / "tune" / "2026-11-23_10-00-00"
    jobs = [_run(f"{number}_a16w16_llama8b", root=sweep) for number in (0, 1, 10)]
    (sweep / "multirun.yaml").write_text("")
    assert run_folders() == [new, *reversed(jobs), old]
    assert [(parent, len(runs)) for parent, runs in groups(run_folders())] == [(None, 1), (sweep, 3), (None, 1)]
    assert run_folders(pipeline="quick") == [new]
    assert describe_run(jobs[0]).sweep == sweep


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"row":"session","device":3}', "\x00\xff", '{"overrides": [1, {}]}'])
def test_damaged_files_leave_facts_empty(text: str) -> None:
    path = _run("2026-11-23_09-00-00")
    for name in ("trials.jsonl", "manifest.json", "problems.csv", "selections.csv", ".hydra/hydra.yaml"):
        (path / name).write_text(text)
    found = describe_run(path)
    assert (found.solved, found.device) == (0, "")
    assert found.command.isprintable()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("solved", "code", "state"), [(2, 0, "finished"), (1, 0, "partial"), (0, 1, "failed")])
def test_the_list_tells_a_run_that_solved_less_from_one_that_solved_all(solved: int, code: int, state: str) -> None:
    folder = _run("2026-11-23_09-00-00", code)
    (folder / "problems.csv").write_text("problem\na\nb\n")
    (folder / "selections.csv").write_text("problem,format\n" + "a,\n" * solved)
    row = lines({folder: describe_run(folder)}, 80)[1]
    assert state in row.split()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("chain", "expected"), [(["capture", "screen", "select"], "partial"), (["capture"], "finished")]
)
def test_a_run_that_its_budget_ends_before_the_first_choice_is_partial(chain: list[str], expected: str) -> None:
    folder = _run("2026-11-23_09-00-00")
    (folder / "selections.csv").unlink(missing_ok=True)
    (folder / "problems.csv").write_text("problem\na\nb\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "config": {"chain": chain}}))
    _, row = lines({folder: describe_run(folder)}, 100)
    assert expected in row.split()
    assert ("0/2" in row.split()) == (expected == "partial")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("left", "state", "problems"), [([], "finished", "2"), (["b"], "partial", "1/2")])
def test_a_comparison_that_its_budget_ended_is_partial(left: list[str], state: str, problems: str) -> None:
    folder = _run("2026-11-23_09-00-00", root=RUNS / "compare")
    (folder / "selections.csv").unlink(missing_ok=True)
    (folder / "problems.csv").write_text("problem\na\nb\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    changed = {**manifest, "config": {"chain": ["capture", "lineup", "bench", "compare"]}, "left": left}
    (folder / "manifest.json").write_text(json.dumps(changed))
    _, row = lines({folder: describe_run(folder)}, 120)
    assert {state, problems} <= set(row.split())


@pytest.mark.usefixtures("folder")
def test_a_run_that_was_aborted_has_the_progress_of_its_journal() -> None:
    """Its tables are of an earlier session, which was interrupted too, with fewer choices."""
    folder = _run("2026-11-23_09-00-00", 130)
    (folder / "problems.csv").write_text("problem\na\nb\n")
    (folder / "selections.csv").write_text("problem,format\n")
    done = [f'{{"row":"done","stage":"bench","problem":"{name}"}}\n' for name in "ab"]
    with (folder / "trials.jsonl").open("a") as stream:
        stream.writelines(['{"row":"problem"}\n' * 2, *done])
    manifest = json.loads((folder / "manifest.json").read_text())
    for aborted, solved in ((False, 0), (True, 2)):
        (folder / "manifest.json").write_text(json.dumps({**manifest, "aborted": aborted}))
        found = describe_run(folder)
        assert (found.state, found.solved, found.problems) == ("interrupted", solved, 2)


@pytest.mark.usefixtures("folder")
def test_the_time_of_a_run_is_that_of_all_its_sessions() -> None:
    folder = _run("2026-11-23_09-00-00")
    manifest = {**json.loads((folder / "manifest.json").read_text()), "wall_s": 2.5, "earlier_wall_s": 12.5}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = describe_run(folder)
    assert (found.wall_s, found.total_s) == (2.5, 15.0)


@pytest.mark.usefixtures("folder")
def test_a_cut_manifest_is_named_with_the_command_that_writes_it_again() -> None:
    folder = _run("2026-11-23_09-00-00")
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=f"damaged; gemmpipe resume={folder} writes it again"):
        read_manifest(folder)
    _, row = lines({folder: describe_run(folder)}, 60)
    assert "damaged" in row.split()
