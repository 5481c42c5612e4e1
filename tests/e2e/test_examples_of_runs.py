"""The example notebook runs, and the example workflow gates on what gemmpipe has."""

from pathlib import Path

import pytest
import yaml

from gemmpipe.cli.commands import COMMANDS

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


def test_the_workflow_is_valid_and_uses_no_secret() -> None:
    text = (EXAMPLES / "github_action.yml").read_text()
    workflow = yaml.safe_load(text)
    steps = workflow["jobs"]["gate"]["steps"]
    assert "secrets." not in text
    assert workflow["permissions"] == {"contents": "read"}
    (compare,) = [step for step in steps if step.get("name") == "Compare"]
    assert "diff" in COMMANDS
    assert "gemmpipe diff tuned/bf16_tuned_gemm.csv last fail_above=2 markdown=true" in compare["run"]
