"""Reports open in the browser by one rule: `demo`, `report`, and a run with `report=true`."""

import os
from pathlib import Path

import pytest
from forked_programs import Forking

ROOT = Path(__file__).parents[2]
RUN = ("kernel=a16w16", "device=cpu", "shapes=list", "shapes.items=[[8,64,64]]", "timer@stages.bench.timer=quick")

pytestmark = pytest.mark.e2e


class _User:
    """Types commands; the browser is a program that notes the page."""

    def __init__(self, folder: Path, programs: Forking) -> None:
        self.folder = folder
        self._programs = programs
        browser = folder / "browser.sh"
        browser.write_text(f'#!/bin/sh\necho "$1" >> {folder}/opened.txt\n')
        browser.chmod(0o755)
        hidden = {"CI", "DISPLAY", "WAYLAND_DISPLAY"}
        self._environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._environment |= {"PYTHONPATH": str(ROOT), "BROWSER": f"{browser} %s"}

    def opened_by(self, *arguments: str) -> list[str]:
        """The pages that a command opened."""
        pages = self.folder / "opened.txt"
        pages.unlink(missing_ok=True)
        done = self._programs.run(self.folder, self._environment, "gemmpipe", arguments)
        assert done.returncode == 0, done.stderr
        return pages.read_text().splitlines() if pages.exists() else []


@pytest.mark.slow
def test_a_report_opens_where_it_is_wanted_and_not_without_a_display(tmp_path: Path, forked_programs: Forking) -> None:
    user = _User(tmp_path, forked_programs)
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


def test_opening_without_a_report_is_refused(tmp_path: Path, forked_programs: Forking) -> None:
    done = forked_programs.run(tmp_path, os.environ, "gemmpipe", (*RUN, "open=true"))
    assert done.returncode == 2
    assert "open: true given, and no report is written; expected report=true too" in done.stderr
