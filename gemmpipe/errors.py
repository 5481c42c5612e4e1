"""Everything gemmpipe raises on purpose.

GemmpipeError
├── UserError          the user's mistake (exit code 2)
│   └── NotComputed    a product of a format that the family does not have
└── EnvironmentProblem no device, disk full, read-only folder (exit code 3)
"""

import difflib
from collections.abc import Iterable

MOST_PROCESSES = 4096
"""More than any machine has cores: who asks for more starts processes until nothing works."""

_MOST_SHOWN = 12
_FEW_LETTERS = 3  # of which two are alike by chance: 'gpu' is not meant to be 'cpu'


class GemmpipeError(Exception):
    """Base of all errors raised on purpose; the message is one line."""

    exit_code = 1


class UserError(GemmpipeError):
    """The user's mistake: the message names where, what was expected and the nearest known name."""

    exit_code = 2


class NotComputed(UserError):
    """A well-formed key of a product that the family's kernels do not compute."""


class EnvironmentProblem(GemmpipeError):
    """The machine cannot do it: no device, no space left, no permission."""

    exit_code = 3


def nearest(word: str, known: Iterable[str]) -> str:
    """A clause that names the nearest known words, or lists them: "; did you mean 'x'?"."""
    names = sorted(set(known))
    if close := closest(word, names):
        sure = len(word) > _FEW_LETTERS or len(names) > _MOST_SHOWN
        return close if sure else f"{close} known: {', '.join(names)}"
    shown = ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")
    return f"; known: {shown}" if names else ""


def closest(word: str, known: Iterable[str]) -> str:
    """The clause about the nearest known word alone, where the known ones are named already: "; did you mean 'x'?"."""
    close = difflib.get_close_matches(word, sorted(set(known)), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def one_line(error: BaseException) -> str:
    """What was raised, in a line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def at_least(bound: float, /, **values: float | None) -> None:
    """Refuse values below a bound; None is no value. Raises ValueError naming the field, for the configuration."""
    for name, value in values.items():
        if value is not None and value < bound:
            raise ValueError(f"{name}={_number(value)}, expected at least {bound:g}")


def at_most(most: float, **values: float | None) -> None:
    """The same for values above a bound."""
    for name, value in values.items():
        if value is not None and value > most:
            raise ValueError(f"{name}={_number(value)}, expected at most {most:g}")


def _number(value: float) -> str:
    """As it was typed: 1000000 is not 1e+06."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def printable(text: str) -> str:
    """A text from somewhere else, such that no terminal takes a part of it for a command or a line break."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def one_letter_apart(one: str, other: str) -> bool:
    """Whether one letter exchanged, added or left out makes two words the same."""
    if abs(len(one) - len(other)) > 1 or one == other:
        return False
    pairs = enumerate(zip(one, other, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[same + (len(one) >= len(other)) :] == other[same + (len(other) >= len(one)) :]
