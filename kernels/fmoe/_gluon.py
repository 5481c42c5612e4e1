"""The fused experts on Hopper: rows sorted by expert, so that the copy engine brings both operands of both products."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar, digest
from gemmpipe.experts import experts_of
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.fmoe._grouped_steps import KERNELS, SORTED, scratch, steps
from gemmpipe.kernels.fmoe._grouped_tile import by_block, capacity_of, most_tiles, quantises, whole_knobs
from gemmpipe.kernels.fmoe._launching import LaunchesInARow, Planned, settled
from gemmpipe.kernels.fmoe._steps import dtypes_of
from gemmpipe.launching.builds import find_kernel, is_interpreted
from gemmpipe.launching.workspace import Shape
from gemmpipe.operand_types import element_bytes
from gemmpipe.templates.axes import KIND, integer
from gemmpipe.templates.signature import SCALE_BLOCK
from gemmpipe.templates.tiled import ceil_div, facts_of, hash_of, next_power
from gemmpipe.templates.two_stage import APART, FUSED, SECOND
from gemmpipe.templates.warp_specialised import WARP_SPECIALISED
from gemmpipe.templates.warp_specialised_fits import tile_misfit
from gemmpipe.templates.warp_specialised_tiles import BLOCK_SCALED, DENSE, GROUP_ROWS, MOST_PIECES

if TYPE_CHECKING:
    from gemmpipe.space import Space

_OF_A_STAGE = ("BLOCK_SIZE_N", "GROUP_SIZE_M", "num_stages")
_OWN = tuple(f"{name}{SECOND}" for name in _OF_A_STAGE)
_AXES = (KIND, "BLOCK_SIZE_M", "BLOCK_SIZE_K", *_OF_A_STAGE, FUSED, *_OWN)
_PLACES = 2**31 - 2**20


@dataclass(frozen=True, kw_only=True)
class GroupedExperts(LaunchesInARow):
    """`gluon`: sort by expert, rows there, product, activation, product, sum; blocks of 64 or 128 rows of an expert.

    BLOCK_SIZE_N counts rows of the weight: with FUSED_ACT half of a tile's are the gate's, half the up side's.
    """

    label = "gluon"

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that it knows."""
        return _AXES

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points of this kernel type."""
        if KIND not in space.axes:
            return ()
        return space.points({**facts_of(spec, device), KIND: WARP_SPECIALISED})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone, without what says the same as not being there."""
        return settled(spec, {name: knobs[name] for name in _AXES if knobs.get(name) is not None})

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that either stage breaks, or None."""
        experts = spec.experts
        if experts is None:
            return "experts: this kernel computes routed products alone"
        if unknown := [name for name in APART if name in knobs and name not in _OWN]:
            return f"second stage: {unknown[0]} is no knob of this kernel"
        if reason := _pair_misfit(spec, knobs):
            return reason
        for stage, (n, k) in enumerate(((experts.wide, spec.k), (spec.n, experts.inner)), 1):
            plain = replace(spec, n=n, k=k, x_dtype=spec.w_dtype, x_scale=experts.quantised, experts=None)
            widest = replace(BLOCK_SCALED if by_block(spec) else DENSE, parts=0)
            if reason := tile_misfit(plain, whole_knobs(knobs, stage), device, widest):
                return f"{reason} (stage {stage})"
        if knobs.get(FUSED) and experts.gated and experts.inner * int(element_bytes(spec.out_dtype)) % 16:
            return f"alignment: inter_dim={experts.inner}, the copy engine's rows begin at multiples of 16 bytes"
        if capacity_of(spec, knobs) > _PLACES // ceil_div(max(spec.k, experts.inner), SCALE_BLOCK):
            return f"places: {capacity_of(spec, knobs)} rows with their scales are over 32 bits"
        if (tiles := max(most_tiles(spec, knobs, stage) for stage in (1, 2))) > MOST_PIECES:
            return f"order: up to {tiles} tiles, {MOST_PIECES} are told apart"
        return None

    def wasteful(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """Blocks that are mostly padding: no expert gets more rows than there are."""
        m = integer(knobs, "BLOCK_SIZE_M")
        if m > GROUP_ROWS and m >= 2 * next_power(spec.m):
            return f"tile beyond the problem: {m} rows for {spec.m} an expert at most"
        return None

    def kernel_name(self, knobs: Knobs) -> str:
        """`grouped@3fa9c1d2`, `grouped_fused@...`, `grouped_apart@...`, `grouped_fused_apart@...`."""
        words = ("_fused" if knobs.get(FUSED) else "") + ("_apart" if any(name in knobs for name in APART) else "")
        return f"grouped{words}@{digest([hash_of(kernel) for kernel in KERNELS])[:8]}"

    def planned(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Planned:
        """The launches with their builds; candidates that differ in one stage share the others."""
        return _planned(spec, tuple(sorted(knobs.items())), device)

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Shape]:
        """The tensors between the launches."""
        return scratch(spec, knobs)


def _pair_misfit(spec: GemmSpec, knobs: Knobs) -> str | None:
    """Why a tile cannot hold both sides of whole groups of h, where scales are by blocks and h is quantised in it."""
    if not quantises(spec, knobs):
        return None
    # A warpgroup multiplies all that it sums up by one scale of the weight, so it has one side.
    m, n = integer(knobs, "BLOCK_SIZE_M"), integer(knobs, "BLOCK_SIZE_N")
    if (m, n) != (GROUP_ROWS, 2 * SCALE_BLOCK):
        return f"fused activation: a {m}x{n} tile, of which each warpgroup has {GROUP_ROWS}x{SCALE_BLOCK} of a side"
    if experts_of(spec).inner % SCALE_BLOCK:
        return f"fused activation: inter_dim={experts_of(spec).inner}, groups of {SCALE_BLOCK} columns are not whole"
    return None


@lru_cache(maxsize=4096)
def _planned(spec: GemmSpec, items: tuple[tuple[str, Scalar], ...], device: Device) -> Planned:
    """The launches with their builds: a running program asks for the same ones in each call."""
    knobs = dict(items)
    dtypes = dtypes_of(spec, scratch(spec, knobs))
    interpreted = is_interpreted(find_kernel(f"{SORTED}:sorted_rows"))
    return tuple((step, step.build(dtypes)) for step in steps(spec, knobs, device, interpreted=interpreted))
