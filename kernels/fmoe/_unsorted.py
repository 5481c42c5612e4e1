"""Fused experts for some hundred pairs without a sort: each program finds the pairs of its expert in the routing.

Three launches that overlap: both products and the sum. fp8 operands are quantised in the products.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, Knobs, Scalar, digest
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.family.moe import require_experts
from gemmpipe.kernels.fmoe._launch_plan import COLUMNS_PER_PROGRAM, INT, LaunchStep, dtypes_of
from gemmpipe.kernels.fmoe._triton import LaunchPlan, MultiLaunchImplementation, name_suffix, padding_reason
from gemmpipe.launch.build import find_kernel, is_interpreted
from gemmpipe.launch.workspace import TensorShape
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.params import AMD_KNOBS, KERNEL_TYPE, int_knob, tile_constants
from gemmpipe.templates.tiled import (
    STAGE2_SUFFIX,
    ceil_div,
    kernel_hash,
    next_power_of_2,
    space_facts,
    stage_knobs,
    uses_pdl,
)

if TYPE_CHECKING:
    from gemmpipe.family.space import Space

LABEL = "unsorted"
MODULE = "gemmpipe.kernels.fmoe._unsorted_kernel"
KERNELS = (f"{MODULE}:unsorted", f"{MODULE}:sum_of_pairs")
_PER_STAGE_KNOBS = ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
_STAGE2_KNOBS = tuple(f"{name}{STAGE2_SUFFIX}" for name in _PER_STAGE_KNOBS)
_AXES = (KERNEL_TYPE, "BLOCK_SIZE_M", *_PER_STAGE_KNOBS, "cache_modifier", *AMD_KNOBS, *_STAGE2_KNOBS)
_MAX_PAIRS = 1024
"""Every program compares all pairs with its expert: more take longer than a sort."""


@dataclass(frozen=True, kw_only=True)
class UnsortedExperts(MultiLaunchImplementation):
    """`unsorted`: product with the activation, product, sum; BLOCK_SIZE_N counts columns of h and of the output."""

    label = LABEL

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that these kernels have."""
        return _AXES

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs of this kernel type."""
        if KERNEL_TYPE not in space.axes:
            return ()
        return space.configs({**space_facts(spec, device), KERNEL_TYPE: LABEL})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone, without those equal to their default or ignored by this vendor's compiler."""
        kept: dict[str, Scalar] = {name: knobs[name] for name in _AXES if knobs.get(name) is not None}
        if device.vendor != "amd":
            kept = {name: value for name, value in kept.items() if name not in AMD_KNOBS}
        elif device.gfx == "gfx950" and "kpack" in kept:
            kept["kpack"] = 1  # the compiler overrides it from gfx950 on
        for name in _STAGE2_KNOBS:
            if name in kept and kept[name] == kept.get(name.removesuffix(STAGE2_SUFFIX)):
                del kept[name]
        return {"cache_modifier": "", **kept, KERNEL_TYPE: LABEL}

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that either stage breaks, or None."""
        experts = spec.experts
        if experts is None:
            return "experts: this kernel computes routed products alone"
        if spec.m * experts.topk > _MAX_PAIRS:
            return f"pairs: {spec.m * experts.topk}, every program reads all of them, {_MAX_PAIRS} at most"
        group = spec.w_scale.block[1] if spec.w_scale and spec.w_scale.granularity == "block" else 0
        for stage in (1, 2):
            own = stage_knobs(knobs, stage)
            size = int_knob(own, "BLOCK_SIZE_K")
            # One pair of scales is applied to a whole K block: one across two groups would be scaled by the first's.
            if group and (size < 1 or group % size):
                return f"scale group: BLOCK_SIZE_K={size} does not divide {group} (stage {stage})"
            n, k = (experts.w1_rows, spec.k) if stage == 1 else (spec.n, experts.inner)
            plain = replace(spec, n=n, k=k, x_dtype=spec.w_dtype, x_scale=experts.quantised, experts=None)
            wide = {**own, "NUM_KSPLIT": 1, "GROUP_SIZE_M": 1}
            if stage == 1 and experts.gated:  # gate and up: two weight tiles and two accumulators
                wide["BLOCK_SIZE_N"] = 2 * int_knob(own, "BLOCK_SIZE_N")
            sums = 1 if spec.w_scale is None else 2
            if reason := tile_violation(plain, wide, device, accumulators=sums, parts=False, gathered=True):
                return f"{reason} (stage {stage})"
        return None

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for blocks that are mostly padding (an expert gets M rows at most), or None."""
        return padding_reason(spec, knobs)

    def kernel_name(self, knobs: Knobs) -> str:
        """`unsorted@3fa9c1d2`, `unsorted_apart@...`."""
        return f"{LABEL}{name_suffix(knobs)}@{digest([kernel_hash(kernel) for kernel in KERNELS])[:8]}"

    def launch_plan(self, spec: GemmSpec, knobs: Knobs, device: Device) -> LaunchPlan:
        """The launches with their builds."""
        return _planned(spec, tuple(sorted(knobs.items())), device, is_interpreted(find_kernel(KERNELS[0])))

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, TensorShape]:
        """h, the parts of the output, and the pairs that programs have found."""
        return _scratch_shapes(spec)


def _scratch_shapes(spec: GemmSpec) -> dict[str, TensorShape]:
    experts = require_experts(spec)
    pairs = spec.m * experts.topk
    return {
        "inner": ((pairs, experts.inner), spec.x_dtype),
        "parts": ((pairs, spec.n), spec.out_dtype),
        "found": ((min(pairs, experts.count), _pairs_compared(spec)), INT),
    }


def _pairs_compared(spec: GemmSpec) -> int:
    """The pairs rounded up to a power of two, from 64 on (an AMD warp)."""
    return max(64, next_power_of_2(spec.m * require_experts(spec).topk))


@lru_cache(maxsize=4096)
def _planned(spec: GemmSpec, items: tuple[tuple[str, Scalar], ...], device: Device, interpreted: bool) -> LaunchPlan:
    """The launches with their builds, cached: a running program makes the same call repeatedly."""
    knobs, dtypes = dict(items), dtypes_of(spec, _scratch_shapes(spec))
    overlap = uses_pdl(device, interpreted=interpreted)
    steps = [_product_step(spec, knobs, stage, overlap, interpreted) for stage in (1, 2)]
    steps.append(_sum_step(spec, overlap, interpreted))
    return tuple((step, step.build(dtypes)) for step in steps)


def _product_step(spec: GemmSpec, knobs: Knobs, stage: int, overlap: bool, interpreted: bool) -> LaunchStep:
    experts, own, first = require_experts(spec), stage_knobs(knobs, stage), stage == 1
    x, w, out = ("x", "w", "inner") if first else ("inner", "w2", "parts")
    n, k = (experts.inner, spec.k) if first else (spec.n, experts.inner)
    pairs, block_n = spec.m * experts.topk, int_knob(own, "BLOCK_SIZE_N")
    group = spec.w_scale.block[1] if spec.w_scale and spec.w_scale.granularity == "block" else 1
    gated = first and experts.gated
    return LaunchStep(
        kernel="unsorted",
        module=MODULE,
        tensors={
            "x_ptr": x,
            "w_ptr": w,
            "w_scale_ptr": f"{w}_scale" if spec.w_scale else None,
            "shares_ptr": "shares" if first == experts.weight_first else None,
            "ids_ptr": "ids",
            "found_ptr": "found",
            "out_ptr": out,
        },
        integers={
            "pairs": pairs,
            "N": n,
            "K": k,
            "w_rows": experts.w1_rows if first else spec.n,
            "experts": experts.count,
        },
        constants={
            **tile_constants(own),
            "TOPK": experts.topk if first else 1,
            "SCALES": spec.w_scale.granularity if spec.w_scale else "none",
            "GROUP": group,
            "UNIFORM": group % block_n == 0 and (not gated or n % block_n == 0),
            "TOP": FP8_MAX.get(spec.w_dtype, 1.0),
            "ACTIVATION": experts.activation if first else "none",
            "GATED": gated,
            "EVEN_K": k % int_knob(own, "BLOCK_SIZE_K") == 0,
            "CACHE": own["cache_modifier"],
            "PAIRS": _pairs_compared(spec),
            "BY_PAIR": pairs <= experts.count,
            "ROUTED_BEFORE": not first,
            "OVERLAP": overlap,
            "INTERPRETED": interpreted,
        },
        grid=(min(pairs, experts.count) * ceil_div(n, block_n), 1, 1),
        options=_options(overlap)
        | {name: own[name] for name in ("num_warps", "num_stages", *AMD_KNOBS) if name in own},
    )


def _sum_step(spec: GemmSpec, overlap: bool, interpreted: bool) -> LaunchStep:
    """Adds up each row's parts."""
    experts, block = require_experts(spec), min(COLUMNS_PER_PROGRAM, next_power_of_2(spec.n))
    return LaunchStep(
        kernel="sum_of_pairs",
        module=MODULE,
        tensors={"parts_ptr": "parts", "ids_ptr": "ids", "out_ptr": "out"},
        integers={"N": spec.n, "experts": experts.count},
        constants={"TOPK": experts.topk, "BLOCK": block, "OVERLAP": overlap, "INTERPRETED": interpreted},
        grid=(spec.m, ceil_div(spec.n, block), 1),
        options=_options(overlap) | {"num_warps": 4},
    )


def _options(overlap: bool) -> dict[str, Scalar]:
    return {"launch_pdl": True} if overlap else {}
