"""The rule for which row of a tuned table's key is kept or used, and the merging of a run's rows into a table.

`row_ranks` is the rule: the row with the greatest rank wins. Every place that chooses among rows of one key uses it:
merges, the run time, incumbents, comparisons, reports. A run's new rows are compared with old ones by the same
criteria, except that times which cannot be compared are replaced by the new ones (`merge_rows`).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from gemmpipe.core.data import Scalar, is_plausible_time_us
from gemmpipe.core.errors import shortened
from gemmpipe.core.events import counted, verb
from gemmpipe.core.schema import RESULT
from gemmpipe.core.units import time_text
from gemmpipe.family import Family

Row = dict[str, Scalar]
"""A row of a tuned table: `gfx`, `cu_num`, the family's key, the result columns."""
RowKey = tuple[Scalar, ...]
T = TypeVar("T")

DEPENDENT = "dependent"
"""The word in the policy of times for which a dependent launch preceded each replay (launch/replays.py)."""
BOTH_CLOCKS = "both_clocks"
"""In the policy of a product at the power limit: its times are geometric means of a launch at full clocks and one at
sustained clocks (`Timer.sustained_ms`)."""
SUSTAINED = "sustained"
"""The same of times at sustained clocks alone, in rows of 2026-11-27 to 29."""
SHARED_GPU = "shared_gpu"
"""In the policy of a row that was timed while other work ran on the GPU, or with `device.shared=true`."""
SHARED_CPU = "shared_cpu"
"""In the policy of a row that was timed while other processes used the cores."""
CUT_SHORT = "cut_short"
"""In the policy of a row from a search that ended early."""
_PROVISIONAL = frozenset((SHARED_GPU, SHARED_CPU, CUT_SHORT))

REPLAYED = "replayed"
"""In the policy of a row of a replay (gemmpipe demo): its time is of a recording, and no table takes it."""


@lru_cache(maxsize=256)  # a table has many rows and few policies
def is_provisional(policy: Scalar) -> bool:
    """True if a row of this policy only fills a gap: a full row replaces it."""
    return any(word in str(policy or "").split() for word in _PROVISIONAL)


def provisional_text(policies: Iterable[Scalar]) -> str:
    """`2 of 3 rows are provisional (shared_cpu)` for the policies of rows; empty if none is."""
    known = [str(policy or "").split() for policy in policies]
    marked = [words for words in known if not _PROVISIONAL.isdisjoint(words)]
    if not marked:
        return ""
    why = sorted(_PROVISIONAL.intersection(word for words in marked for word in words))
    are = verb(len(marked), "is", "are")
    return f"{len(marked):,} of {counted(len(known), 'row')} {are} provisional ({', '.join(why)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConflict:
    """Two rows of one key with different choices."""

    key: RowKey
    family: Family
    kept: str
    """`old` or `new`."""
    reason: str

    def __str__(self) -> str:
        return f"{key_text(self.key, self.family)}: kept the {self.kept} row: {self.reason}"


def row_key(row: Mapping[str, Scalar], family: Family) -> RowKey:
    """(gfx, cu_num, *the family's key)."""
    values = (row.get(c.name) if c.optional else row[c.name] for c in family.key_columns)
    return (row["gfx"], row["cu_num"], *values)


def key_text(key: RowKey, family: Family) -> str:
    """A key for people: `sm_90/132 M=1 N=512 K=1024 dtype=bfloat16`; without columns that have no value."""
    gfx, units, *values = key
    named = zip((column.name for column in family.key_columns), values, strict=True)
    shown = (f"{name}={shortened(str(value))}" for name, value in named if value is not None)
    return " ".join((f"{shortened(str(gfx))}/{units}", *shown))


_KERNEL = ("libtype", "kernelName", "config")


def _never(row: Row) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class RowPreference:
    """Preferences between rows that the rows themselves do not contain."""

    device: str | None
    """The device product to prefer where rows of several products share a key."""
    is_stale: Callable[[Row], bool] = _never
    """True if the source of a row's kernel has changed, which depends on the columns of `_KERNEL` alone. Where rows are
    only used, those that cannot run are skipped."""
    runs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """The facts of each run in the sidecars."""

    def with_runs(self, runs: Mapping[str, Mapping[str, object]]) -> "RowPreference":
        """A copy with these runs."""
        return replace(self, runs=runs)


NO_PREFERENCE = RowPreference(device=None)


class Rank(NamedTuple):
    """The rank of a row among those of its key, the most important criterion first.

    It does not depend on the other rows: merging all at once or one by one gives the same result. Times are compared
    only if all criteria before them are equal, device and policy included.
    """

    timed: bool
    full_policy: bool
    current: bool
    named_device: bool
    device: str
    has_policy: bool
    method: tuple[int, ...]
    """The later method is the greater: how a policy's times were taken, by its words."""
    policy: str
    speed: float
    completeness: int = 0
    """The number of filled cells."""
    texts: tuple[str, ...] = ()


def row_ranks(rows: Sequence[Row], preference: RowPreference) -> list[Rank]:
    """The rank of each row of one key; its cells, which are long, only where they decide."""
    # A check for a changed kernel needs its module and Triton: skipped where it cannot decide.
    kernels = {tuple(map(row.get, _KERNEL)) for row in rows}
    known = preference if len(kernels) > 1 else replace(preference, is_stale=_never)
    ranks = [_rank(row, known) for row in rows]
    if len(set(ranks)) == len(ranks):
        return ranks
    return [_with_cells(rank, row) for rank, row in zip(ranks, rows, strict=True)]


def rows_by_key(
    rows: Iterable[Row], family: Family, preference: RowPreference = NO_PREFERENCE
) -> dict[RowKey, list[Row]]:
    """The rows of each key, best first; keys in the order of first occurrence."""
    found: dict[RowKey, list[Row]] = {}
    for row in rows:
        found.setdefault(row_key(row, family), []).append(row)
    for group in found.values():
        if len(group) > 1:
            ranks = row_ranks(group, preference)
            group[:] = [group[i] for i in sorted(range(len(group)), key=lambda i: ranks[i], reverse=True)]
    return found


def used_rows(rows: Sequence[T], key_of: Callable[[T], Hashable], cells_of: Callable[[T], Row]) -> list[T]:
    """The rows of one file without those that lose against another row of their key, in the order of the file.

    A key keeps the row that a look-up uses on each device model which its rows name: an H100 and an H200 share keys.
    `cells_of` is called only for rows that share a key; of the cells it needs those of `schema.RESULT`.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(key_of(row), []).append(index)
    used: set[int] = set()
    for group in groups.values():
        if len(group) == 1:
            used.update(group)
            continue
        found = [cells_of(rows[index]) for index in group]
        named = {str(row["device"]) for row in found if row.get("device")}
        for device in named or (None,):
            ranks = row_ranks(found, RowPreference(device=device))
            used.add(group[ranks.index(max(ranks))])
    return [rows[index] for index in sorted(used)]


def _rank(row: Row, preference: RowPreference) -> Rank:
    policy, device, us = str(row.get("policy") or ""), str(row.get("device") or ""), row.get("us")
    return Rank(
        timed=is_timed(row),
        full_policy=not is_provisional(policy),
        current=not preference.is_stale(row),
        named_device=preference.device is not None and preference.device == device,
        device=device,
        has_policy=bool(policy),
        method=_method(policy),
        policy=policy,
        speed=-float(us) if isinstance(us, int | float) else -math.inf,
    )


@lru_cache(maxsize=256)
def _method(policy: str) -> tuple[int, ...]:
    words = policy.split()
    return tuple(int(word in words) for word in (BOTH_CLOCKS, SUSTAINED, DEPENDENT))


def _with_cells(rank: Rank, row: Row) -> Rank:
    texts = tuple("" if row.get(name) is None else repr(row[name]) for name in RESULT)
    return rank._replace(completeness=sum(map(bool, texts)), texts=texts)


def is_timed(row: Row) -> bool:
    """True if the row has a measured time."""
    return is_plausible_time_us(row.get("us"))


def merge_rows(
    old: Sequence[Row],
    new: Sequence[Row],
    family: Family,
    *,
    min_improvement_pct: float,
    preference: RowPreference = NO_PREFERENCE,
) -> tuple[list[Row], list[MergeConflict]]:
    """One row per key, in the order of first occurrence, and a conflict for every key with different choices.

    Of several old rows the one with the greatest rank stays. A new row that was timed against the old one in its run
    (`incumbent_us`) replaces it. Otherwise comparable times decide (a tie, or a gain below `min_improvement_pct`, keeps
    the old row); of times that cannot be compared the new one wins.
    """
    merged: dict[RowKey, Row] = {}
    conflicts: list[MergeConflict] = []
    for rows, fresh in ((old, False), (new, True)):
        for row in rows:
            key = row_key(row, family)
            before = merged.get(key)
            if before is None:
                merged[key] = row
                continue
            take, reason = (
                _decide_new(before, row, min_improvement_pct, preference)
                if fresh
                else _decide_old(before, row, preference)
            )
            if take:
                merged[key] = {**{name: v for name, v in before.items() if name not in row}, **row}
            if choice_of(before) != choice_of(row):
                kept = "new" if take else "old"
                conflicts.append(MergeConflict(key=key, family=family, kept=kept, reason=reason))
    return list(merged.values()), conflicts


def choice_of(row: Row) -> tuple[Scalar, ...]:
    """The choice of a row, for comparison: rows without knobs (aiter's) identify it by the kernel's name and index."""
    config = row.get("config")
    return (row.get("libtype"), config) if config else (row.get("libtype"), row.get("kernelName"), row.get("solidx"))


def _decide_old(old: Row, new: Row, preference: RowPreference) -> tuple[bool, str]:
    """For two rows of one table: the second is kept if its rank is greater."""
    before, after = row_ranks([old, new], preference)
    times = f"{old.get('us')} us and {new.get('us')} us in one table"
    return after > before, times


def _decide_new(old: Row, new: Row, min_improvement_pct: float, preference: RowPreference) -> tuple[bool, str]:
    """For a row of a table and one of this run: True if the new one is kept, and the reason."""
    before, after = _rank(old, preference), _rank(new, preference)
    if not after.timed:
        return False, "the new row has no measured time"
    if not before.timed:
        return True, "the old row has no measured time"
    if before.full_policy != after.full_policy:
        gap, name = (old, "old") if after.full_policy else (new, "new")
        return after.full_policy, f"the {name} row {_why_provisional(str(gap.get('policy')))}"
    before_us, after_us = -before.speed, -after.speed
    earlier, now = time_text(before_us), time_text(after_us)
    if new.get("incumbent_us") is not None:
        return True, f"{now}, timed against the old choice at {time_text(float(str(new['incumbent_us'])))}"
    if choice_of(old) == choice_of(new):
        return True, "timed again"
    if not before.current:
        return True, "the source of the old row's kernel has changed"
    if before.device and after.device and before.device != after.device:
        how = f"on different devices ('{before.device}' and '{after.device}')"
        return True, f"timed {how}, {earlier} and {now} cannot be compared"
    if before.policy != after.policy:
        how = f"by different policies ('{before.policy or 'unknown'}' and '{after.policy or 'unknown'}')"
        return True, f"timed {how}, {earlier} and {now} cannot be compared"
    needed = before_us * (1 - min_improvement_pct / 100)
    return after_us < needed, f"{earlier} before, {now} now, {min_improvement_pct:g} % required"


def _why_provisional(policy: str) -> str:
    shared = {SHARED_GPU: "GPU", SHARED_CPU: "CPU"}
    device = next((name for word, name in shared.items() if word in policy), "")
    return f"was timed on a shared {device}" if device else "is from a search that was cut short"


def without(policy: str, *words: str) -> str:
    """The policy of times that lack properties of the run's other times."""
    return " ".join(each for each in policy.split() if each not in words)


def shared_policy(kind: str) -> str:
    """The word in the policy of rows timed on a device of this kind while others used it."""
    return SHARED_CPU if kind == "cpu" else SHARED_GPU
