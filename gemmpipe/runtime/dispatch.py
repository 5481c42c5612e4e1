"""From operands to a tuned call: bound once per key under a lock, then one dictionary look-up.

The process has one dispatch per family; while products are captured it also counts them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from gemmpipe.core.data import Device, Problem
from gemmpipe.core.errors import UserError, short_repr
from gemmpipe.family import GemmSpec, load_family
from gemmpipe.runtime.binding import (
    GemmCall,
    NotCapturable,
    biased_call,
    bind_kernel,
    generic_call,
    linear_call,
    padded_call,
)
from gemmpipe.runtime.cache import BindRequest, BoundCall, CallKey, KernelCache, device_by_index
from gemmpipe.runtime.capture.recorder import Recorder, requested_recorder
from gemmpipe.runtime.capture.watcher import capture_paused, current_module
from gemmpipe.runtime.operands import (
    CallOperands,
    OptionalTensor,
    memory_orders,
    on_meta,
    operand_type_error,
    problem_of,
    product_spec,
    with_order,
)
from gemmpipe.runtime.select import LookupResult
from gemmpipe.runtime.selection_log import UntunedKey

SHUFFLED = "bpreshuffle"
"""The key column of families with weights in tiles or row-major."""
_AITER_SHUFFLED_ATTRIBUTE = "is_shuffled"
"""The attribute that aiter's `shuffle_weight` sets on the returned tensor."""


_MAX_STRIDES = 64
"""Strides of a key's scales for which the memory order is remembered."""


@dataclass(frozen=True, kw_only=True)
class Dispatch(KernelCache):
    """All that calls of one family need; `flag` is a key column that is true for all of them, or empty."""

    flag: str = ""

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        x_scale: OptionalTensor,
        w_scale: OptionalTensor,
        bias: OptionalTensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """The product. Raises UserError for operands that are not a product of this family."""
        # All that a bound call relies on; it checks layouts and addresses itself.
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
            raise operand_type_error(self.family.entry_point, x, w, x_scale, w_scale, bias) from None
        if key[5] == -1:
            key = (*key, *on_meta(x, w, x_scale, w_scale, bias))
        call = self.calls.get(key)
        try:
            if call is not None:
                return call(x, w, x_scale, w_scale, bias)
            given = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
            return self._bind_and_run(key, given)
        except NotCapturable:
            given = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
            return self._run_in_graph(given)

    def run_torch(self, given: CallOperands, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a product that is torch's own for a reason other than the tables."""
        return compute()

    def checked_product(self, given: CallOperands) -> tuple[Problem, GemmSpec]:
        """The family's key for these operands, and the product. Raises UserError if they are not a product of it."""
        if not isinstance(given.out_dtype, torch.dtype):
            raise UserError(
                f"{self.family.entry_point}: out_dtype is {short_repr(given.out_dtype)}, expected a torch.dtype"
            )
        shuffled = getattr(given.w, _AITER_SHUFFLED_ATTRIBUTE, False) is True
        if shuffled and not self.flag and any(column.name == SHUFFLED for column in self.family.key_columns):
            raise UserError(
                f"{self.family.entry_point}: w is shuffled (w.{_AITER_SHUFFLED_ATTRIBUTE}), expected {SHUFFLED}=True"
            )
        problem = problem_of(self.family, given, self.flag)
        return problem, product_spec(self.family, given, problem)

    def check_without_rows(self, spec: GemmSpec, device: Device) -> None:
        """Checks of a product without rows in addition to those of its operands: none, as nothing is looked up."""

    def _bind_and_run(self, key: CallKey, given: CallOperands) -> torch.Tensor:
        """The first call of a key: check, look up, bind, run, and keep the call. Raises NotCapturable."""
        problem, spec = self.checked_product(given)
        if given.x.is_meta or 0 in (spec.batch, spec.m, spec.n, spec.k):
            if not given.x.is_meta:
                self.check_without_rows(spec, device_by_index(given.x.get_device()))
            return _degenerate_output(given)
        if spec.x_scale is not None and spec.x_scale.granularity == "block" and self.tables().orders:
            call = self.calls[key] = self._call_by_scale_order(key, given.out_dtype)
            return call(given.x, given.w, given.x_scale, given.w_scale, given.bias)
        return self.first_call(key, self._bind_request(problem, spec, given))

    def _bind_request(
        self, problem: Problem, spec: GemmSpec, given: CallOperands, orders: tuple[str, ...] = ()
    ) -> BindRequest:
        device = device_by_index(given.x.get_device())
        return BindRequest(
            problem=problem,
            spec=spec,
            device=device,
            bind=lambda selected: self._bind(selected, spec, device, given),
            run=lambda call: call(given.x, given.w, given.x_scale, given.w_scale, given.bias),
            with_counter=_counting_call,
            orders=orders,
        )

    def _call_by_scale_order(self, key: CallKey, out_dtype: torch.dtype) -> GemmCall:
        """A call that dispatches by the memory order of x's scales, for tables with rows for a single order.

        The order is determined once for each strides of the scales (2 us of the host's time with the second look-up).
        """
        calls, missed = self.calls, self._missed
        by_strides: dict[tuple[int, ...], BoundCall] = {}

        def call(
            x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
        ) -> torch.Tensor:
            assert x_scale is not None  # part of the key
            strides = x_scale.stride()
            found = by_strides.get(strides)
            if found is None:
                orders = memory_orders(x_scale)
                own = (*key, orders)
                found = calls.get(own)
                if found is None:
                    given = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
                    problem = with_order(problem_of(self.family, given, self.flag), orders)
                    return self.first_call(
                        own, self._bind_request(problem, product_spec(self.family, given, problem), given, orders)
                    )
                if own not in missed and len(by_strides) < _MAX_STRIDES:  # a reload looks up what had no row again
                    by_strides[strides] = found
            out: torch.Tensor = found(x, w, x_scale, w_scale, bias)
            return out

        return call

    def _bind(self, selected: LookupResult, spec: GemmSpec, device: Device, given: CallOperands) -> GemmCall:
        runnable = selected.runnable
        if given.bias is not None and not spec.bias:
            return biased_call(self._bind(selected, spec, device, replace(given, bias=None)))
        if runnable.rows is not None:
            inner = generic_call(
                runnable, replace(spec, m=runnable.rows), device, given.out_dtype, graph_pool=self.graph_pool
            )
            return padded_call(inner, spec, runnable.rows)
        bound = linear_call(runnable, spec, given) if self.make_out is None else None
        bound = bound or bind_kernel(runnable, spec, device, given, graph_pool=self.graph_pool, make_out=self.make_out)
        return bound or generic_call(
            runnable, spec, device, given.out_dtype, graph_pool=self.graph_pool, make_out=self.make_out
        )

    def _run_in_graph(self, given: CallOperands) -> torch.Tensor:
        """The fallback, inside a graph without a prepared weight; nothing that it makes is kept."""
        problem, device = problem_of(self.family, given, self.flag), device_by_index(given.x.get_device())
        spec, runnable = self.select_for_graph(problem, device, ", or gemmpipe.runtime.prepare_weight(weight)")
        inner_spec = spec if runnable.rows is None else replace(spec, m=runnable.rows)
        call = generic_call(runnable, inner_spec, device, given.out_dtype, keep=False)
        if runnable.rows is not None:
            call = padded_call(call, spec, runnable.rows)
        if given.bias is not None and not spec.bias:
            call = biased_call(call)
        return call(given.x, given.w, given.x_scale, given.w_scale, given.bias)


def _counting_call(call: GemmCall, untuned: UntunedKey) -> GemmCall:
    def counted(
        x: torch.Tensor, w: torch.Tensor, x_scale: OptionalTensor, w_scale: OptionalTensor, bias: OptionalTensor
    ) -> torch.Tensor:
        untuned.calls += 1
        return call(x, w, x_scale, w_scale, bias)

    return counted


def _degenerate_output(given: CallOperands) -> torch.Tensor:
    """The output of a product with a size of 0, or on a device without memory (meta)."""
    out = torch.zeros(given.out_shape, dtype=given.out_dtype, device=given.x.device)
    return out if given.bias is None else out.add_(given.bias)


@dataclass(frozen=True, kw_only=True)
class RecordingDispatch(Dispatch):
    """A dispatch that also counts every product."""

    recorder: Recorder

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        x_scale: OptionalTensor,
        w_scale: OptionalTensor,
        bias: OptionalTensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """As in Dispatch, and counted."""
        given = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
        return self._recording(
            given, lambda: super(RecordingDispatch, self).__call__(x, w, x_scale, w_scale, bias, out_dtype)
        )

    def run_torch(self, given: CallOperands, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As in Dispatch, and counted."""
        return self._recording(given, compute)

    def _recording(self, given: CallOperands, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        with capture_paused():
            out = compute()
        if out.numel() and given.x.shape[-1]:
            with self.recorder.logging_errors():
                orders = memory_orders(given.x_scale)  # a single row or column has both orders
                problem = with_order(problem_of(self.family, given, self.flag), orders if len(orders) == 1 else ())
                self.recorder.add(
                    self.family.name, {**dict(problem.key), "op": self.family.entry_point}, current_module()
                )
        return out


EAGER: dict[str, Dispatch] = {}
"""The process's dispatches by family, for calls outside compiled graphs; read directly, without a function call."""
_COMPILED: dict[str, Dispatch] = {}
WITH_OPTIONS: dict[tuple[object, ...], Dispatch] = {}
"""The dispatches of calls with a configuration or an output."""
_LOCK = threading.Lock()


def dispatch_of(family: str, *, graph_pool: bool = False) -> Dispatch:
    """The process's dispatch of a family, made at the first use; `family+column`: with that key column true."""
    held = _COMPILED if graph_pool else EAGER
    found = held.get(family)
    if found is None:
        with _LOCK:
            recorder = requested_recorder()
            kind = Dispatch if recorder is None else partial(RecordingDispatch, recorder=recorder)
            name, _, flag = family.partition("+")
            found = held.setdefault(family, kind(family=load_family(name), flag=flag, graph_pool=graph_pool))
    return found


def reload() -> None:
    """Read the tables again at the next call and look up every key again: after tuning or a changed environment."""
    with _LOCK:
        EAGER.clear()
        _COMPILED.clear()
        WITH_OPTIONS.clear()
