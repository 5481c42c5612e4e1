"""Calls into an implementation's code: exceptions that it raises become one line with file and line number."""

import re
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gemmpipe.core.errors import GemmpipeError, one_line

if TYPE_CHECKING:
    from gemmpipe.family import Family, Implementation

T = TypeVar("T")


class PluginError(Exception):
    """An implementation's own code raised an exception; the message is one line: `place: type: text`."""

    def __init__(self, place: str, text: str) -> None:
        super().__init__(place, text)
        self.place = place
        """`file:line` in the implementation's code."""

    def __str__(self) -> str:
        return ": ".join(part for part in self.args if part)


def call_plugin(implementation: "Implementation", function: Callable[[], T]) -> T:
    """The result of `function`, which calls the implementation.

    Raises PluginError for any other exception than GemmpipeError, which passes unchanged.
    """
    try:
        return function()
    except GemmpipeError:
        raise
    except Exception as error:
        home = _package_folder(type(implementation).__module__)
        place = error_location(home, error) if home else ""
        raise PluginError(place or _class_location(type(implementation)), one_line(error)) from error


def describe_error(implementation: "Implementation", error: Exception) -> str:
    """One line about an exception while a candidate was made or run, with the place in code outside gemmpipe."""
    return _describe((type(implementation),), error)


def describe_family_error(family: "Family", error: Exception) -> str:
    """Like `describe_error`, for an exception of the family's own functions (operands, reference)."""
    return _describe(tuple(value for value in vars(family).values() if callable(value)), error)


def _describe(codes: "Iterable[type | Callable[..., object]]", error: Exception) -> str:
    modules = {str(getattr(code, "__module__", "gemmpipe.")) for code in codes}
    homes = {_package_folder(module) for module in modules if not module.startswith("gemmpipe.")}
    place = next(filter(None, (error_location(home, error) for home in homes if home)), "")
    return f"{place}: {one_line(error)}" if place else one_line(error)


def error_location(folder: Path, error: BaseException) -> str:
    """`file:line` of the innermost frame in `folder`, also of a worker's traceback; empty without such a frame."""
    text = "".join(traceback.format_exception(error))
    places = re.findall(rf'File "{re.escape(str(folder))}/([^"]+)", line (\d+)', text)
    return f"{folder / places[-1][0]}:{places[-1][1]}" if places else ""


def _package_folder(module: str) -> Path | None:
    """The folder of a module's outermost package, or of the module itself without a package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).parents[max(0, module.count(".") - 1)] if file else None


@lru_cache
def _class_location(kind: type) -> str:
    """`file:line` of a class, for an exception without a frame in the class's own code (an invalid result)."""
    import inspect

    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return ""
