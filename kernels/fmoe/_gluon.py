"""The fused experts on Hopper: rows sorted by expert, so that TMA loads both operands of both products."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, Knobs, Scalar, digest
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import element_bytes
from gemmpipe.family.moe import require_experts
from gemmpipe.kernels.fmoe._grouped_launch_plan import (
    GATHERED_KERNELS,
    KERNELS,
    PINGPONG_KERNEL,
    SORT_MODULE,
    grouped_launch_steps,
    grouped_scratch_shapes,
    has_block_scales,
    max_tiles,
    quantises_in_epilogue,
    row_capacity,
    unsplit_knobs,
)
from gemmpipe.kernels.fmoe._launch_plan import dtypes_of, max_blocks
from gemmpipe.kernels.fmoe._triton import LaunchPlan, MultiLaunchImplementation, canonical_knobs, name_suffix
from gemmpipe.launch.build import find_kernel, is_interpreted
from gemmpipe.launch.workspace import TensorShape
from gemmpipe.templates.hopper.constraints import (
    BLOCK_SCALED_MAX_COLUMNS,
    DENSE_MAX_COLUMNS,
    MAX_WORK_TILES,
    WARPGROUP_M,
    MaxColumns,
    epilogue_columns,
    hopper_shared_bytes,
    hopper_tile_violation,
)
from gemmpipe.templates.params import KERNEL_TYPE, SCALE_BLOCK, WARP_SPECIALISED, int_knob
from gemmpipe.templates.tiled import (
    FUSED_ACT,
    FUSED_SUM,
    GATHER_ROWS,
    PINGPONG,
    STAGE2_KNOBS,
    STAGE2_SUFFIX,
    ceil_div,
    kernel_hash,
    next_power_of_2,
    space_facts,
)

if TYPE_CHECKING:
    from gemmpipe.family.space import Space

_PER_STAGE_KNOBS = ("BLOCK_SIZE_N", "GROUP_SIZE_M", "num_stages")
_GROUP_2 = f"GROUP_SIZE_M{STAGE2_SUFFIX}"
_STAGE2_KNOBS = tuple(f"{name}{STAGE2_SUFFIX}" for name in _PER_STAGE_KNOBS)
_FLAGS = (FUSED_ACT, GATHER_ROWS, PINGPONG, FUSED_SUM)
_AXES = (KERNEL_TYPE, "BLOCK_SIZE_M", "BLOCK_SIZE_K", *_PER_STAGE_KNOBS, *_FLAGS, *_STAGE2_KNOBS)
_MAX_ROWS = 2**31 - 2**20
_MAX_PARTS_IN_ANY_ORDER = 2  # 0 + a + b is 0 + b + a to the bit


@dataclass(frozen=True, kw_only=True)
class GroupedExperts(MultiLaunchImplementation):
    """`gluon`: sort, gather rows, product, activation, product, sum; blocks of 64 or 128 rows of an expert.

    BLOCK_SIZE_N counts rows of the weight: with FUSED_ACT half of a tile's are the gate's, half the up projection's.
    """

    label = "gluon"

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that these kernels have."""
        return _AXES

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs of this kernel type."""
        if KERNEL_TYPE not in space.axes:
            return ()
        return space.configs({**space_facts(spec, device), KERNEL_TYPE: WARP_SPECIALISED})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone, without those equal to their default; flags only where they apply."""
        kept = {name: knobs[name] for name in _AXES if knobs.get(name) is not None}
        if not kept.get(GATHER_ROWS) or not _can_gather(spec, kept):
            kept.pop(GATHER_ROWS, None)
        if not kept.get(PINGPONG) or int_knob(kept, "BLOCK_SIZE_M") != WARPGROUP_M:
            kept.pop(PINGPONG, None)
        if not kept.get(FUSED_SUM):
            kept.pop(FUSED_SUM, None)
        kept = canonical_knobs(spec, kept)
        if _GROUP_2 in kept and int_knob(kept, "BLOCK_SIZE_M") > 0:  # groups of all blocks or more have one order
            blocks = max_blocks(spec, int_knob(kept, "BLOCK_SIZE_M"))
            kept[_GROUP_2] = min(int_knob(kept, _GROUP_2), next_power_of_2(blocks))
        return canonical_knobs(spec, kept)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that either stage breaks, or None."""
        experts = spec.experts
        if experts is None:
            return "experts: this kernel computes routed products alone"
        if unknown := [name for name in STAGE2_KNOBS if name in knobs and name not in _STAGE2_KNOBS]:
            return f"second stage: {unknown[0]} is no knob of this kernel"
        if reason := _exchange_violation(spec, knobs):
            return reason
        for stage, (n, k) in enumerate(((experts.w1_rows, spec.k), (spec.n, experts.inner)), 1):
            plain = replace(spec, n=n, k=k, x_dtype=spec.w_dtype, x_scale=experts.quantised, experts=None)
            widest = replace(BLOCK_SCALED_MAX_COLUMNS if has_block_scales(spec) else DENSE_MAX_COLUMNS, parts=0)
            own = unsplit_knobs(knobs, stage)
            if stage == 2 and knobs.get(PINGPONG) and (reason := _pingpong_violation(own, device, widest)):
                return f"{reason} (stage 2)"
            if reason := hopper_tile_violation(plain, own, device, widest):
                return f"{reason} (stage {stage})"
        if knobs.get(FUSED_ACT) and experts.gated and experts.inner * int(element_bytes(spec.out_dtype)) % 16:
            return f"alignment: inter_dim={experts.inner}, rows of a TMA descriptor begin at multiples of 16 bytes"
        if knobs.get(FUSED_SUM) and (spec.n % 16 or spec.m * spec.n > _MAX_ROWS):
            return f"fused sum: an output of {spec.m} x {spec.n}, expected a multiple of 16 columns and 32-bit offsets"
        if row_capacity(spec, knobs) > _MAX_ROWS // ceil_div(max(spec.k, experts.inner), SCALE_BLOCK):
            return f"places: {row_capacity(spec, knobs)} rows with their scales exceed 32-bit offsets"
        if (tiles := max(max_tiles(spec, knobs, stage) for stage in (1, 2))) > MAX_WORK_TILES:
            return f"order: up to {tiles} tiles, at most {MAX_WORK_TILES} have exact coordinates"
        return None

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for blocks that are mostly padding (an expert gets M rows at most), or None."""
        m = int_knob(knobs, "BLOCK_SIZE_M")
        if m > WARPGROUP_M and m >= 2 * next_power_of_2(spec.m):
            return f"tile beyond the problem: {m} rows for at most {spec.m} per expert"
        return None

    def called_knobs(self, spec: GemmSpec, knobs: Knobs) -> Knobs:
        """Without FUSED_SUM if torch.use_deterministic_algorithms(True) is set (not if it only warns).

        The sum of one or two parts does not depend on their order.
        """
        import torch

        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        strict = torch.are_deterministic_algorithms_enabled() and not warns
        if not strict or require_experts(spec).topk <= _MAX_PARTS_IN_ANY_ORDER:
            return knobs
        return {name: value for name, value in knobs.items() if name != FUSED_SUM}

    def kernel_name(self, knobs: Knobs) -> str:
        """`grouped@3fa9c1d2`, `grouped_fused@...`, `grouped_apart@...`, `grouped_fused_apart@...`."""
        gathered, kernels = ("_gathered", GATHERED_KERNELS) if knobs.get(GATHER_ROWS) else ("", KERNELS)
        if knobs.get(PINGPONG):
            gathered, kernels = f"{gathered}_pingpong", (*kernels, PINGPONG_KERNEL)
        if knobs.get(FUSED_SUM):
            gathered = f"{gathered}_summed"
        return f"grouped{gathered}{name_suffix(knobs)}@{digest([kernel_hash(kernel) for kernel in kernels])[:8]}"

    def launch_plan(self, spec: GemmSpec, knobs: Knobs, device: Device) -> LaunchPlan:
        """The launches with their builds; candidates that differ in one stage share the others."""
        return _planned(spec, tuple(sorted(knobs.items())), device)

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, TensorShape]:
        """The tensors between the launches."""
        return grouped_scratch_shapes(spec, knobs)


def _exchange_violation(spec: GemmSpec, knobs: Knobs) -> str | None:
    """`rule: detail` if a tile with block scales cannot quantise h (both sides of whole groups of columns), or None."""
    if not quantises_in_epilogue(spec, knobs):
        return None
    # A warpgroup applies one scale of the weight to its whole sum, so it computes one side.
    m, n = int_knob(knobs, "BLOCK_SIZE_M"), int_knob(knobs, "BLOCK_SIZE_N")
    if (m, n) != (WARPGROUP_M, 2 * SCALE_BLOCK):
        return f"fused activation: a {m}x{n} tile, expected {WARPGROUP_M}x{2 * SCALE_BLOCK}, one side per warpgroup"
    inner = require_experts(spec).inner
    if inner % SCALE_BLOCK:
        return f"fused activation: inter_dim={inner}, expected a multiple of {SCALE_BLOCK} columns"
    return None


def _pingpong_violation(own: Knobs, device: Device, widest: MaxColumns) -> str | None:
    """`rule: detail` if a warpgroup cannot have a whole tile of 64 rows with its sums and its output, or None."""
    columns = int_knob(own, "BLOCK_SIZE_N")
    if columns > widest.whole:
        return f"registers: {columns} columns per warpgroup, 16 to {widest.whole} fit"
    staged = 2 * 2 * WARPGROUP_M * (columns - epilogue_columns(own))
    if (needed := hopper_shared_bytes(own) + staged) > device.shared_bytes:
        return f"shared memory: about {needed} bytes, {device.shared_bytes} per block"
    return None


def _can_gather(spec: GemmSpec, knobs: Knobs) -> bool:
    """True if the loader can read x's rows where they are: whole K blocks, no scale per row, 32-bit offsets."""
    experts = require_experts(spec)
    scaled_rows = experts.weight_first or (experts.quantised is not None and not has_block_scales(spec))
    whole = spec.k % int_knob(knobs, "BLOCK_SIZE_K") == 0
    return not scaled_rows and whole and spec.m * spec.k <= _MAX_ROWS


@lru_cache(maxsize=4096)
def _planned(spec: GemmSpec, items: tuple[tuple[str, Scalar], ...], device: Device) -> LaunchPlan:
    """The launches with their builds, cached: a running program makes the same call repeatedly."""
    knobs = dict(items)
    dtypes = dtypes_of(spec, grouped_scratch_shapes(spec, knobs))
    interpreted = is_interpreted(find_kernel(f"{SORT_MODULE}:sorted_rows"))
    return tuple(
        (step, step.build(dtypes)) for step in grouped_launch_steps(spec, knobs, device, interpreted=interpreted)
    )
