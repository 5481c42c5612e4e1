"""Gluon's names in the installed Triton: 3.9 renamed those of 3.6."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def view_as_box(place, tensor, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """A view of shared memory as [A, B, C] in the layout of a tensor descriptor's boxes."""
    if _RENAMED:
        box = place.reinterpret(place.dtype, [A, B, C], tensor.layout)
    else:
        box = place._reinterpret(place.dtype, [A, B, C], tensor.layout)
    return box


@gluon.jit
def view_as_ring(places, SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """A view of shared memory, or its beginning, as SLOTS slots of ROWS rows."""
    SHAPE: gl.constexpr = [SLOTS, ROWS, places.shape[2]]
    KIND: gl.constexpr = places.dtype
    return (
        places.reinterpret(KIND, SHAPE, places.layout) if _RENAMED else places._reinterpret(KIND, SHAPE, places.layout)
    )


@gluon.jit
def view_as_row(place, LENGTH: gl.constexpr):
    """A view of shared memory as LENGTH int32."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return place.reinterpret(gl.int32, [LENGTH], PLAIN) if _RENAMED else place._reinterpret(gl.int32, [LENGTH], PLAIN)


@gluon.jit
def view_as(place, KIND: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """A view of shared memory, or its beginning, with this element type, shape and layout."""
    return place.reinterpret(KIND, SHAPE, LAYOUT) if _RENAMED else place._reinterpret(KIND, SHAPE, LAYOUT)
