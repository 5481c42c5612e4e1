"""Shell completion: Hydra's, with our first word taken out of the line it sees."""

import os
import re
from collections.abc import Iterable, Mapping

from gemmpipe.cli.argv import CHOICES, FLAGS, CommandLine, long_form, sort_words
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
    if words and words[-1].startswith("-") and long_form(words[-1]) in CHOICES:
        return CommandLine(flags=((long_form(words[-1]), None),), first=None, words=()), current
    try:
        return sort_words(words), current
    except GemmpipeError:
        return CommandLine(flags=(), first=None, words=tuple(w for w in words if not w.startswith("-"))), current


def is_flag(line: CommandLine, current: str) -> bool:
    """Whether the word under the cursor is a flag, or the value of one."""
    waits = bool(line.flags) and line.flags[-1][1] is None and line.flags[-1][0] in CHOICES
    return waits or current.startswith("-")


def own_words(line: CommandLine, current: str, folders: Folders) -> list[str]:
    """What the word under the cursor could become that Hydra does not know: flags, their values, pipelines, places."""
    if is_flag(line, current):
        found: Iterable[str] = FLAGS if current.startswith("-") else CHOICES[line.flags[-1][0]]
    elif "@" in current and "=" in current:  # timer@stages.bench.timer=
        key = current.partition("=")[0]
        found = [f"{key}={name}" for name in folders.options.get(key.partition("@")[0], ())]
    elif line.first is not None or line.words or "=" in current:
        found = ()
    else:
        found = folders.pipelines
    return sorted(word for word in found if word.startswith(current))


def show_hydra(line: CommandLine, current: str) -> None:
    """Rewrite the line that Hydra's completion reads: its own flags and overrides only."""
    mode = ["-m"] if line.has("--multirun") else []
    os.environ[_LINE] = " ".join(["gemmpipe", *mode, *line.words, current])


def for_users(words: str) -> str:
    """What Hydra offers, without the keys that name a class, which belong to files, and what others only build on."""
    return re.sub(r"\S*_target_=\S*[ \t]*|[\w@./]+=_\w+[ \t]*", "", words)
