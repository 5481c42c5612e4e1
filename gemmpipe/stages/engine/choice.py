"""The choice of configurations for an engine's file: no M gets slower than with what the engine uses without the file.

Also the grid of Ms to time, so that nothing gets slower between the keys of a file either.
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
    """The tuned Ms: each becomes a key of the file."""
    extra: tuple[int, ...]
    """Timed with the finalists of the nearest keys; each may become a key."""
    copied: tuple[int, ...]
    """Keys of the engine's published file outside the tuned range: copied, so that none is lost."""
    existing: tuple[int, ...]
    """Keys of the output's file that this run does not tune: kept."""

    @property
    def timed_ms(self) -> tuple[int, ...]:
        """Every M that is timed, ascending."""
        return tuple(sorted((*self.keys, *self.extra)))

    def nearest(self, m: int, extra_keys: Iterable[int] = ()) -> int:
        """The key that serves this M in a file with all these keys and `extra_keys`."""
        return nearest_key(sorted({*self.keys, *self.copied, *self.existing, *extra_keys}), m)

    def adjacent(self, m: int) -> tuple[int, ...]:
        """The next tuned keys below and above, at least one of them."""
        below, above = [key for key in self.keys if key < m], [key for key in self.keys if key > m]
        return (*below[-1:], *above[:1])


def key_grid(ms: Collection[int], published: Collection[int], existing: Collection[int]) -> KeyGrid:
    """The grid for tuning `ms` (one at least), given the keys of the published file and of the output's.

    In addition to the keys, these are timed: published keys between them, the geometric means of neighbours among all
    of these (and the next published key on either side), twice the last key if no published key is above it, and 1 if
    none is below the first. Points nearest to a key that is not tuned are left out: nothing changes there.
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
    """By timed M: the key that serves it in a file with `keys` and those that are kept."""
    return {m: nearest_key(sorted({*keys, *grid.copied, *grid.existing}), m) for m in grid.timed_ms}


@dataclass(frozen=True, kw_only=True)
class TimedPoint:
    """One M with finalists timed in the same rounds."""

    m: int
    finalists: tuple[Finalist, ...]
    """Those with a correct result."""
    current: tuple[Candidate, ...]
    """The engine's configurations for this M today: its published entry or its default, and that of the output."""
    untried: frozenset[Candidate] = frozenset()
    """Those of `current` that could not be timed."""

    @property
    def reference(self) -> Finalist | None:
        """The fastest of `current`; None where none of them ran."""
        return next((f for f in rank(self.finalists) if f.candidate in self.current), None) if self.finalists else None

    def is_faster(self, finalist: Finalist) -> bool:
        """True if it is the reference, or faster by the interval of their paired rounds."""
        reference = self.reference
        if reference is None or finalist.candidate == reference.candidate:
            return True
        return paired_ratio(finalist.samples_us, reference.samples_us).high < 1

    def of(self, candidate: Candidate) -> Finalist | None:
        """The finalist of a candidate, if it was timed here."""
        return next((f for f in self.finalists if f.candidate == candidate), None)


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """The entry of a file for an M."""

    m: int
    candidate: Candidate
    finalist: Finalist | None
    """None for an entry that is copied without being timed."""
    reference: Finalist | None = None

    @property
    def ratio(self) -> PairedRatio | None:
        """Its time over that of the engine's current configuration."""
        if self.finalist is None or self.reference is None:
            return None
        return paired_ratio(self.finalist.samples_us, self.reference.samples_us)


@dataclass(frozen=True, kw_only=True)
class ExtraKeys:
    """When an M between two keys gets a key of its own."""

    pct: float
    """If another configuration is faster by more than this."""
    exact_from: int | None = None
    """From this M on if another configuration is faster at all; None: never."""

    def slower_pct(self, m: int) -> float:
        """How much slower than its best an M may be without a key of its own."""
        return 0.0 if self.exact_from is not None and m >= self.exact_from else self.pct


def choose_entries(grid: KeyGrid, points: Mapping[int, TimedPoint], extra: ExtraKeys) -> list[EngineEntry]:
    """An entry for each key with a timed candidate, and for other Ms that the nearest key's entry does not suit.

    A key's entry is the candidate that suits most of the Ms that the key serves, including the key. It suits an M if it
    is faster than the engine's current configuration there (`is_faster`), and at most `extra.slower_pct` slower than
    that M's best. Among several, the one with the least sum of relative times. An M that it does not suit gets its own
    key.
    """
    wanted: dict[int, Candidate] = {}
    keys: set[int] = set()
    for key, ms in _by_key(grid).items():
        here = {m: points[m] for m in ms}
        chosen, suited = _shared(key, here, extra)
        for m, point in here.items():
            own = chosen if m in suited else best_candidate(point)
            if own is not None:
                wanted[m] = own
        keys |= {m for m in ms if m in wanted and (m == key or m not in suited)}
    return [_entry(points[m], wanted[m]) for m in sorted(_complete(grid, wanted, keys))]


def best_candidate(point: TimedPoint) -> Candidate | None:
    """The fastest candidate that is faster than the engine's current one, else that one; None where nothing ran."""
    untried = [candidate for candidate in point.current if candidate in point.untried]
    if untried:  # without its time no other is known to be faster
        return untried[0]
    return next((f.candidate for f in rank(point.finalists) if point.is_faster(f)), None) if point.finalists else None


def _by_key(grid: KeyGrid) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {key: [] for key in grid.keys}
    for m, key in serving_keys(grid, grid.keys).items():
        found[key].append(m)
    return found


def _shared(key: int, points: Mapping[int, TimedPoint], extra: ExtraKeys) -> tuple[Candidate | None, set[int]]:
    """The candidate for a key, and the Ms that it suits; None if only the current configuration is possible."""
    if points[key].untried or not points[key].finalists:
        return None, set()
    best: tuple[int, float, str, Candidate, set[int]] | None = None
    for candidate in dict.fromkeys(f.candidate for f in points[key].finalists):
        relative = {m: _relative_time(candidate, point) for m, point in points.items()}
        good = {m: r for m, r in relative.items() if r is not None and r <= 1 + extra.slower_pct(m) / 100}
        if key in good:
            ranked = (-len(good), sum(good.values()), candidate.id, candidate, set(good))
            best = ranked if best is None or ranked[:3] < best[:3] else best
    return (best[3], best[4]) if best is not None else (None, set())


def _relative_time(candidate: Candidate, point: TimedPoint) -> float | None:
    """Its time over that of the M's best; None where it is untimed or not faster, or the current one is untried."""
    if point.untried:
        return None
    finalist, best = point.of(candidate), best_candidate(point)
    own = point.of(best) if best is not None else None
    if finalist is None or own is None or not point.is_faster(finalist):
        return None
    return paired_ratio(finalist.samples_us, own.samples_us).median


def _complete(grid: KeyGrid, wanted: Mapping[int, Candidate], keys: set[int]) -> set[int]:
    """These keys, plus those that other Ms need to get their wanted candidate, minus extra ones that change nothing."""
    while wrong := _wrongly_served(grid, wanted, keys):  # an added key serves some Ms next to it
        keys = keys | wrong
    for m in sorted(keys - set(grid.keys)):
        if not _wrongly_served(grid, wanted, keys - {m}):
            keys = keys - {m}
    return keys


def _wrongly_served(grid: KeyGrid, wanted: Mapping[int, Candidate], keys: set[int]) -> set[int]:
    """The Ms that get another candidate than wanted from a file with these keys."""
    if not keys:
        return set(wanted)
    serving = serving_keys(grid, sorted(keys))
    return {m for m, candidate in wanted.items() if m not in keys and wanted.get(serving[m]) != candidate}


def _entry(point: TimedPoint, candidate: Candidate) -> EngineEntry:
    return EngineEntry(m=point.m, candidate=candidate, finalist=point.of(candidate), reference=point.reference)
