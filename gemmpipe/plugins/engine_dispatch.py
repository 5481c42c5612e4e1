"""Dispatch of an engine's products per M: a key with a tuned row runs its candidate, any other the engine's kernel.

An engine registers its kernels by name, since a compiled graph can hold a name but no function. The name states all
that the kernel depends on but its operands, and not the layer: equal layers then have equal graphs, which the engine
compiles once.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from gemmpipe.core.data import Device
from gemmpipe.core.errors import UserError
from gemmpipe.launch.launch import KernelImplementation
from gemmpipe.plugins.tuned_products import reads_weight_as_given
from gemmpipe.runtime.binding import GemmCall, is_capturing
from gemmpipe.runtime.cache import BindRequest, BoundCall, CallKey, KernelCache, device_by_index
from gemmpipe.runtime.dispatch import Dispatch, dispatch_of
from gemmpipe.runtime.operands import CallOperands, OptionalTensor, memory_orders
from gemmpipe.runtime.select import LookupResult, lookup_results
from gemmpipe.runtime.selection_log import LOG

MAX_KEYS = 16384
"""Keys that are remembered per kernel of an engine; beyond, all are looked up again."""
ENGINE_STEP = "engine"
"""The step of a key without a row in `dispatch_report`: the engine's own kernel."""

DTYPES_16BIT = (torch.bfloat16, torch.float16)
SCALE_BLOCK = 128
"""Elements along K, or along K and N, that share a scale in the engines' block-scaled products."""
KERNEL_ATTRIBUTE = "gemmpipe_kernel"
"""The attribute of a layer: the name of the engine's kernel if rows may answer, else empty; of a function: replaced."""
LEAST_GAIN = 1.02
"""Rows ahead of an engine's kernel by less are left to it: rows ahead by 1 % made a bf16 prefill of 2,048 tokens 2 %
slower (H200, docs/results/engines.md)."""

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x [M, K] in 16 bits -> (x in fp8, its scales)."""
TunedCall = tuple[BoundCall, torch.Tensor]
"""The bound call of a key's row, and its output for the operands of the first call."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineAnswers:
    """The rows that an engine's own kernel answers, and when a tuned product's launch may begin."""

    libtypes: frozenset[str] = frozenset()
    """Backends of gemmpipe that run this kernel's library.

    A row with one of them is answered by this kernel, and one that is ahead of them by less than LEAST_GAIN, where it
    was timed beside them.
    """
    is_baseline: bool = False
    """True for a kernel that is the rows' baseline: rows ahead of it by less than LEAST_GAIN are left to it too."""

    after_quantiser: bool = False
    """True if x comes from our quantiser, whose end the product's launch may overlap."""

    def keeps(self, selected: LookupResult) -> str:
        """Why a row is answered by this kernel; empty if its own candidate answers."""
        if selected.runnable.candidate.backend in self.libtypes:
            return "the row's library is the engine's"
        baseline = self.is_baseline and selected.gain is not None and selected.gain < LEAST_GAIN
        beside = any(selected.backend_ratios.get(name, LEAST_GAIN) < LEAST_GAIN for name in self.libtypes)
        if baseline or beside:
            return f"ahead of the engine's kernel by less than {100 * (LEAST_GAIN - 1):.0f} %"
        return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineKernel(EngineAnswers):
    """A kernel of an engine, by the operands of a product."""

    name: str
    call: GemmCall
    """(x, w, x_scale, w_scale, bias) -> out [..., N], for operands in the form of a tuned candidate's."""
    from_16bit: GemmCall | None = None
    """The same for x in 16 bits and without x_scale, if the engine's kernel quantises x itself."""
    quantise: Quantise | None = None
    """x's quantisation for a tuned candidate; given with `from_16bit`."""


_KERNELS: dict[str, EngineKernel] = {}
_DISPATCHES: dict[tuple[str, str], "EngineDispatch"] = {}
_LOADING: list[Callable[[], bool]] = []
_LOCK = threading.Lock()


def look_up_unless(loading: Callable[[], bool]) -> None:
    """While `loading()` is true, keys that have not been called before have the engine's kernel.

    An engine that loads weights into a pool of its own may discard all of the pool later: memory that launches keep,
    as arrival counters, must not be made there.
    """
    if loading not in _LOADING:
        _LOADING.append(loading)


def may_look_up(device: Device) -> bool:
    """True if a key may be looked up now, and its candidate compiled and run."""
    return not is_capturing(device) and not any(loading() for loading in _LOADING)


def register_kernel(kernel: EngineKernel) -> str:
    """Register an engine's kernel and return its name; the first of a name is kept: all of a name compute the same."""
    with _LOCK:
        _KERNELS.setdefault(kernel.name, kernel)
    return kernel.name


def clear_dispatches() -> None:
    """Look up every key again at its next call: after tables have changed. Registered kernels are kept."""
    with _LOCK:
        _DISPATCHES.clear()


def tuned_call(cache: KernelCache, request: BindRequest, kernel: EngineAnswers) -> TunedCall | None:
    """The first row's call that runs with these operands, or None: the engine's kernel is used then.

    `kernel`: the engine's, which may answer rows itself. Raises torch.OutOfMemoryError. Any other failure of a
    candidate is logged, and the next row is tried.
    """
    results = lookup_results(cache.tables(), request.problem, request.spec, request.device, request.orders)
    for selected in _usable(results, kernel):
        if why := kernel.keeps(selected):
            LOG.record_step(cache.family.name, request.problem.id, ENGINE_STEP)
            LOG.log_step(f"{request.problem.id}: {ENGINE_STEP}: {selected.source}: {why}")
            return None
        try:
            call = request.bind(_launched_early(selected) if kernel.after_quantiser else selected)
            if call is None:
                continue
            out = request.run(call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of a candidate must not end a forward pass
            LOG.warn(f"{cache.family.name} {selected.source} {type(error).__name__}", selected.failure_message(error))
            continue
        LOG.record_step(cache.family.name, request.problem.id, selected.step)
        LOG.log_step(f"{request.problem.id}: {selected.step}: {selected.source}: {selected.description}")
        return call, out
    LOG.record_step(cache.family.name, request.problem.id, ENGINE_STEP)
    LOG.log_step(f"{request.problem.id}: {ENGINE_STEP}: no row, the engine's own kernel")
    return None


def _launched_early(selected: LookupResult) -> LookupResult:
    """The same, with a launch that begins while the previous kernel ends."""
    runnable = selected.runnable
    if not isinstance(runnable.implementation, KernelImplementation):
        return selected
    early = replace(runnable.implementation, launch_pdl=True)
    return replace(selected, runnable=replace(runnable, implementation=early))


def _usable(results: Iterator[LookupResult], kernel: EngineAnswers) -> Iterator[LookupResult]:
    """The tuned rows that read the weight in the engine's form, and those that the engine's kernel answers."""
    for selected in results:
        if selected.step == "fallback":
            return
        if kernel.keeps(selected) or reads_weight_as_given(selected.runnable):
            yield selected
        else:
            LOG.warn(
                f"form {selected.source}",
                f"{selected.source}: {selected.description}: skipped in an engine: it keeps another form of the weight",
            )


@dataclass(frozen=True, kw_only=True)
class EngineDispatch(Dispatch):
    """A dispatch with the engine's kernel in place of gemmpipe's default configurations.

    Inside a graph capture a key that has not been called before has the engine's kernel, since nothing may be compiled
    or loaded there; it is looked up at its next call outside. The same holds while weights are loaded.
    """

    kernel: EngineKernel
    answered: dict[tuple[int, ...], bool] = field(default_factory=dict)
    """For x in 16 bits: (rows, N, K) -> whether a row answers."""

    def product_16bit(
        self, x: torch.Tensor, w: torch.Tensor, w_scale: OptionalTensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """x [M, K] in 16 bits times w [N, K]^T in fp8; x is quantised here only if a row answers."""
        assert self.kernel.from_16bit is not None
        assert self.kernel.quantise is not None
        sizes = (x.shape[:-1].numel(), *w.shape)
        answered = self.answered.get(sizes)
        if answered is None and may_look_up(device_by_index(x.get_device())):
            answered = self._look_up(sizes, x, w, w_scale, out_dtype)
        if not answered:
            return self.kernel.from_16bit(x, w, None, w_scale, None)
        quantised, x_scale = self.kernel.quantise(x)
        return self(quantised, w, x_scale, w_scale, None, out_dtype)

    def first_call(self, key: CallKey, request: BindRequest) -> torch.Tensor:
        """Run the first call of a key, by a row or by the engine's kernel, and keep it."""
        if not may_look_up(request.device):
            return request.run(self.kernel.call)
        with self.lock:
            call = self.calls.get(key)
            if call is None:
                tuned = tuned_call(self, request, self.kernel)
                if tuned is not None:
                    self._keep(key, tuned[0])
                    return tuned[1]
                call = self._keep(key, self.kernel.call)
        return request.run(call)

    def _bind_and_run(self, key: CallKey, given: CallOperands) -> torch.Tensor:
        try:
            return super()._bind_and_run(key, given)
        except UserError as error:  # no product of the family, for which the engine has a kernel
            LOG.log_step(f"{self.family.name}: {ENGINE_STEP}: {error}")
            call = self._keep(key, self.kernel.call)
            return call(given.x, given.w, given.x_scale, given.w_scale, given.bias)

    def _run_in_graph(self, given: CallOperands) -> torch.Tensor:
        return self.kernel.call(given.x, given.w, given.x_scale, given.w_scale, given.bias)

    def _keep(self, key: CallKey, call: BoundCall) -> BoundCall:
        if len(self.calls) >= MAX_KEYS:
            self.calls.clear()
        self.calls[key] = call
        return call

    def _look_up(
        self, sizes: tuple[int, ...], x: torch.Tensor, w: torch.Tensor, w_scale: OptionalTensor, out_dtype: torch.dtype
    ) -> bool:
        """True if these sizes have a row; found by one call and kept."""
        assert self.kernel.quantise is not None
        if 0 in sizes:
            return False
        quantised, x_scale = self.kernel.quantise(x)
        given = CallOperands(x=quantised, w=w, x_scale=x_scale, w_scale=w_scale, bias=None, out_dtype=out_dtype)
        try:
            problem, spec = self.checked_product(given)
            device = device_by_index(x.get_device())
            results = lookup_results(self.tables(), problem, spec, device, self._orders(x_scale))
            first = next(_usable(results, self.kernel), None)
            why = "no row" if first is None else self.kernel.keeps(first)
            found = not why
            if not found:
                LOG.record_step(self.family.name, problem.id, ENGINE_STEP)
                LOG.log_step(f"{problem.id}: {ENGINE_STEP}: {why}, the engine's own kernel")
        except UserError:
            found = False
        if len(self.answered) >= MAX_KEYS:
            self.answered.clear()
        self.answered[sizes] = found
        return found

    def _orders(self, x_scale: torch.Tensor) -> tuple[str, ...]:
        return memory_orders(x_scale) if self.tables().orders else ()


def engine_dispatch(family: str, name: str) -> EngineDispatch:
    """The process's dispatch of a family with a registered kernel. Raises KeyError for a name without a kernel."""
    found = _DISPATCHES.get((family, name))
    if found is None:
        plain = dispatch_of(family)
        plain.tables()
        made = EngineDispatch(family=plain.family, graph_pool=True, _tables=plain._tables, kernel=_KERNELS[name])
        with _LOCK:
            found = _DISPATCHES.setdefault((family, name), made)
    return found
