"""Neighbors of a candidate: equal in all knobs but one, with an adjacent value there.

Knobs can be coupled: a tile of 160 columns has exactly five pipeline slots, and a cluster has as many splits as
programs. If no candidate differs in one knob only, a neighbor differs in a second numeric knob as well.
"""

from collections.abc import Iterable, Mapping, Sequence

from gemmpipe.core.data import Candidate, Scalar


class NeighborIndex:
    """Neighbor queries over the candidates of one problem."""

    def __init__(self, candidates: Sequence[Candidate], index: Mapping[Candidate, int]) -> None:
        """`index`: candidate -> its index in `candidates`."""
        self._candidates = candidates
        self._index = index
        self._values: dict[str, dict[str, list[Scalar]]] = {}
        """Backend -> knob -> its values, sorted."""

    def neighbors(self, index: int) -> list[int]:
        """Indices of the neighbors: the next value of a numeric knob in both directions, any value of another."""
        center = self._candidates[index]
        values = self._values_of(center.backend)
        found = []
        for name, value in center.items:
            for direction in _directions(value, values[name]):
                near = next(
                    (p for other in direction if (p := self._index_with(center, {name: other})) is not None), None
                )
                if near is None and direction and _is_number(value):
                    near = self._nearest_with_two_changes(center, name, direction[0], values)
                if near is not None and near not in found:
                    found.append(near)
        return found

    def _index_with(self, center: Candidate, changes: Mapping[str, Scalar]) -> int | None:
        """The index of the candidate that equals `center` but for `changes`; None if there is none."""
        items = tuple((name, changes.get(name, value)) for name, value in center.items)
        return self._index.get(Candidate(backend=center.backend, items=items))

    def _nearest_with_two_changes(
        self, center: Candidate, name: str, value: Scalar, values: Mapping[str, Sequence[Scalar]]
    ) -> int | None:
        """The index of the nearest candidate with this value and one more changed number; None if there is none."""
        others = [
            (abs(values[n].index(v) - values[n].index(own)), n, v)
            for n, own in center.items
            if n != name and _is_number(own)
            for v in values[n]
            if v != own and _is_number(v)
        ]
        for _, other, taken in sorted(others, key=lambda each: each[0]):
            if (index := self._index_with(center, {name: value, other: taken})) is not None:
                return index
        return None

    def _values_of(self, backend: str) -> dict[str, list[Scalar]]:
        if backend not in self._values:
            items = {item for c in self._candidates if c.backend == backend for item in c.items}
            values: dict[str, list[Scalar]] = {}
            for name, value in items:
                values.setdefault(name, []).append(value)
            self._values[backend] = {name: _sorted(found) for name, found in values.items()}
        return self._values[backend]


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sorted(values: Iterable[Scalar]) -> list[Scalar]:
    return sorted(values, key=lambda v: (not _is_number(v), v if _is_number(v) else str(v)))


def _directions(value: Scalar, values: list[Scalar]) -> list[list[Scalar]]:
    """The values in each direction from this one, nearest first; a non-numeric value is a direction of its own."""
    if not _is_number(value):
        return [[v] for v in values if v != value]
    numbers = [v for v in values if _is_number(v)]
    index = numbers.index(value)
    return [numbers[:index][::-1], numbers[index + 1 :]]
