"""The bound calls of a family by key: selected, bound and run at the first call under a lock, kept until a reload."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gemmpipe.core.data import Device, Problem
from gemmpipe.core.device import cpu_device, gpu_device
from gemmpipe.core.errors import GemmpipeError
from gemmpipe.family import Family, GemmSpec
from gemmpipe.runtime import online
from gemmpipe.runtime.binding import MakeOut, NotCapturable, is_capturing
from gemmpipe.runtime.select import LookupResult, RunnableCandidate, fallback_candidates, first_usable, lookup_results
from gemmpipe.runtime.selection_log import LOG, UntunedKey
from gemmpipe.runtime.tables import TunedTables, file_states, load_tables

_MAX_CALLS = 16384  # bound calls kept per family, about 2 kB each; beyond, the cache is cleared

CallKey = tuple[object, ...]
"""All properties of the operands that a bound call relies on."""
BoundCall = Callable[..., torch.Tensor]
"""A call of a product or of a mixture of experts, with their own operands."""

_DEVICES: dict[int, Device] = {}


def device_by_index(index: int) -> Device:
    """The device with torch's index, -1 for the CPU."""
    if index not in _DEVICES:
        _DEVICES[index] = cpu_device() if index < 0 else gpu_device(index)
    return _DEVICES[index]


def process_device() -> Device:
    """The device for which this process builds and runs layers: torch's current GPU, else the CPU."""
    return device_by_index(torch.cuda.current_device() if torch.cuda.is_available() else -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class BindRequest:
    """The first call of a key: the product, and functions that bind a selection to these operands and run it."""

    problem: Problem
    spec: GemmSpec
    device: Device
    bind: Callable[[LookupResult], BoundCall | None]
    """The bound call; None for a selection that cannot be called with such operands."""
    run: Callable[[BoundCall], torch.Tensor]
    """Runs a call with the operands of the request."""
    with_counter: Callable[[BoundCall, UntunedKey], BoundCall]
    """A call that also counts itself."""
    orders: tuple[str, ...] = ()
    """The memory orders of x's block scales, if the tables distinguish them."""


@dataclass(frozen=True, kw_only=True)
class KernelCache:
    """The tables and the bound calls of one family.

    `graph_pool`: calls run in compiled graphs, and memory that they make belongs to the graphs' pool.
    """

    family: Family
    graph_pool: bool
    make_out: MakeOut | None = None
    """Returns the output tensor of a call; None: each call makes its own."""
    calls: dict[CallKey, BoundCall] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _tables: list[TunedTables] = field(default_factory=list)
    _missed: set[CallKey] = field(default_factory=set)
    """The keys without a row, with a fallback."""
    _outdated: dict[CallKey, BoundCall] = field(default_factory=dict)
    """The calls of keys before the last reload: used in graph captures, where nothing may be compiled or loaded."""

    def tables(self) -> TunedTables:
        """The tuned tables, read at the first use."""
        with self.lock:
            if not self._tables:
                self._tables.append(load_tables(self.family))
            return self._tables[0]

    def tables_changed(self) -> bool:
        """True if the tables' files have changed since they were read."""
        return bool(self._tables) and self._tables[0].state != file_states(self.family)

    def reload_tables(self) -> int:
        """Read the tables again and drop the calls of keys without a row; returns the number of these keys.

        Calls of other threads see the state before or after; existing graphs keep their captured kernels.
        """
        fresh = load_tables(self.family)
        with self.lock:
            self._tables[:] = [fresh]
            again = [key for key in self._missed if key in self.calls]
            for key in again:
                self._outdated[key] = self.calls.pop(key)
            self._missed.clear()
        return len(again)

    def has_row(self, problem: Problem, device: Device) -> bool:
        """True if the tables have a row for this problem that can run."""
        rows = self.tables().find(device, (value for _, value in problem.key))
        return first_usable(self.family, (found.row for found in rows), device) is not None

    def select_for_graph(
        self, problem: Problem, device: Device, alternative: str
    ) -> tuple[GemmSpec, RunnableCandidate]:
        """The candidate for a graph that is captured before the weights were prepared."""
        return graph_fallback(self.family, problem, device, alternative)

    def first_call(self, key: CallKey, request: BindRequest) -> torch.Tensor:
        """Run the first call of a key: one thread selects, binds, runs and keeps the call.

        Raises NotCapturable if it would have to prepare weights inside a graph capture.
        """
        outdated = self._outdated.get(key)
        if outdated is not None and is_capturing(request.device):
            return request.run(outdated)
        with self.lock:
            call = self.calls.get(key)
            if call is None:
                selected, call, out = self._select_and_run(request)
                self._store(key, request, selected, call)
                return out
        return request.run(call)  # another thread was first, and this one waited for it

    def _select_and_run(self, request: BindRequest) -> tuple[LookupResult, BoundCall, torch.Tensor]:
        """(selection, its call, its output) of the first candidate that runs: exact row, padded rows, fallbacks."""
        failed: Exception | None = None
        for selected in lookup_results(self.tables(), request.problem, request.spec, request.device, request.orders):
            try:
                call = request.bind(selected)
                if call is not None:
                    return selected, call, request.run(call)
            except (torch.OutOfMemoryError, NotCapturable):
                raise
            except Exception as error:  # noqa: BLE001 - an error of a kernel or library must not end a forward pass
                failed = error
                LOG.warn(
                    f"{self.family.name} {selected.source} {type(error).__name__}", selected.failure_message(error)
                )
        if failed is not None:
            raise failed
        raise GemmpipeError(
            f"{self.family.entry_point}: no implementation for {request.problem.id} on {request.device.gfx}"
        )

    def _store(self, key: CallKey, request: BindRequest, selected: LookupResult, call: BoundCall) -> None:
        problem, missed = request.problem, selected.step == "fallback"
        if missed:
            untuned = LOG.count_miss(self.family.name, problem.id)
            untuned.calls += 1  # the call that has just run
            online.missed(self, problem, request.device, untuned)
            call = request.with_counter(call, untuned)
        LOG.record_step(self.family.name, problem.id, selected.step)
        LOG.log_step(f"{problem.id}: {selected.step}: {selected.source}: {selected.description}")
        if len(self.calls) >= _MAX_CALLS:
            for held in (self.calls, self._missed, self._outdated):
                held.clear()
        self.calls[key] = call
        self._outdated.pop(key, None)
        (self._missed.add if missed else self._missed.discard)(key)


def graph_fallback(
    family: Family, problem: Problem, device: Device, alternative: str
) -> tuple[GemmSpec, RunnableCandidate]:
    """The fallback for a graph without prepared weights; warns once per problem."""
    LOG.warn(
        f"graph {problem.id}",
        f"{problem.id}: captured in a graph before its weights were prepared, so the graph has the fallback; "
        f"call it once before the capture{alternative}",
    )
    spec = family.spec(problem)
    return spec, next(fallback_candidates(family, spec, device))
