"""Who is one step from whom: equal in all knobs but one, and next to each other there.

Knobs can hang together: a tile of 160 columns comes with five slots alone, splits of a cluster are as many as its
programs. Where no candidate along a knob is equal in all others, the step takes another number along.
"""

from collections.abc import Iterable, Mapping, Sequence

from gemmpipe.core.data import Candidate, Scalar


class NeighborIndex:
    """The candidates of one problem by their knobs."""

    def __init__(self, candidates: Sequence[Candidate], places: Mapping[Candidate, int]) -> None:
        """`places` says where each stands in `candidates`."""
        self._candidates = candidates
        self._index = places
        self._values: dict[str, dict[str, list[Scalar]]] = {}
        """By backend and knob, in order."""

    def neighbors(self, place: int) -> list[int]:
        """Places of those one step away: for a number the next either way, any value of another knob."""
        centre = self._candidates[place]
        values = self._values_of(centre.backend)
        found = []
        for name, value in centre.items:
            for way in _directions(value, values[name]):
                near = next((p for other in way if (p := self._index_with(centre, {name: other})) is not None), None)
                if near is None and way and _is_number(value):
                    near = self._nearest_with_two_changes(centre, name, way[0], values)
                if near is not None and near not in found:
                    found.append(near)
        return found

    def _index_with(self, centre: Candidate, changes: Mapping[str, Scalar]) -> int | None:
        """Where the candidate stands that has these values, and the centre's of all other knobs."""
        items = tuple((name, changes.get(name, value)) for name, value in centre.items)
        return self._index.get(Candidate(backend=centre.backend, items=items))

    def _nearest_with_two_changes(
        self, centre: Candidate, name: str, value: Scalar, values: Mapping[str, Sequence[Scalar]]
    ) -> int | None:
        """Where one stands that has this value and one more number that is not the centre's, as near as there is."""
        others = [
            (abs(values[n].index(v) - values[n].index(own)), n, v)
            for n, own in centre.items
            if n != name and _is_number(own)
            for v in values[n]
            if v != own and _is_number(v)
        ]
        for _, other, taken in sorted(others, key=lambda each: each[0]):
            if (place := self._index_with(centre, {name: value, other: taken})) is not None:
                return place
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
    """The values each way from this one, nearest first; another knob's are a way each."""
    if not _is_number(value):
        return [[v] for v in values if v != value]
    numbers = [v for v in values if _is_number(v)]
    place = numbers.index(value)
    return [numbers[:place][::-1], numbers[place + 1 :]]
