"""Who is one step from whom: equal in all knobs but one, and next to each other there."""

from collections.abc import Iterable, Mapping, Sequence

from gemmpipe.data import Candidate, Scalar


class Neighbourhood:
    """The candidates of one problem by their knobs."""

    def __init__(self, candidates: Sequence[Candidate], places: Mapping[Candidate, int]) -> None:
        """`places` says where each stands in `candidates`."""
        self._candidates = candidates
        self._places = places
        self._values: dict[str, dict[str, list[Scalar]]] = {}
        """By backend and knob, in order."""

    def around(self, place: int) -> list[int]:
        """Places of those one step away; a step goes to the next value of a number, to any value of another knob."""
        centre = self._candidates[place]
        values = self._values_of(centre.backend)
        found = []
        for name, value in centre.items:
            for other in _steps(value, values[name]):
                items = tuple((n, other if n == name else v) for n, v in centre.items)
                near = self._places.get(Candidate(backend=centre.backend, items=items))
                if near is not None:
                    found.append(near)
        return found

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


def _steps(value: Scalar, values: list[Scalar]) -> list[Scalar]:
    if not _is_number(value):
        return [v for v in values if v != value]
    numbers = [v for v in values if _is_number(v)]
    place = numbers.index(value)
    return numbers[max(0, place - 1) : place] + numbers[place + 1 : place + 2]
