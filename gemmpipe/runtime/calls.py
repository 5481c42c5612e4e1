"""A chosen candidate as a function of tensors, bound anew in each call: what every candidate can do."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.nn.functional import linear

from gemmpipe.backends import Backend
from gemmpipe.data import Candidate, Device
from gemmpipe.family import GemmSpec, Implementation, Prepared, Weights
from gemmpipe.launching.launches import Kernel
from gemmpipe.launching.workspace import taking_from
from gemmpipe.layouts import PLAIN
from gemmpipe.runtime.borrowed import BORROWED
from gemmpipe.runtime.choosing import Chosen
from gemmpipe.runtime.copies import tell_copies, tell_padded
from gemmpipe.runtime.operands import (
    Given,
    Optional,
    inputs_of,
    kernel_inputs,
    kernel_weights,
    weights_of,
)
from gemmpipe.runtime.outside import outside_pools
from gemmpipe.runtime.prepared import FORMS
from gemmpipe.spec import ROW

Call = Callable[[torch.Tensor, torch.Tensor, Optional, Optional, Optional], torch.Tensor]
"""(x, w, x_scale, w_scale, bias) -> out [..., N], for operands of one shape, type and device."""

MakeOut = Callable[[], torch.Tensor]
"""Gives the contiguous tensor that a call writes its result into."""

_MM = Candidate.of("torch", {"method": "mm"})


class NotInGraph(Exception):
    """The candidate has work on the weight still to do, which must not become part of a graph."""


def capturing(device: Device) -> bool:
    """Whether the current stream records a graph."""
    return device.kind != "cpu" and torch.cuda.is_current_stream_capturing()


def on(device: Device) -> AbstractContextManager[object]:
    """Makes the device current; a kernel is loaded and launched on the current one."""
    return nullcontext() if device.kind == "cpu" else torch.cuda.device(device.index)


def any_call(
    chosen: Chosen,
    spec: GemmSpec,
    device: Device,
    out_dtype: torch.dtype,
    *,
    keep: bool = True,
    borrowed: bool = False,
    make_out: MakeOut | None = None,
) -> Call:
    """A call of any candidate: operands made contiguous, the weight prepared on first sight and kept.

    The call raises NotInGraph when that first sight is inside a graph capture. Without `keep` it prepares each time:
    what it makes inside a graph then belongs to the graph. `borrowed`, `make_out`: see Dispatch; a library may return
    another tensor than the one that it was given.
    """
    implementation, knobs = chosen.implementation, chosen.candidate.knobs
    library = isinstance(implementation, Backend)
    orders = scale_orders(implementation, spec)
    shape = spec.out_shape
    # Nothing to keep where preparing makes nothing; whether it does shows the first time.
    plain = [type(implementation).prepare is Implementation.prepare]

    def prepared_weights(weights: Weights) -> Prepared:
        if plain[0]:
            return Prepared(weights=weights)
        if not keep:
            return implementation.prepare(spec, weights, knobs)
        prepared = kept_form(chosen, spec, weights, device, borrowed=borrowed)
        plain[0] = prepared.extra is None
        return prepared

    def call(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
        out = torch.empty(shape, dtype=out_dtype, device=x.device) if make_out is None else make_out().view(shape)
        with on(device):
            inputs, prepared = inputs_of(given, spec), prepared_weights(weights_of(given, spec))
            if not library:  # libraries take any strides; kernels read rows, and other operands are copied each time
                prepared = replace(prepared, weights=kernel_weights(prepared.weights))
                inputs = kernel_inputs(inputs, spec, orders)
            elif not implementation.reads_strides:  # type: ignore[attr-defined]  # a Backend's
                tell_copies(x=inputs.x, w=prepared.weights.w, bias=prepared.weights.bias)
            with taking_from(BORROWED.take) if borrowed else nullcontext():
                out = implementation.bind(spec, knobs, device, inputs, prepared, out)()
        return out.view(given.out_shape)

    return call


def padded_call(inner: Call, spec: GemmSpec, rows: int) -> Call:
    """A call that pads x [M, K] to `rows` (zeros, scales 1), has `inner` compute that, and returns the first M."""
    by_row = spec.x_scale is not None and spec.x_scale.granularity != "tensor"

    def call(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        tell_padded(x, rows)
        wide = _with_rows(x, spec.m, rows, 0)
        scale = x_scale if x_scale is None or not by_row else _with_rows(x_scale, spec.m, rows, 1)
        out = inner(wide, w, scale, w_scale, bias)[: spec.m]
        return out.view(*x.shape[:-1], out.shape[-1])

    return call


def _with_rows(tensor: torch.Tensor, m: int, rows: int, filler: int) -> torch.Tensor:
    flat = tensor.reshape(m, -1)
    wide = torch.full((rows, flat.shape[1]), filler, dtype=tensor.dtype, device=tensor.device)
    wide[:m].copy_(flat)
    return wide


def scale_orders(implementation: Implementation, spec: GemmSpec) -> tuple[str, ...]:
    """The memory orders of x's block scales that it reads as they lie; rows, where it does not say."""
    return implementation.scale_orders(spec) if isinstance(implementation, Kernel) else (ROW,)


def address_of(argument: object) -> int | None:
    """Where a kernel's argument lies: a tensor, or a descriptor of one; None for numbers."""
    tensor = getattr(argument, "base", argument)
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else None


def linear_call(chosen: Chosen, spec: GemmSpec, given: Given) -> Call | None:
    """torch's own linear layer where the candidate is nothing else, or None; it takes any strides."""
    plain = spec.x_scale is None and spec.w_scale is None and spec.w_layout == PLAIN and spec.batch == 1
    same = {given.x.dtype, given.w.dtype, given.out_dtype} | (set() if given.bias is None else {given.bias.dtype})
    if chosen.candidate != _MM or not plain or given.w.dim() != 2 or len(same) > 1:
        return None

    def call(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        return linear(x, w, bias)

    return call


def _complete(make: Callable[[], Prepared], device: Device) -> Prepared:
    """What others find from now on, on whatever stream they are, is ready for all of them."""
    prepared = make()
    if device.kind != "cpu" and prepared.extra is not None:
        torch.cuda.current_stream(device.index).synchronize()
    return prepared


def kept_form(chosen: Chosen, spec: GemmSpec, weights: Weights, device: Device, *, borrowed: bool = False) -> Prepared:
    """The candidate's form of the weights, kept from before or made and kept now. Raises NotInGraph.

    `borrowed`: memory made here belongs to a compiled graph, so what is kept is made elsewhere.
    """
    implementation, knobs = chosen.implementation, chosen.candidate.knobs
    form = Candidate.of(implementation.label, {**implementation.form_knobs(spec, knobs), "layout": spec.w_layout})
    entry = FORMS.find(form, weights)
    if entry is not None:
        return Prepared(weights=weights, extra=entry.extra)
    if capturing(device):
        raise NotInGraph
    rows = weights if isinstance(implementation, Backend) else kernel_weights(weights)

    def make() -> Prepared:
        return implementation.prepare(spec, replace(rows, bias=None), knobs)

    prepared = outside_pools(make, weights.w.device) if borrowed else _complete(make, device)
    if prepared.extra is not None:
        FORMS.keep(form, weights, prepared.extra)
    return Prepared(weights=weights, extra=prepared.extra, extra_bytes=prepared.extra_bytes)
