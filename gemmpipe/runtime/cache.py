"""What answers a key: selected, bound and run at its first call under a lock, and kept while the tables stay."""

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

_MAX_CALLS = 16384  # bound calls kept a family: some 2 kB each; a workload of more shapes starts anew

CallKey = tuple[object, ...]
"""Everything of the operands that a bound call takes for granted."""
BoundCall = Callable[..., torch.Tensor]
"""Of a product or of a mixture of experts, which have operands of their own."""

_DEVICES: dict[int, Device] = {}


def device_by_index(index: int) -> Device:
    """The device of torch's number, -1 for the CPU."""
    if index not in _DEVICES:
        _DEVICES[index] = cpu_device() if index < 0 else gpu_device(index)
    return _DEVICES[index]


@dataclass(frozen=True, kw_only=True, eq=False)
class BindRequest:
    """The first call of a key: what is asked for, and how a selection becomes a call of these operands."""

    problem: Problem
    spec: GemmSpec
    device: Device
    bind: Callable[[LookupResult], BoundCall | None]
    """None for a selection that cannot be called with such operands."""
    run: Callable[[BoundCall], torch.Tensor]
    """The call with the operands at hand."""
    with_counter: Callable[[BoundCall, UntunedKey], BoundCall]
    """The call that also counts itself."""
    orders: tuple[str, ...] = ()
    """Those in which x's block scales lie, where the tables tell them apart."""


@dataclass(frozen=True, kw_only=True)
class KernelCache:
    """What calls of one family need to be found, and what was found.

    `borrowed` memory: a compiled graph's pool holds what a call makes.
    """

    family: Family
    graph_pool: bool
    make_out: MakeOut | None = None
    """Gives the tensor that calls write into; None: each makes its own."""
    calls: dict[CallKey, BoundCall] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _tables: list[TunedTables] = field(default_factory=list)
    _missed: set[CallKey] = field(default_factory=set)
    """The keys that the rules answer."""
    _outdated: dict[CallKey, BoundCall] = field(default_factory=dict)
    """What answered a key until the tables changed: good for graphs, in which nothing new is compiled or loaded."""

    def tables(self) -> TunedTables:
        """The tuned tables, read when first asked for."""
        with self.lock:
            if not self._tables:
                self._tables.append(load_tables(self.family))
            return self._tables[0]

    def tables_changed(self) -> bool:
        """Whether the files of the tables are others than those that were read."""
        return bool(self._tables) and self._tables[0].state != file_states(self.family)

    def reload_tables(self) -> int:
        """Read the tables again and look up anew what they did not answer before; how many keys that are.

        Calls of other threads see the state before or after; graphs captured before keep what they captured.
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
        """Whether the tables have a row of the problem's own that can run."""
        rows = self.tables().find(device, (value for _, value in problem.key))
        return first_usable(self.family, (found.row for found in rows), device) is not None

    def select_for_graph(self, problem: Problem, device: Device, otherwise: str) -> tuple[GemmSpec, RunnableCandidate]:
        """What computes in a graph that is captured before the weights were prepared."""
        return graph_fallback(self.family, problem, device, otherwise)

    def first_call(self, key: CallKey, request: BindRequest) -> torch.Tensor:
        """The first call of a key: what answers it is found by one thread, kept, and run.

        Raises NotInGraph where that has work on the weights to do inside a graph.
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
        return request.run(call)  # another thread asked first, and this one has waited for its answer

    def _select_and_run(self, request: BindRequest) -> tuple[LookupResult, BoundCall, torch.Tensor]:
        """The first of the exact row, padded ones and the rules that runs, with what it gave."""
        failed: Exception | None = None
        for selected in lookup_results(self.tables(), request.problem, request.spec, request.device, request.orders):
            try:
                call = request.bind(selected)
                if call is not None:
                    return selected, call, request.run(call)
            except (torch.OutOfMemoryError, NotCapturable):
                raise
            except Exception as error:  # noqa: BLE001 - what a kernel or library raises must not end a forward pass
                failed = error
                LOG.warn(
                    f"{self.family.name} {selected.source} {type(error).__name__}", selected.failure_message(error)
                )
        if failed is not None:
            raise failed
        raise GemmpipeError(
            f"{self.family.entry_point}: nothing here computes {request.problem.id} on {request.device.gfx}"
        )

    def _store(self, key: CallKey, request: BindRequest, selected: LookupResult, call: BoundCall) -> None:
        problem, missed = request.problem, selected.step == "fallback"
        if missed:
            untuned = LOG.count_miss(self.family.name, problem.id)
            untuned.calls += 1  # the one that was just made
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
    family: Family, problem: Problem, device: Device, otherwise: str
) -> tuple[GemmSpec, RunnableCandidate]:
    """What computes in a graph whose weights were not prepared before it; said once a problem."""
    LOG.warn(
        f"graph {problem.id}",
        f"{problem.id}: captured in a graph before its weights were prepared, so the fallback is captured; "
        f"call it once before{otherwise}",
    )
    spec = family.spec(problem)
    return spec, next(fallback_candidates(family, spec, device))
