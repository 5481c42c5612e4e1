"""The errors that gemmpipe raises on purpose, and helpers for the text of their messages.

GemmpipeError
├── UserError          usage error (exit code 2)
│   └── NotComputed    a product of a format that the family does not have
└── EnvironmentProblem no device, disk full, read-only folder (exit code 3)
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence

MAX_PROCESSES = 4096
"""More than any machine has cores; a larger number of processes makes the machine unusable."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, the convention of shells."""

_MAX_SHOWN = 16
_MAX_LENGTH = 60
_MAX_QUOTED = 200
"""Characters of a cell or a value in a message; cells are unbounded."""
_ELLIPSIS = " ... "
_MAX_LISTED = 100  # characters of a list of names
_SHORT_WORD = 3  # names of this length are similar by chance, like 'gpu' and 'cpu'


class GemmpipeError(Exception):
    """Base of all errors raised on purpose; the message is one line."""

    exit_code = 1


class UserError(GemmpipeError):
    """Usage error; the message has the place, the expected value and the nearest known name."""

    exit_code = 2


class NotComputed(UserError):
    """A well-formed key of a product that the family's kernels do not compute."""


class EnvironmentProblem(GemmpipeError):
    """The environment does not allow it: no device, no space left, no permission."""

    exit_code = 3


def suggest_or_list(name: str, known: Iterable[str], where: str = "") -> str:
    """The clause "; did you mean 'x'?" with the nearest known name, or a list of the known names.

    `where`: the command that lists all of them, named where they do not fit.
    """
    names = sorted(set(known))
    listed = _listed(names, where)
    if close := suggest(name, names):
        sure = len(name) > _SHORT_WORD or len(names) > _MAX_SHOWN or len(names) == 1
        return close if sure else f"{close} known: {listed}"
    return f"; known: {listed}" if names else ""


def _listed(names: Sequence[str], where: str) -> str:
    """The names, as many as fit into a line after the message itself, with the number of the others."""
    text = ", ".join(names)
    if len(text) <= _MAX_LISTED:
        return text
    shown = list(names)
    while len(", ".join(shown)) > _MAX_LISTED and len(shown) > 1:
        shown.pop()
    return f"{', '.join(shown)} and {len(names) - len(shown)} more{f' ({where})' if where else ''}"


def suggest(name: str, known: Iterable[str]) -> str:
    """The clause "; did you mean 'x'?", or "" without a similar name; for messages that list the known ones already."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def one_line(error: BaseException) -> str:
    """Type and message of an exception in one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def short_repr(value: object) -> str:
    """A value in one line of about 60 characters; an array or a tensor as its type and shape."""
    text = " ".join(_describe(value).split())
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."


def _describe(value: object) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{each!r}: {_describe(item)}' for each, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_describe, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_describe, value))}{',' * (len(value) == 1)})"
    return repr(value)


def check_at_least(bound: float, /, **values: float | None) -> None:
    """Check fields of a configuration against a lower bound; None passes. Raises ValueError with the field's name."""
    for name, value in values.items():
        if value is not None and value < bound:
            raise ValueError(f"{name}={_number(value)}, expected at least {bound:g}")


def check_at_most(most: float, **values: float | None) -> None:
    """Check fields of a configuration against an upper bound; None passes. Raises ValueError with the field's name."""
    for name, value in values.items():
        if value is not None and value > most:
            raise ValueError(f"{name}={_number(value)}, expected at most {most:g}")


def _number(value: float) -> str:
    """An integer in full (1000000, not 1e+06)."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def quoted_repr(value: object) -> str:
    """The repr of a value from an input file, shortened to 200 characters for a message."""
    try:
        return shortened(repr(value))
    except ValueError:  # a whole number of over 4,300 digits
        return f"a {type(value).__name__} of thousands of digits"


def shortened(text: str, most: int = _MAX_QUOTED) -> str:
    """A text of at most `most` characters; the middle of a longer one is replaced by an ellipsis."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - len(_ELLIPSIS)]}{_ELLIPSIS}{text[-end:]}"


def printable(text: str) -> str:
    """A text from outside with `?` for control characters, which a terminal would interpret."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def one_letter_apart(one: str, other: str) -> bool:
    """True if two names differ by one letter replaced, added or removed."""
    if abs(len(one) - len(other)) > 1 or one == other:
        return False
    pairs = enumerate(zip(one, other, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[same + (len(one) >= len(other)) :] == other[same + (len(other) >= len(one)) :]
