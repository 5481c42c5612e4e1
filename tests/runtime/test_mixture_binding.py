"""Launches of experts that are bound once have the arguments of those that are bound in each call.

The launches themselves need a GPU: what would be launched is recorded instead.
"""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairwise import pairwise

from gemmpipe.core.data import Build, Device
from gemmpipe.core.device import arch_device
from gemmpipe.family import Implementation, Inputs, KernelDefaults, Prepared, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.kernels.fmoe import _triton
from gemmpipe.launch.build import LoadedKernel
from gemmpipe.runtime import mixture_binding, moe
from gemmpipe.runtime.launcher import BoundKernel, bind_launch
from gemmpipe.runtime.mixture_binding import OPERANDS, bind_mixture
from gemmpipe.runtime.moe import RoutedOperands

FMOE, DEVICE = load_family("fmoe"), arch_device("sm_90")
SIZES = {"model_dim": 256, "inter_dim": 128, "expert": 8, "topk": 2}
KNOBS = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
Recorded = list[tuple[str, tuple[int, ...], dict[str, object]]]


class Recording(LoadedKernel):
    """A loaded kernel whose launches are recorded: (kernel, grid, arguments by name)."""

    @property
    def launches(self) -> Recorded:
        return self.kernel.launches  # type: ignore[no-any-return]

    def launcher(self, grid, arguments, cluster=1):  # type: ignore[no-untyped-def]
        given = {**arguments, **dict(self.build.constants)}
        return lambda: self.launches.append((self.build.kernel, grid, given))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found: Recorded = []

    def load(build: Build, device: Device) -> Recording:
        names = [name for name, _ in build.signature]

        def run(x: int, y: int, z: int, stream: int, function: int, metadata: object, *rest: object) -> None:
            found.append((build.kernel, (x, y, z), dict(zip(names, rest[3:], strict=True))))

        kernel = SimpleNamespace(run=run, function=0, packed_metadata=(4, 1, 0), launches=found)
        return Recording(build=build, kernel=kernel, interpreted=False)

    for module in (_triton, mixture_binding):
        monkeypatch.setattr(module, "load_build", load)
    monkeypatch.setattr(mixture_binding, "stream_getter", lambda: lambda index: 0)
    monkeypatch.setattr(moe, "device_context", lambda device: nullcontext())
    return found


def made(token: int, q_type: str, label: str) -> tuple[Any, Implementation, dict[str, Any], Weights, Inputs]:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = FMOE.spec(make_problem(FMOE, {**SIZES, "token": token, "q_type": q_type}, defaults, "sm_90", "test"))
    implementation = next(each for each in FMOE.implementations if each.label == label)
    block_k = 128 if q_type != "none" else 64
    knobs = dict(implementation.normalise(spec, {**KNOBS, "BLOCK_SIZE_K": block_k}, DEVICE))
    generator = torch.Generator().manual_seed(token)
    return spec, implementation, knobs, FMOE.make_weights(spec, generator), FMOE.make_inputs(spec, generator)


def operands(weights: Weights, inputs: Inputs, out: torch.Tensor) -> dict[str, torch.Tensor | None]:
    tensors = (inputs.x, inputs.topk_ids, inputs.topk_weights, out)
    rest = (weights.w, weights.w_scale, weights.w2, weights.w2_scale)
    return dict(zip(OPERANDS, (*tensors, *rest), strict=True))


def address(value: Any) -> int | None:
    base = getattr(value, "base", value)
    return base if type(base) is int else base.data_ptr() if hasattr(base, "data_ptr") else None


def comparable(launches: Recorded, given: dict[str, torch.Tensor | None]) -> list[object]:
    """Launches with operands by name, and scratch tensors by their distance to the first."""
    pointers = {each.data_ptr(): name for name, each in given.items() if each is not None}
    integers = 1 << 20  # arguments below are sizes
    scratch = [
        at
        for *_, arguments in launches
        for value in arguments.values()
        if (at := address(value)) is not None and at >= integers and at not in pointers
    ]

    def plain(value: Any) -> object:
        at = address(value)
        if at is None or at < integers:
            return value
        place = pointers.get(at, at - min(scratch))
        if not hasattr(value, "base"):
            return place
        return place, tuple(value.shape), tuple(value.strides), tuple(value.block_shape), str(value.layout)

    return [(kernel, grid, {k: plain(v) for k, v in arguments.items()}) for kernel, grid, arguments in launches]


@pytest.mark.parametrize(
    ("label", "q_type", "token"),
    pairwise(["triton", "gluon", "skinny"], ["none", "per_1x128", "per_token"], [1, 40], once=True),
)
def test_the_arguments_are_those_of_a_call_bound_anew(launches, label: str, q_type: str, token: int) -> None:
    spec, implementation, knobs, weights, inputs = made(token, q_type, label)
    quick = bind_mixture(implementation, spec, knobs, DEVICE, operands(weights, inputs, torch.empty(spec.out_shape)))
    assert quick is not None
    for _ in range(2):  # with the operands of another call than the one that was bound
        inputs = FMOE.make_inputs(spec, torch.Generator().manual_seed(7))
        weights = FMOE.make_weights(spec, torch.Generator().manual_seed(7))
        given = operands(weights, inputs, torch.empty(spec.out_shape, dtype=torch.bfloat16))
        launches.clear()
        assert given["out"] is not None
        implementation.bind(spec, knobs, DEVICE, inputs, Prepared(weights=weights), given["out"])()
        expected = comparable(launches, given)
        launches.clear()
        assert quick(tuple(given.values()))
        assert comparable(launches, given) == expected
        assert len(expected) >= 2
    alive = [weakref.ref(each) for each in given.values() if each is not None]
    del given, inputs, weights
    launches.clear()
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_operands_that_must_be_copied_are_not_launched(launches) -> None:
    spec, implementation, knobs, weights, inputs = made(40, "none", "triton")
    given = operands(weights, inputs, torch.empty(spec.out_shape, dtype=torch.bfloat16))
    quick = bind_mixture(implementation, spec, knobs, DEVICE, given)
    assert quick is not None
    wide = torch.empty(40, 512, dtype=torch.bfloat16)
    for x in (wide[:, :256], torch.empty(40 * 256 + 1, dtype=torch.bfloat16)[1:].view(40, 256)):
        assert not quick(tuple({**given, "x": x}.values()))
    assert launches == []


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_a_routing_in_another_type_is_converted_in_each_call(launches, ids: torch.dtype) -> None:
    spec, implementation, knobs, weights, inputs = made(40, "none", "triton")
    general: list[RoutedOperands] = []
    fallback = torch.zeros(spec.out_shape, dtype=torch.bfloat16)

    def call(given: RoutedOperands) -> torch.Tensor:
        general.append(given)
        return fallback

    quick = moe._quick_call(implementation, spec, knobs, DEVICE, call, None)
    given = RoutedOperands(
        x=inputs.x,
        w=weights.w,
        w2=weights.w2,
        topk_weights=inputs.topk_weights,
        topk_ids=inputs.topk_ids.to(ids),
        w_scale=None,
        w2_scale=None,
        activation="silu",
        weight_first=False,
    )
    for _ in range(2):
        assert quick(given).shape == (40, 256)
    assert (len(general), bool(launches)) == ((0, True) if ids == torch.int32 else (2, False))


def test_threads_share_no_operands(launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*given: Any) -> BoundKernel:
        bound = bind_launch(*given)

        def launch(stream: int, values: list[object]) -> None:
            time.sleep(0.002)  # other threads run between the arguments and the launch
            bound.launch(stream, values)

        return replace(bound, launch=launch)

    monkeypatch.setattr(mixture_binding, "bind_launch", bind)
    spec, implementation, knobs, weights, inputs = made(40, "none", "gluon")
    first = operands(weights, inputs, torch.empty(spec.out_shape, dtype=torch.bfloat16))
    quick = bind_mixture(implementation, spec, knobs, DEVICE, first)
    assert quick is not None
    sets = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        own = FMOE.make_weights(spec, generator), FMOE.make_inputs(spec, generator)
        sets.append(operands(*own, torch.empty(spec.out_shape, dtype=torch.bfloat16)))
    launches.clear()
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert all(pool.map(quick, [tuple(given.values()) for given in sets]))
    owner = {each.data_ptr(): index for index, given in enumerate(sets) for each in given.values() if each is not None}
    owners = [
        {owner[at] for value in arguments.values() if (at := address(value)) in owner} for *_, arguments in launches
    ]
    assert {len(each) for each in owners} <= {0, 1}, "a launch mixes the operands of two calls"
    assert set.union(*owners) == {0, 1, 2, 3}


def test_a_call_keeps_no_memory(launches) -> None:
    spec, implementation, knobs, weights, inputs = made(40, "per_1x128", "triton")
    given = operands(weights, inputs, torch.empty(spec.out_shape, dtype=torch.bfloat16))
    quick = bind_mixture(implementation, spec, knobs, DEVICE, given)
    assert quick is not None

    def tensors() -> int:
        launches.clear()
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    before = tensors()
    for _ in range(3):
        assert quick(tuple(given.values()))
    assert tensors() == before, "memory that a graph would replay into after it was freed"
