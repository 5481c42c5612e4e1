"""What candidates made of weights: kept while the weight lives, found by where the weight lies."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gemmpipe.data import Candidate
from gemmpipe.family import Weights

Place = tuple[Candidate, int, tuple[int, ...], tuple[int, ...], torch.dtype, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A candidate's own form of a weight; `version` is torch's count of in-place changes, None where it has none."""

    storage: "weakref.ref[torch.UntypedStorage]"
    version: int | None
    extra: object


@dataclass(frozen=True, kw_only=True)
class PreparedWeights:
    """Forms by candidate, address, layout, dtype and scale's address; an entry goes when the weight's storage does.

    An in-place change that torch counts (`load_state_dict`, `copy_`) makes the form anew. One that it does not count
    (through `.data`, in an inference tensor, by another library) needs `forget(weight)`.
    """

    entries: dict[Place, Entry] = field(default_factory=dict)

    def find(self, candidate: Candidate, weights: Weights) -> Entry | None:
        """The form that is still true of these weights."""
        entry = self.entries.get(_place(candidate, weights))
        if entry is None or entry.storage() is not weights.w.untyped_storage() or entry.version != _version(weights):
            return None
        return entry

    def keep(self, candidate: Candidate, weights: Weights, extra: object) -> None:
        """Keep a form until the weight's storage dies; one that shares the weight's memory is not kept."""
        storage = weights.w.untyped_storage()
        if isinstance(extra, torch.Tensor) and _shares(extra, storage):
            return
        place = _place(candidate, weights)
        entry = Entry(
            storage=weakref.ref(storage, _release(self.entries, place)), version=_version(weights), extra=extra
        )
        self.entries[place] = entry

    def forget(self, weight: torch.Tensor) -> int:
        """Drop all forms of what lies in this weight's storage; how many there were."""
        storage = weight.untyped_storage()
        gone = [place for place, entry in list(self.entries.items()) if entry.storage() is storage]
        for place in gone:
            self.entries.pop(place, None)
        return len(gone)


def _release(entries: dict[Place, Entry], place: Place) -> Callable[[object], None]:
    def release(dead: object) -> None:
        entry = entries.get(place)
        if entry is not None and entry.storage is dead:  # another weight may lie there by now
            del entries[place]

    return release


def _place(candidate: Candidate, weights: Weights) -> Place:
    scale = 0 if weights.w_scale is None else weights.w_scale.data_ptr()
    w = weights.w
    return (candidate, w.data_ptr(), tuple(w.shape), w.stride(), w.dtype, scale)


def _version(weights: Weights) -> int | None:
    """In-place changes of the weight and its scales so far; inference tensors do not count them."""
    total = 0
    for tensor in (weights.w, weights.w_scale):
        if tensor is not None:
            if tensor.is_inference():
                return None
            total += tensor._version
    return total


def _shares(extra: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return extra.layout is torch.strided and extra.untyped_storage().data_ptr() == storage.data_ptr()


FORMS = PreparedWeights()
