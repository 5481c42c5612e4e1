"""Uniting tuned tables of equal rank: one row per key, independent of the order of input, and the reasons."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import shortened
from gemmpipe.core.schema import FROM_FILE
from gemmpipe.core.units import time_text
from gemmpipe.family import Family
from gemmpipe.tables.merge import Rank, Row, RowKey, RowPreference, key_text, row_key, row_ranks
from gemmpipe.tables.recorded import source_hash_of
from gemmpipe.tables.store import ParsedTable, with_device_names


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
        return " ".join([*named, time_text(us) if isinstance(us, int | float) else "no time"])


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedRow:
    """A row that lost to another row with the same key."""

    key: RowKey
    family: Family
    kept: TableEntry
    dropped: TableEntry
    kind: str
    """The category of the reason, for counts."""
    reason: str

    def __str__(self) -> str:
        kept, dropped = (f"{entry.place} ({entry.summary})" for entry in (self.kept, self.dropped))
        return f"{key_text(self.key, self.family)}: kept {kept}, dropped {dropped}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class UnitedTable:
    """The rows of several tables, one per key and sorted by key, and the rows that they replaced."""

    entries: list[TableEntry]
    conflicts: list[DroppedRow]
    duplicates: int
    """Rows left out because they equal the one that is kept."""


def entries_of(
    path: Path, family: Family, sheet: ParsedTable, runs: Mapping[str, Mapping[str, object]]
) -> list[TableEntry]:
    """The rows of a table; in older tables without a column `device` it comes from the sidecar of a row's run.

    A row that names no run (of another program, or of an older version) has the file in its place: `FROM_FILE`.
    """
    rows, foreign = with_device_names(sheet.rows, runs), frozenset(sheet.extra)
    return [
        TableEntry(
            row={
                **{name: value for name, value in row.items() if name not in foreign},
                "run_id": row.get("run_id") or f"{FROM_FILE}{path.name}",
            },
            extra={name: row[name] for name in sheet.extra},
            place=f"{path}:{line}",
        )
        for row, line in zip(rows, sheet.lines, strict=True)
    ]


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
        ranks = row_ranks([entry.row for entry in group], preference)
        best = max(range(len(group)), key=lambda i: (ranks[i], group[i].place))
        twins = [entry for entry, rank in zip(group, ranks, strict=True) if rank == ranks[best]]
        kept.append(_with_all_columns(group[best], twins))
        duplicates += len(twins) - 1
        dropped = sorted((i for i in range(len(group)) if ranks[i] != ranks[best]), key=lambda i: group[i].place)
        conflicts += [_conflict(key, family, group, ranks, best, i, preference) for i in dropped]
    return UnitedTable(entries=kept, conflicts=conflicts, duplicates=duplicates)


def _sort_key(key: RowKey, family: Family) -> tuple[object, ...]:
    """By architecture and product, then as aiter sorts: N, M, K, then the rest."""
    gfx, units, *values = key
    named = dict(zip((column.name for column in family.key_columns), values, strict=True))
    sizes = tuple(value if isinstance(value, int) else 0 for value in (named.pop(name, 0) for name in ("N", "M", "K")))
    return (str(gfx), units, *sizes, *(str(value) for value in named.values()))


_KINDS = {
    "timed": "without a time",
    "full_policy": "provisional",
    "current": "of a changed kernel",
    **dict.fromkeys(("named_device", "device"), "of another or an unnamed device"),
    **dict.fromkeys(("has_policy", "method", "policy"), "of another policy"),
    "speed": "slower",
    **dict.fromkeys(("completeness", "texts"), "as fast"),
}
"""The category of a reason, by the first criterion of Rank that differs."""


def _with_all_columns(best: TableEntry, twins: Sequence[TableEntry]) -> TableEntry:
    """The best entry with the foreign columns of all equal rows; of two texts the greater."""
    if len(twins) == 1:
        return best
    extra: dict[str, Scalar] = {}
    for name in sorted({name for twin in twins for name in twin.extra}):
        extra[name] = max((str(twin.extra[name]) for twin in twins if twin.extra.get(name) is not None), default=None)
    return TableEntry(row=best.row, extra=extra, place=best.place)


def _conflict(
    key: RowKey,
    family: Family,
    group: Sequence[TableEntry],
    ranks: Sequence[Rank],
    kept: int,
    dropped: int,
    preference: RowPreference,
) -> DroppedRow:
    """The conflict of two rows: the first criterion at which their ranks differ is the reason."""
    names, pairs = Rank._fields, zip(ranks[kept], ranks[dropped], strict=True)
    criterion = next(name for name, (a, b) in zip(names, pairs, strict=True) if a != b)
    reason = _reason(criterion, group[kept].row, group[dropped].row, preference)
    kind, left = _KINDS[criterion], group[dropped]
    return DroppedRow(key=key, family=family, kept=group[kept], dropped=left, kind=kind, reason=reason)


def _reason(criterion: str, new: Row, old: Row, preference: RowPreference) -> str:
    if criterion == "timed":
        return f"us is {old.get('us')}: not a measured time"
    if criterion == "full_policy":
        other = "was timed alone and in full" if new.get("policy") else "does not say how it was timed"
        return f"provisional ('{old.get('policy')}'), the other row {other}"
    if criterion == "current":
        return f"its kernel's source {source_hash_of(old)} has changed since"
    if criterion in ("named_device", "device"):
        return _device_reason(str(old.get("device") or ""), str(new.get("device") or ""))
    if criterion in ("has_policy", "method", "policy"):
        names = [str(row.get("policy") or "unknown") for row in (old, new)]
        return f"timed by different policies ('{names[0]}' and '{names[1]}'): the times cannot be compared"
    versions = _version_note(old, new, preference)
    if criterion == "speed":
        return f"slower under the same policy{versions}"
    why = "fewer filled cells" if criterion == "completeness" else "the last in the order of texts is kept"
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
