"""Tiled Triton kernels compiled and bound once a key: a call makes the output, reads addresses and launches."""

from collections.abc import Callable, Mapping

import torch

from gemmpipe.builds import Bound, load_build
from gemmpipe.data import Device, Knobs
from gemmpipe.dense import Dense
from gemmpipe.family import GemmSpec, Inputs, Prepared, Weights
from gemmpipe.runtime.calls import Call, any_call, on
from gemmpipe.runtime.choosing import Chosen
from gemmpipe.runtime.operands import ALIGNMENT, Given, Optional, inputs_of, kernel_inputs, kernel_weights, weights_of
from gemmpipe.tiled import Tiled, integer
from gemmpipe.workspace import WORKSPACES

_ROLES = ("x", "w", "x_scale", "w_scale", "bias", "out")
_WORKSPACE = ("parts_ptr", "counters_ptr")

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
    inputs = kernel_inputs(inputs_of(given, spec), m_major=False)
    weights = kernel_weights(weights_of(given, spec))
    shape = (spec.m, spec.n) if spec.batch == 1 else (spec.batch, spec.m, spec.n)
    out = torch.empty(shape, dtype=given.out_dtype, device=given.x.device)
    arguments = implementation.arguments(inputs, Prepared(weights=weights), out)
    roles = _roles(arguments, inputs, weights, out)
    (build,) = implementation.builds(spec, knobs, device)
    pointers = [name for name, kind in build.signature if kind.startswith("*") and name not in _WORKSPACE]
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
    operands = tuple((bound.places[name], _ROLES.index(roles[name])) for name in pointers)
    general = any_call(chosen, spec, device, given.out_dtype)
    held = implementation.workspace_bytes(spec, knobs)
    if not held:
        return _call(bound, operands, given, general, device)
    take = _made if fresh_workspace else WORKSPACES.take
    return _call(bound, operands, given, general, device, take, (held // 4, spec.batch * tiles_m * tiles_n))


def _launches_alone(implementation: Tiled, knobs: Knobs) -> bool:
    """Whether a call of it is one launch: atomics need their output zeroed before."""
    if isinstance(implementation, Dense):
        return type(implementation).bind is Dense.bind and (not implementation.atomic or knobs["NUM_KSPLIT"] == 1)
    return type(implementation).bind is Tiled.bind


def _roles(arguments: Mapping[str, object], inputs: Inputs, weights: Weights, out: torch.Tensor) -> Mapping[str, str]:
    """Which operand each pointer parameter is, for those that are operands as they were given."""
    tensors = (inputs.x, weights.w, inputs.x_scale, weights.w_scale, weights.bias, out)
    return {
        parameter: role
        for parameter, value in arguments.items()
        for role, tensor in zip(_ROLES, tensors, strict=True)
        if value is not None and value is tensor
    }


def _call(
    bound: Bound,
    operands: tuple[tuple[int, int], ...],
    given: Given,
    general: Call,
    device: Device,
    take: TakeWorkspace | None = None,
    workspace: tuple[int, int] = (0, 0),
) -> Call:
    """`operands` pairs a place in the kernel's arguments with one of _ROLES."""
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
        for at, role in operands:
            tensor = tensors[role]
            address = tensor.data_ptr()  # type: ignore[union-attr]
            if not tensor.is_contiguous():  # type: ignore[union-attr]
                bits = 1
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
