"""Shared fixtures: a browser that opens pages."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser on PATH; expected one of {', '.join(_PROGRAMS)}")
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=program, args=flags)
        yield started
        started.close()
