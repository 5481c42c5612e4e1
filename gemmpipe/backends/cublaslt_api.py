"""cuBLASLt through nvmath-python's bindings: descriptors of a product, and the algorithms that compute it.

The library's matrices are column-major: a row-major out[M, N] = x[M, K] @ w[N, K]^T is its D[N, M] = A^T B with A = w
as [K, N] and B = x as [K, M]. Numbers are those of cublasLt.h, cublas_api.h and library_types.h (CUDA 12.9 on).
"""

import ctypes
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

_COMPUTE_32F, _R_32F = 68, 0
CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14, "float8_e4m3fn": 28, "float8_e5m2": 29}
"""cudaDataType_t."""
SCALE_MODES = {"tensor": (0, 0), "row": (3, 3), "block": (5, 4)}
"""cublasLtMatmulMatrixScale_t of (w, x): one scalar, one per row, one per 128x128 (w) and 1x128 (x) block."""

_TRANSA, _EPILOGUE, _BIAS_POINTER, _FAST_ACCUM, _BIAS_TYPE = 3, 7, 8, 25, 26
_A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 31, 32
_EPILOGUE_BIAS = 4
_PLACEHOLDER_ADDRESS = 2**21  # a device pointer in queries, which do not dereference it

Attributes = Mapping[str, int]
"""The identity of an algorithm: its ATTRIBUTES by name."""
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

MAX_WORKSPACE_BYTES = 32 * 2**20  # NVIDIA's recommendation for Hopper, and torch's limit
MAX_ALGORITHMS = 256  # per product; each costs its first launch when it is screened
_MAX_PROPOSED = 64
_MAX_CHECKS = 4096  # queries of 16 us each
_MAX_OPTIONS = 15
_CLUSTERS = tuple(range(2, 20))  # 1x1x1 and the shapes of at most 16 blocks
_ALIGNMENT = 16  # bytes, of all operands
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)

_PREFER_WORKSPACE, _PREFER_ALIGNMENT = 1, (5, 6, 7, 8)
_REDUCE_IN_FP32 = 2  # a reduction scheme
_CAN_SPLIT, _TILES, _CUSTOM_MAX, _STAGES = 0, 6, 7, 13


class UnsupportedAlgorithm(Exception):
    """The library does not compute a product with an algorithm; the message is `rule: detail`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A product as the library's descriptors describe it; `scale` is a key of SCALE_MODES or empty."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    scale: str
    bias: bool
    fast_accum: bool


class MatmulDescriptors:
    """The library's descriptors of a product; destroyed with this object."""

    def __init__(self, lt: ModuleType, operation: Operation) -> None:
        self._lt = lt
        self.matmul = lt.matmul_desc_create(_COMPUTE_32F, _R_32F)
        ab, d = CUDA_TYPES[operation.dtype], CUDA_TYPES[operation.out_dtype]
        m, n, k = operation.m, operation.n, operation.k
        self.w = lt.matrix_layout_create(ab, k, n, k)
        self.x = lt.matrix_layout_create(ab, k, m, k)
        self.out = lt.matrix_layout_create(d, n, m, n)
        weakref.finalize(self, _destroy, lt, self.matmul, (self.w, self.x, self.out))
        self.set(_TRANSA, ctypes.c_int32(1))
        if operation.scale:
            w_mode, x_mode = SCALE_MODES[operation.scale]
            self.set(_A_SCALE_MODE, ctypes.c_int32(w_mode))
            self.set(_B_SCALE_MODE, ctypes.c_int32(x_mode))
            self.set(_FAST_ACCUM, ctypes.c_int8(operation.fast_accum))
        if operation.bias:
            self.set(_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
            self.set(_BIAS_TYPE, ctypes.c_int32(d))
        scales = _PLACEHOLDER_ADDRESS if operation.scale else None
        self.set_pointers(w_scale=scales, x_scale=scales, bias=_PLACEHOLDER_ADDRESS if operation.bias else None)

    def set_pointers(self, *, w_scale: int | None, x_scale: int | None, bias: int | None) -> None:
        """Set the device addresses of scales and bias."""
        for attribute, address in ((_A_SCALE, w_scale), (_B_SCALE, x_scale), (_BIAS_POINTER, bias)):
            if address is not None:
                self.set(attribute, ctypes.c_void_p(address))

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute of the product."""
        self._lt.matmul_desc_set_attribute(self.matmul, attribute, ctypes.addressof(value), ctypes.sizeof(value))


def _destroy(lt: ModuleType, matmul: int, layouts: tuple[int, ...]) -> None:
    for layout in layouts:
        lt.matrix_layout_destroy(layout)
    lt.matmul_desc_destroy(matmul)


def compute_types(operation: Operation) -> tuple[int, ...]:
    """The types of the sum, the scalars, A, B, C and D."""
    ab, d = CUDA_TYPES[operation.dtype], CUDA_TYPES[operation.out_dtype]
    return _COMPUTE_32F, _R_32F, ab, ab, d, d


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
class ConfiguredAlgorithm:
    """An algorithm ready to be called, with the workspace that it needs."""

    algo: Any
    workspace_bytes: int


def bindings() -> ModuleType:
    """nvmath-python's bindings of the library. Raises ImportError."""
    import importlib

    return importlib.import_module("nvmath.bindings.cublasLt")


@cache
def version() -> int:
    """The library's version, 130100 for 13.1.0. Raises ImportError, or RuntimeError if it cannot be loaded."""
    return int(bindings().get_version())


@cache
def library(index: int) -> "CublasLtLibrary":
    """The library on a device, opened at the first call."""
    return CublasLtLibrary(index)


class CublasLtLibrary:
    """The library, opened on one device."""

    def __init__(self, index: int) -> None:
        import torch

        self.lt = bindings()
        with torch.cuda.device(index):
            # Creates the context that the library queries; nothing is launched that could disturb timings.
            torch.empty(1, device="cuda")
            self.handle = self.lt.create()

    def heuristics(self, operation: Operation) -> list[dict[str, int]]:
        """The library's proposals, the most promising first: 8 or fewer, whatever number is requested."""
        lt, described = self.lt, MatmulDescriptors(self.lt, operation)
        preference = lt.matmul_preference_create()
        results, count = (_Result * _MAX_PROPOSED)(), ctypes.c_int(0)
        try:
            preferences: list[tuple[int, Any]] = [(_PREFER_WORKSPACE, ctypes.c_uint64(MAX_WORKSPACE_BYTES))]
            preferences += [(number, ctypes.c_uint32(_ALIGNMENT)) for number in _PREFER_ALIGNMENT]
            for number, value in preferences:
                lt.matmul_preference_set_attribute(preference, number, ctypes.addressof(value), ctypes.sizeof(value))
            lt.matmul_algo_get_heuristic(
                self.handle,
                *(described.matmul, described.w, described.x, described.out, described.out, preference),
                *(_MAX_PROPOSED, ctypes.addressof(results), ctypes.addressof(count)),
            )
        except lt.cuBLASLtError:
            return []  # raised if the library has no algorithm at all
        finally:
            lt.matmul_preference_destroy(preference)
        return [self._attributes(r.algo) for r in results[: count.value] if r.state == 0]

    def neighbours(self, operation: Operation, seeds: Sequence[Attributes]) -> Iterator[dict[str, int]]:
        """The seeds with one attribute changed to another value that their algorithm claims to support.

        Only `check` shows if it supports this product: Hopper's algorithms claim millions of combinations, of which
        nearly none are accepted.
        """
        axes = [self._axes(operation, seed["algo_id"]) for seed in seeds]
        for name in ("NUM_KSPLIT", "cluster_shape_id", "custom_option", "tile_id", "stages_id"):
            for seed, axis in zip(seeds, axes, strict=True):
                for value in axis[name]:
                    changed = {**seed, name: value}
                    if name == "NUM_KSPLIT":
                        changed["reduction_scheme"] = 0 if value == 1 else seed["reduction_scheme"] or _REDUCE_IN_FP32
                    if changed != seed:
                        yield changed

    def _axes(self, operation: Operation, algo_id: int) -> dict[str, tuple[int, ...]]:
        algo = (ctypes.c_uint64 * 8)()
        self.lt.matmul_algo_init(self.handle, *compute_types(operation), algo_id, ctypes.addressof(algo))
        return {
            "NUM_KSPLIT": _SPLITS if self._cap(algo, _CAN_SPLIT) else (),
            "cluster_shape_id": _CLUSTERS,
            "custom_option": tuple(range(min(self._cap(algo, _CUSTOM_MAX), _MAX_OPTIONS) + 1)),
            "tile_id": self._ids(algo, _TILES),
            "stages_id": self._ids(algo, _STAGES),
        }

    def configure(self, operation: Operation, attributes: Attributes) -> ConfiguredAlgorithm:
        """The algorithm with these attributes for this product, cached. Raises UnsupportedAlgorithm."""
        return _configured(self, operation, tuple(attributes.items()))

    def check(self, operation: Operation, attributes: Attributes) -> ConfiguredAlgorithm:
        """As `configure`, without the cache."""
        lt, described = self.lt, MatmulDescriptors(self.lt, operation)
        algo, result = (ctypes.c_uint64 * 8)(), _Result()
        address = ctypes.addressof(algo)
        try:
            lt.matmul_algo_init(self.handle, *compute_types(operation), attributes["algo_id"], address)
            now = self._attributes(algo)
            for name, wanted in attributes.items():
                if now[name] != wanted:
                    number, kind = ATTRIBUTES[name]
                    value = kind(wanted)
                    lt.matmul_algo_config_set_attribute(address, number, ctypes.addressof(value), ctypes.sizeof(value))
            lt.matmul_algo_check(
                self.handle,
                *(described.matmul, described.w, described.x, described.out, described.out),
                *(address, ctypes.addressof(result)),
            )
        except lt.cuBLASLtError as error:
            raise UnsupportedAlgorithm(f"algorithm: {' '.join(str(error).split())[:120]}") from None
        if result.state:
            raise UnsupportedAlgorithm(f"algorithm: cuBLASLt status {result.state} for this product")
        if result.workspace_bytes > MAX_WORKSPACE_BYTES:
            raise UnsupportedAlgorithm(
                f"workspace: {result.workspace_bytes >> 20} MiB, at most {MAX_WORKSPACE_BYTES >> 20}"
            )
        return ConfiguredAlgorithm(algo=algo, workspace_bytes=int(result.workspace_bytes))

    def _attributes(self, algo: Any) -> dict[str, int]:
        """The attributes of an algorithm; 0 for those that this version does not have."""
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
        """The tiles or stages that an algorithm claims; (0,), meaning undefined, if it claims none."""
        values, written = (ctypes.c_uint32 * 1024)(), ctypes.c_size_t(0)
        self.lt.matmul_algo_cap_get_attribute(
            ctypes.addressof(algo), number, ctypes.addressof(values), ctypes.sizeof(values), ctypes.addressof(written)
        )
        return tuple(values[: written.value // 4]) or (0,)


@lru_cache(maxsize=4096)
def algorithms(index: int, operation: Operation) -> tuple[dict[str, int], ...]:
    """The distinct algorithms that compute a product on a device, at most MAX_ALGORITHMS.

    First the library's proposals, then their neighbours, each checked by the library. On an H200 (cuBLASLt 13.1,
    2026-11-21) the fastest for M of 1, 16, 256 and 4096 were neighbours, 2 to 11 % faster than torch.mm; those of
    earlier architectures, which can compute the products too, were far slower.
    """
    opened = library(index)
    seeds = opened.heuristics(operation)
    found = {tuple(seed.items()): None for seed in seeds}
    for attributes in itertools.islice(opened.neighbours(operation, seeds), _MAX_CHECKS):
        if len(found) >= MAX_ALGORITHMS:
            break
        with suppress(UnsupportedAlgorithm):
            opened.check(operation, attributes)
            found[tuple(attributes.items())] = None
    return tuple(dict(attributes) for attributes in found)


@lru_cache(maxsize=4096)
def _configured(
    library: CublasLtLibrary, operation: Operation, attributes: tuple[tuple[str, int], ...]
) -> ConfiguredAlgorithm:
    return library.check(operation, dict(attributes))
