"""Shell completion: Hydra's, with our first word taken out of the line it sees."""

import os
import re
from collections.abc import Iterable, Mapping

from gemmpipe.cli.argv import CommandLine, sort_words
from gemmpipe.cli.folders import Folders
from gemmpipe.errors import GemmpipeError

SCRIPTS = {(f"{verb}={shell}",) for verb in ("install", "uninstall") for shell in ("bash", "zsh", "fish")}
"""The words after `-sc` that print a shell's script."""
_LINE = "COMP_LINE"


def is_query(line: CommandLine) -> bool:
    """Whether a shell asks what the words on its line could become."""
    return line.has("--shell-completion") and any(word.startswith("query=") for word in line.words)


def typed_line(environ: Mapping[str, str]) -> tuple[CommandLine, str]:
    """The line in the making, sorted as far as it can be, and the word under the cursor ("" for a new one)."""
    text = environ.get(_LINE, "")
    words = text.split()[1:]
    current = words.pop() if words and not text.endswith(" ") else ""
    try:
        return sort_words(words), current
    except GemmpipeError:
        return CommandLine(flags=(), first=None, words=tuple(words)), current


def first_words(line: CommandLine, current: str, folders: Folders) -> Iterable[str]:
    """The pipelines that the word under the cursor could become, where a pipeline may stand."""
    if line.first is not None or line.words or "=" in current:
        return ()
    return sorted(name for name in folders.pipelines if name.startswith(current))


def show_hydra(line: CommandLine, current: str) -> None:
    """Rewrite the line that Hydra's completion reads: its own flags and overrides only."""
    mode = ["-m"] if line.has("--multirun") else []
    os.environ[_LINE] = " ".join(["gemmpipe", *mode, *line.words, current])


def without_code(words: str) -> str:
    """What Hydra offers, without the keys that name a class: those belong to files."""
    return re.sub(r"\S*_target_=\S*[ \t]*", "", words)
