"""Which configuration an engine's file gets for each M: none that is slower than what the engine takes without it.

At which Ms an engine's function is timed, so that between the keys of a file nothing gets slower either.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gemmpipe.bench.timer import PairedRatio, paired_ratio
from gemmpipe.core.data import Candidate
from gemmpipe.formats.engine_json import nearest_key
from gemmpipe.stages.selection_rules import Finalist, rank


@dataclass(frozen=True, kw_only=True)
class KeyGrid:
    """The Ms of one file, all in order."""

    keys: tuple[int, ...]
    """What is tuned: each becomes a key of the file."""
    extra: tuple[int, ...]
    """Timed with the finalists of the keys beside them; each may become a key."""
    copied: tuple[int, ...]
    """Keys of the engine's published file beyond what is tuned: written as they are, so that it loses none."""
    existing: tuple[int, ...]
    """Keys of the output's file that this run does not tune: they stay."""

    @property
    def timed_ms(self) -> tuple[int, ...]:
        """Every M that is timed."""
        return tuple(sorted((*self.keys, *self.extra)))

    def nearest(self, m: int, extra_keys: Iterable[int] = ()) -> int:
        """The key whose entry serves this M in a file with all these keys, and `also` these."""
        return nearest_key(sorted({*self.keys, *self.copied, *self.existing, *extra_keys}), m)

    def adjacent(self, m: int) -> tuple[int, ...]:
        """The tuned keys next below and next above, or the one there is."""
        below, above = [key for key in self.keys if key < m], [key for key in self.keys if key > m]
        return (*below[-1:], *above[:1])


def key_grid(ms: Collection[int], published: Collection[int], existing: Collection[int]) -> KeyGrid:
    """The grid for tuning `ms` (one at least), given the keys of the published file and of the output's.

    Beside the keys, these are timed: published keys between them, the geometric middles between all of these (and the
    next published key on either side), and, where no published key lies beyond the last, twice that; where none lies
    below the first, 1. Points nearest to a key that stays as it is are left out: nothing changes there.
    """
    keys = sorted(set(ms))
    first, last = keys[0], keys[-1]
    within = {key for key in published if first < key < last}
    below, above = [key for key in published if key < first], [key for key in published if key > last]
    line = sorted({*keys, *within, *([max(below)] if below else []), *([min(above)] if above else [])})
    extra = {*within, *(round(math.sqrt(a * b)) for a, b in pairwise(line))}
    extra |= ({1} if not below else set()) | ({2 * last} if not above else set())
    grid = KeyGrid(
        keys=tuple(keys),
        extra=(),
        copied=tuple(sorted({*below, *above} - set(existing))),
        existing=tuple(sorted(set(existing) - set(keys))),
    )
    left = sorted(m for m in extra - set(keys) if grid.nearest(m) in keys)
    return KeyGrid(keys=grid.keys, extra=tuple(left), copied=grid.copied, existing=grid.existing)


def serving_keys(grid: KeyGrid, keys: Sequence[int]) -> dict[int, int]:
    """By timed M: the key that serves it where the file has these `keys` beside those that stay."""
    return {m: nearest_key(sorted({*keys, *grid.copied, *grid.existing}), m) for m in grid.timed_ms}


@dataclass(frozen=True, kw_only=True)
class TimedPoint:
    """One M at which finalists were timed side by side."""

    m: int
    finalists: tuple[Finalist, ...]
    """Those whose result is right."""
    current: tuple[Candidate, ...]
    """What the engine takes for so many rows today: its published entry or its default, and that of the output."""
    untried: frozenset[Candidate] = frozenset()
    """Those of `taken` that could not take part."""

    @property
    def reference(self) -> Finalist | None:
        """The fastest of what the engine takes today; None where nothing of it ran."""
        return next((f for f in rank(self.finalists) if f.candidate in self.current), None) if self.finalists else None

    def is_faster(self, finalist: Finalist) -> bool:
        """Whether it is faster than the reference by the interval of their paired rounds, or is that one."""
        reference = self.reference
        if reference is None or finalist.candidate == reference.candidate:
            return True
        return paired_ratio(finalist.samples_us, reference.samples_us).high < 1

    def of(self, candidate: Candidate) -> Finalist | None:
        """Its times here."""
        return next((f for f in self.finalists if f.candidate == candidate), None)


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """What a file gets for an M."""

    m: int
    candidate: Candidate
    finalist: Finalist | None
    """None for what is taken over without having been timed."""
    reference: Finalist | None = None

    @property
    def ratio(self) -> PairedRatio | None:
        """Its time over what the engine takes today."""
        if self.finalist is None or self.reference is None:
            return None
        return paired_ratio(self.finalist.samples_us, self.reference.samples_us)


def choose_entries(grid: KeyGrid, points: Mapping[int, TimedPoint], extra_key_pct: float) -> list[EngineEntry]:
    """An entry for each key that something ran for, and for further Ms where the nearest key's does not do.

    A key's entry is the candidate that does for most of the Ms which the key serves, itself among them: that is
    `ahead` there, and not slower than that M's own best by more than `extra_key_pct`; of several, the one with the least
    sum of relative times. An M for which it does not do gets a key with its own best.
    """
    wanted: dict[int, Candidate] = {}
    keys: set[int] = set()
    for key, ms in _by_key(grid).items():
        here = {m: points[m] for m in ms}
        chosen, alike = _shared(key, here, extra_key_pct)
        for m, point in here.items():
            own = chosen if m in alike else best_candidate(point)
            if own is not None:
                wanted[m] = own
        keys |= {m for m in ms if m in wanted and (m == key or m not in alike)}
    return [_entry(points[m], wanted[m]) for m in sorted(_complete(grid, wanted, keys))]


def best_candidate(point: TimedPoint) -> Candidate | None:
    """The fastest that is ahead of what the engine takes today, else that; None where nothing ran."""
    held = [candidate for candidate in point.current if candidate in point.untried]
    if held:  # no time says that another is faster
        return held[0]
    return next((f.candidate for f in rank(point.finalists) if point.is_faster(f)), None) if point.finalists else None


def _by_key(grid: KeyGrid) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {key: [] for key in grid.keys}
    for m, key in serving_keys(grid, grid.keys).items():
        found[key].append(m)
    return found


def _shared(key: int, points: Mapping[int, TimedPoint], extra_key_pct: float) -> tuple[Candidate | None, set[int]]:
    """The candidate for a key, and the Ms that it does for; None where nothing but what the key has will do."""
    if points[key].untried or not points[key].finalists:
        return None, set()
    best: tuple[int, float, str, Candidate, set[int]] | None = None
    for candidate in dict.fromkeys(f.candidate for f in points[key].finalists):
        relative = {m: _relative_time(candidate, point) for m, point in points.items()}
        good = {m: r for m, r in relative.items() if r is not None and r <= 1 + extra_key_pct / 100}
        if key in good:
            ranked = (-len(good), sum(good.values()), candidate.id, candidate, set(good))
            best = ranked if best is None or ranked[:3] < best[:3] else best
    return (best[3], best[4]) if best is not None else (None, set())


def _relative_time(candidate: Candidate, point: TimedPoint) -> float | None:
    """Its time over that of the M's own best; None where it was not timed, is not ahead, or nothing can be said."""
    if point.untried:
        return None
    finalist, best = point.of(candidate), best_candidate(point)
    own = point.of(best) if best is not None else None
    if finalist is None or own is None or not point.is_faster(finalist):
        return None
    return paired_ratio(finalist.samples_us, own.samples_us).median


def _complete(grid: KeyGrid, wanted: Mapping[int, Candidate], keys: set[int]) -> set[int]:
    """These keys, with what it takes that every M gets what it should, and without further ones that change nothing."""
    while lost := _wrongly_served(grid, wanted, keys):  # a key that was added serves some beside it
        keys = keys | lost
    for m in sorted(keys - set(grid.keys)):
        if not _wrongly_served(grid, wanted, keys - {m}):
            keys = keys - {m}
    return keys


def _wrongly_served(grid: KeyGrid, wanted: Mapping[int, Candidate], keys: set[int]) -> set[int]:
    """The Ms that a file with these keys has another candidate for."""
    if not keys:
        return set(wanted)
    serving = serving_keys(grid, sorted(keys))
    return {m for m, candidate in wanted.items() if m not in keys and wanted.get(serving[m]) != candidate}


def _entry(point: TimedPoint, candidate: Candidate) -> EngineEntry:
    return EngineEntry(m=point.m, candidate=candidate, finalist=point.of(candidate), reference=point.reference)
