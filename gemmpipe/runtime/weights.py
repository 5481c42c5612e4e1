"""Preparing weights ahead of their first call, and forgetting what was prepared."""

from collections.abc import Iterator, Mapping

import torch

from gemmpipe.data import Scalar
from gemmpipe.family import Family, GemmSpec, Implementation, Weights, load_family
from gemmpipe.paths import PACKAGE
from gemmpipe.runtime.answering import device_of
from gemmpipe.runtime.calls import kept_form, on
from gemmpipe.runtime.choosing import Chosen, first_usable
from gemmpipe.runtime.dispatches import dispatch_of
from gemmpipe.runtime.operands import Given, bytes_as, inner_size, name_of, no_tensor, scale_fits, weights_of
from gemmpipe.runtime.prepared import FORMS, made_of


def prepare(weight: torch.Tensor, w_scale: torch.Tensor | None = None) -> int:
    """Make and keep every form of a weight [N, K] that a tuned row of it wants; how many forms are kept for it.

    0 where no row wants one, as of what is no weight of any family. Raises UserError for what is no tensor.

    Call it before a CUDA graph is captured, and after weights were reloaded in a way that torch does not count (see
    `forget`). Forms are kept as long as the weight's memory.
    """
    _check("prepare", {"weight": weight, "w_scale": w_scale})
    scale = None if w_scale is None else bytes_as(w_scale, torch.float8_e8m0fnu)
    given = Weights(w=bytes_as(weight.detach(), torch.float4_e2m1fn_x2), w_scale=scale)
    device = device_of(weight.get_device())
    for family in _families():
        for chosen, spec, weights in _wanted(family, given):
            if type(chosen.implementation).prepare is not Implementation.prepare:
                with torch.no_grad(), on(device):
                    kept_form(chosen, spec, weights, device)
    storage = weight.untyped_storage()
    return sum(made_of(entry, storage) for entry in list(FORMS.entries.values()))


def forget(weight: torch.Tensor) -> int:
    """Drop what was prepared of this weight; the next call makes it anew. Returns how many forms there were.

    Needed after an in-place reload that torch does not count: through `.data`, into inference tensors, or by another
    library. A CUDA graph captured before still reads the dropped form: capture it again.
    Raises UserError for what is no tensor.
    """
    _check("forget", {"weight": weight})
    return FORMS.forget(weight)


def _check(name: str, operands: Mapping[str, object]) -> None:
    known = (torch.Tensor, type(None))
    if operands["weight"] is None or not all(isinstance(value, known) for value in operands.values()):
        raise no_tensor(name, operands, optional=("w_scale",))


def _families() -> Iterator[Family]:
    for path in sorted((PACKAGE / "kernels").glob("*/__init__.py")):
        yield load_family(path.parent.name)


def _wanted(family: Family, given: Weights) -> Iterator[tuple[Chosen, GemmSpec, Weights]]:
    """Each candidate that a row of this weight's sizes, type and device names, once; the weight as calls have it."""
    device = device_of(given.w.get_device())
    names = {column.name for column in family.key_columns}
    if not {"N", "K"} <= names or given.w.dim() < 2:  # a family of products of several weights; no weight
        return
    wanted: dict[str, Scalar] = {"N": given.w.shape[-2], "K": inner_size(given.w), "dtype": name_of(given.w.dtype)}
    wanted["bpreshuffle"] = False  # a 16-bit weight in tiles is read as it lies
    seen = set()
    for rows in dispatch_of(family.name).tables().like(device, {k: v for k, v in wanted.items() if k in names}):
        chosen, spec = first_usable(family, rows, device) or (None, None)
        weights = None if spec is None else _as_called(given, spec)
        if chosen is not None and spec is not None and weights is not None and chosen.candidate not in seen:
            seen.add(chosen.candidate)
            yield chosen, spec, weights


def _as_called(given: Weights, spec: GemmSpec) -> Weights | None:
    """What a call of this product makes of the weight, since a form is found by that; None: it is of another one.

    Rows of several families have one N and K, and not all say in the key what their scales are.
    """
    if name_of(given.w.dtype) != spec.w_dtype or given.w.shape[:-2].numel() != spec.batch:
        return None
    if (spec.w_scale is None) != (given.w_scale is None):
        return None
    if spec.w_scale is not None and not scale_fits(given.w_scale, spec.w_scale, (spec.batch, spec.n, spec.k)):
        return None
    out_dtype = getattr(torch, spec.out_dtype)
    return weights_of(
        Given(x=given.w, w=given.w, x_scale=None, w_scale=given.w_scale, bias=None, out_dtype=out_dtype), spec
    )
