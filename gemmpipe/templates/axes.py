"""The knobs of tiled kernels: their names, which a space must have, and the values that they can take."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gemmpipe.data import Knobs, Scalar
from gemmpipe.errors import UserError, nearest

if TYPE_CHECKING:
    from gemmpipe.space import Space

NEEDED = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
NEUTRAL: Mapping[str, Scalar] = {"GROUP_SIZE_M": 1, "NUM_KSPLIT": 1, "cache_modifier": ""}
AMD_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
SWAP = "SWAP_AB"
"""Weights on the wide side of the matrix instruction."""
KIND = "kernel_type"
"""Which kernel of a family an entry of the space is for; `plain` is the tiled one."""
CTAS = "CTAS_PER_SM"
"""Programs that share a multiprocessor: the warp-specialised kernels', passed over by the tiled ones."""
CLUSTER = "CLUSTER_SIZE"
"""Programs launched side by side in one GPC: the warp-specialised kernels' as well."""
CACHES = ("", ".ca", ".cg")
"""How a load of the weight may be cached."""
PORTABLE_CLUSTER = 8
"""Programs in a cluster that every device of sm_90 and later can launch (CUDA programming guide)."""
AXES = (*NEEDED, *NEUTRAL, *AMD_ONLY, KIND)


def integer(knobs: Knobs, name: str) -> int:
    """A knob as an int. Raises UserError when it is none."""
    value = knobs[name]
    if type(value) is not int:  # a bool is none
        raise UserError(f"space.{name}: {value!r}, expected an integer")
    return value


def check_axes(space: "Space", known: Sequence[str]) -> None:
    """Raise UserError for an axis that is not known, a needed one that is missing, or a value that no tile can have."""
    for axis in space.axes:
        if axis not in (*known, CTAS, CLUSTER):
            raise UserError(f"space.{axis}: no knob of this kernel{nearest(axis, known)}")
    for axis in NEEDED:
        if axis not in space.axes:
            raise UserError(f"space.{axis}: missing; a tiled kernel needs {', '.join(NEEDED)}")
    replaced = [
        (name, v) for entry in space.when for name, values in entry.items() if isinstance(values, tuple) for v in values
    ]
    for axis, value in [(axis, v) for axis, values in space.axes.items() for v in values] + replaced:
        if expected := _out_of_range(axis, value):
            raise UserError(f"space.{axis}: {value!r}, expected {expected}")


def _out_of_range(axis: str, value: Scalar) -> str | None:
    """What a value of this axis should be, where it is none; null leaves out what a kernel can do without."""
    if value is None and axis not in NEEDED:
        return None
    number = isinstance(value, int) and not isinstance(value, bool)
    size = value if number and isinstance(value, int) else 0
    if axis == "BLOCK_SIZE_N":  # multiples of 16 are the warp-specialised kernels'; others pass over them
        wanted = size > 0 and (not size & (size - 1) or size % 16 == 0)
        return None if wanted else "a power of two or a multiple of 16"
    if axis.startswith("BLOCK_SIZE_") or axis == "num_warps":
        return None if size > 0 and not size & (size - 1) else "a power of two"
    if axis in ("num_stages", "GROUP_SIZE_M", "NUM_KSPLIT"):
        return None if size > 0 else "a whole number from 1"
    if axis == CLUSTER:
        return None if 0 < size <= PORTABLE_CLUSTER else f"a whole number from 1 to {PORTABLE_CLUSTER}"
    if axis == CTAS:
        return None if number and value in (1, 2) else "1 or 2"
    if axis in AMD_ONLY:
        return None if value is None or (number and size >= 0) else "a whole number from 0"
    if axis == "cache_modifier":
        return None if value in CACHES else f"one of {', '.join(map(repr, CACHES))}"
    return (None if isinstance(value, bool) else "true or false") if axis == SWAP else None
