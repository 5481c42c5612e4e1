"""Environment variables: gemmpipe's own, those of aiter that it reads too, and replacements for the others of aiter."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from gemmpipe.core.paths import TABLES_PREFIX, tables_variable
from gemmpipe.family import Family, load_family, shipped_families

AITER_PREFIX = "AITER_CONFIG_"
ONLY_GIVEN = "GEMMPIPE_GIVEN_TABLES_ONLY"
"""Set to 1: only tables named by environment variables are used."""
LOG_SELECTION = ("GEMMPIPE_LOG_SELECTION", "GEMMPIPE_LOG_TUNED_CONFIG", "AITER_LOG_TUNED_CONFIG")
"""Each step of a lookup is logged if one of these is set."""
CAPTURE = ("GEMMPIPE_CAPTURE", "GEMMPIPE_TUNE_GEMM", "AITER_TUNE_GEMM")
"""The first one that is set enables capture of shapes; only the first may name the file."""

REPORTED: Mapping[str, str] = {
    "HIP_ONLINE_TUNING": "hipBLASLt's own, which its calls follow; GEMMPIPE_ONLINE_TUNING=1 tunes what no row matched",
    "PREBUILD_KERNELS": "not read: 'gemmpipe prebuild kernel=... table=...' compiles what a table needs",
    "AITER_REBUILD": "not read: kernels are compiled when their source or knobs are new; "
    "gemmpipe.runtime.reload() reads changed tables",
    "GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH": "not read: Triton has its own compiler, clang is not called",
    **dict.fromkeys(
        ("AITER_ONLINE_TUNE", "AITER_ONLINE_TUNING", "AITER_HIP_ONLINE_TUNING", "GEMMPIPE_HIP_ONLINE_TUNING"),
        "not read: GEMMPIPE_ONLINE_TUNING=1 tunes what no row matched, in a process of its own",
    ),
    "AITER_TRITON_CONFIGS_PATH": "not read: GEMMPIPE_CONFIG_<FAMILY> names tables, and the run time reads no JSON",
    "AITER_BYPASS_TUNE_CONFIG": "not read: GEMMPIPE_GIVEN_TABLES_ONLY=1 without a table leaves all tables out",
    "AITER_KSPLIT": "not read: the splits of K are those of the row, or of config=",
    "AITER_USE_NT": "not read: how weights are loaded is a knob of the row (cache_modifier)",
    "AITER_LOG_MORE": "not read: GEMMPIPE_LOG_SELECTION=1 logs look-ups, verbose=true a run",
    "AITER_TUNE_CANDIDATE_DUMP_DIR": "not read: profile=NAME.csv has every candidate",
    "CU_NUM": "not read: cu_num is that of the device, or of target=",
    "GTUNE_INPUT": "not read: shapes=csv shapes.path=",
    "GTUNE_TUNED": "not read: output=",
    "GTUNE_MODEL": "not read: shapes=model shapes.path=",
    "GTUNE_TP": "not read: shapes.tp=",
    "GTUNE_BATCH_SIZE": "not read: shapes.nsets= are the M themselves",
    "SCREEN_MAX_BATCH": "not read: each candidate is compiled and timed by itself",
    **dict.fromkeys(("TUNE_ONLY", "OPUS_ONLY", "OPUS_SKIP_CKTILE"), "not read: backend= names the libraries"),
    "TUNE_MOE_KERNEL_REGEX": "not read: space= and backend= choose the candidates",
    **dict.fromkeys(("TUNE_MOE_EXPERT_BALANCE", "TUNE_MOE_ROUTING_SEED"), "not read: kernel.key.routing="),
}
"""Variables of aiter's programs and tuning scripts -> what they are here."""


def is_enabled(names: Iterable[str]) -> bool:
    """True if one of these variables is neither empty nor 0."""
    return any(os.environ.get(name, "") not in ("", "0") for name in names)


def only_given_tables() -> bool:
    """True if the user's own and the shipped tables are not used."""
    return is_enabled((ONLY_GIVEN,))


def table_variables(family: Family) -> tuple[str, ...]:
    """The variables with paths of a family's tables: by the family's name, then by aiter's name, both prefixes."""
    theirs = family.aiter_table.variable if family.aiter_table else ""
    named = (f"{TABLES_PREFIX}{theirs}", f"{AITER_PREFIX}{theirs}") if theirs else ()
    return tuple(dict.fromkeys((tables_variable(family.name), *named)))


def table_variable(family: Family) -> str:
    """The variable that is read for a family: the first nonempty one, or the one with the family's name."""
    names = table_variables(family)
    return next((name for name in names if os.environ.get(name)), names[0])


def given_tables(family: Family) -> list[Path]:
    """The table files in a family's environment variable, which are separated by colons, in order."""
    return [Path(part).expanduser() for part in os.environ.get(table_variable(family), "").split(os.pathsep) if part]


def unused_variables() -> dict[str, str]:
    """Variables of aiter that are set but have another or no effect here, each with a line of advice."""
    found = {name: f"{name} is {text}" for name, text in REPORTED.items() if is_enabled((name,))}
    named = [name for name, value in os.environ.items() if value and name.startswith((TABLES_PREFIX, AITER_PREFIX))]
    own = {tables_variable(name) for name in shipped_families()}
    if own.issuperset(named):
        return found  # further names need every family to be loaded
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
