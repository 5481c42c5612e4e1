"""CUDA's driver through ctypes: cubins, descriptors of tensors for the copy engine, and launches of their kernels."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER, _OVERLAP = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, ..._PROGRAMMATIC_STREAM_SERIALIZATION
TENSOR_TYPES = {"bytes": 0, "float32": 7, "bfloat16": 9}
"""CUtensorMapDataType."""
_SWIZZLES = {0: 0, 16: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by bytes
_PROMOTE_256_BYTES = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_MAP_BYTES = 128
_LINE_BYTES, _SCALES_PER_LINE = 16, 4
"""The copy engine reads rows that begin at multiples of 16 bytes, which are four fp32 scales."""


class _AttributeValue(ctypes.Union):
    """CUlaunchAttributeValue, as far as used here."""

    _fields_ = [("bytes", ctypes.c_byte * 64), ("cluster", ctypes.c_uint * 3), ("flag", ctypes.c_int)]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _AttributeValue)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class TensorMap(ctypes.Structure):
    """CUtensorMap: a matrix in device memory and the box that one copy moves; passed to kernels by value."""

    _fields_ = [("words", ctypes.c_ubyte * _MAP_BYTES)]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A row-major matrix for the copy engine: sizes in elements, `swizzle` and the row's stride in bytes."""

    address: int
    kind: str
    """A key of TENSOR_TYPES."""
    rows: int
    columns: int
    row_bytes: int
    box: tuple[int, int]
    """(rows, columns) of one copy."""
    swizzle: int = 0

    def encode(self) -> TensorMap:
        """The descriptor. Raises RuntimeError if the driver refuses it, e.g. for the alignment."""
        # The driver writes to addresses that are multiples of 64; kernels take a copy from any address.
        room = (ctypes.c_ubyte * (_MAP_BYTES + 64))()
        aligned = -(-ctypes.addressof(room) // 64) * 64
        sizes = (ctypes.c_uint64 * 2)(self.columns, self.rows)
        strides = (ctypes.c_uint64 * 1)(self.row_bytes)
        box = (ctypes.c_uint32 * 2)(self.box[1], self.box[0])
        _check(
            driver().cuTensorMapEncodeTiled(
                *(ctypes.c_void_p(aligned), ctypes.c_int(TENSOR_TYPES[self.kind]), ctypes.c_uint32(2)),
                *(ctypes.c_void_p(self.address), sizes, strides, box, (ctypes.c_uint32 * 2)(1, 1)),
                *(ctypes.c_int(0), ctypes.c_int(_SWIZZLES[self.swizzle])),
                *(ctypes.c_int(_PROMOTE_256_BYTES), ctypes.c_int(0)),
            ),
            "cuTensorMapEncodeTiled",
        )
        return TensorMap.from_buffer_copy(ctypes.string_at(aligned, _MAP_BYTES))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How a kernel is launched: programs along x, threads of each, shared memory, programs per cluster."""

    programs: int
    threads: int
    shared_bytes: int
    cluster: int = 1


class LoadedCubin:
    """A cubin loaded into the current context, for the life of the process, and one of its kernels."""

    def __init__(self, binary: bytes, kernel: str) -> None:
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver().cuModuleLoadData(ctypes.byref(self._module), binary), "cuModuleLoadData")
        found = driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, kernel.encode())
        _check(found, "cuModuleGetFunction")

    def launcher(self, grid: Grid, arguments: Sequence[Any]) -> Callable[[int], None]:
        """A launch on a stream, which may begin while the previous kernel ends, as its kernel waits for that itself.

        `arguments` are ctypes objects; they must not change afterwards.
        """
        shared = ctypes.c_int(grid.shared_bytes)
        _check(
            driver().cuFuncSetAttribute(self._function, ctypes.c_int(_SHARED_BYTES_ATTRIBUTE), shared),
            "cuFuncSetAttribute",
        )
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[0].value.flag = _OVERLAP, 1
        if grid.cluster > 1:
            attributes[1].id, attributes[1].value.cluster[:] = _CLUSTER, (grid.cluster, 1, 1)
        config = _LaunchConfig(
            grid=(grid.programs, 1, 1),
            block=(grid.threads, 1, 1),
            shared_bytes=grid.shared_bytes,
            attributes=attributes,
            count=1 + (grid.cluster > 1),
        )
        kept = tuple(arguments)
        pointers = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(argument) for argument in kept))
        launch_kernel, function, reference = driver().cuLaunchKernelEx, self._function, ctypes.byref(config)

        def launch(stream: int) -> None:
            assert kept
            config.stream = stream
            if code := launch_kernel(reference, function, pointers, None):
                _check(code, "cuLaunchKernelEx")

        return launch


@cache
def driver() -> ctypes.CDLL:
    """libcuda. Raises RuntimeError if it cannot be loaded."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"CUDA's driver cannot be loaded: {error}") from error


def _check(code: int, call: str) -> None:
    """Raises RuntimeError with the name of the error."""
    if code:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        raise RuntimeError(f"{call}: {(name.value or b'unknown').decode()} ({code})")


def aligned_rows(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor, or a copy if its rows are not contiguous or do not begin at a multiple of 16 bytes."""
    rows = tensor.contiguous()
    return rows.clone() if rows.data_ptr() % _LINE_BYTES else rows


def scales_for_copy_engine(
    scales: "torch.Tensor", *, whole_lines: bool = False
) -> "tuple[torch.Tensor, Callable[[], object]]":
    """(scales [M, blocks] with stride (1, a multiple of 4), a call to make before each product that reads them).

    Scales in that layout are returned unchanged with a call that does nothing; others are copied by the call.
    `whole_lines`: the stride between blocks must be M rounded up to 4, for readers that do not ask for it.
    """
    import torch

    rows, blocks = scales.shape
    line, stride = -(-rows // _SCALES_PER_LINE) * _SCALES_PER_LINE, scales.stride(1)
    m_major = rows == 1 or scales.stride(0) == 1
    fits = stride == line if whole_lines else stride % _SCALES_PER_LINE == 0 and stride >= rows
    if m_major and fits and not scales.data_ptr() % _LINE_BYTES:
        return scales, lambda: None
    kept = torch.empty_strided((rows, blocks), (1, line), dtype=scales.dtype, device=scales.device)
    return kept, lambda: kept.copy_(scales)
