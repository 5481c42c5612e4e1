"""Few of many cases run always: every pair of values of several axes, or those that a test names; the rest is slow."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

SLOW = pytest.mark.slow
Case = tuple[int, ...]


def pairwise(*axes: Sequence[Any], once: bool = False) -> list[Any]:
    """Parameters of the axes' product: each test takes an element of every axis, in their order.

    Cases that are needed to have every pair of values of two axes together once run always, the others are marked
    slow. `once`: cases that are needed to have every value once run always. An element that is a tuple stands for
    as many parameters as it has.
    """
    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    kept = _covering(cases, 1 if once else 2)
    return [
        pytest.param(*_flat(axis[i] for axis, i in zip(axes, case, strict=True)), marks=() if case in kept else SLOW)
        for case in cases
    ]


def few(cases: Sequence[Any], *places: int) -> list[Any]:
    """Parameters of which those at these places run always; the others are marked slow.

    A case that is a tuple stands for as many parameters as it has.
    """
    assert all(0 <= place < len(cases) for place in places)
    return [pytest.param(*_flat((case,)), marks=() if i in places else SLOW) for i, case in enumerate(cases)]


def _flat(elements: Any) -> list[Any]:
    return [part for each in elements for part in (each if isinstance(each, tuple) else (each,))]


def _covering(cases: Sequence[Case], together: int) -> set[Case]:
    """Some of the cases, each taken for holding the most combinations of `together` values that none before held."""
    missing = {part for case in cases for part in _parts(case, together)}
    kept: set[Case] = set()
    while missing:
        best = max(cases, key=lambda case: len(missing & _parts(case, together)))
        kept.add(best)
        missing -= _parts(best, together)
    return kept


def _parts(case: Case, together: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), together))
