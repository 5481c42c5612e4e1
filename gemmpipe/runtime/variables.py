"""Environment variables that were meant to name a family's tables, and name none's."""

import difflib
import os
import sys
from importlib.util import find_spec
from types import ModuleType

from gemmpipe.aiter_environment import advice, variables_of
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.paths import TABLES_PREFIX, tables_variable
from gemmpipe.runtime.selection import LOG

_ALIKE = 0.8
"""Of 1: a slip of two letters in ten. A family of one's own in a package is known only once it is loaded."""


def warn_of_slips() -> None:
    """One line, once a variable, about each that is nearly a shipped family's and no other's: nothing reads it."""
    shipped = {tables_variable(name) for name in shipped_families()}
    strange = [n for n, value in os.environ.items() if value and n.startswith(TABLES_PREFIX) and n not in shipped]
    meant = _names_of_families() if strange else {}
    for name in strange:
        if name in meant.values() or _is_own(name):
            continue
        known = {known.removeprefix(TABLES_PREFIX): read for known, read in meant.items()}
        close = difflib.get_close_matches(name.removeprefix(TABLES_PREFIX).upper(), known, n=1, cutoff=_ALIKE)
        if close:
            LOG.warn(name, f"{name} is the variable of no family, and is not read; did you mean {known[close[0]]}?")


def warn_of_aiters() -> None:
    """One line, once a variable, about each of aiter's that is set and means something else or nothing here."""
    for name, line in advice().items():
        LOG.warn(name, line)


def _names_of_families() -> dict[str, str]:
    """What somebody may write for a shipped family's variable, and the variable that is read: aiter's names too."""
    found = {tables_variable(f"gemm_{name}"): tables_variable(name) for name in shipped_families()}
    for family in map(load_family, shipped_families()):
        found |= {name: name for name in variables_of(family) if name.startswith(TABLES_PREFIX)}
    return found


def _is_own(name: str) -> bool:
    """Whether a family of one's own has this variable: one that was loaded, or a module that bears the name."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    loaded = (vars(module).get("FAMILY") for module in modules)  # getattr would wake those that load when asked
    if any(isinstance(family, Family) and tables_variable(family.name) == name for family in loaded):
        return True
    try:
        return find_spec(name.removeprefix(TABLES_PREFIX).lower()) is not None
    except (ImportError, ValueError):
        return False
