"""`resume=` and `reuse=`: the run that they name, and its configuration."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmpipe.cli.main import main
from gemmpipe.pipeline.plan import Plan

Refusal = Callable[..., str]


def _journal(run_dir: Path) -> None:
    (run_dir / "trials.jsonl").write_text('{"row":"session"}\n{"row":"problem"}\n')


def test_resume_uses_the_same_folder_and_overrides(plans: list[Plan]) -> None:
    assert main(["quick", "kernel=a16w16", "shapes.tp=2", "output=/x(y)"]) == 0
    _journal(plans[0].run_dir)
    before = sorted(path.name for path in (plans[0].run_dir / ".hydra").iterdir())
    assert main(["resume=last", "batch=7"]) == 0
    first, second = plans
    assert second.run_dir == first.run_dir
    assert (second.pipeline, second.family.name, second.batch, second.output) == ("quick", "a16w16", 7, "/x(y)")
    assert second.source == first.source
    assert sorted(path.name for path in (first.run_dir / ".hydra").iterdir()) == before


def test_last_is_the_newest_run_with_a_journal(plans: list[Plan], refusal: Refusal) -> None:
    assert main(["kernel=a16w16"]) == main(["quick"]) == main(["kernel=a8w8_blockscale"]) == 0
    for plan in plans[:2]:
        _journal(plan.run_dir)
    (plans[2].run_dir / "trials.jsonl").write_text('{"row":"session"}\n')
    (plans[2].run_dir / "manifest.json").write_text('{"exit_code": 0}')  # ended without a problem
    os.utime(plans[0].run_dir / "trials.jsonl", ns=(0, 0))
    assert main(["resume=last"]) == main(["tune", "resume=last"]) == 0
    assert [plan.run_dir for plan in plans[3:]] == [plans[1].run_dir, plans[0].run_dir]
    assert refusal("tune", f"resume={plans[1].run_dir}").endswith("not 'tune'; leave it out")
    assert refusal("-m", "resume=last") == "resume: resumes one run; leave -m out"
    (plans[2].run_dir / "trials.jsonl").unlink()
    assert "no trials.jsonl there" in refusal(f"resume={plans[2].run_dir}")


def test_last_includes_runs_stopped_before_the_first_problem(plans: list[Plan], refusal: Refusal) -> None:
    assert main(["kernel=a16w16"]) == 0
    (plans[0].run_dir / "trials.jsonl").write_text('{"row":"session"}\n')
    for text in ("no JSON", "[]", '{"exit_code": 2}'):
        (plans[0].run_dir / "manifest.json").write_text(text)
        assert "no run that can be resumed" in refusal("resume=last")
    (plans[0].run_dir / "manifest.json").write_text('{"exit_code": 130}')
    assert main(["resume=last"]) == 0
    assert plans[1].run_dir == plans[0].run_dir


@pytest.mark.e2e
def test_last_includes_runs_killed_after_their_first_row(folder: Path) -> None:
    """A real run, killed at its first row, before any problem: `resume=last` finds the problems."""
    argv = [sys.executable, "-m", "gemmpipe", "kernel=a16w16", "device=cpu", "shapes=list", "shapes.items=[[8,64,64]]"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folder)}
    script = folder / "sitecustomize.py"
    script.write_text(
        "import os, signal\nfrom gemmpipe.journal.writer import Journal\nwrite = Journal.write\n"
        "def once(self, row, **values):\n    write(self, row, **values)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Journal.write = once\n"
    )
    killed = {**environment, "PYTHONPATH": f"{folder}{os.pathsep}{environment['PYTHONPATH']}"}
    assert subprocess.run(argv, env=killed, cwd=folder, check=False).returncode == -signal.SIGKILL
    (journal,) = folder.glob("outputs/runs/tune/*/trials.jsonl")
    assert len(journal.read_text().splitlines()) == 1
    assert main(["resume=last", "chain=[capture]"]) == 0
    assert list(folder.glob("outputs/runs/tune/*/trials.jsonl")) == [journal]
    assert len(journal.read_text().splitlines()) > 2


def test_reuse_selects_again_in_a_new_folder(plans: list[Plan]) -> None:
    assert main(["kernel=a16w16", "shapes=qwen8b"]) == 0
    _journal(plans[0].run_dir)
    assert main([f"reuse={plans[0].run_dir}", "chain=[select,merge]"]) == 0
    assert plans[1].family.name == "a16w16"
    assert plans[1].source == plans[0].source
    assert plans[1].chain == ("select", "merge")
    assert plans[1].reuse == str(plans[0].run_dir)
    assert plans[1].run_dir != plans[0].run_dir


def test_a_run_of_a_sweep_can_be_resumed(plans: list[Plan], refusal: Refusal) -> None:
    assert main(["-m", "kernel=a16w16,a8w8_blockscale"]) == 0
    _journal(plans[0].run_dir)
    assert main(["resume=last"]) == 0
    assert plans[2].family.name == "a16w16"
    assert plans[2].run_dir == plans[0].run_dir
    assert "the folder of a sweep" in refusal(f"resume={plans[0].run_dir.parent}")
