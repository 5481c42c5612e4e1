"""Checks of vLLM's and SGLang's configuration files without a device.

Both engines read `{int(key): value}` and use the value of the nearest key for a call of M rows; the knobs are keyword
arguments of a Triton kernel's launch (sources: engine_filenames.py, engine_knobs.py).
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gemmpipe.core.errors import UserError, quoted_repr, suggest_or_list
from gemmpipe.core.files import read_object, suggest_path
from gemmpipe.engines.launch import EXPERTS
from gemmpipe.engines.packages import ENGINES, SGLANG, VLLM
from gemmpipe.family.problem import MAX_SIZE
from gemmpipe.formats.engine_filenames import (
    CHANNELWISE,
    EngineFileName,
    check_file_name,
    check_location,
    engine_of_file,
    is_of_another_function,
    looks_like_engine_file,
    parse_file_name,
)
from gemmpipe.formats.engine_knobs import check_entry
from gemmpipe.formats.findings import ERROR, NOTE, WARNING, Finding

DECODE_ROWS = 16
"""Rows of a decode step at most: a file should have a key up to this M."""
PREFILL_ROWS = 1024
"""Rows of a prefill at least: a file should have a key from this M on."""
MAX_KEY_RATIO = 4
"""Ratio of neighbouring keys above which a call between them gets an entry of a very different M."""
_MAX_SHOWN = 60
_MAX_KEYS = 4


@dataclass(frozen=True, kw_only=True)
class LintedFile:
    """A file, the parts of its name, its readable entries by M, and the findings."""

    path: Path
    engine: str
    name: EngineFileName | None
    entries: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def engine_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The paths that are files, and in folders all files with an engine's name for products, each once.

    Raises UserError for a path that does not exist, and if there is nothing to check.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            named = (
                Path(root) / name for root, _, names in os.walk(path) for name in names if looks_like_engine_file(name)
            )
            here = [each for each in named if not is_of_another_function(each)]
            if not here:
                raise UserError(f"{path}: no file of an engine; expected names such as N=..,K=..,device_name=...json")
            found |= dict.fromkeys(sorted(here))
        elif path.exists():
            found[path] = None
        else:
            expected = "expected configuration files of an engine, or their folder"
            raise UserError(f"lint: {path}: no such file or folder; {expected}{suggest_path(path)}")
    if not found:
        raise UserError("lint: no path; expected configuration files of an engine, or folders of them")
    return tuple(found)


def lint(paths: Sequence[Path], engine: str | None, present: Sequence[str] = ()) -> tuple[LintedFile, ...]:
    """Check files, and those in folders. `engine`: None to infer it from each file's folder and name.

    `present`: names of this machine's devices. Raises UserError as `engine_files`, and for an unknown engine.
    """
    if engine is not None and engine not in ENGINES:
        raise UserError(f"engine: no engine '{engine}'{suggest_or_list(engine, ENGINES)}")
    return tuple(lint_file(path, engine, present) for path in engine_files(paths))


def findings_of(files: Iterable[LintedFile]) -> list[Finding]:
    """The findings of all files without duplicates: those of a folder appear once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(file.findings for file in files)))


def lint_file(path: Path, engine: str | None, present: Sequence[str] = ()) -> LintedFile:
    """Check one file; all of its defects are findings."""
    inferred = engine or engine_of_file(path)
    checked = inferred or VLLM
    name = parse_file_name(path.name, checked)
    found = list(check_file_name(path, name, checked, present))
    if inferred is None and name is not None:
        text = "engine unknown from its name and folder; checked as vLLM's"
        found.append(Finding(path=path, severity=NOTE, text=text, remedy="engine=sglang, if it is SGLang's"))
    if name is not None:
        found += check_location(path, name)
    entries: dict[int, Mapping[str, object]] = {}
    try:
        content = read_object(path)
    except UserError as error:
        text = str(error).removeprefix(f"{path}").lstrip(": ")
        found.append(Finding(path=path, severity=ERROR, text=text, remedy="fix it, or write it again"))
    else:
        rows = _by_rows(content, name)
        found += _check_keys(path, content, name)
        found += _check_entries(path, rows, name)
        found += check_coverage(path, [m for m, key, _ in rows if m > 0])
        entries = {m: dict(value) for m, _, value in rows if isinstance(value, dict)}
    return LintedFile(path=path, engine=checked, name=name, entries=entries, findings=tuple(_grouped_findings(found)))


def _grouped_findings(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Entries with the same finding, joined into one."""
    groups: dict[Finding, list[str]] = {}
    for each in findings:
        groups.setdefault(replace(each, key=""), []).append(each.key)
    for finding, keys in groups.items():
        more = len(keys) - _MAX_KEYS
        yield replace(finding, key=", ".join(keys[:_MAX_KEYS]) + (f" and {more} more" if more > 0 else ""))


def _by_rows(content: Mapping[str, object], name: EngineFileName | None) -> list[tuple[int, str, object]]:
    """(M, key, value) of the entries that the engine keeps: of keys with the same M the last one."""
    found: dict[int, tuple[str, object]] = {}
    for key, value in content.items():
        m = _parse_m(key)
        if m is not None and not _is_metadata(key, name):
            found[m] = (key, value)
    return [(m, key, value) for m, (key, value) in found.items()]


def _parse_m(key: str) -> int | None:
    """The result of the engines' int(key); None where it raises."""
    try:
        return int(key)
    except ValueError:
        return None


def _is_metadata(key: str, name: EngineFileName | None) -> bool:
    """True if vLLM removes this name before it reads the others, which it does only for experts."""
    return key == "triton_version" and name is not None and name.engine == VLLM and name.kind == EXPERTS


def _check_keys(path: Path, content: Mapping[str, object], name: EngineFileName | None) -> Iterator[Finding]:
    if not content:
        yield Finding(path=path, severity=ERROR, text="no entry", remedy="expected a configuration for each M tuned")
    holders: dict[int, str] = {}
    for key in content:
        if _is_metadata(key, name):
            continue
        m, shown = _parse_m(key), quoted_repr(key)[:_MAX_SHOWN]
        if m is None:
            text = "not a whole number: the engine's int(key) fails, and so does loading"
            yield Finding(path=path, key=shown, severity=ERROR, text=text, remedy="expected an M such as 64")
            continue
        if not 1 <= m <= MAX_SIZE:
            text, remedy = "not a valid number of rows", f"expected an M from 1 to {MAX_SIZE}"
            yield Finding(path=path, key=shown, severity=ERROR, text=text, remedy=remedy)
        if m in holders:
            text = f"the same M as {quoted_repr(holders[m])}: the engine keeps only the later entry"
            yield Finding(path=path, key=shown, severity=ERROR, text=text, remedy="delete one of them")
        elif key != str(m):
            text = f"read as {m}"
            yield Finding(path=path, key=shown, severity=WARNING, text=text, remedy=f"expected '{m}'")
        holders[m] = key


def _check_entries(
    path: Path, rows: Sequence[tuple[int, str, object]], name: EngineFileName | None
) -> Iterator[Finding]:
    for _, key, value in rows:
        shown = quoted_repr(key)[:_MAX_SHOWN].strip("'")
        if value is None and name is not None and name.kind == CHANNELWISE and name.engine == SGLANG:
            continue  # CUTLASS runs there
        if not isinstance(value, dict):
            text, remedy = (
                f"{quoted_repr(value)[:_MAX_SHOWN]}, not an object of knobs",
                "expected BLOCK_SIZE_M and the others",
            )
            yield Finding(path=path, key=shown, severity=ERROR, text=text, remedy=remedy)
        elif name is not None:
            for severity, text, remedy in check_entry(value, name):
                yield Finding(path=path, key=shown, severity=severity, text=text, remedy=remedy)


def check_coverage(path: Path, ms: Sequence[int]) -> Iterator[Finding]:
    """Calls that get an entry of a very different M: few rows, many rows, and gaps between neighbouring keys."""
    ordered = sorted(set(ms))
    if not ordered:
        return
    low, high = ordered[0], ordered[-1]
    if low > DECODE_ROWS:
        calls = f"calls of 1 to {_last_m_of(low, ms):,} rows" if len(ordered) > 1 else "all calls"
        remedy = f"tune keys from 1 to {DECODE_ROWS} too"
        text = f"no key of at most {DECODE_ROWS}: {calls} use the entry of M = {low}"
        yield Finding(path=path, severity=WARNING, text=text, remedy=remedy)
    if high < PREFILL_ROWS:
        text = f"no key from {PREFILL_ROWS} on: larger calls use the entry of M = {high}"
        yield Finding(path=path, severity=WARNING, text=text, remedy="tune 1024 to 4096 too")
    for one, other in itertools.pairwise(ordered):
        if other > MAX_KEY_RATIO * one:
            text = f"no key between {one} and {other}, more than a factor of {MAX_KEY_RATIO} apart"
            remedy = f"tune keys between, such as {round((one * other) ** 0.5)}"
            yield Finding(path=path, key=str(other), severity=WARNING, text=text, remedy=remedy)


def _last_m_of(low: int, ms: Sequence[int]) -> int:
    """The most rows of a call that uses the lowest key: of two equally near keys the engines use the file's first."""
    following = min(m for m in ms if m > low)
    middle, odd = divmod(low + following, 2)
    first = list(ms).index(low) < list(ms).index(following)
    return middle if odd or first else middle - 1
