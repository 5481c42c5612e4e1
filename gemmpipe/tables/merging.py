"""Which of two rows of a tuned table stays, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gemmpipe.data import Scalar
from gemmpipe.family import Family

Row = dict[str, Scalar]
"""A row of a tuned table: `gfx`, `cu_num`, the family's key, the result columns."""
Key = tuple[Scalar, ...]

SHARED = "shared_gpu"
"""In the policy of a row that was timed beside other work."""
CUT_SHORT = "cut_short"
"""In the policy of a row whose search ended before it was done."""


@lru_cache(maxsize=256)  # a table has many rows and few policies
def provisional(policy: Scalar) -> bool:
    """Whether a row of this policy only fills a gap: a full one is kept over it, and it is tuned again."""
    return any(word in str(policy or "").split() for word in (SHARED, CUT_SHORT))


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Two rows of one key that chose differently."""

    key: Key
    kept: str
    """`old` or `new`."""
    reason: str

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.key))}: kept the {self.kept} row: {self.reason}"


def key_of(row: Mapping[str, Scalar], family: Family) -> Key:
    """(gfx, cu_num, *the family's key)."""
    values = (row.get(c.name) if c.optional else row[c.name] for c in family.key_columns)
    return (row["gfx"], row["cu_num"], *values)


def merge(
    old: Sequence[Row], new: Sequence[Row], family: Family, *, min_improvement_pct: float
) -> tuple[list[Row], list[Conflict]]:
    """One row a key, in the order of first sight, and a conflict for every key with different choices.

    A new row that raced the old one in its run (`incumbent_us`) replaces it; else times of one policy are compared
    (a tie, or less than `min_improvement_pct` gained, keeps the old row) and times of different policies are not.
    """
    merged: dict[Key, Row] = {}
    conflicts: list[Conflict] = []
    for rows, fresh in ((old, False), (new, True)):
        for row in rows:
            key = key_of(row, family)
            before = merged.get(key)
            if before is None:
                merged[key] = row
                continue
            take, reason = _better(before, row, fresh, min_improvement_pct)
            if take:
                merged[key] = {**{name: v for name, v in before.items() if name not in row}, **row}
            if _choice(before) != _choice(row):
                conflicts.append(Conflict(key=key, kept="new" if take else "old", reason=reason))
    return list(merged.values()), conflicts


def _choice(row: Row) -> tuple[Scalar, ...]:
    # Without knobs (aiter's rows) the kernel's name and index say what was chosen.
    config = row.get("config")
    return (row.get("libtype"), config) if config else (row.get("libtype"), row.get("kernelName"), row.get("solidx"))


def _better(old: Row, new: Row, fresh: bool, min_improvement_pct: float) -> tuple[bool, str]:
    old_policy, new_policy = str(old.get("policy") or ""), str(new.get("policy") or "")
    before, after = _us(old), _us(new)
    if after is None:
        return False, "the new row has no time that was measured"
    if before is None:
        return True, "the old row has no time that was measured"
    if provisional(new_policy) != provisional(old_policy):
        gap = new_policy if provisional(new_policy) else old_policy
        why = "was timed on a shared GPU" if SHARED in gap else "is of a search cut short"
        return not provisional(new_policy), f"the {'new' if gap is new_policy else 'old'} one {why}"
    if fresh and new.get("incumbent_us") is not None:
        return True, f"{after:g} us, raced against the old choice at {new['incumbent_us']} us"
    if fresh and _choice(old) == _choice(new):
        return True, "timed again"
    if old_policy != new_policy:
        words = f"'{old_policy or 'unknown'}' and '{new_policy or 'unknown'}'"
        return fresh, f"timed by different policies ({words}), {before:g} and {after:g} us cannot be compared"
    needed = before * (1 - min_improvement_pct / 100)
    return after < needed, f"{before:g} us before, {after:g} us now, {min_improvement_pct:g} % asked for"


def _us(row: Row) -> float | None:
    value = row.get("us")
    return float(value) if isinstance(value, int | float) and value > 0 else None
