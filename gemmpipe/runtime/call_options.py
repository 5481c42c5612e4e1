"""Calls with options: an output `y`, a fixed `config`, and aiter's names of arguments."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from gemmpipe.core.errors import UserError, short_repr
from gemmpipe.runtime.copy_log import log_copied_output
from gemmpipe.runtime.dispatch import Dispatch, RecordingDispatch, dispatch_of
from gemmpipe.runtime.fixed_config import fixed_config_dispatch, frozen_config, output_dispatch
from gemmpipe.runtime.moe import RoutedOperands, checked_key, record_mixture, run_mixture
from gemmpipe.runtime.operands import ALIGNMENT, CallOperands, OptionalTensor, dtype_name, flag, operand_type_error
from gemmpipe.runtime.product import autocast_operands, product, traceable_function_name

ProductOperands = tuple[torch.Tensor, torch.Tensor, OptionalTensor, OptionalTensor, OptionalTensor]
"""x, w, x_scale, w_scale, bias."""


class _Output(threading.local):
    """The output of this thread's current call."""

    y: OptionalTensor = None

    def take(self) -> torch.Tensor:
        """The output; an assertion fails if there is none."""
        assert self.y is not None
        return self.y


_OUTPUT = _Output()
_TAKE = _OUTPUT.take  # one object: it is part of a key


@dataclass(frozen=True, kw_only=True, eq=False)
class CallOptions:
    """The options of a call; `dtype` is another name of `out_dtype`, which tuning scripts use."""

    out_dtype: torch.dtype | None
    dtype: torch.dtype | None = None
    y: OptionalTensor = None
    config: object = None
    skip_reduce: bool = False


def product_with_options(family: str, operands: ProductOperands, options: CallOptions) -> torch.Tensor:
    """x [..., K] times w [N, K]^T, into `y` [..., N] if given, with the given configuration or the tuned one.

    Raises UserError for unknown knobs, an output that does not match the operands, and recorded gradients.
    """
    name = traceable_function_name(family)
    x, w, x_scale, w_scale, bias = operands
    try:
        records_gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
        autocast = torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        shape = (*x.shape[:-1], w.shape[-2])
    except (AttributeError, IndexError):
        raise operand_type_error(name, *operands) from None
    if flag(name, "skip_reduce", options.skip_reduce):
        raise UserError(f"{name}: skip_reduce: the parts of a split are added up here, expected False")
    requested = _out_dtype(name, options)
    if options.y is None and options.config is None:
        return product(family, *operands, requested)
    if records_gradients:
        raise UserError(f"{name}: calls with y or config record no gradients: call them under torch.no_grad()")
    if autocast:
        x, w, bias = autocast_operands(family, *operands)
        with torch.autocast(x.device.type, enabled=False):
            typed = replace(options, out_dtype=requested, dtype=None)
            return product_with_options(family, (x, w, x_scale, w_scale, bias), typed)
    out_dtype = requested or (x.dtype if x_scale is None else torch.bfloat16)
    if options.y is not None:
        _check_output(name, options.y, shape, x.device)
    if is_compiling() or type(x) is FakeTensor:
        from gemmpipe.runtime.torch_ops import (  # local import: it loads torch's compiler (2 s)
            config_json,
            register_operators,
        )

        register_operators()
        text = None if options.config is None else config_json(options.config, name)
        full: torch.Tensor = torch.ops.gemmpipe.product(family, *operands, out_dtype, text)
        return full if options.y is None else options.y.copy_(full)
    given = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
    return _run_into_output(family, options, lambda dispatch: _run(family, dispatch, given))


def _run(family: str, dispatch: Dispatch, given: CallOperands) -> torch.Tensor:
    def compute() -> torch.Tensor:
        return dispatch(given.x, given.w, given.x_scale, given.w_scale, given.bias, given.out_dtype)

    plain = dispatch_of(family)
    return plain.run_torch(given, compute) if isinstance(plain, RecordingDispatch) else compute()


def mixture_with_options(family: str, given: RoutedOperands, options: CallOptions) -> torch.Tensor:
    """The experts' output [..., N] in x's type, into `y` if given, with `config` or the tuned configuration."""
    name, key = traceable_function_name(family), checked_key(family, given)
    if options.y is not None:
        _check_output(name, options.y, (*given.x.shape[:-1], given.w2.shape[1]), given.x.device)
        if options.y.dtype != given.x.dtype:
            raise UserError(f"{name}: y is {dtype_name(options.y.dtype)}, expected {dtype_name(given.x.dtype)} as x")

    def run(dispatch: Dispatch) -> torch.Tensor:
        plain = dispatch_of(family)
        if isinstance(plain, RecordingDispatch):
            return record_mixture(plain, dispatch, key, given)
        return run_mixture(dispatch, key, given)

    shared = options.y is not None and _share_memory(options.y, given.x)
    return _run_into_output(family, options, run, shared=shared)


def _run_into_output(
    family: str, options: CallOptions, run: Callable[[Dispatch], torch.Tensor], *, shared: bool = False
) -> torch.Tensor:
    """The call's output in `y`: written by the kernel if it can, else copied, as where it has x's memory (`shared`)."""
    y, config = options.y, options.config
    direct = y is not None and not shared and y.is_contiguous() and not y.data_ptr() & ALIGNMENT
    take = _TAKE if direct else None
    if config is not None:
        dispatch: Dispatch = fixed_config_dispatch(family, frozen_config(config, traceable_function_name(family)), take)
    else:
        dispatch = dispatch_of(family) if take is None else output_dispatch(family, take)
    if y is None:
        return run(dispatch)
    _OUTPUT.y = y if direct else None
    try:
        out = run(dispatch)
    finally:
        _OUTPUT.y = None
    if out.data_ptr() == y.data_ptr() and direct:
        return y
    # A library may return an output of its own, padded rows always do.
    if y.numel():
        log_copied_output(y, direct=direct, shared=shared)
    return y.copy_(out.view(y.shape))


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the tensors have elements in common; also for parts of the same memory with strides."""
    first, second = a.data_ptr(), b.data_ptr()
    if not first or not second:  # no memory, or no elements
        return False
    if not (a.is_contiguous() and b.is_contiguous()):
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return first < second + b.numel() * b.element_size() and second < first + a.numel() * a.element_size()


def _out_dtype(name: str, options: CallOptions) -> torch.dtype | None:
    """The output's type: of `y`, else `dtype`, else `out_dtype`. Raises UserError if they contradict each other."""
    for option, value in (("out_dtype", options.out_dtype), ("dtype", options.dtype)):
        if value is not None and not isinstance(value, torch.dtype):
            raise UserError(f"{name}: {option} is {short_repr(value)}, expected a torch.dtype")
    requested = options.dtype or options.out_dtype
    if options.y is None:
        return requested
    if not isinstance(options.y, torch.Tensor):
        raise UserError(f"{name}: y is {short_repr(options.y)}, expected a tensor or None")
    if options.dtype not in (None, options.y.dtype):
        raise UserError(f"{name}: y is {dtype_name(options.y.dtype)}, expected {dtype_name(options.dtype)} as dtype")
    return options.y.dtype


def _check_output(name: str, y: object, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(y, torch.Tensor):
        raise UserError(f"{name}: y is {short_repr(y)}, expected a tensor or None")
    if tuple(y.shape) != shape:
        raise UserError(f"{name}: y {list(y.shape)}, expected {list(shape)}")
    if y.device != device:
        raise UserError(f"{name}: y is on {y.device}, expected {device} as x")
    if y.requires_grad:
        raise UserError(f"{name}: y records gradients, expected a tensor that does not")
