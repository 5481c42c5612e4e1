"""The environment variables that name a family's tables, and those that were meant to."""

import difflib
import os
import sys
from importlib.util import find_spec
from types import ModuleType

from gemmpipe.family import Family, shipped_families
from gemmpipe.runtime.selection import LOG

_PREFIX = "GEMMPIPE_CONFIG_"
_ALIKE = 0.8
"""Of 1: a slip of two letters in ten. A family of one's own in a package is known only once it is loaded."""


def variable_of(name: str) -> str:
    """The environment variable that names the tables of a family."""
    return f"{_PREFIX}{name.upper()}"


def warn_of_slips() -> None:
    """One line, once a variable, about each that is nearly a shipped family's and no other's: nothing reads it."""
    shipped = {variable_of(name): variable_of(name) for name in shipped_families()}
    functions = {variable_of(f"gemm_{name}"): variable_of(name) for name in shipped_families()}
    for name, value in os.environ.items():
        if not value or not name.startswith(_PREFIX) or name in shipped or _is_own(name):
            continue
        known = {known.removeprefix(_PREFIX): meant for known, meant in {**functions, **shipped}.items()}
        close = difflib.get_close_matches(name.removeprefix(_PREFIX).upper(), known, n=1, cutoff=_ALIKE)
        if close:
            LOG.warn(name, f"{name} is the variable of no family, and is not read; did you mean {known[close[0]]}?")


def _is_own(name: str) -> bool:
    """Whether a family of one's own has this variable: one that was loaded, or a module that bears the name."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    loaded = (vars(module).get("FAMILY") for module in modules)  # getattr would wake those that load when asked
    if any(isinstance(family, Family) and variable_of(family.name) == name for family in loaded):
        return True
    try:
        return find_spec(name.removeprefix(_PREFIX).lower()) is not None
    except (ImportError, ValueError):
        return False
