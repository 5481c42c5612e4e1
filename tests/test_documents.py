"""Links between the documents lead somewhere: files that are there, headings that a page has."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def _links(page: Path) -> list[tuple[str, str]]:
    """(file, heading) of each; code is none."""
    return _LINK.findall(re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL))


def _anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them: lower case, words joined by dashes, other signs left out."""
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    titles = (line.lstrip("#").strip().lower() for line in lines if re.match(r"#{1,6} ", line))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def _dead(page: Path) -> Iterator[str]:
    for target, anchor in _links(page):
        if "://" in target:
            continue
        found = (page.parent / target).resolve() if target else page
        if not found.exists():
            yield f"{target}: no such file"
        elif anchor and found.suffix == ".md" and anchor not in _anchors(found):
            yield f"{target}#{anchor}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(_dead(page)) == []


def test_every_page_is_found_from_the_readme() -> None:
    linked = {target for target, _ in _links(ROOT / "README.md")}
    assert {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")} <= linked
