"""From operands to a tuned call: found once a key under a lock, one dictionary look-up ever after."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gemmpipe.data import Device, Problem
from gemmpipe.errors import UserError, shown
from gemmpipe.family import GemmSpec
from gemmpipe.runtime.answering import Answering, CallKey, FirstCall, device_of
from gemmpipe.runtime.bound import kernel_call
from gemmpipe.runtime.calls import Call, NotInGraph, any_call, linear_call, padded_call
from gemmpipe.runtime.operands import (
    Given,
    Optional,
    not_tensors,
    orders_of,
    problem_of,
    product_of,
    with_order,
    without_memory,
)
from gemmpipe.runtime.selecting import Selected
from gemmpipe.runtime.selection import Untuned

SHUFFLED = "bpreshuffle"
"""The key column of families whose weights may lie in tiles or not."""
_AITERS_MARK = "is_shuffled"
"""What aiter's `shuffle_weight` sets on the tensor that it returns."""


@dataclass(frozen=True, kw_only=True)
class Dispatch(Answering):
    """Everything that calls of one family need; `flag` is the key column that is true of all of them, or empty."""

    flag: str = ""

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
        try:
            if call is not None:
                return call(x, w, x_scale, w_scale, bias)
            given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
            return self._first(key, given)
        except NotInGraph:
            given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
            return self._in_graph(given)

    def torchs_own(self, given: Given, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What is left to torch for a reason other than the tables."""
        return compute()

    def checked(self, given: Given) -> tuple[Problem, GemmSpec]:
        """The family's key for these operands, and the product. Raises UserError where they are none."""
        if not isinstance(given.out_dtype, torch.dtype):
            raise UserError(f"{self.family.entry_point}: out_dtype is {shown(given.out_dtype)}, expected a torch.dtype")
        shuffled = getattr(given.w, _AITERS_MARK, False) is True
        if shuffled and not self.flag and any(column.name == SHUFFLED for column in self.family.key_columns):
            raise UserError(f"{self.family.entry_point}: w is shuffled (w.{_AITERS_MARK}), expected {SHUFFLED}=True")
        problem = problem_of(self.family, given, self.flag)
        return problem, product_of(self.family, given, problem)

    def _first(self, key: CallKey, given: Given) -> torch.Tensor:
        """The first call of a key: check, look up, bind, run, and keep what ran. Raises NotInGraph."""
        problem, spec = self.checked(given)
        if given.x.is_meta or 0 in (spec.batch, spec.m, spec.n, spec.k):
            return _degenerate(given)
        if spec.x_scale is not None and spec.x_scale.granularity == "block" and self.tables().orders:
            call = self.calls[key] = self._by_order(key, given.out_dtype)
            return call(given.x, given.w, given.x_scale, given.w_scale, given.bias)
        return self.first(key, self._asked(problem, spec, given))

    def _asked(self, problem: Problem, spec: GemmSpec, given: Given, orders: tuple[str, ...] = ()) -> FirstCall:
        device = device_of(given.x.get_device())
        return FirstCall(
            problem=problem,
            spec=spec,
            device=device,
            bind=lambda selected: self._bind(selected, spec, device, given),
            run=lambda call: call(given.x, given.w, given.x_scale, given.w_scale, given.bias),
            counted=_counted,
            orders=orders,
        )

    def _by_order(self, key: CallKey, out_dtype: torch.dtype) -> Call:
        """A call that is answered by how x's scales lie, where rows are for one layout of them alone."""
        calls = self.calls

        def call(
            x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional
        ) -> torch.Tensor:
            orders = orders_of(x_scale)
            own = (*key, orders)
            found = calls.get(own)
            if found is not None:
                out: torch.Tensor = found(x, w, x_scale, w_scale, bias)
                return out
            given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
            problem = with_order(problem_of(self.family, given, self.flag), orders)
            return self.first(own, self._asked(problem, product_of(self.family, given, problem), given, orders))

        return call

    def _bind(self, selected: Selected, spec: GemmSpec, device: Device, given: Given) -> Call:
        chosen = selected.chosen
        if chosen.rows is not None:
            inner = any_call(chosen, replace(spec, m=chosen.rows), device, given.out_dtype, borrowed=self.borrowed)
            return padded_call(inner, spec, chosen.rows)
        bound = linear_call(chosen, spec, given) if self.make_out is None else None
        bound = bound or kernel_call(chosen, spec, device, given, borrowed=self.borrowed, make_out=self.make_out)
        return bound or any_call(chosen, spec, device, given.out_dtype, borrowed=self.borrowed, make_out=self.make_out)

    def _in_graph(self, given: Given) -> torch.Tensor:
        """The fallback, inside a graph whose weight was not prepared before: nothing that it makes is kept."""
        problem, device = problem_of(self.family, given, self.flag), device_of(given.x.get_device())
        spec, chosen = self.in_graph(problem, device, ", or gemmpipe.runtime.prepare(weight)")
        inner_spec = spec if chosen.rows is None else replace(spec, m=chosen.rows)
        call = any_call(chosen, inner_spec, device, given.out_dtype, keep=False)
        if chosen.rows is not None:
            call = padded_call(call, spec, chosen.rows)
        return call(given.x, given.w, given.x_scale, given.w_scale, given.bias)


def _counted(call: Call, untuned: Untuned) -> Call:
    def counted(x: torch.Tensor, w: torch.Tensor, x_scale: Optional, w_scale: Optional, bias: Optional) -> torch.Tensor:
        untuned.calls += 1
        return call(x, w, x_scale, w_scale, bias)

    return counted


def _degenerate(given: Given) -> torch.Tensor:
    """The product without a batch, a row, a column or an inner element, or on a device without memory (meta)."""
    out = torch.zeros(given.out_shape, dtype=given.out_dtype, device=given.x.device)
    return out if given.bias is None else out.add_(given.bias)
