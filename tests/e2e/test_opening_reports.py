"""Reports open in the browser by one rule: `demo`, `report`, and a run with `report=true`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ("kernel=a16w16", "device=cpu", "shapes=list", "shapes.items=[[8,64,64]]", "timer@stages.bench.timer=quick")

pytestmark = pytest.mark.e2e


class _User:
    """Types commands; the browser is a program that notes the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        browser = folder / "browser.sh"
        browser.write_text(f'#!/bin/sh\necho "$1" >> {folder}/opened.txt\n')
        browser.chmod(0o755)
        hidden = {"CI", "DISPLAY", "WAYLAND_DISPLAY"}
        self._environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._environment |= {"PYTHONPATH": str(ROOT), "BROWSER": f"{browser} %s"}

    def opened_by(self, *words: str) -> list[str]:
        """The pages that a command opened."""
        pages = self.folder / "opened.txt"
        pages.unlink(missing_ok=True)
        command = [sys.executable, "-m", "gemmpipe", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return pages.read_text().splitlines() if pages.exists() else []


def test_a_report_opens_where_it_is_wanted_and_not_without_a_display(tmp_path: Path) -> None:
    user = _User(tmp_path)
    [page] = user.opened_by(*RUN, "report=true", "open=true")
    assert page.startswith("file://")
    assert page.endswith("/report.html")
    assert Path(page.removeprefix("file://")).is_file()
    assert user.opened_by("report") == [], "no terminal and no display"
    assert user.opened_by("report", "open=false") == []
    assert user.opened_by("report", "last", "open=true") == [page]
    assert user.opened_by("report", "outputs/tuned/bf16_tuned_gemm.csv", "out=t.html", "open=true") == [
        (tmp_path / "t.html").as_uri()
    ]


def test_opening_without_a_report_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gemmpipe", *RUN, "open=true"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "open: true given, and no report is written; expected report=true too" in done.stderr
