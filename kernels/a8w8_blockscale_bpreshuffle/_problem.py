"""a8w8_blockscale_bpreshuffle's problems: a8w8_blockscale's, with the weight in tiles."""

from collections.abc import Mapping
from dataclasses import replace

from gemmpipe.data import Problem, Scalar
from gemmpipe.family import GemmSpec, KernelDefaults
from gemmpipe.kernels.a8w8_blockscale import _problem as row_major
from gemmpipe.layouts import TILES_16X16, check_tiles
from gemmpipe.operand_types import refuse_bias


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """What a source leaves open: the fp8 format that this architecture multiplies, bf16 out. Raises UserError."""
    refuse_bias(kernel, "a8w8_blockscale_bpreshuffle")
    return row_major.key_defaults(kernel, gfx)


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError for a type or a size that kernels or layout do not take."""
    found = replace(row_major.spec(problem), w_layout=TILES_16X16)
    check_tiles(problem.id, found.n, found.k)
    return found
