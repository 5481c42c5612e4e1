"""cuBLASLt through nvmath-python's bindings: the algorithms that compute a product, and what each needs.

Numbers are those of cublasLt.h (CUDA 12.9 on).
"""

import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

from gemmpipe.backends.cublaslt_descriptors import Descriptors, Operation, types

Attributes = Mapping[str, int]
"""What makes an algorithm the one it is: ATTRIBUTES by name."""

ATTRIBUTES = {
    "algo_id": (0, ctypes.c_int32),
    "tile_id": (1, ctypes.c_uint32),
    "stages_id": (6, ctypes.c_uint32),
    "NUM_KSPLIT": (2, ctypes.c_int32),
    "reduction_scheme": (3, ctypes.c_uint32),
    "cta_swizzling": (4, ctypes.c_uint32),
    "custom_option": (5, ctypes.c_uint32),
    "inner_shape_id": (7, ctypes.c_uint16),
    "cluster_shape_id": (8, ctypes.c_uint16),
}
"""cublasLtMatmulAlgoConfigAttributes_t, the same that TunableOp names: name -> (number, type)."""

MOST_WORKSPACE_BYTES = 32 * 2**20  # what NVIDIA recommends for Hopper, and what torch gives it
MOST_ALGORITHMS = 256  # of a product; each costs its first launch when it is screened
_MOST_PROPOSED = 64
_MOST_CHECKS = 4096  # questions of 16 us each
_MOST_OPTIONS = 15
_CLUSTERS = tuple(range(2, 20))  # 1x1x1 and the shapes of at most 16 blocks
_ALIGNMENT = 16  # bytes that operands of others are aligned to
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)

_PREFER_WORKSPACE, _PREFER_ALIGNMENT = 1, (5, 6, 7, 8)
_IN_FP32 = 2  # of reduction schemes
_CAN_SPLIT, _TILES, _CUSTOM_MAX, _STAGES = 0, 6, 7, 13


class Unsupported(Exception):
    """Why the library does not compute a product in this way."""


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, kw_only=True)
class Configured:
    """An algorithm ready to be called."""

    algo: Any
    workspace_bytes: int


def bindings() -> ModuleType:
    """nvmath-python's module of the library. Raises ImportError."""
    import importlib

    return importlib.import_module("nvmath.bindings.cublasLt")


@cache
def version() -> int:
    """The library's version, 130100 for 13.1.0. Raises ImportError, RuntimeError where it cannot be loaded."""
    return int(bindings().get_version())


@cache
def library(index: int) -> "Library":
    """The library on a device, opened when first asked for."""
    return Library(index)


class Library:
    """The library, opened on one device."""

    def __init__(self, index: int) -> None:
        import torch

        self.lt = bindings()
        with torch.cuda.device(index):
            # A context, which the library asks about its device; nothing is launched that could disturb what is timed.
            torch.empty(1, device="cuda")
            self.handle = self.lt.create()

    def heuristics(self, operation: Operation) -> list[dict[str, int]]:
        """What the library proposes, the most promising first: 8 or fewer, however many are asked for."""
        lt, known = self.lt, Descriptors(self.lt, operation)
        preference = lt.matmul_preference_create()
        results, count = (_Result * _MOST_PROPOSED)(), ctypes.c_int(0)
        try:
            wishes: list[tuple[int, Any]] = [(_PREFER_WORKSPACE, ctypes.c_uint64(MOST_WORKSPACE_BYTES))]
            wishes += [(number, ctypes.c_uint32(_ALIGNMENT)) for number in _PREFER_ALIGNMENT]
            for number, value in wishes:
                lt.matmul_preference_set_attribute(preference, number, ctypes.addressof(value), ctypes.sizeof(value))
            lt.matmul_algo_get_heuristic(
                self.handle,
                *(known.matmul, known.w, known.x, known.out, known.out, preference),
                *(_MOST_PROPOSED, ctypes.addressof(results), ctypes.addressof(count)),
            )
        except lt.cuBLASLtError:
            return []  # it says so where it has no algorithm at all
        finally:
            lt.matmul_preference_destroy(preference)
        return [self._attributes(r.algo) for r in results[: count.value] if r.state == 0]

    def neighbours(self, operation: Operation, seeds: Sequence[Attributes]) -> Iterator[dict[str, int]]:
        """The seeds with one attribute changed to another value that their algorithm claims to have.

        Whether it takes this product only `check` tells. The whole of what is claimed is millions for the algorithms of
        Hopper, of which nearly nothing is taken.
        """
        axes = [self._axes(operation, seed["algo_id"]) for seed in seeds]
        for name in ("NUM_KSPLIT", "cluster_shape_id", "custom_option", "tile_id", "stages_id"):
            for seed, axis in zip(seeds, axes, strict=True):
                for value in axis[name]:
                    changed = {**seed, name: value}
                    if name == "NUM_KSPLIT":
                        changed["reduction_scheme"] = 0 if value == 1 else seed["reduction_scheme"] or _IN_FP32
                    if changed != seed:
                        yield changed

    def _axes(self, operation: Operation, algo_id: int) -> dict[str, tuple[int, ...]]:
        algo = (ctypes.c_uint64 * 8)()
        self.lt.matmul_algo_init(self.handle, *types(operation), algo_id, ctypes.addressof(algo))
        return {
            "NUM_KSPLIT": _SPLITS if self._cap(algo, _CAN_SPLIT) else (),
            "cluster_shape_id": _CLUSTERS,
            "custom_option": tuple(range(min(self._cap(algo, _CUSTOM_MAX), _MOST_OPTIONS) + 1)),
            "tile_id": self._ids(algo, _TILES),
            "stages_id": self._ids(algo, _STAGES),
        }

    def configure(self, operation: Operation, attributes: Attributes) -> Configured:
        """The algorithm of these attributes for this product. Raises Unsupported."""
        return _configured(self, operation, tuple(attributes.items()))

    def check(self, operation: Operation, attributes: Attributes) -> Configured:
        """As configure, asked anew."""
        lt, known = self.lt, Descriptors(self.lt, operation)
        algo, result = (ctypes.c_uint64 * 8)(), _Result()
        address = ctypes.addressof(algo)
        try:
            lt.matmul_algo_init(self.handle, *types(operation), attributes["algo_id"], address)
            now = self._attributes(algo)
            for name, wanted in attributes.items():
                if now[name] != wanted:
                    number, kind = ATTRIBUTES[name]
                    value = kind(wanted)
                    lt.matmul_algo_config_set_attribute(address, number, ctypes.addressof(value), ctypes.sizeof(value))
            lt.matmul_algo_check(
                self.handle,
                *(known.matmul, known.w, known.x, known.out, known.out),
                *(address, ctypes.addressof(result)),
            )
        except lt.cuBLASLtError as error:
            raise Unsupported(f"algorithm: {' '.join(str(error).split())[:120]}") from None
        if result.state:
            raise Unsupported(f"algorithm: cuBLASLt status {result.state} for this product")
        if result.workspace_bytes > MOST_WORKSPACE_BYTES:
            raise Unsupported(f"workspace: {result.workspace_bytes >> 20} MiB, at most {MOST_WORKSPACE_BYTES >> 20}")
        return Configured(algo=algo, workspace_bytes=int(result.workspace_bytes))

    def _attributes(self, algo: Any) -> dict[str, int]:
        """The attributes of an algorithm; those that this version does not have are 0."""
        found, written = {}, ctypes.c_size_t(0)
        for name, (number, kind) in ATTRIBUTES.items():
            value = kind(0)
            try:
                self.lt.matmul_algo_config_get_attribute(
                    *(ctypes.addressof(algo), number, ctypes.addressof(value)),
                    *(ctypes.sizeof(value), ctypes.addressof(written)),
                )
            except self.lt.cuBLASLtError:
                value = kind(0)
            found[name] = int(value.value)
        return found

    def _cap(self, algo: Any, number: int) -> int:
        value, written = ctypes.c_uint32(0), ctypes.c_size_t(0)
        self.lt.matmul_algo_cap_get_attribute(
            ctypes.addressof(algo), number, ctypes.addressof(value), 4, ctypes.addressof(written)
        )
        return int(value.value)

    def _ids(self, algo: Any, number: int) -> tuple[int, ...]:
        """The tiles or stages that an algorithm claims; 0, that is undefined, where it claims none."""
        values, written = (ctypes.c_uint32 * 1024)(), ctypes.c_size_t(0)
        self.lt.matmul_algo_cap_get_attribute(
            ctypes.addressof(algo), number, ctypes.addressof(values), ctypes.sizeof(values), ctypes.addressof(written)
        )
        return tuple(values[: written.value // 4]) or (0,)


@lru_cache(maxsize=4096)
def algorithms(index: int, operation: Operation) -> tuple[dict[str, int], ...]:
    """The algorithms that compute a product on a device, each once, at most MOST_ALGORITHMS.

    First what the library proposes, then the neighbours of that, each checked by the library. On an H200 (cuBLASLt
    13.1, 2026-11-21) the fastest for M of 1, 16, 256 and 4096 were neighbours, 2 to 11 % faster than torch.mm; those
    of earlier architectures, which can compute the products too, were far behind.
    """
    opened = library(index)
    seeds = opened.heuristics(operation)
    found = {tuple(seed.items()): None for seed in seeds}
    for attributes in itertools.islice(opened.neighbours(operation, seeds), _MOST_CHECKS):
        if len(found) >= MOST_ALGORITHMS:
            break
        with suppress(Unsupported):
            opened.check(operation, attributes)
            found[tuple(attributes.items())] = None
    return tuple(dict(attributes) for attributes in found)


@lru_cache(maxsize=4096)
def _configured(library: Library, operation: Operation, attributes: tuple[tuple[str, int], ...]) -> Configured:
    return library.check(operation, dict(attributes))
