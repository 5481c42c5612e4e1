"""Fused experts of few rows, each pair of a row and an expert a product of its own on the CUDA cores.

Two launches: h of every pair, and the output with its sum over the experts. Nothing is sorted or quantised.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, Knobs, Scalar, digest
from gemmpipe.family import GemmSpec
from gemmpipe.family.moe import expected_experts, hardly_shares_experts, require_experts
from gemmpipe.kernels.fmoe._launch_plan import LaunchStep, dtypes_of
from gemmpipe.kernels.fmoe._triton import LaunchPlan, MultiLaunchImplementation, name_suffix
from gemmpipe.launch.build import find_kernel, is_interpreted
from gemmpipe.launch.workspace import TensorShape
from gemmpipe.templates.constraints import launch_violation
from gemmpipe.templates.params import KERNEL_TYPE, int_knob
from gemmpipe.templates.tiled import STAGE2_SUFFIX, ceil_div, kernel_hash, space_facts, stage_knobs, uses_pdl

if TYPE_CHECKING:
    from gemmpipe.family.space import Space

LABEL = "skinny"
MODULE = "gemmpipe.kernels.fmoe._skinny_kernel"
KERNELS = (f"{MODULE}:skinny_up", f"{MODULE}:skinny_down")
_PER_STAGE_KNOBS = ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
_STAGE2_KNOBS = tuple(f"{name}{STAGE2_SUFFIX}" for name in _PER_STAGE_KNOBS)
_AXES = (KERNEL_TYPE, "BLOCK_SIZE_M", *_PER_STAGE_KNOBS, "cache_modifier", *_STAGE2_KNOBS)
_VECTOR = 8
"""Elements along K that a thread loads at once: 16 bytes of x, so that w has the layout of x."""
_MAX_GRID_Y = 65535
_MAX_VALUES = 128


@dataclass(frozen=True, kw_only=True)
class SkinnyExperts(MultiLaunchImplementation):
    """`skinny`: few rows on the CUDA cores; BLOCK_SIZE_N counts columns of h and of the output, BLOCK_SIZE_M is 1."""

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
        """Its own knobs alone, without those equal to their default."""
        kept: dict[str, Scalar] = {name: knobs[name] for name in _AXES if knobs.get(name) is not None}
        for name in _STAGE2_KNOBS:
            if name in kept and kept[name] == kept.get(name.removesuffix(STAGE2_SUFFIX)):
                del kept[name]
        return {"cache_modifier": "", **kept, KERNEL_TYPE: LABEL, "BLOCK_SIZE_M": 1}

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that either stage breaks, or None."""
        experts = spec.experts
        if experts is None:
            return "experts: this kernel computes routed products alone"
        for stage, columns in ((1, experts.inner), (2, spec.n)):
            plain = replace(spec, x_dtype=spec.w_dtype, experts=None)
            own = {**stage_knobs(knobs, stage), "NUM_KSPLIT": 1, "GROUP_SIZE_M": 1}
            if reason := launch_violation(plain, own, device):
                return f"{reason} (stage {stage})"
            n, k = int_knob(own, "BLOCK_SIZE_N"), int_knob(own, "BLOCK_SIZE_K")
            if k < _VECTOR:
                return f"minimum tile: {k} along K, a thread loads {_VECTOR} at once (stage {stage})"
            if ceil_div(columns, n) > _MAX_GRID_Y:
                return (
                    f"grid: {ceil_div(columns, n)} tiles, at most {_MAX_GRID_Y} in its second dimension (stage {stage})"
                )
            sides = 2 if stage == 1 and experts.gated else 1
            held = sides * n * k // (int_knob(own, "num_warps") * device.warp_size)
            if held > _MAX_VALUES:
                return f"registers: {held} weights per thread, {_MAX_VALUES} leave room for sums (stage {stage})"
        return None

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for weights that would be read several times: once for each pair of their expert, or None."""
        if not hardly_shares_experts(spec):
            pairs, hit = spec.m * require_experts(spec).topk, expected_experts(spec)
            return f"rows: {pairs} pairs would read the weights of {hit:.0f} experts"
        return None

    def default_config(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """Few rows on NVIDIA, where it was measured ahead of the plain kernel: as many programs as there are columns.

        Of a second product with a short K a program takes two columns, which share the loads of h.
        """
        if device.vendor != "nvidia" or not hardly_shares_experts(spec):
            return None
        columns, depth = (1, 512) if require_experts(spec).inner >= 512 else (2, 256)
        sizes = {"BLOCK_SIZE_N": 1, "BLOCK_SIZE_K": 1024, "num_warps": 1, "num_stages": 1}
        return self.normalise(spec, {**sizes, "BLOCK_SIZE_N_2": columns, "BLOCK_SIZE_K_2": depth}, device)

    def kernel_name(self, knobs: Knobs) -> str:
        """`skinny@3fa9c1d2`, `skinny_apart@...`."""
        return f"{LABEL}{name_suffix(knobs)}@{digest([kernel_hash(kernel) for kernel in KERNELS])[:8]}"

    def launch_plan(self, spec: GemmSpec, knobs: Knobs, device: Device) -> LaunchPlan:
        """Both launches with their builds."""
        return _planned(spec, tuple(sorted(knobs.items())), device, is_interpreted(find_kernel(KERNELS[0])))

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, TensorShape]:
        """h."""
        return _scratch_shapes(spec)


def _scratch_shapes(spec: GemmSpec) -> dict[str, TensorShape]:
    experts = require_experts(spec)
    return {"inner": ((spec.m * experts.topk, experts.inner), spec.x_dtype)}


@lru_cache(maxsize=4096)
def _planned(spec: GemmSpec, items: tuple[tuple[str, Scalar], ...], device: Device, interpreted: bool) -> LaunchPlan:
    """The launches with their builds, cached: a running program makes the same call repeatedly."""
    knobs, dtypes = dict(items), dtypes_of(spec, _scratch_shapes(spec))
    steps = (_up_step(spec, knobs, device, interpreted), _down_step(spec, knobs, device, interpreted))
    return tuple((step, step.build(dtypes)) for step in steps)


def _up_step(spec: GemmSpec, knobs: Knobs, device: Device, interpreted: bool) -> LaunchStep:
    experts, own = require_experts(spec), stage_knobs(knobs, 1)
    shared = _shared_constants(spec, own, spec.k, experts.inner, device, interpreted)
    return LaunchStep(
        kernel="skinny_up",
        module=MODULE,
        tensors=_tensors(spec, ("x", "w", "inner"), shares=experts.weight_first),
        integers={"N": experts.inner, "w_rows": experts.w1_rows, "experts": experts.count},
        constants={**shared, "ACTIVATION": experts.activation, "GATED": experts.gated},
        grid=(spec.m * experts.topk, ceil_div(experts.inner, int_knob(own, "BLOCK_SIZE_N")), 1),
        options=_options(own, device, interpreted),
    )


def _down_step(spec: GemmSpec, knobs: Knobs, device: Device, interpreted: bool) -> LaunchStep:
    experts, own = require_experts(spec), stage_knobs(knobs, 2)
    shared = _shared_constants(spec, own, experts.inner, spec.n, device, interpreted)
    return LaunchStep(
        kernel="skinny_down",
        module=MODULE,
        tensors=_tensors(spec, ("inner", "w2", "out"), shares=not experts.weight_first),
        integers={"N": spec.n, "experts": experts.count},
        constants=shared,
        grid=(spec.m, ceil_div(spec.n, int_knob(own, "BLOCK_SIZE_N")), 1),
        options=_options(own, device, interpreted),
    )


def _tensors(spec: GemmSpec, names: tuple[str, str, str], *, shares: bool) -> dict[str, str | None]:
    x, w, out = names
    return {
        "x_ptr": x,
        "w_ptr": w,
        "w_scale_ptr": f"{w}_scale" if spec.w_scale else None,
        "shares_ptr": "shares" if shares else None,
        "ids_ptr": "ids",
        "out_ptr": out,
    }


def _shared_constants(
    spec: GemmSpec, own: Knobs, k: int, n: int, device: Device, interpreted: bool
) -> dict[str, Scalar]:
    """The constants that both kernels have, for K = `k` and N = `n`; K is one, as a model has one."""
    group = spec.w_scale.block[1] if spec.w_scale and spec.w_scale.granularity == "block" else 1
    block_n = int_knob(own, "BLOCK_SIZE_N")
    return {
        "K": k,
        "BLOCK_SIZE_N": block_n,
        "BLOCK_SIZE_K": own["BLOCK_SIZE_K"],
        "VECTOR": _VECTOR,
        "TOPK": require_experts(spec).topk,
        "SCALES": spec.w_scale.granularity if spec.w_scale else "none",
        "GROUP": group,
        # One scale per K block for all columns of a tile, gate and up each: neither crosses a group of rows of w.
        "UNIFORM": group % block_n == 0 and n % block_n == 0,
        "CACHE": own["cache_modifier"],
        "STAGES": own["num_stages"],
        "OVERLAP": uses_pdl(device, interpreted=interpreted),
        "INTERPRETED": interpreted,
    }


def _options(own: Knobs, device: Device, interpreted: bool) -> dict[str, Scalar]:
    overlap: dict[str, Scalar] = {"launch_pdl": True} if uses_pdl(device, interpreted=interpreted) else {}
    return {**overlap, "num_warps": own["num_warps"]}
