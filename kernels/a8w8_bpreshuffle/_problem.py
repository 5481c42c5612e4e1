"""a8w8_bpreshuffle's problems: a8w8's, with the weight in tiles."""

from dataclasses import replace

from gemmpipe.data import Problem
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.a8w8 import _problem as row_major
from gemmpipe.layouts import TILES_16X16, check_tiles

GRANULARITIES = row_major.GRANULARITIES
key_defaults = row_major.key_defaults


def spec(problem: Problem) -> GemmSpec:
    """The product that the key means. Raises UserError for a value that the kernels or the layout do not take."""
    found = replace(row_major.spec(problem), w_layout=TILES_16X16)
    check_tiles(problem.id, found.n, found.k)
    return found
