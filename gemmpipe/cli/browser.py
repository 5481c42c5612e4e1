"""Opening a report in the browser: one rule for `demo`, `report`, and a run with `report=true`.

Where a person can see it, the page opens; `open=false` prevents it, `open=true` opens it anywhere.
"""

import contextlib
import os
import sys
import webbrowser
from pathlib import Path


def may_open(given: bool | None) -> bool:
    """True if a report is to be opened; `given` is the value of `open=`, None where it was not typed."""
    return has_display() if given is None else given


def open_page(page: Path) -> None:
    """Open a file in the browser. A browser that does not start is no error: the path is printed."""
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(page.resolve().as_uri())


def has_display() -> bool:
    """True if a person can see a page that opens: a terminal, and a display where the system needs one."""
    if not sys.stdout.isatty() or os.environ.get("CI"):
        return False
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
