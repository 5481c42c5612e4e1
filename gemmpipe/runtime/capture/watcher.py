"""Counting every matrix product of a PyTorch program where torch executes it, each once for any caller.

Ranks that torchrun starts, directly or through another launcher, count their products too.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import nn
from torch.backends.mha import get_fastpath_enabled, set_fastpath_enabled
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemmpipe.runtime.capture.recorder import Recorder, capturing_spawned
from gemmpipe.runtime.operands import dtype_name
from gemmpipe.sources.products import (
    READERS,
    Argument,
    ObservedProduct,
    Operand,
    foreign_product_of,
    product_of,
    reader_name,
)

_UNBUFFERED = "-u"  # the first argument of every Python that torchrun starts
_CAPTURE = ("-m", "gemmpipe.capture")


@contextmanager
def capturing_launched_ranks() -> Iterator[None]:
    """Within the block a rank starts as `python -u -m gemmpipe.capture script`; GEMMPIPE_CAPTURE names its file.

    A command that torchrun does not run with Python (`--no-python`) starts unchanged.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.launcher.api import elastic_launch

    before: Any = elastic_launch.__call__

    def launch(self: Any, *args: Any) -> Any:
        if args[:1] == (_UNBUFFERED,) and args[1 : 1 + len(_CAPTURE)] != _CAPTURE:
            args = (_UNBUFFERED, *_CAPTURE, *args[1:])
        return before(self, *args)

    setattr(elastic_launch, "__call__", launch)  # noqa: B010  mypy knows it as a method
    try:
        yield
    finally:
        setattr(elastic_launch, "__call__", before)  # noqa: B010


class _ThreadState(threading.local):
    paused: bool = False
    modules: tuple[str, ...] = ()


_TORCH_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")
"""Namespaces of torch's own operators; operators of others are decomposed to find products in them."""
THREAD_STATE = _ThreadState()
"""This thread's state: `paused` while a caller counts the product, and the names of the modules being called."""


def current_module() -> str:
    """The name of the innermost module that is being called; empty if unknown."""
    return THREAD_STATE.modules[-1] if THREAD_STATE.modules else ""


@contextmanager
def capture_paused() -> Iterator[None]:
    """Products within the block are not counted."""
    before, THREAD_STATE.paused = THREAD_STATE.paused, True
    try:
        yield
    finally:
        THREAD_STATE.paused = before


class GemmCountingMode(TorchDispatchMode):
    """Counts the products of the thread that enters it, each once for any calling operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet is None or _is_tracing():  # None: a higher-order operator of torch
            return func(*args, **kwargs)
        foreign = func.namespace not in _TORCH_NAMESPACES
        name = packet.__name__ if foreign else reader_name(packet.__name__)
        read = foreign_product_of if foreign else product_of
        arguments: list[Argument] = []
        with self._recorder.logging_errors():
            found = _arguments(func, args, kwargs) if foreign or name in READERS else []
            if found and (name in READERS or read(name, found, "")):
                arguments = found
        if arguments:
            # Operators that torch executes inside this one are not dispatched here: each product counts once.
            out = func(*args, **kwargs)
            with self._recorder.logging_errors():
                self._count(name, read(name, arguments, _dtype_of(out, args)))
            return out
        # Under inference mode composite operators (einsum, attention) arrive undecomposed.
        with self:
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        return self._decompose(func, args, kwargs) if foreign else func(*args, **kwargs)

    def _count(self, name: str, found: ObservedProduct | None) -> None:
        if found is not None and not THREAD_STATE.paused:
            family, values = found
            self._recorder.add(family, {**values, "op": name}, current_module())

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a custom operator with this mode on, which torch disables inside: its inner operators are counted."""
        keys = [torch._C._dispatch_keys(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not keys or any(each.has(torch._C.DispatchKey.Python) for each in keys):
            return func(*args, **kwargs)  # a tensor subclass dispatches here again
        below = reduce(or_, keys) & torch._C._after_ADInplaceOrView_keyset
        with self:
            return func.redispatch(below, *args, **kwargs)


class Watcher:
    """Counts the products of this thread, and of threads, processes of multiprocessing and ranks started within.

    Layer names come from the modules being called. Compiled functions run eagerly: torch refuses to compile under a
    dispatch mode, and the products are the same. Products in a CUDA graph count at its capture, not at replays.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names: dict[int, str] = {}
        self._left = ExitStack()

    def __enter__(self) -> "Watcher":
        for hook in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            self._left.callback(hook.remove)
        self._left.callback(setattr, threading.Thread, "start", threading.Thread.start)
        setattr(threading.Thread, "start", self._counting_start(threading.Thread.start))  # noqa: B010  mypy knows it as a method
        self._left.enter_context(capturing_spawned(self._recorder.path, Watcher))
        self._left.enter_context(capturing_launched_ranks())
        self._left.enter_context(torch.compiler.set_stance("force_eager"))
        # torch's fused encoder layers hide their products; without the fast path they are linear layers.
        self._left.callback(set_fastpath_enabled, get_fastpath_enabled())
        set_fastpath_enabled(False)
        self._left.enter_context(GemmCountingMode(self._recorder))
        return self

    def __exit__(self, *error: Any) -> None:
        self._left.close()

    def _counting_start(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """`Thread.start` for threads that count: a dispatch mode is per thread."""

        def counted(thread: threading.Thread) -> None:
            run = thread.run

            def run_counted() -> None:
                with GemmCountingMode(self._recorder):
                    run()

            thread.run = run_counted  # type: ignore[method-assign]
            start(thread)

        return counted

    def _enter(self, module: nn.Module, args: object) -> None:
        if not THREAD_STATE.modules:  # the outermost module has all names below it
            with self._recorder.logging_errors():
                self._names.update({id(inner): _plain_module_name(name) for name, inner in module.named_modules()})
        THREAD_STATE.modules = (*THREAD_STATE.modules, self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: object, out: object) -> None:
        THREAD_STATE.modules = THREAD_STATE.modules[:-1]


def _plain_module_name(name: str) -> str:
    """A module's name without torch.compile's wrappers."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _is_tracing() -> bool:
    """True during shape propagation, as in torch.export; decomposing operators there crashes the process."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _dtype_of(out: Any, args: tuple[Any, ...]) -> str:
    """The result's type; an operator that returns nothing writes to its first tensor."""
    found = next((each for each in (out, *args) if isinstance(each, torch.Tensor)), None)
    return "" if found is None else dtype_name(found.dtype)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Argument]:
    """An operator's arguments, in the order of its schema."""
    named = [kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :]]
    return [_argument(value) for value in (*args, *named)]


def _argument(value: Any) -> Argument:
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        strides = tuple(value.stride()) if strided else (0,) * value.dim()
        return Operand(dtype=dtype_name(value.dtype), shape=tuple(value.shape), strides=strides)
    if isinstance(value, list | tuple) and value and all(isinstance(each, torch.Tensor) for each in value):
        return tuple(Operand(dtype=dtype_name(x.dtype), shape=tuple(x.shape), strides=tuple(x.stride())) for x in value)
    return None
