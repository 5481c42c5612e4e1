"""Two warpgroups that multiply in turns: one adds up what it has multiplied while the other's product runs.

For tiles so wide that the registers hold one product beside the sums. On their own the two fall into step, and both add
up at a time: 2048x1280x8192 in tiles of 160 columns took 38.4 us, 34.3 in turns (H200, docs/kernels.md). Whose turn it
is two of a program's 16 barriers say, the last, as Triton counts from 0. Written in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.templates.hopper_columns import run, slot_descriptors, steps_of_block


@gluon.constexpr_function
def _wait(group):
    return f"bar.sync {14 + group}, 256;"


@gluon.constexpr_function
def _give(group):
    return f"bar.arrive {14 + group}, 256;"


@gluon.constexpr_function
def _instructions(columns, parts, element, group):
    """The turn is given after three of four: how long the other takes to begin lies under the fourth."""
    first, second, third, last = steps_of_block(columns, parts, element, True)
    commit = "wgmma.commit_group.sync.aligned;"
    begin = f"{_wait(group)} wgmma.fence.sync.aligned; {first} {second} {third} {commit} {last} {commit}"
    end = f"wgmma.wait_group.sync.aligned 1; {_give(1 - group)} wgmma.wait_group.sync.aligned 0;"
    return f"{{ .reg .pred add; .reg .b64 x, w; {begin} {end} }}"


@gluon.jit
def multiply_in_turn(ring, share, x_at, w_at, slot):
    """x @ w^T of a K block by its warpgroup, once it is its turn; returns the parts of the product, which is done.

    Arguments as hopper_columns.multiply_slot has them. Both warpgroups call it equally often.
    """
    ELEMENT: gl.constexpr = ring.x.dtype.name
    x, w = slot_descriptors(ring, share, x_at, w_at, slot)
    text: gl.constexpr = _instructions(share.COLUMNS, share.PARTS, ELEMENT, share.GROUP)
    return run(text, (), share, x, w, ELEMENT)


@gluon.jit
def begin_turns(GROUP: gl.constexpr):
    """The first turn is warpgroup 0's."""
    if GROUP == 1:
        _run_once(_give(0))


@gluon.jit
def end_turns(GROUP: gl.constexpr):
    """Take the turn that warpgroup 1 gave last, which nobody multiplies in."""
    if GROUP == 0:
        _run_once(_wait(0))


@gluon.jit
def _run_once(text: gl.constexpr):
    asm: gl.constexpr = text + " mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
