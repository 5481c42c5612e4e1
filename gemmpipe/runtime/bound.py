"""Tiled Triton kernels compiled and bound once a key: a call makes the output, reads addresses and launches."""

from collections.abc import Callable, Mapping

import torch

from gemmpipe.builds import Bound, load_build
from gemmpipe.data import Device, Knobs
from gemmpipe.dense import Dense
from gemmpipe.family import GemmSpec, Inputs, Prepared, Weights
from gemmpipe.runtime.calls import Call, any_call, on, reads_m_major
from gemmpipe.runtime.choosing import Chosen
from gemmpipe.runtime.operands import ALIGNMENT, Given, Optional, inputs_of, kernel_inputs, kernel_weights, weights_of
from gemmpipe.tiled import Tiled, integer
from gemmpipe.workspace import WORKSPACES

_X_SCALE = 2  # its place among x, w, x_scale, w_scale, bias, out
_WORKSPACE = ("parts_ptr", "counters_ptr")

Role = tuple[int, tuple[int, ...] | None]
TakeWorkspace = Callable[[int, int, torch.device], tuple[torch.Tensor, torch.Tensor]]


def tiled_call(chosen: Chosen, spec: GemmSpec, device: Device, given: Given, *, fresh_workspace: bool) -> Call | None:
    """A call that launches a kernel compiled and bound now, or None where it must be bound each time.

    It takes contiguous operands at addresses divisible by 16, for which the kernel was compiled, and hands others to
    `any_call`. Split-K's workspace is the stream's, or made by each call where memory belongs to someone else's pool
    (`fresh_workspace`). Raises what the compiler or the driver raises.
    """
    implementation, knobs = chosen.implementation, chosen.candidate.knobs
    if not isinstance(implementation, Tiled) or not _launches_alone(implementation, knobs):
        return None
    if given.bias is not None and given.bias.dtype != given.out_dtype:
        return None  # it is converted in each call
    weights = kernel_weights(weights_of(given, spec))
    shape = spec.out_shape
    out = torch.empty(shape, dtype=given.out_dtype, device=given.x.device)
    inputs, prepared = inputs_of(given, spec), Prepared(weights=weights)
    inputs = kernel_inputs(inputs, m_major=reads_m_major(implementation, inputs, prepared, out))
    arguments = implementation.arguments(inputs, prepared, out)
    (build,) = implementation.builds(spec, knobs, device)
    pointers = [name for name, kind in build.signature if kind.startswith("*") and name not in _WORKSPACE]
    roles = _roles(arguments, inputs, weights, out)
    if any(name not in roles for name in pointers):
        return None  # an operand that the launch derives from what was given
    tiles_m, tiles_n = implementation.tiles(spec, knobs)
    splits = integer(knobs, "NUM_KSPLIT")
    sizes: dict[str, object] = {**implementation.integers(spec)}
    sizes |= {"group_m": integer(knobs, "GROUP_SIZE_M"), "splits": splits}
    sizes |= {name: value for name, value in arguments.items() if isinstance(value, int)}
    with on(device):
        loaded = load_build(build, device)
        if loaded.interpreted:
            return None
        bound = loaded.bound((tiles_m * tiles_n, splits, spec.batch), sizes)
    operands = tuple((bound.places[name], *roles[name]) for name in pointers)
    workspace = (implementation.workspace_bytes(spec, knobs) // 4, spec.batch * tiles_m * tiles_n)
    take = None if not workspace[0] else _made if fresh_workspace else WORKSPACES.take
    return _call(bound, operands, given, any_call(chosen, spec, device, given.out_dtype), device, take, workspace)


def _launches_alone(implementation: Tiled, knobs: Knobs) -> bool:
    """Whether a call of it is one launch: atomics need their output zeroed before."""
    if isinstance(implementation, Dense):
        return type(implementation).bind is Dense.bind and (not implementation.atomic or knobs["NUM_KSPLIT"] == 1)
    return type(implementation).bind is Tiled.bind


def _roles(arguments: Mapping[str, object], inputs: Inputs, weights: Weights, out: torch.Tensor) -> dict[str, Role]:
    """For each parameter that is an operand as it was given: its place in a call, its strides unless contiguous."""
    rows = (inputs.x, weights.w, inputs.x_scale, weights.w_scale, weights.bias, out)
    roles: dict[str, Role] = {}
    for parameter, value in arguments.items():
        if value is None:
            continue
        for place, tensor in enumerate(rows):
            if value is tensor:
                roles[parameter] = (place, None)
        if inputs.x_scale_t is not None and value is inputs.x_scale_t:
            roles[parameter] = (_X_SCALE, inputs.x_scale_t.stride())
    return roles


def _call(
    bound: Bound,
    operands: tuple[tuple[int, int, tuple[int, ...] | None], ...],
    given: Given,
    general: Call,
    device: Device,
    take: TakeWorkspace | None,
    workspace: tuple[int, int],
) -> Call:
    """`operands`: a place in the kernel's arguments, one in a call, strides unless contiguous."""
    empty, values, launch = torch.empty, list(bound.values), bound.launch
    shape, dtype, place = given.out_shape, given.out_dtype, given.x.device
    parts_at, counters_at = (bound.places.get(name, 0) for name in _WORKSPACE)
    others = device.kind != "cpu" and torch.cuda.device_count() > 1
    current = torch.cuda.current_device

    def call(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        out = empty(shape, dtype=dtype, device=place)
        tensors = (x, w, x_scale, w_scale, bias, out)
        arguments = values[:]
        bits = 0
        for at, role, strides in operands:
            tensor = tensors[role]
            address = tensor.data_ptr()  # type: ignore[union-attr]
            if not (tensor.is_contiguous() if strides is None else tensor.stride() == strides):  # type: ignore[union-attr]
                return general(x, w, x_scale, w_scale, bias)
            bits |= address
            arguments[at] = address
        if bits & ALIGNMENT:
            return general(x, w, x_scale, w_scale, bias)
        if take is not None:
            parts, counters = take(*workspace, place)
            arguments[parts_at], arguments[counters_at] = parts.data_ptr(), counters.data_ptr()
        if others and current() != device.index:
            with on(device):
                launch(arguments)
        else:
            launch(arguments)
        return out

    return call


def _made(parts: int, counters: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
