"""Asking an implementation: what its own code raises comes back as one line that names file and line."""

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
    """An implementation's own code raised something; the message is one line: `place: type: text`."""

    def __init__(self, place: str, text: str) -> None:
        super().__init__(place, text)
        self.place = place
        """`file:line` in its code."""

    def __str__(self) -> str:
        return ": ".join(part for part in self.args if part)


def call_plugin(implementation: "Implementation", question: Callable[[], T]) -> T:
    """The answer. Raises Raised for what the implementation did not mean to raise; a UserError is said as it is."""
    try:
        return question()
    except GemmpipeError:
        raise
    except Exception as error:
        home = _package_folder(type(implementation).__module__)
        place = error_location(home, error) if home else ""
        raise PluginError(place or _class_location(type(implementation)), one_line(error)) from error


def describe_error(implementation: "Implementation", error: Exception) -> str:
    """What was raised while a candidate was made or run, in a line; with the place in code that is not gemmpipe's."""
    return _describe((type(implementation),), error)


def describe_family_error(family: "Family", error: Exception) -> str:
    """The same of what was raised while a problem's operands or its truth were made, by the family's own functions."""
    return _describe(tuple(value for value in vars(family).values() if callable(value)), error)


def _describe(codes: "Iterable[type | Callable[..., object]]", error: Exception) -> str:
    modules = {str(getattr(code, "__module__", "gemmpipe.")) for code in codes}
    homes = {_package_folder(module) for module in modules if not module.startswith("gemmpipe.")}
    place = next(filter(None, (error_location(home, error) for home in homes if home)), "")
    return f"{place}: {one_line(error)}" if place else one_line(error)


def error_location(folder: Path, error: BaseException) -> str:
    """The file of that folder and the line at which an error arose, in this process or another; nothing if in none."""
    told = "".join(traceback.format_exception(error))
    places = re.findall(rf'File "{re.escape(str(folder))}/([^"]+)", line (\d+)', told)
    return f"{folder / places[-1][0]}:{places[-1][1]}" if places else ""


def _package_folder(module: str) -> Path | None:
    """The folder of a module's outermost package, or of the module where that lies in none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).parents[max(0, module.count(".") - 1)] if file else None


@lru_cache
def _class_location(kind: type) -> str:
    """File and line of a class: for an answer that is no answer, which no line of its own code complained about."""
    import inspect

    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return ""
