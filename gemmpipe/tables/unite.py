"""Uniting tuned tables of equal standing: one row a key, the same in whatever order they are read, and why."""

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
    """A row of a table: its known columns, its foreign ones, and where it stands (`file:line`)."""

    row: Row
    extra: Mapping[str, Scalar]
    place: str

    @property
    def summary(self) -> str:
        """What it says, in a few words."""
        us = self.row.get("us")
        name = self.row.get("kernelName") or self.row.get("solidx")
        words = [word for word in (self.row.get("libtype"), name) if word not in (None, "")]
        named = dict.fromkeys(shortened(str(word)) for word in words)
        return " ".join([*named, "no time" if us is None else f"{us:g} us"])


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedRow:
    """A row that another one of its key displaced."""

    key: RowKey
    kept: TableEntry
    dropped: TableEntry
    kind: str
    """The reason in a word or two, the same for all of a kind."""
    reason: str

    def __str__(self) -> str:
        words = " ".join("-" if value is None else shortened(str(value)) for value in self.key)
        return (
            f"{words}: kept {self.kept.place} ({self.kept.summary}), left {self.dropped.place} ({self.dropped.summary}): "
            + (self.reason)
        )


@dataclass(frozen=True, kw_only=True)
class UnitedTable:
    """The rows of several tables, one a key and in the order of the key, and what they displaced."""

    entries: list[TableEntry]
    conflicts: list[DroppedRow]
    duplicates: int
    """Rows left out because they say the same as the one that is kept."""


@dataclass(frozen=True, kw_only=True)
class RowPreference:
    """What decides between rows, besides the rows themselves."""

    device: str | None
    """The product's name whose rows are wanted where several share a key."""
    is_stale: Callable[[Row], bool]
    """Whether the kernel that a row names has another source now."""
    runs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """What the sidecars say of each run."""

    def with_runs(self, runs: Mapping[str, Mapping[str, object]]) -> "RowPreference":
        """The same, with these runs."""
        return replace(self, runs=runs)


def entries_of(
    path: Path, family: Family, sheet: ParsedTable, runs: Mapping[str, Mapping[str, object]]
) -> list[TableEntry]:
    """The rows of a table; a run's sidecar says which product it ran on where an older table has no column for it."""
    found = []
    fill_device_names(sheet.rows, runs)
    for row, line in zip(sheet.rows, sheet.lines, strict=True):
        extra = {name: row.pop(name) for name in sheet.extra}
        found.append(TableEntry(row=row, extra=extra, place=f"{path}:{line}"))
    return found


def unite_tables(entries: Iterable[TableEntry], family: Family, judge: RowPreference) -> UnitedTable:
    """One entry a key: the greatest in one order of all rows, hence the same for any order of the input.

    Rows that differ in foreign columns alone are one row with the columns of all.
    """
    groups: dict[RowKey, list[TableEntry]] = {}
    for entry in entries:
        groups.setdefault(row_key(entry.row, family), []).append(entry)
    kept: list[TableEntry] = []
    conflicts: list[DroppedRow] = []
    alike = 0
    for key in sorted(groups, key=lambda key: _sort_key(key, family)):
        group = groups[key]
        if len(group) == 1:
            kept += group
            continue
        ranks = _rank_rows(group, judge)
        best = max(range(len(group)), key=lambda i: (ranks[i], group[i].place))
        twins = [entry for entry, rank in zip(group, ranks, strict=True) if rank == ranks[best]]
        kept.append(_with_all_columns(group[best], twins))
        alike += len(twins) - 1
        left = sorted((i for i in range(len(group)) if ranks[i] != ranks[best]), key=lambda i: group[i].place)
        conflicts += [_conflict(key, group, ranks, best, i, judge) for i in left]
    return UnitedTable(entries=kept, conflicts=conflicts, duplicates=alike)


def _sort_key(key: RowKey, family: Family) -> tuple[object, ...]:
    """By architecture and product, then as aiter sorts: N, M, K, then the rest."""
    gfx, units, *values = key
    named = dict(zip((column.name for column in family.key_columns), values, strict=True))
    sizes = tuple(value if isinstance(value, int) else 0 for value in (named.pop(name, 0) for name in ("N", "M", "K")))
    return (str(gfx), units, *sizes, *(str(value) for value in named.values()))


_TIMED, _FULL_POLICY, _CURRENT, _NAMED_DEVICE, _DEVICE, _KNOWN, _POLICY, _SPEED, _COMPLETENESS, _TEXT = range(10)
"""The places of a rank, the most important first."""

_KINDS = (
    "without a time",
    "provisional",
    "of a changed kernel",
    *("of another or an unnamed product",) * 2,
    *("of another policy",) * 2,
    "slower",
    *("as fast",) * 2,
)

Merit = tuple[bool, bool, bool, bool, str, bool, str, float]
Rank = tuple[bool, bool, bool, bool, str, bool, str, float, int, tuple[str, ...]]


def _rank_rows(group: Sequence[TableEntry], judge: RowPreference) -> list[Rank]:
    """How good each row is; what it says in full, which is long, only where that decides."""
    merits = [_merit(entry.row, judge) for entry in group]
    if merits.count(max(merits)) == 1:
        return [(*merit, 0, ()) for merit in merits]
    return [(*merit, *_completeness(entry.row)) for merit, entry in zip(merits, group, strict=True)]


def _merit(row: Row, judge: RowPreference) -> Merit:
    """How good a row is, whatever it stands beside: else merging all at once and one by one would end differently.

    Times are compared only where all before them is equal: device and policy too.
    """
    policy, device, us = str(row.get("policy") or ""), str(row.get("device") or ""), row.get("us")
    return (
        is_timed(row),
        not is_provisional(policy),
        not judge.is_stale(row),
        judge.device is not None and judge.device == device,
        device,
        bool(policy),
        policy,
        -float(us) if isinstance(us, int | float) else -math.inf,
    )


def _completeness(row: Row) -> tuple[int, tuple[str, ...]]:
    """How many cells say something, and what they say."""
    said = tuple(_text(row.get(name)) for name in RESULT)
    return sum(map(bool, said)), said


def _text(value: Scalar) -> str:
    return "" if value is None else repr(value)


def _hash(row: Row) -> str:
    return str(row.get("kernelName") or "").partition("@")[2]


def _with_all_columns(best: TableEntry, twins: Sequence[TableEntry]) -> TableEntry:
    """The best with the foreign columns of those that say the same; of two texts the greater."""
    if len(twins) == 1:
        return best
    extra: dict[str, Scalar] = {}
    for name in sorted({name for twin in twins for name in twin.extra}):
        extra[name] = max((str(twin.extra[name]) for twin in twins if twin.extra.get(name) is not None), default=None)
    return TableEntry(row=best.row, extra=extra, place=best.place)


def _conflict(
    key: RowKey, group: Sequence[TableEntry], ranks: Sequence[Rank], kept: int, left: int, judge: RowPreference
) -> DroppedRow:
    """Why one row was kept and another was not: the first place in which their ranks differ."""
    pairs = zip(ranks[kept], ranks[left], strict=True)
    place = next(i for i, (a, b) in enumerate(pairs) if a != b)
    reason = _reason(place, group[kept].row, group[left].row, judge)
    return DroppedRow(key=key, kept=group[kept], dropped=group[left], kind=_KINDS[place], reason=reason)


def _reason(place: int, new: Row, old: Row, judge: RowPreference) -> str:
    if place == _TIMED:
        return f"us is {old.get('us')}: no time that was measured"
    if place == _FULL_POLICY:
        return f"it only fills a gap ('{old.get('policy')}'), the other one was timed alone and in full"
    if place == _CURRENT:
        return f"its kernel's source was {_hash(old)}, which has changed since"
    if place in (_NAMED_DEVICE, _DEVICE):
        return _device_reason(str(old.get("device") or ""), str(new.get("device") or ""))
    if place in (_KNOWN, _POLICY):
        names = [str(row.get("policy") or "unknown") for row in (old, new)]
        return f"timed by different policies ('{names[0]}' and '{names[1]}'): the times cannot be compared"
    versions = _version_note(old, new, judge)
    if place == _SPEED:
        return f"slower under the same policy{versions}"
    return f"the same time; {'it says less' if place == _COMPLETENESS else 'the last in the order of their texts'}{versions}"


def _device_reason(old: str, new: str) -> str:
    if not old:
        return f"it does not say on which product it was timed, the other one does: {new}"
    return (
        f"timed on {old} and {new or 'an unnamed one'}, which gfx and cu_num cannot tell apart: the times cannot be "
        "compared (stages.merge.device= names the one to keep)"
    )


def _version_note(old: Row, new: Row, judge: RowPreference) -> str:
    """` (triton 3.6.0 and 3.9.0)` where the runs had different ones."""
    if not judge.runs:
        return ""
    before, after = (_versions(judge.runs.get(str(row.get("run_id")), {})) for row in (old, new))
    differ = [f"{n} {before[n]} and {after[n]}" for n in sorted(before) if n in after and before[n] != after[n]]
    return f" ({', '.join(differ)})" if differ else ""


def _versions(facts: Mapping[str, object]) -> Mapping[str, object]:
    found = facts.get("versions")
    return found if isinstance(found, Mapping) else {}
