"""The example notebook runs, and the example workflow gates on what gemmpipe has."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gemmpipe.cli.commands import COMMANDS
from gemmpipe.core.paths import shipped_tables

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow  # it starts Jupyter, and a run in it
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    html = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    (shown,) = [text for text in html if "gemmpipe a16w16" in text]
    assert 'aria-label="time over M, 256 x 512"' in shown, "a picture"
    assert len(list(tmp_path.glob("outputs/runs/tune/*/report.html"))) == 1


@pytest.mark.parametrize(("factor", "code", "verdict"), [(1.0, 0, "passed"), (3.0, 1, "FAILED")])
def test_the_step_that_compares_passes_and_fails(tmp_path: Path, factor: float, code: int, verdict: str) -> None:
    """As a runner executes it, with the run's table as its second side."""
    rows = list(csv.DictReader((shipped_tables() / "bf16_tuned_gemm.csv").open()))[:4]
    for name, scale in (("tuned/bf16_tuned_gemm.csv", 1.0), ("run.csv", factor)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as stream:
            writer = csv.DictWriter(stream, rows[0].keys())
            writer.writeheader()
            writer.writerows({**row, "us": scale * float(row["us"])} for row in rows)
    program = tmp_path / ".venv" / "bin" / "gemmpipe"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gemmpipe "$@"\n')
    program.chmod(0o755)
    steps = yaml.safe_load((EXAMPLES / "github_action.yml").read_text())["jobs"]["gate"]["steps"]
    (compare,) = [step for step in steps if step.get("name") == "Compare"]
    assert compare["shell"] == "bash"
    summary = tmp_path / "summary.md"
    script = compare["run"].replace(" last ", " run.csv ")
    bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(bash, cwd=tmp_path, env={**os.environ, "GITHUB_STEP_SUMMARY": str(summary)}, check=False)
    assert done.returncode == code
    assert f"gate: {verdict}" in summary.read_text()


def test_the_workflow_is_valid_and_uses_no_secret() -> None:
    text = (EXAMPLES / "github_action.yml").read_text()
    workflow = yaml.safe_load(text)
    steps = workflow["jobs"]["gate"]["steps"]
    assert "secrets." not in text
    assert workflow["permissions"] == {"contents": "read"}
    (compare,) = [step for step in steps if step.get("name") == "Compare"]
    assert "diff" in COMMANDS
    assert "gemmpipe diff tuned/bf16_tuned_gemm.csv last fail_above=2 markdown=true" in compare["run"]
