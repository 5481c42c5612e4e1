"""The knobs of candidates that are two products in a row: which stage a name is for."""

from gemmpipe.data import Knobs, Scalar

SECOND = "_2"
"""Ends the name of a knob that is the second stage's; without it the second stage takes the first's."""
FUSED = "FUSED_ACT"
"""Whether the first stage's kernel multiplies gate and up side by side and activates before it stores."""
APART = tuple(f"{name}{SECOND}" for name in ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"))
"""The second stage's own knobs; BLOCK_SIZE_M is shared, since both read the same blocks of rows."""


def knobs_of_stage(knobs: Knobs, stage: int) -> dict[str, Scalar]:
    """The knobs of stage 1 or 2 under the names without a suffix."""
    own = {name: value for name, value in knobs.items() if name not in APART and name != FUSED}
    if stage == 2:
        own |= {name.removesuffix(SECOND): value for name, value in knobs.items() if name in APART}
    return own
