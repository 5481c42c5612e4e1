"""aiter's environment variables: which are read here too, and what to use in place of the others."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from gemmpipe.core.paths import TABLES_PREFIX, tables_variable
from gemmpipe.family import Family, load_family, shipped_families

AITER_PREFIX = "AITER_CONFIG_"
ONLY_GIVEN = "GEMMPIPE_GIVEN_TABLES_ONLY"
"""Set to 1: no tables but those that a variable names are asked."""
LOG_SELECTION = ("GEMMPIPE_LOG_SELECTION", "GEMMPIPE_LOG_TUNED_CONFIG", "AITER_LOG_TUNED_CONFIG")
"""Each step of a look-up is logged where one of these is set."""
CAPTURE = ("GEMMPIPE_CAPTURE", "GEMMPIPE_TUNE_GEMM", "AITER_TUNE_GEMM")
"""The first that is set asks for captured shapes; only the first may name the file."""

_ADVICE: Mapping[str, str] = {
    "HIP_ONLINE_TUNING": "hipBLASLt's own, which its calls follow; GEMMPIPE_ONLINE_TUNING=1 tunes what no row answered",
    "PREBUILD_KERNELS": "not read: 'gemmpipe prebuild kernel=... table=...' compiles what a table needs",
    "AITER_REBUILD": "not read: kernels are compiled when their source or knobs are new; "
    "gemmpipe.runtime.reload() reads changed tables",
    "GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH": "not read: Triton brings its compiler, none of clang's is called",
}


def is_enabled(names: Iterable[str]) -> bool:
    """Whether one of these variables says something other than nothing and 0."""
    return any(os.environ.get(name, "") not in ("", "0") for name in names)


def only_given_tables() -> bool:
    """Whether the user's own and the shipped tables are left out."""
    return is_enabled((ONLY_GIVEN,))


def table_variables(family: Family) -> tuple[str, ...]:
    """The variables that may name a family's tables: its own name's, then aiter's name for the table, either prefix."""
    theirs = family.aiter_table.variable if family.aiter_table else ""
    named = (f"{TABLES_PREFIX}{theirs}", f"{AITER_PREFIX}{theirs}") if theirs else ()
    return tuple(dict.fromkeys((tables_variable(family.name), *named)))


def table_variable(family: Family) -> str:
    """The variable that is read for a family: the first that names something, or the family's own."""
    names = table_variables(family)
    return next((name for name in names if os.environ.get(name)), names[0])


def given_tables(family: Family) -> list[Path]:
    """The files that the environment names for a family, separated by colons, in this order."""
    return [Path(part).expanduser() for part in os.environ.get(table_variable(family), "").split(os.pathsep) if part]


def unused_variables() -> dict[str, str]:
    """By variable of aiter's that is set and means something else or nothing here: a line that says what to use."""
    found = {name: f"{name} is {text}" for name, text in _ADVICE.items() if is_enabled((name,))}
    named = [name for name, value in os.environ.items() if value and name.startswith((TABLES_PREFIX, AITER_PREFIX))]
    own = {tables_variable(name) for name in shipped_families()}
    if own.issuperset(named):
        return found  # to know what others are called, every family is loaded
    families = [load_family(name) for name in shipped_families()]
    known = {name for family in families for name in table_variables(family)}
    for name in named:
        if name.startswith(AITER_PREFIX) and name not in known:
            found[name] = f"{name} names a table of none of the families here, and is not read"
    for family in families:
        first, *others = [name for name in table_variables(family) if name in named] or [""]
        for name in others:
            found[name] = f"{name} is not read, as {first} is set too"
    return found
