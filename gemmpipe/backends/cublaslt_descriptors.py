"""A product as cuBLASLt is told of it: its descriptors, in the library's own numbers.

Its matrices are column-major: a row-major out[M, N] = x[M, K] @ w[N, K]^T is its D[N, M] = A^T B with A = w as [K, N]
and B = x as [K, M]. Numbers are those of cublasLt.h, cublas_api.h and library_types.h (CUDA 12.9 on).
"""

import ctypes
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_COMPUTE_32F, _R_32F = 68, 0
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14, "float8_e4m3fn": 28, "float8_e5m2": 29}
"""cudaDataType_t."""
SCALE_MODES = {"tensor": (0, 0), "row": (3, 3), "block": (5, 4)}
"""cublasLtMatmulMatrixScale_t of w and x: one scalar, one a row, one a 128x128 and a 1x128 tile."""

_TRANSA, _EPILOGUE, _BIAS_POINTER, _FAST_ACCUM, _BIAS_TYPE = 3, 7, 8, 25, 26
_A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 31, 32
_EPILOGUE_BIAS = 4
_SOMEWHERE = 2**21  # stands for a device pointer in questions, which nobody follows


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A product as the library is told of it; `scale` is a key of SCALE_MODES or empty."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    scale: str
    bias: bool
    fast_accum: bool


class Descriptors:
    """The library's description of a product, for as long as this lives."""

    def __init__(self, lt: ModuleType, operation: Operation) -> None:
        self._lt = lt
        self.matmul = lt.matmul_desc_create(_COMPUTE_32F, _R_32F)
        ab, d = TYPES[operation.dtype], TYPES[operation.out_dtype]
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
        scales = _SOMEWHERE if operation.scale else None
        self.point(w_scale=scales, x_scale=scales, bias=_SOMEWHERE if operation.bias else None)

    def point(self, *, w_scale: int | None, x_scale: int | None, bias: int | None) -> None:
        """Say where on the device scales and bias lie."""
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


def types(operation: Operation) -> tuple[int, ...]:
    """Of the sum, the scalars, A, B, C and D."""
    ab, d = TYPES[operation.dtype], TYPES[operation.out_dtype]
    return _COMPUTE_32F, _R_32F, ab, ab, d, d
