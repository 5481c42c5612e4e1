"""At which Ms an engine's function is timed, so that between the keys of a file nothing gets slower either."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gemmpipe.formats.engine_json import nearest_key


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The Ms of one file, all in order."""

    keys: tuple[int, ...]
    """What is tuned: each becomes a key of the file."""
    further: tuple[int, ...]
    """Timed with the finalists of the keys beside them; each may become a key."""
    carried: tuple[int, ...]
    """Keys of the engine's published file beyond what is tuned: written as they are, so that it loses none."""
    standing: tuple[int, ...]
    """Keys of the output's file that this run does not tune: they stay."""

    @property
    def points(self) -> tuple[int, ...]:
        """Every M that is timed."""
        return tuple(sorted((*self.keys, *self.further)))

    def nearest(self, m: int, also: Iterable[int] = ()) -> int:
        """The key whose entry serves this M in a file with all these keys, and `also` these."""
        return nearest_key(sorted({*self.keys, *self.carried, *self.standing, *also}), m)

    def beside(self, m: int) -> tuple[int, ...]:
        """The tuned keys next below and next above, or the one there is."""
        below, above = [key for key in self.keys if key < m], [key for key in self.keys if key > m]
        return (*below[-1:], *above[:1])


def grid_of(ms: Collection[int], published: Collection[int], standing: Collection[int]) -> Grid:
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
    further = {*within, *(round(math.sqrt(a * b)) for a, b in pairwise(line))}
    further |= ({1} if not below else set()) | ({2 * last} if not above else set())
    grid = Grid(
        keys=tuple(keys),
        further=(),
        carried=tuple(sorted({*below, *above} - set(standing))),
        standing=tuple(sorted(set(standing) - set(keys))),
    )
    left = sorted(m for m in further - set(keys) if grid.nearest(m) in keys)
    return Grid(keys=grid.keys, further=tuple(left), carried=grid.carried, standing=grid.standing)


def served(grid: Grid, keys: Sequence[int]) -> dict[int, int]:
    """By timed M: the key that serves it where the file has these `keys` beside those that stay."""
    return {m: nearest_key(sorted({*keys, *grid.carried, *grid.standing}), m) for m in grid.points}
