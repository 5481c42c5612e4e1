"""What instructions of PTX compute from registers, lane by lane; floats are those of numpy and torch."""

import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Lanes = NDArray[np.uint64]
"""A register's bits, a lane each."""
Flags = NDArray[np.bool_]

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def f32(bits: Lanes) -> NDArray[np.float32]:
    """The values of registers of 32 bits."""
    return bits.astype(np.uint32).view(np.float32)


def bits_of(values: NDArray[Any]) -> Lanes:
    """The opposite of f32; values are rounded to it."""
    return values.astype(np.float32).view(np.uint32).astype(np.uint64)


def _signed(bits: Lanes) -> NDArray[np.int64]:
    return bits.astype(np.uint32).view(np.int32).astype(np.int64)


def _unsigned(bits: Lanes) -> NDArray[np.int64]:
    return bits.astype(np.uint32).astype(np.int64)


def from_halves(bits: Lanes, kind: str) -> NDArray[np.float32]:
    """[lanes, 2]: the values of two 16-bit floats, the low one first."""
    halves = bits.astype(np.uint32).view(np.uint16).reshape(-1, 2)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def to_halves(values: NDArray[np.float32], kind: str) -> Lanes:
    """The opposite of from_halves; the values are exact in their type."""
    halves = values.astype(np.float16).view(np.uint16) if kind == "f16" else (values.view(np.uint32) >> 16)
    return np.ascontiguousarray(halves.astype(np.uint16)).view(np.uint32).reshape(-1).astype(np.uint64)


def e4m3_bits(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounded to fp8 (e4m3), saturated at 448; a NaN stays one."""
    rounded = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(values), np.uint8(0x7F), rounded)


E4M3: NDArray[np.float32] = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The value of each byte in fp8."""


def _two_e4m3(high: Lanes, low: Lanes) -> Lanes:
    return (e4m3_bits(f32(high)).astype(np.uint64) << np.uint64(8)) | e4m3_bits(f32(low)).astype(np.uint64)


def _e4m3_to_halves(bits: Lanes) -> Lanes:
    return to_halves(E4M3[bits.astype(np.uint16).view(np.uint8).reshape(-1, 2)], "f16")


def _largest_halves(kind: str) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda a, b: to_halves(np.fmax(from_halves(a, kind), from_halves(b, kind)), kind)


def _comparison(name: str, kind: str) -> Callable[[Lanes, Lanes], Lanes]:
    compare, read = _COMPARISONS[name], _signed if kind == "s32" else _unsigned
    return lambda a, b: np.asarray(compare(read(a), read(b))).astype(np.uint64)


def _comparison_and(name: str, kind: str) -> Callable[[Lanes, Lanes, Lanes], Lanes]:
    compare = _comparison(name, kind)
    return lambda a, b, p: compare(a, b) & p


VALUES: dict[str, Callable[..., Lanes]] = {
    **dict.fromkeys(("mov.b64", "mov.u32", "mov.f32"), lambda a: a),
    **dict.fromkeys(("add.s32", "add.u32", "add.s64"), lambda a, b: a + b),
    "sub.s32": lambda a, b: a - b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    **dict.fromkeys(("shl.b32", "shl.b64"), lambda a, b: a << b),
    "shr.u32": lambda a, b: (_unsigned(a) >> _unsigned(b)).view(np.uint64),
    "shr.s32": lambda a, b: (_signed(a) >> _signed(b)).view(np.uint64),
    "min.s32": lambda a, b: np.minimum(_signed(a), _signed(b)).view(np.uint64),
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.wide.u32": lambda a, b: (_unsigned(a) * _unsigned(b)).view(np.uint64),
    "mul.wide.s32": lambda a, b: (_signed(a) * _signed(b)).view(np.uint64),
    "selp.b32": lambda a, b, p: np.asarray(np.where(p != 0, a, b), np.uint64),
    "add.f32": lambda a, b: bits_of(f32(a) + f32(b)),
    "mul.f32": lambda a, b: bits_of(f32(a) * f32(b)),
    "max.f32": lambda a, b: bits_of(np.fmax(f32(a), f32(b))),
    "div.full.f32": lambda a, b: bits_of(f32(a) / f32(b)),
    "fma.rn.f32": lambda a, b, c: bits_of(f32(a).astype(np.float64) * f32(b) + f32(c)),
    "max.f16x2": _largest_halves("f16"),
    "max.bf16x2": _largest_halves("bf16"),
    "cvt.f32.f16": lambda a: bits_of(a.astype(np.uint16).view(np.float16)),
    "cvt.rn.satfinite.e4m3x2.f32": _two_e4m3,
    "cvt.rn.f16x2.e4m3x2": _e4m3_to_halves,
    **{f"setp.{name}.{kind}": _comparison(name, kind) for name, kind in product(_COMPARISONS, ("s32", "u32"))},
    **{f"setp.{name}.and.{kind}": _comparison_and(name, kind) for name, kind in product(_COMPARISONS, ("s32", "u32"))},
}
"""Instructions that compute a register from registers, lane by lane; a write cuts to the register's width."""
