"""The host work of a bound kernel's call stays constant over 10,000 calls with changing addresses."""

import gc
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from executed_lines import steps

from gemmpipe.core.device import arch_device
from gemmpipe.runtime import binding
from gemmpipe.runtime.descriptors import _MAX_DESCRIPTORS, DescriptorCache
from gemmpipe.runtime.launcher import BoundKernel

CALLS = 10_000


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """(the launching call of a kernel with a descriptor per operand, its caches, the launches)."""
    monkeypatch.setattr(binding, "stream_getter", lambda: lambda index: 0)
    caches = [DescriptorCache(SimpleNamespace(base=None, shape=[4, 4])) for _ in range(3)]
    count = [0]

    def launch(stream: int, values: list[object]) -> None:
        count[0] += 1

    ready = BoundKernel(launch=launch, values=(None, None, None), positions={"x": 0, "w": 1, "out": 2})
    slots = binding._ArgumentSlots(
        operands=((0, 0, caches[0]), (1, 1, caches[1])), scales=(), out=((2, 5, caches[2]),), strides=None
    )
    outputs = cycle([torch.empty(4, 4) for _ in range(4)])  # a GPU's allocator returns the same few blocks
    call = binding._make_call(False, ready, slots, arch_device("sm_90"), lambda: next(outputs), None, lambda call: call)
    return call, caches, count


def test_with_addresses_that_recur(launched) -> None:
    call, caches, count = launched
    w, xs = torch.empty(4, 4), [torch.empty(4, 4) for _ in range(8)]
    for x in xs * 4:
        call(x, w, None, None, None)
    gc.collect()
    before, objects = steps(lambda: call(xs[0], w, None, None, None)), len(gc.get_objects())
    for index in range(CALLS):
        call(xs[index % 8], w, None, None, None)
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    assert steps(lambda: call(xs[0], w, None, None, None)) == before
    assert count[0] > CALLS
    assert [len(cache) for cache in caches] == [8, 1, 4]


def test_with_a_new_address_in_each_call(launched) -> None:
    call, caches, _ = launched
    memory = torch.empty(CALLS * 16)
    w = torch.empty(4, 4)
    first = steps(lambda: call(memory[:16].view(4, 4), w, None, None, None))
    for index in range(1, CALLS - 1):
        call(memory[16 * index : 16 * index + 16].view(4, 4), w, None, None, None)
    last = steps(lambda: call(memory[-16:].view(4, 4), w, None, None, None))
    assert last <= first + 10
    assert len(caches[0]) <= _MAX_DESCRIPTORS
