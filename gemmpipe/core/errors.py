"""Everything gemmpipe raises on purpose.

GemmpipeError
├── UserError          the user's mistake (exit code 2)
│   └── NotComputed    a product of a format that the family does not have
└── EnvironmentProblem no device, disk full, read-only folder (exit code 3)
"""

import difflib
from collections.abc import Iterable, Mapping

MAX_PROCESSES = 4096
"""More than any machine has cores: who asks for more starts processes until nothing works."""

_MAX_SHOWN = 16
_MAX_LENGTH = 60
_MAX_QUOTED = 200
"""Characters of a cell or a value in a message: a cell may be a book."""
_ELLIPSIS = " ... "
_SHORT_WORD = 3  # of which two are alike by chance: 'gpu' is not meant to be 'cpu'


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


def suggest_or_list(word: str, known: Iterable[str]) -> str:
    """A clause that names the nearest known words, or lists them: "; did you mean 'x'?"."""
    names = sorted(set(known))
    if close := suggest(word, names):
        sure = len(word) > _SHORT_WORD or len(names) > _MAX_SHOWN
        return close if sure else f"{close} known: {', '.join(names)}"
    short_repr = ", ".join(names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")
    return f"; known: {short_repr}" if names else ""


def suggest(word: str, known: Iterable[str]) -> str:
    """The clause about the nearest known word alone, where the known ones are named already: "; did you mean 'x'?"."""
    close = difflib.get_close_matches(word, sorted(set(known)), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def one_line(error: BaseException) -> str:
    """What was raised, in a line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def short_repr(value: object) -> str:
    """A wrong argument in at most 60 characters of one line; an array or a tensor as its type and shape alone."""
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
    """Refuse values below a bound; None is no value. Raises ValueError naming the field, for the configuration."""
    for name, value in values.items():
        if value is not None and value < bound:
            raise ValueError(f"{name}={_number(value)}, expected at least {bound:g}")


def check_at_most(most: float, **values: float | None) -> None:
    """The same for values above a bound."""
    for name, value in values.items():
        if value is not None and value > most:
            raise ValueError(f"{name}={_number(value)}, expected at most {most:g}")


def _number(value: float) -> str:
    """As it was typed: 1000000 is not 1e+06."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def quoted_repr(value: object) -> str:
    """A value that somebody else wrote, as messages quote it: its repr, shortened to 200 characters."""
    try:
        return shortened(repr(value))
    except ValueError:  # a whole number of over 4,300 digits
        return f"a {type(value).__name__} of thousands of digits"


def shortened(text: str, most: int = _MAX_QUOTED) -> str:
    """A text of at most `most` characters: the middle of a longer one is left out, its beginning and end stay."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - len(_ELLIPSIS)]}{_ELLIPSIS}{text[-end:]}"


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
