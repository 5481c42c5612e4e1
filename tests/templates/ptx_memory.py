"""Global and shared memory of a program whose lanes run one by one (ptx_lanes.py), and what its accesses may not do."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from ptx_values import Flags, Lanes

Places = NDArray[np.int64]
"""Indices of bytes: [lanes, bytes of an access]."""

SHARED_BASE = 1024
"""The address of `global_smem`: not zero, so that a text that leaves it out is wrong."""
GLOBAL_BASE = 1 << 40


class Fault(AssertionError):
    """What a text may not do, with the instruction."""


class Region(NamedTuple):
    """Shared memory that only its own warp writes: `size` bytes a warp, one warp after the other from `begin` on."""

    begin: int
    size: int


def places(addresses: Lanes, base: int, size: int, limit: int) -> Places:
    """Indices of the bytes of accesses in memory of `limit` bytes that begins at `base`."""
    offsets = (addresses - np.uint64(base)).view(np.int64)
    if (addresses % np.uint64(size)).any():
        raise Fault(f"an address is no multiple of {size}")
    if ((offsets < 0) | (offsets + size > limit)).any():
        raise Fault(f"outside of memory: bytes {offsets.min()} to {offsets.max() + size} of {limit}")
    return offsets[:, None] + np.arange(size)


class Memory:
    """Global memory: operands, and which of their bytes may be read."""

    def __init__(self) -> None:
        self.bytes: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.valid: Flags = np.zeros(0, bool)

    def place(self, rows: NDArray[Any], stride: int | None = None) -> int:
        """Place rows of an operand, `stride` bytes from one to the next; returns the address of the first."""
        each = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
        padded = np.zeros((len(rows), stride or each.shape[1]), np.uint8)
        valid = np.zeros(padded.shape, bool)
        padded[:, : each.shape[1]], valid[:, : each.shape[1]] = each, True
        address = GLOBAL_BASE + len(self.bytes)
        gap = 4096 - padded.size % 256  # operands begin at multiples of 256
        self.bytes = np.concatenate([self.bytes, padded.reshape(-1), np.zeros(gap, np.uint8)])
        self.valid = np.concatenate([self.valid, valid.reshape(-1), np.zeros(gap, bool)])
        return address

    def read(self, addresses: Lanes, size: int) -> NDArray[np.uint8]:
        """`size` bytes from each address on."""
        at = places(addresses, GLOBAL_BASE, size, len(self.bytes))
        if not self.valid[at].all():
            raise Fault("reads global memory outside of an operand")
        return self.bytes[at]


class Stamp(NamedTuple):
    """When and where an access happens: threads [lanes, 1], their warp, barriers before it: of the warp, bar.sync."""

    threads: Places
    warp: int
    epoch: int
    phase: int


class Accesses:
    """The latest accesses of each byte since the last bar.sync: thread, warp (SEVERAL), warp's barriers before."""

    SEVERAL = -2

    def __init__(self, size: int) -> None:
        self.thread, self.warp, self.epoch, self.phase = (np.full(size, -1, np.int64) for _ in range(4))

    def unordered(self, at: Places, stamp: Stamp) -> bool:
        """Whether any of these bytes has an access of another lane that no barrier puts before this one."""
        others = (self.phase[at] == stamp.phase) & (self.thread[at] != stamp.threads)
        return bool((others & ((self.warp[at] != stamp.warp) | (self.epoch[at] == stamp.epoch))).any())

    def record(self, at: Places, stamp: Stamp) -> None:
        """Add an access."""
        now, same = self.phase[at] == stamp.phase, self.warp[at] == stamp.warp
        several = now & (~same | ((self.epoch[at] == stamp.epoch) & (self.thread[at] != stamp.threads)))
        several_warps = at[now & ~same]
        self.thread[at], self.warp[at], self.epoch[at], self.phase[at] = stamp
        self.thread[at[several | (self.thread[at] != stamp.threads)]] = self.SEVERAL
        self.warp[several_warps] = self.SEVERAL


class Shared:
    """Shared memory: bytes, whether defined, whether a copy is still to write them, their accesses and owners.

    owner: the only warp that may write a byte; without regions every warp may.
    """

    def __init__(self, size: int, warps: int, regions: Sequence[Region]) -> None:
        self.bytes: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self.defined: Flags = np.zeros(size, bool)
        self.pending: Flags = np.zeros(size, bool)
        self.reads, self.writes = Accesses(size), Accesses(size)
        self.owner = np.full(size, -1, np.int64) if regions else None
        self.phase = 0
        for region, warp in product(regions, range(warps)):
            assert self.owner is not None
            begin = region.begin + warp * region.size
            self.owner[begin : begin + region.size] = warp

    def read(self, at: Places, stamp: Stamp) -> NDArray[np.uint8]:
        """The bytes; a fault if a copy or another lane may still be writing them."""
        if self.pending[at].any():
            raise Fault("reads what a copy still writes")
        if self.writes.unordered(at, stamp):
            raise Fault("reads what another lane writes without a barrier between")
        self.reads.record(at, stamp)
        return self.bytes[at]

    def check_write(self, at: Places, stamp: Stamp) -> None:
        """A fault if these bytes may not be written now."""
        if self.pending[at].any():
            raise Fault("writes what a copy still writes")
        if len(np.unique(at)) < at.size:
            raise Fault("two lanes write the same bytes")
        if self.writes.unordered(at, stamp):
            raise Fault("writes what another lane writes without a barrier between")
        if self.reads.unordered(at, stamp):
            raise Fault("writes what another lane reads without a barrier between")
        if self.owner is not None and (self.owner[at] != stamp.warp).any():
            raise Fault("writes outside of the warp's regions of shared memory")
