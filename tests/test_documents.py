"""Links and paths in the documents exist; the README keeps its two commands; changelog and version agree."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmpipe import __version__

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_FILE = re.compile(r"(?<![\w/.@-])(?:tests|gemmpipe|kernels|docs|conf|pipelines|examples)/[\w./-]+\.(?:py|md|yaml)\b")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def _links(page: Path) -> list[tuple[str, str]]:
    """(file, heading) of each link outside code."""
    return _LINK.findall(re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL))


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them: lower case, words joined by dashes, no punctuation."""
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    assert list(_dead(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Paths from the root of the checkout, such as `tests/e2e/test_faults.py`."""
    named = set(_FILE.findall(page.read_text()))
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_modules_in_the_ways_through_the_code_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Ways through the code")[2].partition("\n## ")[0]
    modules = re.findall(r"`([\w/]+\.py)`", section)
    assert len(modules) > 40
    assert [name for name in modules if not (ROOT / "gemmpipe" / name).is_file()] == []


def test_an_entry_of_the_changelog_is_one_line() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("- ") and len(line) > 120] == []
    entries = lines[lines.index("## [Unreleased]") :]
    assert [line for line in entries if line and not line.startswith(("- ", "#"))] == []


def test_the_version_is_after_the_last_release() -> None:
    """A development version while the changelog has unreleased entries, else the newest released one."""
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    unreleased = text.partition("## [Unreleased]")[2].partition("\n## ")[0].strip()
    base, _, suffix = __version__.partition(".dev")
    assert released == sorted(released, key=_numbers, reverse=True)
    if unreleased:
        assert suffix.isdigit()
        assert _numbers(base) > _numbers(released[0])
    else:
        assert __version__ == released[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_package_has_one_version() -> None:
    """The distribution takes it from the package; no other file states it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"] == {"path": "gemmpipe/__init__.py"}
    stated = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
    files = [path for folder in ("gemmpipe", "conf", "pipelines") for path in (ROOT / folder).rglob("*.[py]*")]
    assert [path for path in files if path.suffix in {".py", ".yaml"} and stated.search(path.read_text())] == [
        ROOT / "gemmpipe" / "__init__.py"
    ]


def test_the_readme_leads_to_the_pages() -> None:
    """The other pages are in the navigation of the site (tests/docs/test_reference.py)."""
    linked = {target for target, _ in _links(ROOT / "README.md")}
    assert {"docs/index.md", "docs/start/install.md", "docs/results.md", "docs/glossary.md"} <= linked
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150


def test_gemmpipe_is_installed_from_a_checkout() -> None:
    """No index has it: `pip install 'gemmpipe[...]'` is only what an error of an installed gemmpipe names."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml"), ROOT / "README.md"]
    pages += [path for path in (ROOT / "examples").iterdir() if path.is_file()]
    texts = {path: path.read_text() for path in pages if path.parent.name != "results"}
    found = [path.name for path, text in texts.items() for _ in re.findall(r"pip install (?:-U )?'?gemmpipe", text)]
    assert found == ["install.md"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lists = [each for text in texts.values() for each in re.findall(r"\.\[([\w,]+)\]'", text)]
    named = {name for each in lists for name in each.split(",")}
    assert {"test", "vllm", "mlflow", "hf"} <= named <= set(extras)


@pytest.mark.parametrize(
    "command",
    [
        "pip install -e . && gemmpipe kernel=a8w8_blockscale shapes=llama70b",
        "pip install -e '.[test]' && python -m pytest -n 2",
    ],
)
def test_the_readme_has_the_commands_as_lines(command: str) -> None:
    assert f"    {command}" in (ROOT / "README.md").read_text().splitlines()
