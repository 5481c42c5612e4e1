"""Uniting tuned tables of equal rank: one row per key, independent of the order of input, and the reasons."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import shortened
from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family
from gemmpipe.tables.merge import Row, RowKey, is_provisional, row_key
from gemmpipe.tables.store import ParsedTable, fill_device_names, is_timed


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """A row of a table: its known columns, its foreign ones, and its place (`file:line`)."""

    row: Row
    extra: Mapping[str, Scalar]
    place: str

    @property
    def summary(self) -> str:
        """libtype, kernel and time in one line."""
        us = self.row.get("us")
        name = self.row.get("kernelName") or self.row.get("solidx")
        parts = [word for word in (self.row.get("libtype"), name) if word not in (None, "")]
        named = dict.fromkeys(shortened(str(word)) for word in parts)
        return " ".join([*named, "no time" if us is None else f"{us:g} us"])


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedRow:
    """A row that lost to another row with the same key."""

    key: RowKey
    kept: TableEntry
    dropped: TableEntry
    kind: str
    """The category of the reason, for counts."""
    reason: str

    def __str__(self) -> str:
        key = " ".join("-" if value is None else shortened(str(value)) for value in self.key)
        kept, dropped = (f"{entry.place} ({entry.summary})" for entry in (self.kept, self.dropped))
        return f"{key}: kept {kept}, dropped {dropped}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class UnitedTable:
    """The rows of several tables, one per key and sorted by key, and the rows that they replaced."""

    entries: list[TableEntry]
    conflicts: list[DroppedRow]
    duplicates: int
    """Rows left out because they equal the one that is kept."""


@dataclass(frozen=True, kw_only=True)
class RowPreference:
    """Preferences between rows that the rows themselves do not contain."""

    device: str | None
    """The device product to prefer where rows of several products share a key."""
    is_stale: Callable[[Row], bool]
    """True if the source of a row's kernel has changed."""
    runs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """The facts of each run in the sidecars."""

    def with_runs(self, runs: Mapping[str, Mapping[str, object]]) -> "RowPreference":
        """A copy with these runs."""
        return replace(self, runs=runs)


def entries_of(
    path: Path, family: Family, sheet: ParsedTable, runs: Mapping[str, Mapping[str, object]]
) -> list[TableEntry]:
    """The rows of a table; in older tables without a column `device` it comes from the sidecar of a row's run."""
    found = []
    fill_device_names(sheet.rows, runs)
    for row, line in zip(sheet.rows, sheet.lines, strict=True):
        extra = {name: row.pop(name) for name in sheet.extra}
        found.append(TableEntry(row=row, extra=extra, place=f"{path}:{line}"))
    return found


def unite_tables(entries: Iterable[TableEntry], family: Family, preference: RowPreference) -> UnitedTable:
    """One entry per key: the greatest in a total order of rows, hence independent of the order of the input.

    Rows that differ only in foreign columns become one row with the columns of all.
    """
    groups: dict[RowKey, list[TableEntry]] = {}
    for entry in entries:
        groups.setdefault(row_key(entry.row, family), []).append(entry)
    kept: list[TableEntry] = []
    conflicts: list[DroppedRow] = []
    duplicates = 0
    for key in sorted(groups, key=lambda key: _sort_key(key, family)):
        group = groups[key]
        if len(group) == 1:
            kept += group
            continue
        ranks = _rank_rows(group, preference)
        best = max(range(len(group)), key=lambda i: (ranks[i], group[i].place))
        twins = [entry for entry, rank in zip(group, ranks, strict=True) if rank == ranks[best]]
        kept.append(_with_all_columns(group[best], twins))
        duplicates += len(twins) - 1
        dropped = sorted((i for i in range(len(group)) if ranks[i] != ranks[best]), key=lambda i: group[i].place)
        conflicts += [_conflict(key, group, ranks, best, i, preference) for i in dropped]
    return UnitedTable(entries=kept, conflicts=conflicts, duplicates=duplicates)


def _sort_key(key: RowKey, family: Family) -> tuple[object, ...]:
    """By architecture and product, then as aiter sorts: N, M, K, then the rest."""
    gfx, units, *values = key
    named = dict(zip((column.name for column in family.key_columns), values, strict=True))
    sizes = tuple(value if isinstance(value, int) else 0 for value in (named.pop(name, 0) for name in ("N", "M", "K")))
    return (str(gfx), units, *sizes, *(str(value) for value in named.values()))


_TIMED, _FULL_POLICY, _CURRENT, _NAMED_DEVICE, _DEVICE, _KNOWN, _POLICY, _SPEED, _COMPLETENESS, _TEXT = range(10)
"""The indices into a rank, the most important criterion first."""

_KINDS = (
    "without a time",
    "provisional",
    "of a changed kernel",
    *("of another or an unnamed device",) * 2,
    *("of another policy",) * 2,
    "slower",
    *("as fast",) * 2,
)

Merit = tuple[bool, bool, bool, bool, str, bool, str, float]
Rank = tuple[bool, bool, bool, bool, str, bool, str, float, int, tuple[str, ...]]


def _rank_rows(group: Sequence[TableEntry], preference: RowPreference) -> list[Rank]:
    """The rank of each row; its cells, which are long, only where they decide."""
    merits = [_merit(entry.row, preference) for entry in group]
    if merits.count(max(merits)) == 1:
        return [(*merit, 0, ()) for merit in merits]
    return [(*merit, *_completeness(entry.row)) for merit, entry in zip(merits, group, strict=True)]


def _merit(row: Row, preference: RowPreference) -> Merit:
    """The rank of a row, independent of the other rows: merging all at once or one by one gives the same result.

    Times are compared only if all criteria before them are equal, device and policy included.
    """
    policy, device, us = str(row.get("policy") or ""), str(row.get("device") or ""), row.get("us")
    return (
        is_timed(row),
        not is_provisional(policy),
        not preference.is_stale(row),
        preference.device is not None and preference.device == device,
        device,
        bool(policy),
        policy,
        -float(us) if isinstance(us, int | float) else -math.inf,
    )


def _completeness(row: Row) -> tuple[int, tuple[str, ...]]:
    """(number of filled cells, their texts)."""
    texts = tuple(_text(row.get(name)) for name in RESULT)
    return sum(map(bool, texts)), texts


def _text(value: Scalar) -> str:
    return "" if value is None else repr(value)


def _hash(row: Row) -> str:
    return str(row.get("kernelName") or "").partition("@")[2]


def _with_all_columns(best: TableEntry, twins: Sequence[TableEntry]) -> TableEntry:
    """The best entry with the foreign columns of all equal rows; of two texts the greater."""
    if len(twins) == 1:
        return best
    extra: dict[str, Scalar] = {}
    for name in sorted({name for twin in twins for name in twin.extra}):
        extra[name] = max((str(twin.extra[name]) for twin in twins if twin.extra.get(name) is not None), default=None)
    return TableEntry(row=best.row, extra=extra, place=best.place)


def _conflict(
    key: RowKey, group: Sequence[TableEntry], ranks: Sequence[Rank], kept: int, dropped: int, preference: RowPreference
) -> DroppedRow:
    """The conflict of two rows: the first index at which their ranks differ is the reason."""
    pairs = zip(ranks[kept], ranks[dropped], strict=True)
    index = next(i for i, (a, b) in enumerate(pairs) if a != b)
    reason = _reason(index, group[kept].row, group[dropped].row, preference)
    return DroppedRow(key=key, kept=group[kept], dropped=group[dropped], kind=_KINDS[index], reason=reason)


def _reason(index: int, new: Row, old: Row, preference: RowPreference) -> str:
    if index == _TIMED:
        return f"us is {old.get('us')}: not a measured time"
    if index == _FULL_POLICY:
        return f"provisional ('{old.get('policy')}'), the other row was timed alone and in full"
    if index == _CURRENT:
        return f"its kernel's source {_hash(old)} has changed since"
    if index in (_NAMED_DEVICE, _DEVICE):
        return _device_reason(str(old.get("device") or ""), str(new.get("device") or ""))
    if index in (_KNOWN, _POLICY):
        names = [str(row.get("policy") or "unknown") for row in (old, new)]
        return f"timed by different policies ('{names[0]}' and '{names[1]}'): the times cannot be compared"
    versions = _version_note(old, new, preference)
    if index == _SPEED:
        return f"slower under the same policy{versions}"
    why = "fewer filled cells" if index == _COMPLETENESS else "the last in the order of texts is kept"
    return f"the same time; {why}{versions}"


def _device_reason(old: str, new: str) -> str:
    if not old:
        return f"no device, the other row has one: {new}"
    return (
        f"timed on {old} and {new or 'an unnamed device'}, with the same gfx and cu_num: the times cannot be "
        "compared (set stages.merge.device= to the one to keep)"
    )


def _version_note(old: Row, new: Row, preference: RowPreference) -> str:
    """` (triton 3.6.0 and 3.9.0)` if the runs had different versions."""
    if not preference.runs:
        return ""
    before, after = (_versions(preference.runs.get(str(row.get("run_id")), {})) for row in (old, new))
    differ = [f"{n} {before[n]} and {after[n]}" for n in sorted(before) if n in after and before[n] != after[n]]
    return f" ({', '.join(differ)})" if differ else ""


def _versions(facts: Mapping[str, object]) -> Mapping[str, object]:
    found = facts.get("versions")
    return found if isinstance(found, Mapping) else {}
