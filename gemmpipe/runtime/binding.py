"""A selected candidate as a function of tensors.

`generic_call` binds any candidate in each call. `bind_kernel` compiles and binds a kernel once per key: a call then
only makes the output, reads addresses and launches.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from gemmpipe.backends import Backend
from gemmpipe.core.data import Candidate, Device
from gemmpipe.core.spec import ROW, scale_order
from gemmpipe.family import GemmSpec, Implementation, Inputs, Prepared, Weights
from gemmpipe.family.layouts import ROW_MAJOR
from gemmpipe.launch.build import load_build
from gemmpipe.launch.launch import COUNTERS_PARAMETER, PARTS_PARAMETER, KernelImplementation, KernelLaunch
from gemmpipe.launch.workspace import WORKSPACES, WorkspaceBuffers, stream_getter, stream_is_capturing, use_allocator
from gemmpipe.runtime.copy_log import log_added, log_padded
from gemmpipe.runtime.descriptors import DescriptorCache
from gemmpipe.runtime.launcher import GRAPH_WORKSPACES, BoundKernel, bind_launch, outside_graph_pools
from gemmpipe.runtime.operands import (
    ALIGNMENT,
    CallOperands,
    OptionalTensor,
    aligned,
    inputs_of,
    kernel_inputs,
    kernel_weights,
    library_inputs,
    weights_of,
    with_strides,
)
from gemmpipe.runtime.select import RunnableCandidate
from gemmpipe.runtime.weight_cache import WEIGHT_CACHE

GemmCall = Callable[[torch.Tensor, torch.Tensor, OptionalTensor, OptionalTensor, OptionalTensor], torch.Tensor]
"""(x, w, x_scale, w_scale, bias) -> out [..., N], for operands of one shape, type and device."""

MakeOut = Callable[[], torch.Tensor]
"""Returns the contiguous output tensor of a call."""

_MM = Candidate.of("torch", {"method": "mm"})


class NotCapturable(Exception):
    """The candidate must still prepare the weight, which must not become part of a graph."""


def is_capturing(device: Device) -> bool:
    """True if the current stream captures a graph."""
    return device.kind != "cpu" and torch.cuda.is_current_stream_capturing()


def device_context(device: Device) -> AbstractContextManager[object]:
    """Make the device current: kernels are loaded and launched on the current one."""
    return nullcontext() if device.kind == "cpu" else torch.cuda.device(device.index)


def generic_call(
    runnable: RunnableCandidate,
    spec: GemmSpec,
    device: Device,
    out_dtype: torch.dtype,
    *,
    keep: bool = True,
    graph_pool: bool = False,
    make_out: MakeOut | None = None,
) -> GemmCall:
    """A call of any candidate: operands made contiguous, the weight prepared at its first call and kept.

    The call raises NotCapturable if it would have to prepare inside a graph capture. Without `keep` it prepares in each
    call: inside a graph the prepared form then belongs to the graph. `graph_pool`, `make_out`: see KernelCache; a
    library may return another tensor than the given output.
    """
    implementation, knobs = runnable.implementation, runnable.candidate.knobs
    library = isinstance(implementation, Backend)
    reads_strides = isinstance(implementation, Backend) and implementation.reads_strides
    orders = scale_orders(implementation, spec)
    shape = spec.out_shape
    # True if preparing makes nothing, which shows at the first time: nothing to keep then.
    plain = [type(implementation).prepare is Implementation.prepare]

    def prepared_weights(weights: Weights) -> Prepared:
        if plain[0]:
            return Prepared(weights=weights)
        if not keep:
            return implementation.prepare(spec, weights, knobs)
        prepared = cached_form(runnable, spec, weights, device, graph_pool=graph_pool)
        plain[0] = prepared.extra is None
        return prepared

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        given = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
        out = torch.empty(shape, dtype=out_dtype, device=x.device) if make_out is None else make_out().view(shape)
        with device_context(device):
            inputs, prepared = inputs_of(given, spec), prepared_weights(weights_of(given, spec))
            if not reads_strides:  # operands that are no contiguous rows are copied each time
                prepared = replace(prepared, weights=kernel_weights(prepared.weights))
                inputs = library_inputs(inputs, spec) if library else kernel_inputs(inputs, spec, orders)
            with use_allocator(GRAPH_WORKSPACES.take) if graph_pool else nullcontext():
                out = implementation.bind(spec, knobs, device, inputs, prepared, out)()
        return out.view(given.out_shape)

    return call


def padded_call(inner: GemmCall, spec: GemmSpec, rows: int) -> GemmCall:
    """A call that pads x [M, K] to `rows` (zeros, scales 1), runs `inner` on it, and returns the first M rows."""
    by_row = spec.x_scale is not None and spec.x_scale.granularity != "tensor"

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        log_padded(x, rows)
        padded = _pad_rows(x, spec.m, rows, 0)
        scale = x_scale if x_scale is None or not by_row else _pad_rows(x_scale, spec.m, rows, 1)
        out = inner(padded, w, scale, w_scale, bias)[: spec.m]
        return out.view(*x.shape[:-1], out.shape[-1])

    return call


def biased_call(inner: GemmCall) -> GemmCall:
    """A call that adds the bias to the result of `inner`, a product whose kernels have no bias."""

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        assert bias is not None
        log_added(bias)
        return inner(x, w, x_scale, w_scale, None).add_(bias)

    return call


def _pad_rows(tensor: torch.Tensor, m: int, rows: int, filler: int) -> torch.Tensor:
    flat = tensor.reshape(m, -1)
    padded = torch.full((rows, flat.shape[1]), filler, dtype=tensor.dtype, device=tensor.device)
    padded[:m].copy_(flat)
    return padded


def scale_orders(implementation: Implementation, spec: GemmSpec) -> tuple[str, ...]:
    """The memory orders of x's block scales that the kernel reads without a copy; `row` by default."""
    return implementation.scale_orders(spec) if isinstance(implementation, KernelImplementation) else (ROW,)


def address_of(argument: object) -> int | None:
    """The address of a kernel's argument: a tensor, or a descriptor of one; None for numbers."""
    tensor = getattr(argument, "base", argument)
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else None


def linear_call(runnable: RunnableCandidate, spec: GemmSpec, given: CallOperands) -> GemmCall | None:
    """torch's own linear layer, if the candidate is just that, or None; it accepts any strides."""
    plain = spec.x_scale is None and spec.w_scale is None and spec.w_layout == ROW_MAJOR and spec.batch == 1
    same = {given.x.dtype, given.w.dtype, given.out_dtype} | (set() if given.bias is None else {given.bias.dtype})
    if runnable.candidate != _MM or not plain or given.w.dim() != 2 or len(same) > 1:
        return None

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        return linear(x, w, bias)

    return call


def _synchronized(make: Callable[[], Prepared], device: Device) -> Prepared:
    """`make()`, synchronised so that the result is ready on all streams."""
    prepared = make()
    if device.kind != "cpu" and prepared.extra is not None:
        torch.cuda.current_stream(device.index).synchronize()
    return prepared


def cached_form(
    runnable: RunnableCandidate, spec: GemmSpec, weights: Weights, device: Device, *, graph_pool: bool = False
) -> Prepared:
    """The candidate's form of the weights, from the cache or made and cached now. Raises NotCapturable.

    `graph_pool`: memory made in this thread belongs to a compiled graph, so the form is made in another thread.
    """
    implementation, knobs = runnable.implementation, runnable.candidate.knobs
    form = Candidate.of(implementation.label, {**implementation.prepare_knobs(spec, knobs), "layout": spec.w_layout})
    entry = WEIGHT_CACHE.find(form, weights)
    if entry is not None:
        return Prepared(weights=weights, extra=entry.extra)
    if is_capturing(device):
        raise NotCapturable
    rows = weights if isinstance(implementation, Backend) else kernel_weights(weights)

    def make() -> Prepared:
        return implementation.prepare(spec, replace(rows, bias=None), knobs)

    prepared = outside_graph_pools(make, weights.w.device) if graph_pool else _synchronized(make, device)
    if prepared.extra is not None:
        WEIGHT_CACHE.add(form, weights, prepared.extra)
    return Prepared(weights=weights, extra=prepared.extra, extra_bytes=prepared.extra_bytes)


_X_SCALE, _OUT = 2, 5  # indices into x, w, x_scale, w_scale, bias, out
_MAX_STRIDES = 8
"""Strides of x's scales for which a key's kernel is bound; scales with further ones are copied in each call."""

ArgumentSlot = tuple[int, int, DescriptorCache | None]
"""(index among the kernel's arguments, operand's role, cache of descriptors or None) of an address."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _ArgumentSlots:
    """The kernel arguments that hold the addresses of a call's tensors."""

    operands: tuple[ArgumentSlot, ...]
    """Slots of operands that must be contiguous."""
    scales: tuple[ArgumentSlot, ...]
    """Slots of x's block scales if they are not contiguous."""
    out: tuple[ArgumentSlot, ...]
    strides: tuple[int, ...] | None
    """Strides of x's block scales in the call; None if they must be contiguous, as other operands."""


def bind_kernel(
    runnable: RunnableCandidate,
    spec: GemmSpec,
    device: Device,
    given: CallOperands,
    *,
    graph_pool: bool,
    make_out: MakeOut | None = None,
) -> GemmCall | None:
    """A call that launches a kernel compiled and bound now, or None if it must be bound in each call.

    It uses contiguous operands at addresses divisible by 16, for which the kernel was compiled, and copies others.
    Block scales of x are read without a copy if the kernel reads both orders: it is bound once for each of their
    strides. `graph_pool`, `make_out`: see KernelCache. Raises what the compiler or the driver raises.
    """
    implementation = runnable.implementation
    if (
        not isinstance(implementation, KernelImplementation)
        or type(implementation).bind is not KernelImplementation.bind
    ):
        return None
    if type(implementation).prepare is not Implementation.prepare:
        return None
    if given.bias is not None and given.bias.dtype != given.out_dtype:
        return None  # it is converted in each call
    orders = scale_orders(implementation, spec)
    weights, inputs = kernel_weights(weights_of(given, spec)), kernel_inputs(inputs_of(given, spec), spec, orders)
    out = torch.empty(spec.out_shape, dtype=given.out_dtype, device=given.x.device)
    with device_context(device):
        one = implementation.launch(spec, runnable.candidate.knobs, device, inputs, Prepared(weights=weights), out)
        loaded = load_build(one.build, device)
        if loaded.interpreted:
            return None
        ready = bind_launch(loaded, one.grid, one.cluster, one.arguments, launch_pdl=one.launch_pdl)
    strides = None if len(orders) == 1 or given.x_scale is None else _kernel_strides(given.x_scale, inputs.x_scale)
    slots = _argument_slots(one, ready, inputs, weights, out, strides)
    if slots is None:
        return None

    def bind(other: CallOperands) -> GemmCall | None:
        return bind_kernel(runnable, spec, device, other, graph_pool=graph_pool, make_out=make_out)

    def wrap(call: GemmCall) -> GemmCall:
        copying = _copying_call(call, strides)
        return copying if strides is None else _rebinding_call(copying, strides, bind, given.out_dtype)

    take = _workspace_getter(one, given.x.device, graph_pool=graph_pool) if one.parts else None
    return _make_call(one.zero_output, ready, slots, device, make_out or _output_allocator(given), take, wrap)


def _kernel_strides(given: torch.Tensor, read: OptionalTensor) -> tuple[int, ...]:
    """The strides of scales that the kernel reads without a copy; else those of the copy."""
    as_given = read is not None and read.data_ptr() == given.data_ptr()
    return given.stride() if as_given else torch.empty(given.shape, device="meta").stride()


def _argument_slots(
    one: KernelLaunch,
    ready: BoundKernel,
    inputs: Inputs,
    weights: Weights,
    out: torch.Tensor,
    strides: tuple[int, ...] | None,
) -> _ArgumentSlots | None:
    """The slots; None if an address belongs to no operand, or to two. `strides`: see _ArgumentSlots."""
    tensors = (inputs.x, weights.w, inputs.x_scale, weights.w_scale, weights.bias, out)
    owners = {tensor.data_ptr(): role for role, tensor in enumerate(tensors) if tensor is not None}
    if len(owners) < sum(tensor is not None for tensor in tensors):
        return None
    by_strides = strides is not None and inputs.x_scale is not None and not inputs.x_scale.is_contiguous()
    operands: list[ArgumentSlot] = []
    scales: list[ArgumentSlot] = []
    results: list[ArgumentSlot] = []
    for name, value in one.arguments.items():
        address = address_of(value)
        if address is None or name not in ready.positions:
            continue
        role = owners.get(address)
        if role is None:
            return None
        held = scales if by_strides and role == _X_SCALE else results if role == _OUT else operands
        held.append((ready.positions[name], role, ready.descriptors.get(name)))
    return _ArgumentSlots(operands=tuple(operands), scales=tuple(scales), out=tuple(results), strides=strides)


_Take = Callable[[int], WorkspaceBuffers] | None
_Wrap = Callable[[GemmCall], GemmCall]


def _make_call(
    zeroed: bool, ready: BoundKernel, slots: _ArgumentSlots, device: Device, make: MakeOut, take: _Take, wrap: _Wrap
) -> GemmCall:
    """The launching call, one function since calls in it cost time; `wrap` makes the call for other layouts."""
    values, launch, stream_of = list(ready.values), ready.launch, stream_getter()
    operands, scales, results, strides = slots.operands, slots.scales, slots.out, slots.strides
    index = device.index
    parts_at, counters_at = (ready.positions.get(name, 0) for name in (PARTS_PARAMETER, COUNTERS_PARAMETER))
    others, current = torch.cuda.device_count() > 1, torch.cuda.current_device

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        if others and current() != index:
            with device_context(device):
                return call(x, w, x_scale, w_scale, bias)
        arguments = values[:]
        tensors = (x, w, x_scale, w_scale, bias)
        bits = 0
        for at, role, descriptors in operands:
            tensor = tensors[role]
            if not tensor.is_contiguous():  # type: ignore[union-attr]
                return otherwise(x, w, x_scale, w_scale, bias)
            address = tensor.data_ptr()  # type: ignore[union-attr]
            bits |= address
            arguments[at] = address if descriptors is None else descriptors[address]
        for at, _, descriptors in scales:
            if x_scale.stride() != strides:  # type: ignore[union-attr]
                return otherwise(x, w, x_scale, w_scale, bias)
            address = x_scale.data_ptr()  # type: ignore[union-attr]
            bits |= address
            arguments[at] = address if descriptors is None else descriptors[address]
        if bits & ALIGNMENT:
            return otherwise(x, w, x_scale, w_scale, bias)
        out = make()
        for at, _, descriptors in results:
            address = out.data_ptr()
            arguments[at] = address if descriptors is None else descriptors[address]
        stream = stream_of(index)
        if take is not None:
            space = take(stream)
            arguments[parts_at], arguments[counters_at] = space.parts_address, space.counters_address
        if zeroed:
            out.zero_()
        launch(stream, arguments)
        return out

    otherwise = wrap(call)
    return call


def _copying_call(call: GemmCall, strides: tuple[int, ...] | None) -> GemmCall:
    """The same call for operands with other strides or alignment, which it copies."""

    def copied(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        if x_scale is not None:
            x_scale = aligned(x_scale, "x_scale") if strides is None else with_strides(x_scale, strides, "x_scale")
        others = (
            None if each is None else aligned(each, name) for each, name in ((w_scale, "w_scale"), (bias, "bias"))
        )
        return call(aligned(x, "x"), aligned(w, "w"), x_scale, *others)

    return copied


def _rebinding_call(
    copying: GemmCall, strides: tuple[int, ...], bind: Callable[[CallOperands], GemmCall | None], out_dtype: torch.dtype
) -> GemmCall:
    """A call bound once for each strides of scales; `copying` for scales in neither order."""
    calls: dict[tuple[int, ...], GemmCall] = {}

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        assert x_scale is not None  # the family's products have scales: checked once per key
        found = copying if (own := x_scale.stride()) == strides else calls.get(own)
        if found is None:
            found = copying
            readable = scale_order(x_scale.reshape(-1, x_scale.shape[-1])) is not None
            if readable and len(calls) < _MAX_STRIDES and not x_scale.data_ptr() & ALIGNMENT:
                given = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
                found = calls[own] = bind(given) or copying
        return found(x, w, x_scale, w_scale, bias)

    return call


def _output_allocator(given: CallOperands) -> Callable[[], torch.Tensor]:
    """A function that makes an output [..., N] on the current device."""
    shape, dtype, place = given.out_shape, given.out_dtype, given.x.device
    # The function in Inductor's own code: 0.7 instead of 2.4 us (H200, torch 2.11, 2026-11-21).
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if place.type != "cuda" or quick is None:
        return lambda: torch.empty(shape, dtype=dtype, device=place)
    strides = torch.empty(shape, device="meta").stride()

    def make() -> torch.Tensor:
        out: torch.Tensor = quick(shape, strides, dtype)
        return out

    return make


def _workspace_getter(one: KernelLaunch, place: torch.device, *, graph_pool: bool) -> Callable[[int], WorkspaceBuffers]:
    """A function that returns the workspace of the current stream."""
    parts, counters = one.parts, one.counters
    if graph_pool:
        return lambda stream: GRAPH_WORKSPACES.take(parts, counters, place)
    spaces = WORKSPACES.by_stream(-1 if place.index is None else place.index)
    is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", stream_is_capturing)

    def take(stream: int) -> WorkspaceBuffers:
        held = spaces.get(stream)
        if held is None or held.parts < parts or held.counters < counters or is_capturing():
            return WORKSPACES.space(parts, counters, place)
        return held

    return take
