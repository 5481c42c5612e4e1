"""Words that a user pastes into a shell: quoted, and spelt in bytes where the terminal could not say them."""

import os
import shlex
import sys
from collections.abc import Iterable


def shell_quote(word: str) -> str:
    """A word for a POSIX shell.

    What is no text, or cannot be printed here, is spelt in octal: `"$(printf '/a/\\303\\274')"`.
    """
    if word.isprintable() and _is_encodable(word):
        return shlex.quote(word)
    spelt = "".join(chr(byte) if chr(byte) in _PLAIN else f"\\{byte:03o}" for byte in os.fsencode(word))
    return f"\"$(printf '{spelt}')\""


def shell_join(words: Iterable[str]) -> str:
    """A command of these words."""
    return " ".join(map(shell_quote, words))


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-=+,@:~ ")
"""What neither a quoted text nor `printf` takes for anything else."""


def _is_encodable(word: str) -> bool:
    """Whether standard output has all of a word's letters; it escapes or replaces others."""
    try:
        word.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True
