"""Gluon's names as they are in the installed Triton: 3.9 renamed what 3.6 has."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
