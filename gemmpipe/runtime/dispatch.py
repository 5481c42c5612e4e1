"""From operands to a tuned call: found once a key under a lock, one dictionary look-up ever after."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from gemmpipe.data import Device, Problem
from gemmpipe.device import cpu_device, gpu_device
from gemmpipe.errors import GemmpipeError, UserError
from gemmpipe.family import Family, GemmSpec
from gemmpipe.runtime import online
from gemmpipe.runtime.bound import kernel_call
from gemmpipe.runtime.calls import Call, NotInGraph, any_call, capturing, linear_call, padded_call
from gemmpipe.runtime.choosing import Chosen, fallbacks, first_usable
from gemmpipe.runtime.operands import Given, Optional, check, not_tensors, problem_of, without_memory
from gemmpipe.runtime.selecting import Selected, selections
from gemmpipe.runtime.selection import LOG, Untuned
from gemmpipe.runtime.tables import Tables, load_tables, state_of

_MOST_CALLS = 16384  # bound calls kept a family: some 2 kB each; a workload of more shapes starts anew

CallKey = tuple[object, ...]
"""Everything of the operands that a bound call takes for granted."""

_DEVICES: dict[int, Device] = {}


def device_of(index: int) -> Device:
    """The device of torch's number, -1 for the CPU."""
    if index not in _DEVICES:
        _DEVICES[index] = cpu_device() if index < 0 else gpu_device(index)
    return _DEVICES[index]


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Everything that calls of one family need. `borrowed` memory: a compiled graph's pool holds what a call makes."""

    family: Family
    borrowed: bool
    calls: dict[CallKey, Call] = field(default_factory=dict)
    routed: dict[CallKey, Callable[..., torch.Tensor]] = field(default_factory=dict)
    """Calls of mixtures of experts, which have operands of their own."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _tables: list[Tables] = field(default_factory=list)
    _missed: set[CallKey] = field(default_factory=set)
    """The keys that the rules answer."""
    _outdated: dict[CallKey, Call] = field(default_factory=dict)
    """What answered a key until the tables changed: good for graphs, in which nothing new is compiled or loaded."""

    def tables(self) -> Tables:
        """The tuned tables, read when first asked for."""
        with self.lock:
            if not self._tables:
                self._tables.append(load_tables(self.family))
            return self._tables[0]

    def changed(self) -> bool:
        """Whether the files of the tables are others than those that were read."""
        return bool(self._tables) and self._tables[0].state != state_of(self.family)

    def renew(self) -> int:
        """Read the tables again and look up anew what they did not answer before; how many keys that are.

        Calls of other threads see the state before or after; graphs captured before keep what they captured.
        """
        fresh = load_tables(self.family)
        with self.lock:
            self._tables[:] = [fresh]
            again = [key for key in self._missed if key in self.calls]
            for key in again:
                self._outdated[key] = self.calls.pop(key)
            again += [key for key in self._missed if self.routed.pop(key, None) is not None]
            self._missed.clear()
        return len(again)

    def keep_routed(self, key: CallKey, call: Callable[..., torch.Tensor], *, missed: bool) -> None:
        """Keep a call of a mixture of experts; `missed`: by the rules, until the tables have a row."""
        with self.lock:
            if len(self.routed) >= _MOST_CALLS:
                self.routed.clear()
            self.routed[key] = call
            (self._missed.add if missed else self._missed.discard)(key)

    def answers(self, problem: Problem, device: Device) -> bool:
        """Whether the tables have a row of the problem's own that can run."""
        rows = self.tables().find(device, (value for _, value in problem.key))
        return first_usable(self.family, (found.row for found in rows), device) is not None

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        x_scale: Optional,
        w_scale: Optional,
        bias: Optional,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """The product. Raises UserError for operands that are no product of this family."""
        # Everything that a bound call takes for granted; layouts and addresses it looks at itself.
        try:
            key: CallKey = (
                x.shape,
                w.shape,
                x.dtype,
                w.dtype,
                out_dtype,
                x.get_device(),
                w.get_device(),
                None if x_scale is None else (x_scale.shape, x_scale.dtype, x_scale.get_device()),
                None if w_scale is None else (w_scale.shape, w_scale.dtype, w_scale.get_device()),
                None if bias is None else (bias.shape, bias.dtype, bias.get_device()),
            )
        except AttributeError:
            raise not_tensors(self.family.entry_point, x, w, x_scale, w_scale, bias) from None
        if key[5] == -1:
            key = (*key, *without_memory(x, w, x_scale, w_scale, bias))
        call = self.calls.get(key)
        if call is None:
            given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
            return self._first(key, given)
        try:
            return call(x, w, x_scale, w_scale, bias)
        except NotInGraph:
            given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
            return self._in_graph(given)

    def torchs_own(self, given: Given, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What is left to torch for a reason other than the tables."""
        return compute()

    def _first(self, key: CallKey, given: Given) -> torch.Tensor:
        """The first call of a key: check, look up, bind, run, and keep what ran."""
        if not isinstance(given.out_dtype, torch.dtype):
            raise UserError(f"{self.family.entry_point}: out_dtype is {given.out_dtype!r}, expected a torch.dtype")
        problem = problem_of(self.family, given)
        if given.x.device.type not in ("cpu", "cuda") or 0 in (problem["M"], problem["N"], problem["K"]):
            return _degenerate(given)
        spec = self.family.spec(problem)
        check(self.family, given, spec)
        device = device_of(given.x.get_device())
        outdated = self._outdated.get(key)
        if outdated is not None and capturing(device):
            return outdated(given.x, given.w, given.x_scale, given.w_scale, given.bias)
        with self.lock:
            call, out, missed = self._run_best(problem, spec, device, given)
            if call is not None:
                if len(self.calls) >= _MOST_CALLS:
                    self.calls.clear()
                self.calls[key] = call
                self._outdated.pop(key, None)
                (self._missed.add if missed else self._missed.discard)(key)
        return out

    def _run_best(
        self, problem: Problem, spec: GemmSpec, device: Device, given: Given
    ) -> tuple[Call | None, torch.Tensor, bool]:
        """(the first selected call that runs, or None where it must not be kept; its output; whether it was missed)."""
        failed: Exception | None = None
        for selected in self.selections(problem, spec, device):
            try:
                call = self._bind(selected, spec, device, given)
                missed = selected.step == "fallback"
                if missed:
                    untuned = LOG.miss(self.family.name, problem.id)
                    call = _counted(call, untuned)
                out = call(given.x, given.w, given.x_scale, given.w_scale, given.bias)
            except NotInGraph:
                return None, self._in_graph(given), False
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - what a kernel or library raises must not end a forward pass
                failed = error
                LOG.warn(f"{self.family.name} {selected.source} {type(error).__name__}", selected.failure(error))
                continue
            LOG.answer(self.family.name, problem.id, selected.step)
            if missed:
                online.missed(self, problem, device, untuned)
            LOG.step(f"{problem.id}: {selected.step}: {selected.source}: {selected.words}")
            return call, out, missed
        if failed is not None:
            raise failed
        raise GemmpipeError(f"{self.family.entry_point}: nothing here computes {problem.id} on {device.gfx}")

    def _bind(self, selected: Selected, spec: GemmSpec, device: Device, given: Given) -> Call:
        chosen = selected.chosen
        if chosen.rows is not None:
            inner = any_call(chosen, replace(spec, m=chosen.rows), device, given.out_dtype, borrowed=self.borrowed)
            return padded_call(inner, spec, chosen.rows)
        bound = linear_call(chosen, spec, given)
        bound = bound or kernel_call(chosen, spec, device, given, borrowed=self.borrowed)
        return bound or any_call(chosen, spec, device, given.out_dtype, borrowed=self.borrowed)

    def _in_graph(self, given: Given) -> torch.Tensor:
        """The fallback, inside a graph whose weight was not prepared before: nothing that it makes is kept."""
        problem, device = problem_of(self.family, given), device_of(given.x.get_device())
        spec, chosen = fallback_in_graph(self.family, problem, device, ", or gemmpipe.runtime.prepare(weight)")
        inner_spec = spec if chosen.rows is None else replace(spec, m=chosen.rows)
        call = any_call(chosen, inner_spec, device, given.out_dtype, keep=False)
        if chosen.rows is not None:
            call = padded_call(call, spec, chosen.rows)
        return call(given.x, given.w, given.x_scale, given.w_scale, given.bias)

    def selections(self, problem: Problem, spec: GemmSpec, device: Device) -> Iterator[Selected]:
        """What may answer, best first: the exact row, padded ones, then the rules."""
        return selections(self.tables(), problem, spec, device)


def fallback_in_graph(family: Family, problem: Problem, device: Device, otherwise: str) -> tuple[GemmSpec, Chosen]:
    """What computes in a graph whose weights were not prepared before it; said once a problem."""
    LOG.warn(
        f"graph {problem.id}",
        f"{problem.id}: captured in a graph before its weights were prepared, so the fallback is captured; "
        f"call it once before{otherwise}",
    )
    spec = family.spec(problem)
    return spec, next(fallbacks(family, spec, device))


def _counted(call: Call, untuned: Untuned) -> Call:
    def counted(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        untuned.calls += 1
        return call(x, w, x_scale, w_scale, bias)

    return counted


def _degenerate(given: Given) -> torch.Tensor:
    """The product without a row, a column or an inner element, or on a device without memory (meta)."""
    out = torch.zeros(given.out_shape, dtype=given.out_dtype, device=given.x.device)
    return out if given.bias is None else out.add_(given.bias)
