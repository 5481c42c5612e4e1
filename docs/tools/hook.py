"""Hooks of `mkdocs build`: generated reference texts, and the top-level documents as pages of the site."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file alone

from generated import inserted
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Documents next to `docs/`, with their names on the site."""
_EXAMPLE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)examples/([^)]*)\)")
"""Links to examples: those of the repository, and scripts, are not on the site, and become plain text there."""
_LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the top-level documents."""
    for name, page in TOP_LEVEL.items():
        files.append(File.generated(config, page, content=_at_top((ROOT / name).read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the generated parts; links to top-level documents become links to their pages."""
    up = "../" * page.file.src_uri.count("/")
    for name, target in TOP_LEVEL.items():
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{target}")
    markdown = _EXAMPLE.sub(lambda link: _on_site(link, up), markdown)
    return inserted(markdown.replace(f"]({up}../README.md", f"]({up}index.md"))


def _on_site(link: re.Match[str], up: str) -> str:
    """A link to an example as it is, if the site has the file; else its text. `up` leads from the page to `docs/`."""
    return link[0] if link[2] == up and not link[3].endswith(".py") else link[1]


def _at_top(text: str) -> str:
    """A top-level document's text with links as seen from `docs/`."""

    def moved(link: re.Match[str]) -> str:
        target = link[1].removeprefix("docs/") if link[1].startswith("docs/") else TOP_LEVEL.get(link[1], link[1])
        return f"]({target}{link[2] or ''})"

    return _LINK.sub(moved, text)
