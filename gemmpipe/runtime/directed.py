"""Calls that say more than their operands: `y` to write into, `config` to run, under the names that scripts use."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from gemmpipe.errors import UserError, shown
from gemmpipe.family import load_family
from gemmpipe.runtime.configured import configured_of, frozen, writing_of
from gemmpipe.runtime.dispatch import Dispatch
from gemmpipe.runtime.dispatches import Recorded, dispatch_of
from gemmpipe.runtime.experts import checked_key, mixed, recorded
from gemmpipe.runtime.operands import ALIGNMENT, Given, Optional, name_of, not_tensors
from gemmpipe.runtime.product import in_autocasts_type, product
from gemmpipe.runtime.routed import Routed

Operands = tuple[torch.Tensor, torch.Tensor, Optional, Optional, Optional]
"""x, w, x_scale, w_scale, bias."""


class _Output(threading.local):
    """The output that this thread's call writes into."""

    y: Optional = None

    def take(self) -> torch.Tensor:
        """That output."""
        assert self.y is not None
        return self.y


_OUTPUT = _Output()
_TAKE = _OUTPUT.take  # one object: it is part of a key


@dataclass(frozen=True, kw_only=True, eq=False)
class Directions:
    """What a call says beside its operands; `dtype` is another name of `out_dtype`, which tuning scripts use."""

    out_dtype: torch.dtype | None
    dtype: torch.dtype | None = None
    y: Optional = None
    config: object = None
    skip_reduce: bool = False


def product_as_directed(family: str, operands: Operands, directed: Directions) -> torch.Tensor:
    """x [..., K] times w [N, K]^T, into `y` [..., N] where it is given, by the configuration where one is given.

    Raises UserError: knobs that are none, an output that does not go with the operands, gradients.
    """
    name = _function(family)
    x, w, x_scale, w_scale, bias = operands
    try:
        learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
        autocast = torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        shape = (*x.shape[:-1], w.shape[-2])
    except (AttributeError, IndexError):
        raise not_tensors(name, *operands) from None
    if directed.skip_reduce:
        raise UserError(f"{name}: skip_reduce: the parts of a split are added up here, expected False")
    asked = _out_dtype(name, directed)
    if directed.y is None and directed.config is None:
        return product(family, *operands, asked)
    if learns:
        raise UserError(f"{name}: calls with y or config record no gradients: call them under torch.no_grad()")
    if autocast:
        x, w, bias = in_autocasts_type(family, *operands)
        with torch.autocast(x.device.type, enabled=False):
            typed = replace(directed, out_dtype=asked, dtype=None)
            return product_as_directed(family, (x, w, x_scale, w_scale, bias), typed)
    out_dtype = asked or (x.dtype if x_scale is None else torch.bfloat16)
    if directed.y is not None:
        _check_output(name, directed.y, shape, x.device)
    if is_compiling() or type(x) is FakeTensor:
        from gemmpipe.runtime.compiled import as_text, registered  # not above: it loads torch's compiler (2 s)

        registered()
        text = None if directed.config is None else as_text(directed.config, name)
        full: torch.Tensor = torch.ops.gemmpipe.product(family, *operands, out_dtype, text)
        return full if directed.y is None else directed.y.copy_(full)
    given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
    return _into(family, directed, lambda dispatch: _run(family, dispatch, given))


@cache
def function_name(family: str) -> str:
    """The name of the family's function."""
    return load_family(family.partition("+")[0]).entry_point


def _function(family: str) -> str:
    """As `function_name`; a compiler keeps the answer, since finding a family reads folders."""
    if is_compiling():
        from gemmpipe.runtime.compiled import constant_function_name  # not above: it loads torch's compiler (2 s)

        name: str = constant_function_name(family)
        return name
    return function_name(family)


def _run(family: str, dispatch: Dispatch, given: Given) -> torch.Tensor:
    def compute() -> torch.Tensor:
        return dispatch(given.x, given.w, given.x_scale, given.w_scale, given.bias, given.out_dtype)

    plain = dispatch_of(family)
    return plain.torchs_own(given, compute) if isinstance(plain, Recorded) else compute()


def mixture_as_directed(family: str, given: Routed, directed: Directions) -> torch.Tensor:
    """What the experts give, [..., N] in x's type, into `y` where it is given, by `config` where it is given."""
    name, key = _function(family), checked_key(family, given)
    if directed.y is not None:
        _check_output(name, directed.y, (*given.x.shape[:-1], given.w2.shape[1]), given.x.device)
        if directed.y.dtype != given.x.dtype:
            raise UserError(f"{name}: y is {name_of(directed.y.dtype)}, expected {name_of(given.x.dtype)} as x")

    def run(dispatch: Dispatch) -> torch.Tensor:
        plain = dispatch_of(family)
        if isinstance(plain, Recorded):
            return recorded(plain, dispatch, key, given)
        return mixed(dispatch, key, given)

    return _into(family, directed, run)


def _into(family: str, directed: Directions, run: Callable[[Dispatch], torch.Tensor]) -> torch.Tensor:
    """The call, written into `y`: at once where kernels can write there, else by a copy."""
    y, config = directed.y, directed.config
    direct = y is not None and y.is_contiguous() and not y.data_ptr() & ALIGNMENT
    take = _TAKE if direct else None
    if config is not None:
        dispatch: Dispatch = configured_of(family, frozen(config, _function(family)), take)
    else:
        dispatch = dispatch_of(family) if take is None else writing_of(family, take)
    if y is None:
        return run(dispatch)
    _OUTPUT.y = y if direct else None
    try:
        out = run(dispatch)
    finally:
        _OUTPUT.y = None
    # A library may have made an output of its own, and padded rows always do.
    return y if out.data_ptr() == y.data_ptr() and direct else y.copy_(out.view(y.shape))


def _out_dtype(name: str, directed: Directions) -> torch.dtype | None:
    """The output's type: of `y`, else `dtype`, else `out_dtype`. Raises UserError where they contradict each other."""
    for word, value in (("out_dtype", directed.out_dtype), ("dtype", directed.dtype)):
        if value is not None and not isinstance(value, torch.dtype):
            raise UserError(f"{name}: {word} is {shown(value)}, expected a torch.dtype")
    asked = directed.dtype or directed.out_dtype
    if directed.y is None:
        return asked
    if not isinstance(directed.y, torch.Tensor):
        raise UserError(f"{name}: y is {shown(directed.y)}, expected a tensor or None")
    if directed.dtype not in (None, directed.y.dtype):
        raise UserError(f"{name}: y is {name_of(directed.y.dtype)}, expected {name_of(directed.dtype)} as dtype says")
    return directed.y.dtype


def _check_output(name: str, y: object, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(y, torch.Tensor):
        raise UserError(f"{name}: y is {shown(y)}, expected a tensor or None")
    if tuple(y.shape) != shape:
        raise UserError(f"{name}: y {list(y.shape)}, expected {list(shape)}")
    if y.device != device:
        raise UserError(f"{name}: y is on {y.device}, expected {device} as x")
    if y.requires_grad:
        raise UserError(f"{name}: y records gradients, expected a tensor that does not")
