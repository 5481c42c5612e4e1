"""Pictures of the documents: each is made by the script, is used, is small, and shows no path of a machine."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from pictures import IMAGES, MAX_BYTES, REPORT, SHOTS, _shown, names  # noqa: E402 - a folder that is no package

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def test_every_picture_of_a_page_is_made_by_the_script_and_every_made_one_is_used() -> None:
    used = set()
    for page in PAGES:
        for target in _PICTURE.findall(page.read_text()):
            path = (page.parent / target).resolve()
            assert path.parent == IMAGES, f"{page.name}: {target}"
            used.add(path.name)
    assert used == set(names())
    assert {path.name for path in IMAGES.iterdir()} == set(names())


def test_pictures_are_small_and_anonymous() -> None:
    assert sum(path.stat().st_size for path in IMAGES.iterdir()) <= MAX_BYTES
    for path in IMAGES.glob("*.svg"):
        text = path.read_text()
        assert "url(http" not in text, "fonts of another host"
        assert not re.search(r"/tmp/|/root/|/work/|/opt/", text), path.name
        assert text.count("<text") > 2, "a terminal with lines"


def test_parts_of_the_report_are_sections_of_the_example() -> None:
    text = REPORT.read_text()
    for shot in (each for each in SHOTS.values() if not each.notebook):
        for name in {shot.first, shot.last} - {"top"}:
            assert f'<section id="{name}"' in text, name


def test_a_recorded_terminal_shows_what_was_not_cleared() -> None:
    screen = [""]
    row = _shown("first\r\nbar 10 %\r\n  note\r\x1b[2K\x1b[1A\x1b[2Ksecond\r\n\x1b[32mbar\x1b[0m 20 %", screen, 0)
    assert (screen, row) == (["first", "second", "\x1b[32mbar\x1b[0m 20 %"], 2)
