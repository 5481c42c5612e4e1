"""Prepared forms of weights: kept as long as the weight's memory, found by its address and layout."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gemmpipe.core.data import Candidate
from gemmpipe.family import Weights

WeightKey = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedForm:
    """A candidate's form of a weight; `version` is torch's count of in-place changes, None if it has none."""

    storages: "tuple[weakref.ref[torch.UntypedStorage], ...]"
    """The storages of weights and scales; for experts those of both products."""
    version: int | None
    extra: object


@dataclass(frozen=True, kw_only=True)
class WeightCache:
    """Forms by candidate and by address, layout and dtype of weights and scales; an entry is freed with their storage.

    After an in-place change that torch counts (`load_state_dict`, `copy_`) the form is prepared again. A change that it
    does not count (through `.data`, in an inference tensor, by another library) needs `release_prepared(weight)`.
    """

    entries: dict[WeightKey, PreparedForm] = field(default_factory=dict)

    def find(self, candidate: Candidate, weights: Weights) -> PreparedForm | None:
        """The valid form of these weights, or None."""
        entry = self.entries.get(_weight_key(candidate, weights))
        if entry is None or entry.version != _version(weights):
            return None
        held = zip(entry.storages, _storages(weights), strict=True)
        return entry if all(known() is storage for known, storage in held) else None

    def add(self, candidate: Candidate, weights: Weights, extra: object) -> None:
        """Keep a form until the storage of a weight or scale is freed; a form that shares their memory is not kept."""
        storages = _storages(weights)
        if isinstance(extra, torch.Tensor) and any(_shares(extra, storage) for storage in storages):
            return
        key = _weight_key(candidate, weights)
        watched = tuple(weakref.ref(storage, _release(self.entries, key)) for storage in storages)
        self.entries[key] = PreparedForm(storages=watched, version=_version(weights), extra=extra)

    def release(self, weight: torch.Tensor) -> int:
        """Drop all forms of weights in this weight's storage; returns their number."""
        storage = weight.untyped_storage()
        gone = [key for key, entry in list(self.entries.items()) if is_form_of(entry, storage)]
        for key in gone:
            self.entries.pop(key, None)
        return len(gone)


def is_form_of(entry: PreparedForm, storage: torch.UntypedStorage) -> bool:
    """True if the form belongs to a weight in this storage."""
    return any(known() is storage for known in entry.storages)


def _release(entries: dict[WeightKey, PreparedForm], key: WeightKey) -> Callable[[object], None]:
    def release(dead: object) -> None:
        entry = entries.get(key)
        if entry is not None and any(known is dead for known in entry.storages):  # a new entry may have this key by now
            del entries[key]

    return release


def _weight_key(candidate: Candidate, weights: Weights) -> WeightKey:
    return (candidate, *(t if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in _tensors(weights)))


def _tensors(weights: Weights) -> tuple[torch.Tensor | None, ...]:
    return weights.w, weights.w_scale, weights.w2, weights.w2_scale


def _storages(weights: Weights) -> tuple[torch.UntypedStorage, ...]:
    return tuple(t.untyped_storage() for t in _tensors(weights) if t is not None)


def _version(weights: Weights) -> int | None:
    """The number of in-place changes of weights and scales; None for inference tensors, which have no count."""
    total = 0
    for tensor in _tensors(weights):
        if tensor is not None:
            if tensor.is_inference():
                return None
            total += tensor._version
    return total


def _shares(extra: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return extra.layout is torch.strided and extra.untyped_storage().data_ptr() == storage.data_ptr()


WEIGHT_CACHE = WeightCache()
