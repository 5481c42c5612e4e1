"""The fused experts in Triton: knobs of both stages, what fits where, the launches in a row."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar, digest
from gemmpipe.family import Experts, GemmSpec
from gemmpipe.kernels.fmoe._launching import LaunchesInARow, Planned, mostly_padding, settled
from gemmpipe.kernels.fmoe._steps import KERNELS, MODULE, dtypes_of, scratch, steps
from gemmpipe.launching.builds import find_kernel, is_interpreted
from gemmpipe.launching.workspace import Shape
from gemmpipe.templates.axes import AMD_ONLY, KIND, NEEDED, check_axes, integer
from gemmpipe.templates.fits import tile_misfit
from gemmpipe.templates.tiled import facts_of, hash_of
from gemmpipe.templates.two_stage import APART, FUSED, knobs_of_stage

if TYPE_CHECKING:
    from gemmpipe.space import Space

_NEUTRAL: Mapping[str, Scalar] = {"GROUP_SIZE_M": 1, "cache_modifier": ""}
_AXES = (*NEEDED, *_NEUTRAL, FUSED, *AMD_ONLY, KIND, *APART)


@dataclass(frozen=True, kw_only=True)
class FusedExperts(LaunchesInARow):
    """`triton`: sort by expert, product, activation, product, sum; fp8 operands are quantised on the way.

    Without FUSED_ACT and knobs of the second stage's own it has the form of vLLM's and SGLang's kernel.
    """

    label = "triton"

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis that is no knob of these kernels, a missing one, or a value out of range."""
        check_axes(space, _AXES)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that it knows."""
        return _AXES

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points. Raises UserError for an axis that is no knob of these kernels, or one that is missing."""
        self.check(space)
        return space.points({**facts_of(spec, device), KIND: "plain"})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Drop what this vendor's compiler ignores, and what says the same as not being there."""
        kept = {**_NEUTRAL, **{name: value for name, value in knobs.items() if value is not None}}
        if device.vendor != "amd":
            kept = {name: value for name, value in kept.items() if name not in AMD_ONLY}
        elif device.gfx == "gfx950" and "kpack" in kept:
            kept["kpack"] = 1  # the compiler overrides it from gfx950 on
        kept.pop(KIND, None)
        return settled(spec, kept)

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that either stage breaks, or None."""
        experts = spec.experts
        if experts is None:
            return "experts: this kernel computes routed products alone"
        if not knobs.get(FUSED) and FUSED in knobs:
            return f"fused activation: {knobs[FUSED]!r}, expected true or nothing"
        for stage in (1, 2):
            own = knobs_of_stage(knobs, stage)
            if reason := self._stage_misfit(spec, experts, own, device, stage, fused=bool(knobs.get(FUSED))):
                return f"{reason} (stage {stage})"
        return None

    def _stage_misfit(
        self, spec: GemmSpec, experts: Experts, knobs: Knobs, device: Device, stage: int, *, fused: bool
    ) -> str | None:
        block = spec.w_scale is not None and spec.w_scale.granularity == "block"
        # One pair of scales is applied to a whole K block: a block across two groups would be scaled by the first's.
        if block and spec.w_scale is not None:
            group, size = spec.w_scale.block[1], integer(knobs, "BLOCK_SIZE_K")
            if size < 1 or group % size:
                return f"scale group: BLOCK_SIZE_K={size} does not divide {group}"
        n, k = (experts.wide, spec.k) if stage == 1 else (spec.n, experts.inner)
        plain = replace(spec, n=n, k=k, x_dtype=spec.w_dtype, x_scale=experts.quantised, experts=None)
        wide = {**knobs, "NUM_KSPLIT": 1}
        if stage == 1 and fused and experts.gated:  # gate and up: two weight tiles and two accumulators
            wide["BLOCK_SIZE_N"] = 2 * integer(knobs, "BLOCK_SIZE_N")
        return tile_misfit(plain, wide, device, accumulators=2 if block else 1, parts=False)

    def wasteful(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """Blocks that are mostly padding: no expert gets more rows than there are."""
        return mostly_padding(spec, knobs)

    def rule(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """Few rows an expert: small blocks, as the weights' traffic is all; many: tiles that feed the matrix units."""
        rows = int(str(facts_of(spec, device)["rows"]))
        eight = spec.w_dtype.startswith("float8")
        knobs: Knobs = {
            "BLOCK_SIZE_M": 16 if rows <= 16 else 64,
            "BLOCK_SIZE_N": 64 if rows <= 16 else 128,
            "BLOCK_SIZE_K": 128 if eight else 64,
            "num_warps": 4,
            "num_stages": 2 if device.vendor == "amd" else 3,
        }
        return self.normalise(spec, knobs, device)

    def planned(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Planned:
        """The launches with their builds; candidates that differ in one stage share the others."""
        return _planned(spec, tuple(sorted(knobs.items())), self.interpreted())

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Shape]:
        """The tensors between the launches."""
        return scratch(spec, knobs)

    def kernel_name(self, knobs: Knobs) -> str:
        """`experts@3fa9c1d2`, `experts_fused@...`, `experts_apart@...`, `experts_fused_apart@...`."""
        words = ("_fused" if knobs.get(FUSED) else "") + ("_apart" if any(name in knobs for name in APART) else "")
        return f"experts{words}@{digest([hash_of(f'{MODULE}:{kernel}') for kernel in KERNELS])[:8]}"

    def interpreted(self) -> bool:
        """Whether the kernels run under Triton's interpreter."""
        return is_interpreted(find_kernel(f"{MODULE}:routed"))


@lru_cache(maxsize=4096)
def _planned(spec: GemmSpec, items: tuple[tuple[str, Scalar], ...], interpreted: bool) -> Planned:
    """The launches with their builds: a running program asks for the same ones in each call."""
    knobs = dict(items)
    dtypes = dtypes_of(spec, scratch(spec, knobs))
    return tuple((step, step.build(dtypes)) for step in steps(spec, knobs, interpreted=interpreted))
