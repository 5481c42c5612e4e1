"""Quoting of arguments for a shell command that users copy, also for names that the terminal cannot print."""

import os
import shlex
import sys
from collections.abc import Iterable


def shell_quote(argument: str) -> str:
    """An argument quoted for a POSIX shell.

    Bytes that are not text, or not printable on standard output, become octal: `"$(printf '/a/\\303\\274')"`.
    """
    if argument.isprintable() and _is_encodable(argument):
        return shlex.quote(argument)
    escaped = "".join(chr(byte) if chr(byte) in _PLAIN else f"\\{byte:03o}" for byte in os.fsencode(argument))
    return f"\"$(printf '{escaped}')\""


def shell_join(arguments: Iterable[str]) -> str:
    """A shell command from a list of arguments."""
    return " ".join(map(shell_quote, arguments))


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-=+,@:~ ")
"""Characters without a special meaning in a quoted text or for `printf`."""


def _is_encodable(text: str) -> bool:
    """True if the encoding of standard output has all characters of `text`."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True
