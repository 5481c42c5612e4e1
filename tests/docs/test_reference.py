"""Every command, option, key, variable, exit code, file and column has a place in the reference."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from gemmpipe.cli.commands import COMMANDS
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.core import schema
from gemmpipe.core.data import Status
from gemmpipe.core.errors import EnvironmentProblem, GemmpipeError, UserError
from gemmpipe.core.signals import Interrupted

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "tools"))

from generated import GENERATED, MARK, inserted  # noqa: E402 - a folder that is no package
from yaml_keys import read_option  # noqa: E402

FOLDERS = ConfigFolders(config_dir=None)
OPTION_FILES = sorted(ROOT.glob("conf/*/*.yaml"))
DATA = ("space", "roofline")
"""Groups with tables of data under keys; their files are shown as a whole."""


@cache
def _page(name: str) -> str:
    """A page of the reference as the site shows it."""
    return inserted((DOCS / "reference" / f"{name}.md").read_text())


def test_every_generated_part_is_on_a_page() -> None:
    texts = [path.read_text() for path in DOCS.rglob("*.md")]
    for name in GENERATED:
        assert sum(MARK.format(name) in text for text in texts) == 1, f"{MARK.format(name)} in docs/reference"
    marks = [mark for text in texts for mark in re.findall(r"^<!-- generated: (.+) -->$", text, re.MULTILINE)]
    assert set(marks) == set(GENERATED), "a mark without a text"


def test_every_command_and_pipeline() -> None:
    page = _page("commands")
    for name in {*COMMANDS, *FOLDERS.pipelines}:
        assert f"### `gemmpipe {name}`" in page, name


def test_every_option() -> None:
    page = _page("options")
    for group, names in FOLDERS.options.items():
        for name in names:
            assert f"| `{group}={name}` |" in page, f"{group}={name}"


@pytest.mark.parametrize("path", OPTION_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_key_of_an_option_with_its_comment(path: Path) -> None:
    page = _page("options")
    tree = yaml.safe_load(path.read_text()) or {}
    option = read_option(path)
    assert {key.path for key in option.keys if "." not in key.path} == set(tree) - {"defaults"}
    for key in option.keys:
        if not key.path.endswith("_target_"):
            row = re.compile(rf"^\| `[\w.]*\.{re.escape(key.path)}` \| .* \|$", re.MULTILINE)
            rows = row.findall(page)
            assert any(key.comment.replace("|", "\\|").replace("<", "&lt;") in each for each in rows), key.path


def test_every_key_of_the_pipelines() -> None:
    page = _page("options")
    for name in yaml.safe_load((ROOT / "pipelines" / "_base.yaml").read_text()):
        assert name in ("defaults", "hydra") or f"| `{name}` |" in page, name


def test_every_environment_variable() -> None:
    """Variables are read by a literal name that begins with GEMMPIPE_."""
    page = _page("environment") + (DOCS / "howto" / "aiter.md").read_text()
    found: set[str] = set()
    for path in [*ROOT.glob("gemmpipe/**/*.py"), *ROOT.glob("kernels/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"^GEMMPIPE_[A-Z0-9_]+$", node.value))
    assert "GEMMPIPE_CONFIG_" in found
    for name in found - {"GEMMPIPE_LOG_TUNED_CONFIG", "GEMMPIPE_TUNE_GEMM"}:  # aiter's names with our prefix
        assert f"`{name}" in page, name


def test_every_exit_code() -> None:
    page = _page("exit_codes")
    for code in {0, *(kind.exit_code for kind in (GemmpipeError, UserError, EnvironmentProblem, Interrupted))}:
        assert f"| {code} |" in page, code


def test_every_column_and_file() -> None:
    page = _page("files")
    tables = {name: value for name, value in vars(schema).items() if name.isupper() and isinstance(value, tuple)}
    assert {"TRIALS", "SELECTIONS", "RESULT", "VERIFIED"} <= set(tables)
    for name, columns in tables.items():
        for column in columns:
            assert f"`{column}`" in page, f"{name}: {column}"
    for status in Status:
        assert f"`{status}`" in page, status


def test_every_row_of_the_journal() -> None:
    page = _page("files")
    text = "\n".join(path.read_text() for path in ROOT.glob("gemmpipe/**/*.py"))
    rows = set(re.findall(r"(?:journal|self)\.write\(\s*\"(\w+)\"", text))
    assert {"session", "trial", "candidate"} <= rows
    for row in rows:
        assert f"`{row}`" in page, row


def test_every_extra() -> None:
    text = (DOCS / "start" / "install.md").read_text()
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]:
        assert f"`[{name}]`" in text, name


def test_every_page_is_in_the_navigation_and_ci_builds_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for path in DOCS.rglob("*.md"):
        assert str(path.relative_to(DOCS)) in nav, path
    steps = (ROOT / ".ci" / "run").read_text().splitlines()
    assert any("mkdocs build --strict" in step and not step.lstrip().startswith("#") for step in steps)


@pytest.mark.parametrize("name", ["howto/report", "howto/python_api", "tutorials/read_a_report", "results"])
def test_links_to_examples_are_kept_where_the_site_has_the_file(name: str) -> None:
    """The example report is on the site; scripts, and the examples of the repository, are not."""
    pytest.importorskip("mkdocs")
    from hook import on_page_markdown
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

    config, source = MkDocsConfig(), (DOCS / f"{name}.md").read_text()
    page = Page(None, File(f"{name}.md", str(DOCS), "site", use_directory_urls=True), config)
    shown = on_page_markdown(source, page, config, Files([]))
    assert shown.count("h200_report.html)") == source.count("h200_report.html)")
    assert not re.search(r"\]\([./]*examples/[^)]*\.(py|ipynb|yml)\)", shown)
    assert "examples/notebook.ipynb" in shown or "notebook.ipynb" not in source, "as text"
