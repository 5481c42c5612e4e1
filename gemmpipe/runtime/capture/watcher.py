"""Every matrix product of a PyTorch program, seen where torch executes it: each once, whatever called it.

Ranks that torchrun starts, themselves or through another launcher, count their products as the launcher would.
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

_UNBUFFERED = "-u"  # what torchrun gives every Python that it starts first
_CAPTURE = ("-m", "gemmpipe.capture")


@contextmanager
def capturing_launched_ranks() -> Iterator[None]:
    """Within the block a rank is started as `python -u -m gemmpipe.capture script`; where it counts, the variable says.

    A command that is no Python of torchrun's (`--no-python`) is started as it is.
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
"""Namespaces of operators that are torch's own; what other ones hold is looked into."""
THREAD_STATE = _ThreadState()
"""This thread's state: whether products are counted by someone else, and the names of the modules being called."""


def current_module() -> str:
    """The name of the innermost module that is being called, empty where that is not known."""
    return THREAD_STATE.modules[-1] if THREAD_STATE.modules else ""


@contextmanager
def capture_paused() -> Iterator[None]:
    """Products inside are not counted."""
    before, THREAD_STATE.paused = THREAD_STATE.paused, True
    try:
        yield
    finally:
        THREAD_STATE.paused = before


class GemmCountingMode(TorchDispatchMode):
    """Counts the products of the thread that enters it: each once, whatever operator it was called through."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet is None or _is_tracing():  # or an operator of torch's higher order
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
            # What torch executes below an operator is not seen again: each product is counted once.
            out = func(*args, **kwargs)
            with self._recorder.logging_errors():
                self._count(name, read(name, arguments, _dtype_of(out, args)))
            return out
        # Under inference mode operators come whole that are several otherwise: einsum, attention.
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
        """Someone's own operator, run so that what it is made of is seen: torch leaves the mode for what it calls."""
        keys = [torch._C._dispatch_keys(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not keys or any(each.has(torch._C.DispatchKey.Python) for each in keys):
            return func(*args, **kwargs)  # a subclass of tensor comes back here
        below = reduce(or_, keys) & torch._C._after_ADInplaceOrView_keyset
        with self:
            return func.redispatch(below, *args, **kwargs)


class Watcher:
    """Counts the products of this thread, and of threads, processes of multiprocessing and ranks started meanwhile.

    Layer names come from the modules being called.

    What the program compiles runs eagerly meanwhile: torch refuses to compile under such a mode, and the products are
    the same. What a CUDA graph holds is counted when it is captured: replays call nothing.
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
        # torch's fused encoder layers multiply where nobody sees it; without them they are linear layers.
        self._left.callback(set_fastpath_enabled, get_fastpath_enabled())
        set_fastpath_enabled(False)
        self._left.enter_context(GemmCountingMode(self._recorder))
        return self

    def __exit__(self, *error: Any) -> None:
        self._left.close()

    def _counting_start(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """`Thread.start` for threads that count: a dispatch mode is a thread's own."""

        def counted(thread: threading.Thread) -> None:
            run = thread.run

            def run_counted() -> None:
                with GemmCountingMode(self._recorder):
                    run()

            thread.run = run_counted  # type: ignore[method-assign]
            start(thread)

        return counted

    def _enter(self, module: nn.Module, args: object) -> None:
        if not THREAD_STATE.modules:  # the outermost one knows all names below it
            with self._recorder.logging_errors():
                self._names.update({id(inner): _plain_module_name(name) for name, inner in module.named_modules()})
        THREAD_STATE.modules = (*THREAD_STATE.modules, self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: object, out: object) -> None:
        THREAD_STATE.modules = THREAD_STATE.modules[:-1]


def _plain_module_name(name: str) -> str:
    """A module's name without what torch.compile puts around it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _is_tracing() -> bool:
    """Whether torch.export or the like only looks at shapes; operators taken apart there end the process."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _dtype_of(out: Any, args: tuple[Any, ...]) -> str:
    """The result's type; an operator that returns nothing writes to its first tensor."""
    found = next((each for each in (out, *args) if isinstance(each, torch.Tensor)), None)
    return "" if found is None else dtype_name(found.dtype)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Argument]:
    """What an operator was called with, in the order of its schema."""
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
