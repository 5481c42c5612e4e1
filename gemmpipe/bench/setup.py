"""The operands, references and launches of a worker's problems, cached within a memory budget."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from gemmpipe.backends import Backend
from gemmpipe.backends.scaled_mm import scales_in_order
from gemmpipe.core.data import Candidate, Device, Problem, digest
from gemmpipe.core.errors import one_line
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import (
    Family,
    GemmSpec,
    Implementation,
    Inputs,
    Launch,
    Operands,
    Prepared,
    Weights,
)
from gemmpipe.family.guard import describe_error, describe_family_error
from gemmpipe.family.reference import ErrorBounds, error_bounds, fraction_out_of_bounds
from gemmpipe.launch.launch import KernelImplementation

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_CACHE_MULTIPLE = 3  # total size of operand sets in last-level caches, so that the cache is cold for every launch
_MAX_SETS = {"cpu": 4}  # making a set takes seconds on a CPU
_MAX_SETS_GPU = 32
_DRAWS, _DRAWN_ROWS, _DRAWN_BYTES = 8, 1024, 4e10  # a replay of so many bytes takes 10 ms on an H200


def routing_draws(family: Family, spec: GemmSpec) -> int:
    """Draws of a routing over which a mixture of experts is timed: the fastest configuration depends on the experts.

    With eight draws of 16 rows the choice was up to 3.2 % behind the fastest under eight others (H200, 2026-11-27).
    Large mixtures keep eight, so that the finals have rounds enough.
    """
    affordable = min(_DRAWN_ROWS // max(spec.m, 1), int(_DRAWN_BYTES / max(1.0, family.bytes_moved(spec))))
    return max(_DRAWS, min(_MAX_SETS_GPU, affordable))


class OperandCache:
    """An LRU cache of values by key, with a budget in bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._entries: OrderedDict[tuple[object, ...], tuple[object, int]] = OrderedDict()
        self._used_bytes = 0

    def get(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """The value under `key`, made if missing."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]  # type: ignore[return-value]
        value = make()
        size = _tensor_bytes(value)
        self._entries[key] = (value, size)
        self._used_bytes += size
        while self._used_bytes > self._budget and len(self._entries) > 1:
            _, (_, freed) = self._entries.popitem(last=False)
            self._used_bytes -= freed
        return value


def _tensor_bytes(value: object) -> int:
    """The bytes of all tensors in a value."""
    import torch

    if isinstance(value, torch.Tensor):
        # The storage, since a view keeps all of it alive.
        return value.untyped_storage().nbytes() if value.layout is torch.strided else value.numel() * 4
    if isinstance(value, Prepared):
        return value.extra_bytes
    if isinstance(value, Weights | Inputs | ErrorBounds):
        return sum(_tensor_bytes(v) for v in vars(value).values() if v is not None)
    return 0


class WorkerBench:
    """The state of a worker for one family on one device: implementations, cached operands, known times."""

    def __init__(self, family: Family, implementations: Mapping[str, Implementation], device: Device) -> None:
        import torch

        self.family = family
        self.device = device
        self._implementations = implementations
        self._torch = torch
        self._cache = OperandCache(_budget(device))
        self.launch_counts: dict[tuple[str, str], int] = {}
        """Launches so far, by (problem id, candidate id)."""
        self.single_launch_us: dict[str, dict[str, float]] = {}
        """Time of a single launch, by problem id and candidate id."""
        self.library_us: dict[str, float] = {}
        """Shortest time of a library path without additional weight memory, by problem id."""

    def set_up(self, problem: Problem, *, finals: bool = False) -> "ProblemSetup":
        """The setup of a problem; with `finals` it uses the finals' implementations of candidates."""
        return ProblemSetup(self, problem, self.family.spec(problem), finals=finals)

    def implementation(self, candidate: Candidate) -> Implementation:
        """The implementation of this candidate's backend."""
        return self._implementations[candidate.backend]

    def describe_error(self, candidate: Candidate, error: Exception) -> str:
        """One line about an exception while this candidate ran, with the place in the user's own code."""
        own = self._implementations.get(candidate.backend)
        text = describe_error(own, error) if own is not None else one_line(error)
        # The family's tolerance function is called during a run too.
        return text if text != one_line(error) else self.describe_setup_error(error)

    def describe_setup_error(self, error: Exception) -> str:
        """One line about an exception while a problem was set up, with the place in the user's own code."""
        return describe_family_error(self.family, error)

    def generator(self, *seed: object) -> "torch.Generator":
        """A generator on the device, seeded by the hash of `seed`: equal operands in every run and resume."""
        generator = self._torch.Generator(device=self.device.torch_name)
        generator.manual_seed(int(digest([str(part) for part in seed]), 16))
        return generator

    def cached(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """A value from the operand cache, made if missing."""
        return self._cache.get(key, make)


class ProblemSetup:
    """The operand sets and the reference of one problem, and launches of candidates on them."""

    def __init__(self, bench: WorkerBench, problem: Problem, spec: GemmSpec, *, finals: bool = False) -> None:
        self._bench = bench
        self._finals = finals
        self.problem = problem
        self.spec = spec
        once = max(1.0, bench.family.bytes_moved(spec))
        most = _MAX_SETS.get(bench.device.kind, _MAX_SETS_GPU)
        fewest = 1 if bench.device.kind == "cpu" else 2
        self._weight_sets = max(fewest, min(most, math.ceil(_CACHE_MULTIPLE * bench.device.cache_bytes / once)))
        draws = routing_draws(bench.family, spec) if spec.experts is not None and bench.device.kind != "cpu" else 1
        self.sets = max(self._weight_sets, draws)
        # A string, since hashing a spec takes longer than launching a kernel.
        self._weights_id = str(replace(spec, m=0))

    def weights(self, index: int) -> Weights:
        """The weights of set `index`; problems that differ in M alone share them."""
        key = self._weight_key(index)
        family = self._bench.family
        return self._bench.cached(key, lambda: family.make_weights(self.spec, self._bench.generator(*key)))

    def _weight_key(self, index: int) -> tuple[object, ...]:
        return ("weights", self._weights_id, index % self._weight_sets)

    def inputs(self, index: int, order: str | None = None) -> Inputs:
        """The activations of set `index`; x's block scales in this order, by default the first of the spec."""
        from gemmpipe.family.operands import in_memory_order

        key = ("inputs", self.problem.id, index)
        family = self._bench.family
        made = self._bench.cached(key, lambda: family.make_inputs(self.spec, self._bench.generator(*key)))
        scale, scaling = made.x_scale, self.spec.x_scale
        if scale is None or scaling is None or scaling.granularity != "block":
            return made
        wanted = order or self.spec.x_scale_orders[0]
        own = self._bench.cached(("x_scale", self.problem.id, index, wanted), lambda: in_memory_order(scale, wanted))
        return replace(made, x_scale=own)

    def out(self, index: int) -> "torch.Tensor":
        """The output of set `index`, [M, N] or [B, M, N]; initially NaN."""
        import torch

        shape = self.spec.out_shape
        dtype = getattr(torch, self.spec.out_dtype)
        name = self._bench.device.torch_name
        return self._bench.cached(
            ("out", self.problem.id, index), lambda: torch.full(shape, float("nan"), dtype=dtype, device=name)
        )

    def prepared(self, candidate: Candidate, index: int) -> Prepared:
        """The weights of set `index` prepared for this candidate."""
        implementation = self.implementation(candidate)
        weights = self.weights(index)
        if type(implementation).prepare is Implementation.prepare:
            return implementation.prepare(self.spec, weights, candidate.knobs)  # makes no copy, so it is not cached
        form = Candidate.of(candidate.backend, implementation.prepare_knobs(self.spec, candidate.knobs))
        key = ("prepared", form.backend, form.items, *self._weight_key(index))
        return self._bench.cached(key, lambda: implementation.prepare(self.spec, weights, candidate.knobs))

    def implementation(self, candidate: Candidate) -> Implementation:
        """The implementation of a candidate; in the finals its finals implementation."""
        found = self._bench.implementation(candidate)
        return found.finals_implementation() if self._finals else found

    def timed_scale_orders(self, candidate: Candidate) -> tuple[str, ...]:
        """The memory orders of x's block scales in which the candidate is timed."""
        return self.implementation(candidate).timed_scale_orders(self.spec)

    def bind(self, candidate: Candidate, index: int) -> Launch:
        """A launch of the candidate on set `index`."""
        return self.binder(candidate)(index)

    def binder(self, candidate: Candidate, order: str | None = None) -> Callable[[int], Launch]:
        """A function that makes a launch of the candidate on the set with an index modulo `sets`.

        `order` is that of x's block scales, see `inputs`. If the kernel cannot read this order, the launch includes the
        copy into one that it reads, like a call at run time.
        """
        implementation = self.implementation(candidate)
        bind = implementation.binder(self.spec, candidate.knobs, self._bench.device)
        wanted = order or self.spec.x_scale_orders[0]
        read = _orders_read(implementation, self.spec)
        if wanted in read:
            return lambda index: bind(self._operands(candidate, index % self.sets, order))
        return lambda index: _with_scale_copy(bind, self._operands(candidate, index % self.sets, order), read[0])

    def _operands(self, candidate: Candidate, index: int, order: str | None) -> Operands:
        inputs, prepared = self.inputs(index, order), self.prepared(candidate, index)
        return Operands(inputs=inputs, prepared=prepared, out=self.out(index))

    def reference(self) -> "torch.Tensor":
        """The product of set 0 in fp32."""
        family = self._bench.family
        return self._bench.cached(
            ("reference", self.problem.id),
            lambda: family.reference(self.spec, self.inputs(0), self.weights(0)),
        )

    def release(self) -> None:
        """Free cached memory of graphs in which libraries allocated: inside a capture no memory is freed."""
        import torch

        if self._bench.device.kind != "cpu":
            torch.cuda.empty_cache()

    def fill_nan(self) -> None:
        """Fill the output of set 0 with NaN, so that elements that a candidate does not write are detected."""
        self.out(0).fill_(float("nan"))

    def error_ratio(self, output: "torch.Tensor") -> float:
        """The share of wrong elements of set 0's product, 1.0 at most (see `fraction_out_of_bounds`)."""
        return fraction_out_of_bounds(output, self.reference(), self._allowance())

    def _allowance(self) -> ErrorBounds:
        return self._bench.cached(
            ("allowance", self.problem.id),
            lambda: error_bounds(self.reference(), *self._bench.family.tolerance(self.spec)),
        )


def _orders_read(implementation: Implementation, spec: GemmSpec) -> tuple[str, ...]:
    """The orders of x's block scales that it reads without a copy: all for a library, row-major by default."""
    scaling = spec.x_scale
    if isinstance(implementation, Backend) or scaling is None or scaling.granularity != "block":
        return (ROW, COLUMN)
    return implementation.scale_orders(spec) if isinstance(implementation, KernelImplementation) else (ROW,)


def _with_scale_copy(bind: Callable[[Operands], Launch], own: Operands, order: str) -> Launch:
    """A launch that first copies x's scales into this order."""
    assert own.inputs.x_scale is not None, "block scales are missing"
    scale, copy = scales_in_order(own.inputs.x_scale, order)
    bound = bind(replace(own, inputs=replace(own.inputs, x_scale=scale)))

    def launch() -> "torch.Tensor":
        copy()
        return bound()

    return launch


def _budget(device: Device) -> int:
    """Bytes of operands to keep: a third of the CPU's free memory, half of a GPU's, an eighth of a shared GPU's."""
    import torch

    if device.kind == "cpu":
        import os

        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 3)
    free, _ = torch.cuda.mem_get_info(device.index)
    return int(free // (8 if device.shared else 2))
