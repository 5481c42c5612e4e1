"""Every matrix product of a PyTorch program, seen where torch executes it: each once, whatever called it."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gemmpipe.data import Scalar
from gemmpipe.runtime.captured import OTHER, Recorder
from gemmpipe.runtime.operands import name_of

Seen = tuple[str, dict[str, Scalar]]
"""(family, key columns)."""
_WIDE = ("bfloat16", "float16")
_OUT = (*_WIDE, "float32")
_BLOCK = 128


class _Here(threading.local):
    quiet: bool = False
    modules: tuple[str, ...] = ()


HERE = _Here()
"""This thread's state: whether products are counted by someone else, and the names of the modules being called."""


def layer() -> str:
    """The name of the innermost module that is being called, empty where that is not known."""
    return HERE.modules[-1] if HERE.modules else ""


@contextmanager
def quiet() -> Iterator[None]:
    """Products inside are not counted."""
    before, HERE.quiet = HERE.quiet, True
    try:
        yield
    finally:
        HERE.quiet = before


class Watcher(TorchDispatchMode):
    """Counts the products of this thread; layer names come from the modules in whose forward they happen.

    What the program compiles runs eagerly meanwhile: torch refuses to compile under such a mode, and the products are
    the same.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._names: dict[int, str] = {}

    def __enter__(self) -> "Watcher":
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eager.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = _READERS.get(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else None
        if read is not None and not HERE.quiet:
            found = read(args, kwargs or {}, out)
            if found is not None:
                family, values = found
                self._recorder.add(family, {**values, "op": func.overloadpacket.__name__}, layer())
        return out

    def _enter(self, module: nn.Module, args: object) -> None:
        if not HERE.modules:  # the outermost one knows all names below it
            self._names.update({id(inner): name for name, inner in module.named_modules()})
        HERE.modules = (*HERE.modules, self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: object, out: object) -> None:
        HERE.modules = HERE.modules[:-1]


def _product(x: torch.Tensor, w: torch.Tensor, bias: bool, out: torch.Tensor) -> Seen | None:
    """x [M, K] or [B, M, K] times w [K, N] or [B, K, N], as torch takes them."""
    if 0 in x.shape or 0 in w.shape:
        return None
    dtype, outdtype, batched = name_of(w.dtype), name_of(out.dtype), w.dim() == 3
    values: dict[str, Scalar] = {"M": x.shape[-2], "N": w.shape[-1], "K": w.shape[-2]}
    values |= {"dtype": dtype, "outdtype": outdtype, "layout": f"{_lies(x, 'mk')} {_lies(w, 'kn')}"}
    values |= {"B": w.shape[0]} if batched else {"bias": bias, "scaleAB": False, "bpreshuffle": False}
    if dtype not in _WIDE or outdtype not in _OUT or x.dtype != w.dtype or (batched and bias):
        return OTHER, values
    return ("batched_bf16" if batched else "a16w16"), values


def _lies(tensor: torch.Tensor, letters: str) -> str:
    """The letters in the order of memory, the innermost last; `strided` when neither side is innermost."""
    if tensor.stride(-1) == 1 and tensor.shape[-1] > 1:
        return letters
    return letters[::-1] if tensor.stride(-2) == 1 else letters if tensor.stride(-1) == 1 else "strided"


def _scaled(x: torch.Tensor, w: torch.Tensor, scales: tuple[Any, Any], bias: bool, out: torch.Tensor) -> Seen | None:
    found = _product(x, w, bias, out)
    if found is None:
        return None
    _, values = found
    m, n, k = x.shape[0], w.shape[1], x.shape[1]
    sizes = tuple(scale.numel() for scale in scales if isinstance(scale, torch.Tensor))
    blocks = -(-k // _BLOCK)
    for key in ("scaleAB", "bpreshuffle"):
        del values[key]
    granularity = "tensor" if sizes == (1, 1) else "row" if sizes == (m, n) else ""
    # cuBLASLt has the weight's block scales with their K side padded to a multiple of 4.
    by_block = [(m * blocks, -(-n // _BLOCK) * held) for held in (blocks, -(-blocks // 4) * 4)]
    if not granularity and sizes in by_block and not bias:
        return "a8w8_blockscale", values
    values |= {"q_dtype_w": values.pop("dtype"), "granularity": granularity}
    return ("a8w8" if granularity else OTHER), values


def _linear(args: Any, kwargs: Mapping[str, Any], out: torch.Tensor) -> Seen | None:
    x, w = args[0], args[1]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return _product(x.reshape(-1, x.shape[-1]), w.t(), bias is not None, out)


def _scaled_mm(args: Any, kwargs: Mapping[str, Any], out: torch.Tensor) -> Seen | None:
    named = dict(zip(("x", "w", "scale_a", "scale_b", "bias"), args, strict=False)) | dict(kwargs)
    return _scaled(args[0], args[1], (named["scale_a"], named["scale_b"]), named.get("bias") is not None, out)


def _scaled_mm_v2(args: Any, kwargs: Mapping[str, Any], out: torch.Tensor) -> Seen | None:
    bias = args[8] if len(args) > 8 else kwargs.get("bias")
    return _scaled(args[0], args[1], (args[2][0], args[5][0]), bias is not None, out)


def _int_mm(args: Any, kwargs: Mapping[str, Any], out: torch.Tensor) -> Seen | None:
    found = _product(args[0], args[1], False, out)
    if found is None:
        return None
    values = {name: found[1][name] for name in ("M", "N", "K", "layout")}
    return "a8w8", {**values, "q_dtype_w": "int8"}  # its scales follow in another operation


def _grouped(args: Any, kwargs: Mapping[str, Any], out: torch.Tensor) -> Seen | None:
    x, w = args[0], args[1]
    if 0 in x.shape or 0 in w.shape:
        return None
    values: dict[str, Scalar] = {"M": x.shape[-2], "N": w.shape[-1], "K": x.shape[-1], "B": w.shape[0]}
    return OTHER, {**values, "dtype": name_of(w.dtype), "outdtype": name_of(out.dtype)}


def _is_bias(addend: torch.Tensor, out: torch.Tensor) -> bool:
    return addend.dim() == 1 or (addend.dim() == 2 and addend.shape[0] == 1 and out.shape[0] != 1)


_READERS: Mapping[str, Callable[[Any, Mapping[str, Any], torch.Tensor], Seen | None]] = {
    "linear": _linear,
    "mm": lambda args, kwargs, out: _product(args[0], args[1], False, out),
    "addmm": lambda args, kwargs, out: _product(args[1], args[2], _is_bias(args[0], out), out),
    "bmm": lambda args, kwargs, out: _product(args[0], args[1], False, out),
    "baddbmm": lambda args, kwargs, out: _product(args[1], args[2], False, out),
    "mv": lambda args, kwargs, out: _product(args[1][None], args[0].t(), False, out),
    "addmv": lambda args, kwargs, out: _product(args[2][None], args[1].t(), True, out),
    "_scaled_mm": _scaled_mm,
    "_scaled_mm_v2": _scaled_mm_v2,
    "_int_mm": _int_mm,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_grouped_mm_v2": _grouped,
}
"""By the operator's name, all overloads alike; what torch executes below one of them is not seen again."""
