"""Which configuration an engine's file gets for each M: none that is slower than what the engine takes without it."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Candidate
from gemmpipe.paired import PairedRatio, paired_ratio
from gemmpipe.stages.choice import Finalist, rank
from gemmpipe.stages.engine_grid import Grid, served


@dataclass(frozen=True, kw_only=True)
class Point:
    """One M at which finalists were timed side by side."""

    m: int
    finalists: tuple[Finalist, ...]
    """Those whose result is right."""
    taken: tuple[Candidate, ...]
    """What the engine takes for so many rows today: its published entry or its default, and that of the output."""
    untried: frozenset[Candidate] = frozenset()
    """Those of `taken` that could not take part."""

    @property
    def reference(self) -> Finalist | None:
        """The fastest of what the engine takes today; None where nothing of it ran."""
        return next((f for f in rank(self.finalists) if f.candidate in self.taken), None) if self.finalists else None

    def ahead(self, finalist: Finalist) -> bool:
        """Whether it is faster than the reference by the interval of their paired rounds, or is that one."""
        reference = self.reference
        if reference is None or finalist.candidate == reference.candidate:
            return True
        return paired_ratio(finalist.samples_us, reference.samples_us).high < 1

    def of(self, candidate: Candidate) -> Finalist | None:
        """Its times here."""
        return next((f for f in self.finalists if f.candidate == candidate), None)


@dataclass(frozen=True, kw_only=True)
class Entry:
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


def choose_entries(grid: Grid, points: Mapping[int, Point], further_pct: float) -> list[Entry]:
    """An entry for each key that something ran for, and for further Ms where the nearest key's does not do.

    A key's entry is the candidate that does for most of the Ms which the key serves, itself among them: that is
    `ahead` there, and not slower than that M's own best by more than `further_pct`; of several, the one with the least
    sum of relative times. An M for which it does not do gets a key with its own best.
    """
    wanted: dict[int, Candidate] = {}
    keys: set[int] = set()
    for key, ms in _by_key(grid).items():
        here = {m: points[m] for m in ms}
        chosen, alike = _shared(key, here, further_pct)
        for m, point in here.items():
            own = chosen if m in alike else own_best(point)
            if own is not None:
                wanted[m] = own
        keys |= {m for m in ms if m in wanted and (m == key or m not in alike)}
    return [_entry(points[m], wanted[m]) for m in sorted(_complete(grid, wanted, keys))]


def own_best(point: Point) -> Candidate | None:
    """The fastest that is ahead of what the engine takes today, else that; None where nothing ran."""
    held = [candidate for candidate in point.taken if candidate in point.untried]
    if held:  # no time says that another is faster
        return held[0]
    return next((f.candidate for f in rank(point.finalists) if point.ahead(f)), None) if point.finalists else None


def _by_key(grid: Grid) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {key: [] for key in grid.keys}
    for m, key in served(grid, grid.keys).items():
        found[key].append(m)
    return found


def _shared(key: int, points: Mapping[int, Point], further_pct: float) -> tuple[Candidate | None, set[int]]:
    """The candidate for a key, and the Ms that it does for; None where nothing but what the key has will do."""
    if points[key].untried or not points[key].finalists:
        return None, set()
    best: tuple[int, float, str, Candidate, set[int]] | None = None
    for candidate in dict.fromkeys(f.candidate for f in points[key].finalists):
        relative = {m: _relative(candidate, point) for m, point in points.items()}
        good = {m: r for m, r in relative.items() if r is not None and r <= 1 + further_pct / 100}
        if key in good:
            ranked = (-len(good), sum(good.values()), candidate.id, candidate, set(good))
            best = ranked if best is None or ranked[:3] < best[:3] else best
    return (best[3], best[4]) if best is not None else (None, set())


def _relative(candidate: Candidate, point: Point) -> float | None:
    """Its time over that of the M's own best; None where it was not timed, is not ahead, or nothing can be said."""
    if point.untried:
        return None
    finalist, best = point.of(candidate), own_best(point)
    own = point.of(best) if best is not None else None
    if finalist is None or own is None or not point.ahead(finalist):
        return None
    return paired_ratio(finalist.samples_us, own.samples_us).median


def _complete(grid: Grid, wanted: Mapping[int, Candidate], keys: set[int]) -> set[int]:
    """These keys, with what it takes that every M gets what it should, and without further ones that change nothing."""
    while lost := _lost(grid, wanted, keys):  # a key that was added serves some beside it
        keys = keys | lost
    for m in sorted(keys - set(grid.keys)):
        if not _lost(grid, wanted, keys - {m}):
            keys = keys - {m}
    return keys


def _lost(grid: Grid, wanted: Mapping[int, Candidate], keys: set[int]) -> set[int]:
    """The Ms that a file with these keys has another candidate for."""
    if not keys:
        return set(wanted)
    serving = served(grid, sorted(keys))
    return {m for m, candidate in wanted.items() if m not in keys and wanted.get(serving[m]) != candidate}


def _entry(point: Point, candidate: Candidate) -> Entry:
    return Entry(m=point.m, candidate=candidate, finalist=point.of(candidate), reference=point.reference)
