"""gemmpipe report: from the command line, of a real run on the CPU, of tables, and with errors of one line."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
from report_runs import SECTIONS, write_recorded_run

from gemmpipe.cli.main import main
from gemmpipe.core.paths import shipped_tables
from gemmpipe.journal import Journal

BLOCKSCALE = shipped_tables() / "a8w8_blockscale_tuned_gemm.csv"
REAL = (
    "kernel=a16w16",
    "shapes=list",
    "shapes.items=[{M: [4, 16], N: 64, K: 128}]",
    "backend=[torch,onednn]",
    "timer@stages.bench.timer=quick",
    "device=cpu",
    "format=[csv]",
)


@pytest.mark.e2e
@pytest.mark.usefixtures("own_locks")
def test_a_run_writes_its_report_and_the_command_writes_it_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REAL, "report=true"]) == 0
    (path,) = folder.glob("outputs/runs/tune/*/report.html")
    out, error = capsys.readouterr()
    assert str(path.relative_to(folder)) in out
    assert "report:" not in error
    text = path.read_text()
    for name in SECTIONS - {"conditions"}:  # a CPU has no clocks in the journal
        assert f'<section id="{name}">' in text, name
    (selections,) = folder.glob("outputs/runs/tune/*/selections.csv")
    rows = pd.read_csv(selections)
    assert len(rows[rows["format"].isna()]) == 2
    assert "(run, finished" in text
    path.unlink()
    assert main(["report"]) == 0
    assert "2 products" in capsys.readouterr().out
    again = path.read_text()
    assert "Products near their best, over seconds" in again, "rows of the journal have times"
    (path.parent / "manifest.json").unlink()
    assert main(["report", str(path.parent), "out=killed.html"]) == 0
    assert "(run, killed" in Path("killed.html").read_text()


def test_tables_of_one_kernel_become_one_report(
    h200_tables: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = str(h200_tables / BLOCKSCALE.name)
    shutil.copy(shipped, "mine_a8w8_blockscale_tuned_gemm.csv")
    assert main(["report", shipped, "mine_a8w8_blockscale_tuned_gemm.csv", "out=both.html"]) == 0
    assert [path.name for path in folder.glob("*.html")] == ["both.html"]
    assert main(["report", shipped, str(h200_tables / "bf16_tuned_gemm.csv")]) == 0
    assert capsys.readouterr().out.count("report  ") == 3
    names = {path.name for path in folder.glob("*_report.html")}
    assert names == {"a8w8_blockscale_tuned_gemm_report.html", "bf16_tuned_gemm_report.html"}


def test_a_watched_run_is_written_until_it_ends(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recorded_run(folder / "run", problems=1, candidates=5)
    writer = Journal(folder / "run")
    pages: list[str] = []

    def sleep(seconds: float) -> None:
        pages.append((folder / "run" / "report.html").read_text())
        if len(pages) == 2:
            writer.close()

    monkeypatch.setattr("gemmpipe.cli.report.time.sleep", sleep)
    assert main(["report", "run", "--watch"]) == 0
    assert len(pages) == 2
    assert all('<meta http-equiv="refresh" content="5">' in page for page in pages)
    assert 'http-equiv="refresh"' not in (folder / "run" / "report.html").read_text()
    assert capsys.readouterr().out.count("report  ") == 2


def test_after_ctrl_c_the_page_of_a_watched_run_is_not_loaded_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recorded_run(folder / "run", problems=1, candidates=5)
    page, seen = folder / "run" / "report.html", list[bool]()

    def sleep(seconds: float) -> None:
        seen.append('http-equiv="refresh"' in page.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr("gemmpipe.cli.report.time.sleep", sleep)
    with closing(Journal(folder / "run")):
        assert main(["report", "run", "--watch"]) == 130
    assert seen == [True]
    assert 'http-equiv="refresh"' not in page.read_text()
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst"], "report: lst: no such folder; expected a run, a tuned table or 'last'"),
        ([], "report: last: no run with products under outputs/runs"),
        (["nothing.csv"], "report: nothing.csv: no such file"),
        (["outt=x.html"], "report: outt: no such option; did you mean 'out'?"),
        (["watch=yes"], "report: watch=yes: expected true or false"),
        ([str(BLOCKSCALE), "--watch"], "report: watch=true: expected one run"),
        (["--cfg", "job"], "report: --cfg: no flag of this command"),
        (
            [str(BLOCKSCALE), str(shipped_tables() / "bf16_tuned_gemm.csv"), "out=x.html"],
            "report: out=x.html: one file",
        ),
    ],
)
def test_errors_are_one_line(refusal: Callable[..., str], arguments: list[str], message: str) -> None:
    assert refusal("report", *arguments).startswith(message)
    assert not list(Path().glob("*.html"))


def test_the_flag_is_of_the_report_alone(refusal: Callable[..., str]) -> None:
    assert refusal("tune", "--watch").startswith("--watch: a flag of gemmpipe report")
