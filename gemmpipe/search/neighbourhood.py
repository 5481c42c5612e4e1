"""Who is one step from whom: equal in all knobs but one, and next to each other there."""

from collections.abc import Iterable, Sequence

from gemmpipe.data import Candidate, Scalar


class Neighbourhood:
    """The candidates of one problem by their knobs."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates
        self._places: dict[tuple[object, ...], int] = {}
        self._values: dict[tuple[str, str], list[Scalar]] = {}

    def around(self, place: int) -> list[int]:
        """Places of those one step away; a step goes to the next value of a number, to any value of another knob."""
        if not self._places:
            self._index()
        centre = self._candidates[place]
        found = []
        for name, value in centre.items:
            for other in _steps(value, self._values[centre.backend, name]):
                items = tuple((n, other if n == name else v) for n, v in centre.items)
                near = self._places.get((centre.backend, items))
                if near is not None:
                    found.append(near)
        return found

    def _index(self) -> None:
        values: dict[tuple[str, str], set[Scalar]] = {}
        for i, candidate in enumerate(self._candidates):
            self._places[candidate.backend, candidate.items] = i
            for name, value in candidate.items:
                values.setdefault((candidate.backend, name), set()).add(value)
        self._values = {key: _sorted(found) for key, found in values.items()}


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
