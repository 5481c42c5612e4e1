"""Preparing weights ahead of their first call, and forgetting what was prepared."""

from collections.abc import Iterator

import torch

from gemmpipe.data import Scalar
from gemmpipe.family import Family, GemmSpec, Implementation, Weights, load_family
from gemmpipe.paths import PACKAGE
from gemmpipe.runtime.answering import device_of
from gemmpipe.runtime.calls import kept_form, on
from gemmpipe.runtime.choosing import Chosen, first_usable
from gemmpipe.runtime.dispatches import dispatch_of
from gemmpipe.runtime.operands import name_of
from gemmpipe.runtime.prepared import FORMS, made_of


def prepare(weight: torch.Tensor, w_scale: torch.Tensor | None = None) -> int:
    """Make and keep every form of a weight [N, K] that a tuned row of it wants; how many forms are kept for it.

    Call it before a CUDA graph is captured, and after weights were reloaded in a way that torch does not count (see
    `forget`). Forms are kept as long as the weight's memory.
    """
    weights = Weights(w=weight.detach(), w_scale=w_scale)
    device = device_of(weight.get_device())
    for family in _families():
        for chosen, spec in _wanted(family, weights):
            if type(chosen.implementation).prepare is not Implementation.prepare:
                with torch.no_grad(), on(device):
                    kept_form(chosen, spec, weights, device)
    storage = weight.untyped_storage()
    return sum(made_of(entry, storage) for entry in list(FORMS.entries.values()))


def forget(weight: torch.Tensor) -> int:
    """Drop what was prepared of this weight; the next call makes it anew. Returns how many forms there were.

    Needed after an in-place reload that torch does not count: through `.data`, into inference tensors, or by another
    library. A CUDA graph captured before still reads the dropped form: capture it again.
    """
    return FORMS.forget(weight)


def _families() -> Iterator[Family]:
    for path in sorted((PACKAGE / "kernels").glob("*/__init__.py")):
        yield load_family(path.parent.name)


def _wanted(family: Family, weights: Weights) -> Iterator[tuple[Chosen, GemmSpec]]:
    """Each candidate that a row of this weight's sizes, type and device names, once."""
    device = device_of(weights.w.get_device())
    names = {column.name for column in family.key_columns}
    if not {"N", "K"} <= names or weights.w.dim() < 2:  # a family of products of several weights; no weight
        return
    wanted: dict[str, Scalar] = {"N": weights.w.shape[-2], "K": weights.w.shape[-1], "dtype": name_of(weights.w.dtype)}
    seen = set()
    for rows in dispatch_of(family.name).tables().like(device, {k: v for k, v in wanted.items() if k in names}):
        chosen, spec = first_usable(family, rows, device) or (None, None)
        if chosen is None or spec is None or (spec.w_scale is None) != (weights.w_scale is None):
            continue
        if chosen.candidate not in seen:
            seen.add(chosen.candidate)
            yield chosen, spec
