"""Gluon's names as they are in the installed Triton: 3.9 renamed what 3.6 has."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def as_box(place, tensor, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """The same bytes of shared memory as [A, B, C], laid out as the boxes of a tensor descriptor."""
    if _RENAMED:
        box = place.reinterpret(place.dtype, [A, B, C], tensor.layout)
    else:
        box = place._reinterpret(place.dtype, [A, B, C], tensor.layout)
    return box
