"""Device functions of rows sorted by expert: rows copied to their places, rows activated, the sum."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gemmpipe.kernels.fmoe._kernel import activation
from gemmpipe.templates.device_fns import round_to


@triton.jit
def gdc_wait_and_launch(INTERPRETED: tl.constexpr):
    """Programmatic dependent launch: wait for the previous kernel's end; the next one may start."""
    if not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def sorted_rows(
    x_ptr, out_ptr, scale_ptr, shares_ptr, places_ptr, columns, capacity,
    TOPK: tl.constexpr, SORTED: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, QUANTISED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[place, columns] = act(x[row, :columns]), times x[row, columns:] when GATED, for each of the row's pairs.

    SORTED: x's rows are at their places already, and a program takes one pair's; else it takes a row of x with its TOPK
    pairs. A program takes GROUPS groups of GROUP columns. QUANTISED: a group's scale, its largest magnitude over TOP,
    is stored at scale[group, place], times the pair's share if there are shares. Shares alone are one scale per row.
    """
    gdc_wait_and_launch(INTERPRETED)
    row = tl.program_id(0)
    source = row
    if SORTED:
        source = tl.load(places_ptr + row)
        if source < 0:
            return
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < columns
    x_ptr += source.to(tl.int64) * columns * (2 if GATED else 1)
    value = activation(tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        value *= tl.load(x_ptr + columns + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.full((GROUPS,), 1.0, tl.float32)
    scales = 1
    if QUANTISED:
        largest = tl.max(tl.abs(value), 1)
        scale = tl.where(largest > 0, largest / TOP, 1.0)
        scales = tl.cdiv(columns, GROUP)
        value = tl.minimum(tl.maximum(value / scale[:, None], -TOP), TOP)
    result = round_to(value, out_ptr.dtype.element_ty, INTERPRETED)
    for i in tl.static_range(TOPK):
        place = tl.load(places_ptr + row * TOPK + i)
        held = column < tl.where(place >= 0, columns, 0)
        tl.store(out_ptr + place.to(tl.int64) * columns + column, result, mask=held)
        if scale_ptr is not None:
            factor = scale
            if shares_ptr is not None:
                factor = scale * tl.load(shares_ptr + row * TOPK + i)
            held = groups < tl.where(place >= 0, scales, 0)
            tl.store(scale_ptr + groups.to(tl.int64) * capacity + place, factor, mask=held)


@triton.jit
def total_of_places(
    parts_ptr, shares_ptr, places_ptr, out_ptr, N, TOPK: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """out[row, N] = the sum of the parts [places, N] of the row's TOPK pairs, times their shares if there are any."""
    gdc_wait_and_launch(INTERPRETED)
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    added = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOPK):
        place = tl.load(places_ptr + row * TOPK + i)
        held = columns < tl.where(place >= 0, N, 0)
        part = tl.load(parts_ptr + place.to(tl.int64) * N + columns, mask=held, other=0.0).to(tl.float32)
        if shares_ptr is not None:
            part *= tl.load(shares_ptr + row * TOPK + i)
        added += part
    out_ptr += row.to(tl.int64) * N
    tl.store(out_ptr + columns, round_to(added, out_ptr.dtype.element_ty, INTERPRETED), mask=columns < N)
