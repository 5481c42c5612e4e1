"""The fused experts in Triton: knobs of both stages, constraints, builds.

`MultiLaunchImplementation` is the base of all implementations of the experts: a call is several launches in order,
with scratch tensors between them.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs, Scalar, digest
from gemmpipe.family import Experts, GemmSpec, Implementation, Inputs, Launch, Prepared
from gemmpipe.family.moe import hardly_shares_experts, require_experts, routing
from gemmpipe.kernels.fmoe._launch_plan import (
    KERNELS,
    MODULE,
    ORDER_KERNELS,
    OVERLAPPED_MODULE,
    LaunchStep,
    dtypes_of,
    launch_steps,
    overlapped,
    scratch_shapes,
)
from gemmpipe.launch.build import find_kernel, is_interpreted, load_build
from gemmpipe.launch.workspace import SCRATCH, TensorShape
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.params import AMD_KNOBS, KERNEL_TYPE, REQUIRED_AXES, check_axes, int_knob
from gemmpipe.templates.tiled import (
    FUSED_ACT,
    FUSED_SUM,
    GATHER_ROWS,
    OVERLAP,
    PINGPONG,
    STAGE2_KNOBS,
    STAGE2_SUFFIX,
    WGMMA_M,
    kernel_hash,
    next_power_of_2,
    space_facts,
    stage_knobs,
    uses_pdl,
)

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


LaunchPlan = tuple[tuple[LaunchStep, Build], ...]
_NEUTRAL: Mapping[str, Scalar] = {"GROUP_SIZE_M": 1, "cache_modifier": ""}
_AXES = (*REQUIRED_AXES, *_NEUTRAL, FUSED_ACT, OVERLAP, *AMD_KNOBS, KERNEL_TYPE, *STAGE2_KNOBS)
_OTHERS_FLAGS = (GATHER_ROWS, PINGPONG, FUSED_SUM)
"""Axes of the space that only the warp-specialised kernel has."""


def canonical_knobs(spec: GemmSpec, knobs: Knobs) -> dict[str, Scalar]:
    """The knobs without those equal to their default."""
    kept = {name: value for name, value in knobs.items() if name not in (FUSED_ACT, OVERLAP) or value}
    if spec.m * require_experts(spec).topk == 1:
        kept["GROUP_SIZE_M"] = 1  # one row of tiles has one order
    for name in STAGE2_KNOBS:
        if name in kept and kept[name] == kept.get(name.removesuffix(STAGE2_SUFFIX)):
            del kept[name]
    return kept


def padding_reason(spec: GemmSpec, knobs: Knobs) -> str | None:
    """`rule: detail` if tiles are mostly padding, in rows or in either product's columns, or None."""
    m = int_knob(knobs, "BLOCK_SIZE_M")
    if m > WGMMA_M and m >= 2 * next_power_of_2(spec.m):
        return f"tile beyond the problem: {m} rows for at most {spec.m} per expert"
    for stage, columns in ((1, require_experts(spec).w1_rows), (2, spec.n)):
        n = int_knob(stage_knobs(knobs, stage), "BLOCK_SIZE_N")
        if n > WGMMA_M and n >= 2 * next_power_of_2(columns):
            return f"tile beyond the problem: {n} columns for {columns} (stage {stage})"
    return None


def name_suffix(knobs: Knobs) -> str:
    """The part of a kernel's name for a fused activation and for knobs of the second stage."""
    fused = "_fused" if knobs.get(FUSED_ACT) else ""
    return fused + ("_apart" if any(name in knobs for name in STAGE2_KNOBS) else "")


class MultiLaunchImplementation(Implementation):
    """An implementation with several launches per call and scratch tensors between them."""

    @abstractmethod
    def launch_plan(self, spec: GemmSpec, knobs: Knobs, device: Device) -> LaunchPlan:
        """The launches in their order, with their builds."""

    @abstractmethod
    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, TensorShape]:
        """(shape, dtype) of the tensors between the launches, by name."""

    def library_calls(
        self, spec: GemmSpec, tensors: "Mapping[str, torch.Tensor | None]"
    ) -> "list[Callable[[], object]]":
        """Library calls after the launches, on the tensors of the call by name."""
        return []

    def launches_alone(self, spec: GemmSpec) -> bool:
        """True if a call consists of the plan's launches."""
        return True

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """A build for each launch."""
        return tuple(dict.fromkeys(build for _, build in self.launch_plan(spec, knobs, device)))

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The launches in order; the tensors between them are the current stream's scratch."""
        ids, shares = routing(inputs)
        weights = prepared.weights
        tensors: dict[str, torch.Tensor | None] = {"x": inputs.x, "ids": ids, "shares": shares, "out": out}
        tensors |= {"w": weights.w, "w_scale": weights.w_scale, "w2": weights.w2, "w2_scale": weights.w2_scale}
        tensors |= SCRATCH.take(self.scratch(spec, knobs), out.device)
        runs: list[Callable[[], object]] = [
            load_build(build, device).launcher(step.grid, step.arguments(tensors))
            for step, build in self.launch_plan(spec, knobs, device)
        ]
        runs += self.library_calls(spec, tensors)

        def launch() -> "torch.Tensor":
            for run in runs:
                run()
            return out

        return launch


@dataclass(frozen=True, kw_only=True)
class FusedExperts(MultiLaunchImplementation):
    """`triton`: sort by expert, product, activation, product, sum; fp8 operands are quantised between.

    Without FUSED_ACT and own knobs of the second stage it has the form of vLLM's and SGLang's kernel.
    """

    label = "triton"

    def check(self, space: "Space") -> None:
        """Raises UserError for an unknown axis, one that is missing, or a value out of range."""
        check_axes(space, (*_AXES, *_OTHERS_FLAGS))

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that these kernels have."""
        return _AXES

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs. Raises UserError as `check` does."""
        self.check(space)
        return space.configs({**space_facts(spec, device), KERNEL_TYPE: "plain"})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Drops other kernels' flags, knobs that the vendor's compiler ignores, and those equal to their default."""
        own = {name: value for name, value in knobs.items() if value is not None and name not in _OTHERS_FLAGS}
        kept = {**_NEUTRAL, **own}
        if device.vendor != "amd":
            kept = {name: value for name, value in kept.items() if name not in AMD_KNOBS}
        elif device.gfx == "gfx950" and "kpack" in kept:
            kept["kpack"] = 1  # the compiler overrides it from gfx950 on
        kept.pop(KERNEL_TYPE, None)
        return canonical_knobs(spec, kept)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that either stage breaks, or None."""
        experts = spec.experts
        if experts is None:
            return "experts: this kernel computes routed products alone"
        if not knobs.get(FUSED_ACT) and FUSED_ACT in knobs:
            return f"fused activation: {knobs[FUSED_ACT]!r}, expected true or no value"
        if OVERLAP in knobs and knobs[OVERLAP] is not True:
            return f"overlap: {knobs[OVERLAP]!r}, expected true or no value"
        if knobs.get(OVERLAP) and not uses_pdl(device, interpreted=False):
            return f"overlap: {device.gfx} has no programmatic dependent launch, which begins with sm_90"
        for stage in (1, 2):
            own = stage_knobs(knobs, stage)
            if reason := self._stage_violation(spec, experts, own, device, stage, fused=bool(knobs.get(FUSED_ACT))):
                return f"{reason} (stage {stage})"
        return None

    def _stage_violation(
        self, spec: GemmSpec, experts: Experts, knobs: Knobs, device: Device, stage: int, *, fused: bool
    ) -> str | None:
        block = spec.w_scale is not None and spec.w_scale.granularity == "block"
        # One pair of scales is applied to a whole K block: a block across two groups would be scaled by the first's.
        if block and spec.w_scale is not None:
            group, size = spec.w_scale.block[1], int_knob(knobs, "BLOCK_SIZE_K")
            if size < 1 or group % size:
                return f"scale group: BLOCK_SIZE_K={size} does not divide {group}"
        n, k = (experts.w1_rows, spec.k) if stage == 1 else (spec.n, experts.inner)
        plain = replace(spec, n=n, k=k, x_dtype=spec.w_dtype, x_scale=experts.quantised, experts=None)
        wide = {**knobs, "NUM_KSPLIT": 1}
        if stage == 1 and fused and experts.gated:  # gate and up: two weight tiles and two accumulators
            wide["BLOCK_SIZE_N"] = 2 * int_knob(knobs, "BLOCK_SIZE_N")
        return tile_violation(plain, wide, device, accumulators=2 if block else 1, parts=False, gathered=True)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for blocks that are mostly padding (an expert gets M rows at most), or None."""
        return padding_reason(spec, knobs)

    def default_config(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """Few rows per expert: small blocks, as traffic is weights only; many: tiles for full matrix throughput.

        None where the skinny kernels have one: for rows that hardly share experts.
        """
        if device.vendor == "nvidia" and hardly_shares_experts(spec):
            return None
        rows = int(str(space_facts(spec, device)["rows"]))
        fp8 = spec.w_dtype.startswith("float8")
        knobs: Knobs = {
            "BLOCK_SIZE_M": 16 if rows <= 16 else 64,
            "BLOCK_SIZE_N": 64 if rows <= 16 else 128,
            "BLOCK_SIZE_K": 128 if fp8 else 64,
            "num_warps": 4,
            "num_stages": 2 if device.vendor == "amd" else 3,
        }
        return self.normalise(spec, knobs, device)

    def launch_plan(self, spec: GemmSpec, knobs: Knobs, device: Device) -> LaunchPlan:
        """The launches with their builds; candidates that differ in one stage share the others."""
        return _planned(spec, tuple(sorted(knobs.items())), device.vendor, self.interpreted())

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, TensorShape]:
        """The tensors between the launches."""
        return scratch_shapes(spec, knobs)

    def kernel_name(self, knobs: Knobs) -> str:
        """`experts@3fa9c1d2`, `experts_fused@...`, `experts_apart@...`, `experts_overlapped_fused_apart@...`."""
        module, overlapped = (OVERLAPPED_MODULE, "_overlapped") if knobs.get(OVERLAP) else (MODULE, "")
        hashes = [kernel_hash(kernel) for kernel in (*ORDER_KERNELS, *(f"{module}:{kernel}" for kernel in KERNELS))]
        return f"experts{overlapped}{name_suffix(knobs)}@{digest(hashes)[:8]}"

    def interpreted(self) -> bool:
        """True if the kernels run under Triton's interpreter."""
        return is_interpreted(find_kernel(f"{MODULE}:routed"))


@lru_cache(maxsize=4096)
def _planned(spec: GemmSpec, items: tuple[tuple[str, Scalar], ...], vendor: str, interpreted: bool) -> LaunchPlan:
    """The launches with their builds, cached: a running program makes the same call repeatedly."""
    knobs = dict(items)
    dtypes = dtypes_of(spec, scratch_shapes(spec, knobs))
    steps = launch_steps(spec, knobs, vendor, interpreted=interpreted)
    if knobs.get(OVERLAP) and not interpreted:
        steps = tuple(overlapped(step) for step in steps)
    return tuple((step, step.build(dtypes)) for step in steps)
