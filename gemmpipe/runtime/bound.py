"""A kernel compiled and bound once a key: a call makes the output, reads addresses and launches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gemmpipe.data import Device
from gemmpipe.family import GemmSpec, Implementation, Inputs, Prepared, Weights
from gemmpipe.launching.builds import load_build
from gemmpipe.launching.launches import COUNTERS, PARTS, Kernel, KernelLaunch
from gemmpipe.launching.streams import capturing, stream_getter
from gemmpipe.launching.workspace import WORKSPACES, Space
from gemmpipe.runtime.borrowed import BORROWED
from gemmpipe.runtime.calls import Call, MakeOut, address_of, on, scale_orders
from gemmpipe.runtime.choosing import Chosen
from gemmpipe.runtime.launcher import Bound, Descriptors, bound
from gemmpipe.runtime.operands import (
    ALIGNMENT,
    Given,
    Optional,
    aligned,
    inputs_of,
    kernel_inputs,
    kernel_weights,
    laid_as,
    weights_of,
)
from gemmpipe.spec import order_of

_X_SCALE, _OUT = 2, 5  # places among x, w, x_scale, w_scale, bias, out
_MOST_ORDERS = 8
"""Of x's scales, by their strides, for which a key's kernel is bound; any further one is copied in each call."""

Place = tuple[int, int, Descriptors | None]
"""Of an address: where it goes among the kernel's arguments, whose it is, and the descriptors made of it, if any."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Roles:
    """Where the addresses of a call's tensors go."""

    operands: tuple[Place, ...]
    """Of those that must be contiguous."""
    scales: tuple[Place, ...]
    """Of x's block scales where they are not contiguous."""
    out: tuple[Place, ...]
    strides: tuple[int, ...] | None
    """Of x's block scales as the call was given them; None where they must be contiguous, as other operands."""


def kernel_call(
    chosen: Chosen, spec: GemmSpec, device: Device, given: Given, *, borrowed: bool, make_out: MakeOut | None = None
) -> Call | None:
    """A call that launches a kernel compiled and bound now, or None where it must be bound each time.

    It takes contiguous operands at addresses divisible by 16, for which the kernel was compiled, and copies others.
    Block scales of x are read as they lie where the kernel reads both orders: it is bound anew for each of their
    strides, once. `borrowed`, `make_out`: see Dispatch. Raises what the compiler or the driver raises.
    """
    implementation = chosen.implementation
    if not isinstance(implementation, Kernel) or type(implementation).bind is not Kernel.bind:
        return None
    if type(implementation).prepare is not Implementation.prepare:
        return None
    if given.bias is not None and given.bias.dtype != given.out_dtype:
        return None  # it is converted in each call
    orders = scale_orders(implementation, spec)
    weights, inputs = kernel_weights(weights_of(given, spec)), kernel_inputs(inputs_of(given, spec), spec, orders)
    shape = (spec.m, spec.n) if spec.batch == 1 else (spec.batch, spec.m, spec.n)
    out = torch.empty(shape, dtype=given.out_dtype, device=given.x.device)
    with on(device):
        one = implementation.launch(spec, chosen.candidate.knobs, device, inputs, Prepared(weights=weights), out)
        loaded = load_build(one.build, device)
        if loaded.interpreted:
            return None
        numbers = {name: value for name, value in one.arguments.items() if address_of(value) is None}
        ready = bound(loaded, one.grid, one.cluster, numbers)
    strides = None if len(orders) == 1 or given.x_scale is None else _strides(given.x_scale, inputs.x_scale)
    roles = _roles(one, ready, inputs, weights, out, strides)
    if roles is None:
        return None

    def bind(other: Given) -> Call | None:
        return kernel_call(chosen, spec, device, other, borrowed=borrowed, make_out=make_out)

    return _call(one, ready, roles, given, device, bind, make_out, borrowed=borrowed)


def _strides(given: torch.Tensor, read: Optional) -> tuple[int, ...]:
    """Those of scales that the kernel reads as they were given; else of the copy that stands for them."""
    as_given = read is not None and read.data_ptr() == given.data_ptr()
    return given.stride() if as_given else torch.empty(given.shape, device="meta").stride()


def _roles(
    one: KernelLaunch,
    ready: Bound,
    inputs: Inputs,
    weights: Weights,
    out: torch.Tensor,
    strides: tuple[int, ...] | None,
) -> _Roles | None:
    """None where an address is none of the operands' own, or could be that of two; strides: see _Roles."""
    tensors = (inputs.x, weights.w, inputs.x_scale, weights.w_scale, weights.bias, out)
    owners = {tensor.data_ptr(): role for role, tensor in enumerate(tensors) if tensor is not None}
    if len(owners) < sum(tensor is not None for tensor in tensors):
        return None
    by_strides = strides is not None and inputs.x_scale is not None and not inputs.x_scale.is_contiguous()
    operands: list[Place] = []
    scales: list[Place] = []
    results: list[Place] = []
    for name, value in one.arguments.items():
        address = address_of(value)
        if address is None or name not in ready.places:
            continue
        boxes = None if isinstance(value, torch.Tensor) else Descriptors(value)
        role = owners.get(address)
        if role is None:
            return None
        held = scales if by_strides and role == _X_SCALE else results if role == _OUT else operands
        held.append((ready.places[name], role, boxes))
    return _Roles(operands=tuple(operands), scales=tuple(scales), out=tuple(results), strides=strides)


def _call(
    one: KernelLaunch,
    ready: Bound,
    roles: _Roles,
    given: Given,
    device: Device,
    bind: Callable[[Given], Call | None],
    make_out: MakeOut | None,
    *,
    borrowed: bool,
) -> Call:
    """One long function within, since whatever it called would be called with every product."""
    values, launch, zeroed, stream_of = list(ready.values), ready.launch, one.zeroed, stream_getter()
    operands, scales, results, strides = roles.operands, roles.scales, roles.out, roles.strides
    make, index, place = make_out or _maker(given), device.index, given.x.device
    parts_at, counters_at = (ready.places.get(name, 0) for name in (PARTS, COUNTERS))
    take = _taker(one, place, borrowed=borrowed) if one.parts else None
    others, current = torch.cuda.device_count() > 1, torch.cuda.current_device

    def call(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        if others and current() != index:
            with on(device):
                return call(x, w, x_scale, w_scale, bias)
        arguments = values[:]
        tensors = (x, w, x_scale, w_scale, bias)
        bits = 0
        for at, role, boxes in operands:
            tensor = tensors[role]
            if not tensor.is_contiguous():  # type: ignore[union-attr]
                return otherwise(x, w, x_scale, w_scale, bias)
            address = tensor.data_ptr()  # type: ignore[union-attr]
            bits |= address
            arguments[at] = address if boxes is None else boxes[address]
        for at, _, boxes in scales:
            if x_scale.stride() != strides:  # type: ignore[union-attr]
                return otherwise(x, w, x_scale, w_scale, bias)
            address = x_scale.data_ptr()  # type: ignore[union-attr]
            bits |= address
            arguments[at] = address if boxes is None else boxes[address]
        if bits & ALIGNMENT:
            return otherwise(x, w, x_scale, w_scale, bias)
        out = make()
        for at, _, boxes in results:
            address = out.data_ptr()
            arguments[at] = address if boxes is None else boxes[address]
        stream = stream_of(index)
        if take is not None:
            space = take(stream)
            arguments[parts_at], arguments[counters_at] = space.parts_address, space.counters_address
        if zeroed:
            out.zero_()
        launch(stream, arguments)
        return out

    copying = _copying(call, strides)
    otherwise = copying if strides is None else _laid_otherwise(copying, strides, bind, given.out_dtype)
    return call


def _copying(call: Call, strides: tuple[int, ...] | None) -> Call:
    """The same call for operands that lie in another way than it takes them."""

    def copied(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        if x_scale is not None:
            x_scale = aligned(x_scale, "x_scale") if strides is None else laid_as(x_scale, strides, "x_scale")
        others = (
            None if each is None else aligned(each, word) for each, word in ((w_scale, "w_scale"), (bias, "bias"))
        )
        return call(aligned(x, "x"), aligned(w, "w"), x_scale, *others)

    return copied


def _laid_otherwise(
    copying: Call, strides: tuple[int, ...], bind: Callable[[Given], Call | None], out_dtype: torch.dtype
) -> Call:
    """For scales of other strides a call that is bound for them, once; `copying` for what lies in neither order."""
    calls: dict[tuple[int, ...], Call] = {}

    def call(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        assert x_scale is not None  # the family's products have scales: checked once a key
        found = copying if (own := x_scale.stride()) == strides else calls.get(own)
        if found is None:
            found = copying
            readable = order_of(x_scale.reshape(-1, x_scale.shape[-1])) is not None
            if readable and len(calls) < _MOST_ORDERS and not x_scale.data_ptr() & ALIGNMENT:
                given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
                found = calls[own] = bind(given) or copying
        return found(x, w, x_scale, w_scale, bias)

    return call


def _maker(given: Given) -> Callable[[], torch.Tensor]:
    """What makes an output [..., N] on the current device."""
    shape, dtype, place = given.out_shape, given.out_dtype, given.x.device
    # What Inductor's own code calls: 0.7 instead of 2.4 us (H200, torch 2.11, 2026-11-21).
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if place.type != "cuda" or quick is None:
        return lambda: torch.empty(shape, dtype=dtype, device=place)
    strides = torch.empty(shape, device="meta").stride()

    def make() -> torch.Tensor:
        out: torch.Tensor = quick(shape, strides, dtype)
        return out

    return make


def _taker(one: KernelLaunch, place: torch.device, *, borrowed: bool) -> Callable[[int], Space]:
    """What finds the workspace for a stream, the current one."""
    parts, counters = one.parts, one.counters
    if borrowed:
        return lambda stream: BORROWED.take(parts, counters, place)
    spaces = WORKSPACES.by_stream(-1 if place.index is None else place.index)
    is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", capturing)

    def take(stream: int) -> Space:
        held = spaces.get(stream)
        if held is None or held.parts < parts or held.counters < counters or is_capturing():
            return WORKSPACES.space(parts, counters, place)
        return held

    return take
