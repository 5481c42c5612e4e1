"""Mixtures of experts as vLLM and SGLang run them: what their configuration files can say, and what is timed.

The launches are kernels of the engines' form (_engine_kernel.py); in the finals it is the engine's own `fused_experts`
where the engine is installed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.backends import engine_experts
from gemmpipe.backends.engine import EXPERTS_KIND, EngineImplementation
from gemmpipe.data import Device, Knobs, Scalar, digest
from gemmpipe.family import Experts, GemmSpec, Inputs, Launch, Prepared
from gemmpipe.kernels.fmoe._engine_steps import (
    MODULE,
    SGLANG,
    VLLM,
    EngineForm,
    engine_scratch,
    engine_steps,
    sums_in_torch,
    swaps,
)
from gemmpipe.kernels.fmoe._launching import LaunchesInARow, Planned, mostly_padding
from gemmpipe.kernels.fmoe._steps import dtypes_of
from gemmpipe.launching.builds import find_kernel, is_interpreted
from gemmpipe.launching.workspace import Shape
from gemmpipe.templates.axes import AMD_ONLY, KIND, NEEDED, check_axes, integer
from gemmpipe.templates.fits import tile_misfit
from gemmpipe.templates.tiled import facts_of, hash_of
from gemmpipe.templates.two_stage import APART, SECOND, knobs_of_stage

if TYPE_CHECKING:
    import torch

    from gemmpipe.space import Space

_AXES = (*NEEDED, "GROUP_SIZE_M", *AMD_ONLY, KIND)


@dataclass(frozen=True, kw_only=True)
class EngineExperts(LaunchesInARow, EngineImplementation):
    """The grouped Triton kernel of an engine between its alignment, quantisation, activation and sum.

    `final`: the engine's own function is called instead.
    """

    kind = EXPERTS_KIND
    form: EngineForm
    final: bool = False

    @property
    def label(self) -> str:  # type: ignore[override]
        """`vllm` or `sglang`."""
        return self.form.label

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis that an engine's file cannot hold, a missing one, or a value out of range."""
        check_axes(space, self._axes)

    @property
    def _axes(self) -> tuple[str, ...]:
        return (*_AXES, *APART) if self.form.apart else _AXES

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that the engine's files hold."""
        return self._axes

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points. Raises UserError for an axis that the engine does not have, or one that is missing."""
        self.check(space)
        return space.points({**facts_of(spec, device), KIND: "plain"})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """What the engine would run: K tiles within a group of scales, no knobs that say the same as their absence."""
        kept: dict[str, Scalar] = {"GROUP_SIZE_M": 1, **{k: v for k, v in knobs.items() if v is not None}}
        if device.vendor != "amd":
            kept = {name: value for name, value in kept.items() if name not in AMD_ONLY}
        kept.pop(KIND, None)
        group = _group(spec)
        for name in ("BLOCK_SIZE_K", f"BLOCK_SIZE_K{SECOND}"):
            size = kept.get(name)
            if self.form.clamps and group and isinstance(size, int) and size > group:
                kept[name] = group
        for name in APART:
            if name in kept and kept[name] == kept.get(name.removesuffix(SECOND)):
                del kept[name]
        return kept

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that either product breaks, or None."""
        experts = spec.experts
        if experts is None:
            return "experts: this kernel computes routed products alone"
        if not experts.gated or experts.activation not in ("silu", "gelu"):
            return f"activation: {self.label} reads no file for experts of this kind"
        for stage in (1, 2):
            own = knobs_of_stage(knobs, stage)
            if reason := self._stage_misfit(spec, experts, own, device, stage):
                return f"{reason} (product {stage})"
        return None

    def _stage_misfit(self, spec: GemmSpec, experts: Experts, knobs: Knobs, device: Device, stage: int) -> str | None:
        group = _group(spec)
        size = integer(knobs, "BLOCK_SIZE_K")
        if group and (spec.k % group or experts.inner % group):
            return f"quantiser: {self.label} quantises whole groups of {group} alone, not {spec.k} and {experts.inner}"
        if group and (size < 1 or group % size):
            return f"scale group: BLOCK_SIZE_K={size} does not divide {group}"
        n, k = (experts.wide, spec.k) if stage == 1 else (spec.n, experts.inner)
        plain = replace(spec, n=n, k=k, x_dtype=spec.w_dtype, x_scale=experts.quantised, experts=None)
        wide: dict[str, Scalar] = {**knobs, "NUM_KSPLIT": 1, "cache_modifier": ""}
        if swaps(spec, knobs, device):
            wide["SWAP_AB"] = True
        return tile_misfit(plain, wide, device, accumulators=2 if group else 1, parts=False)

    def wasteful(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """Blocks that are mostly padding: no expert gets more rows than there are."""
        return mostly_padding(spec, knobs)

    def planned(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Planned:
        """The launches with their builds."""
        return _planned(self.form, spec, tuple(sorted(knobs.items())), device, self.interpreted())

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Shape]:
        """The tensors between the launches."""
        return engine_scratch(spec, knobs)

    def further(self, spec: GemmSpec, tensors: "Mapping[str, torch.Tensor | None]") -> "list[Callable[[], object]]":
        """torch's sum of each row's parts, where the engines take that."""
        parts, out = tensors["parts"], tensors["out"]
        if not sums_in_torch(spec) or parts is None or out is None:
            return []
        return [partial(_sum_of_parts, parts.view(spec.m, -1, spec.n), out)]

    def default(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """What the engine takes where it has no file."""
        found = engine_experts.default_configuration(self.label, spec)
        return None if found is None else self.normalise(spec, found, device)

    def folders(self) -> tuple[Path, ...]:
        """Where the installed engine keeps the files that it ships."""
        return engine_experts.folders(self.label)

    def absent(self) -> str | None:
        """Why the engine's own function takes no part, or None."""
        return engine_experts.absent(self.label)

    def call_without_memory(self, spec: GemmSpec, knobs: Knobs) -> None:
        """The function on operands without memory."""
        engine_experts.call_without_memory(self.label, spec, knobs)

    def in_finals(self) -> "EngineExperts":
        """The engine's own function, where it can be called."""
        return self if self.final or self.absent() else replace(self, final=True)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The launches in a row, or in the finals the engine's function, which returns an output of its own."""
        if self.final:
            return engine_experts.launch(self.label, spec, knobs, inputs, prepared.weights)
        return super().bind(spec, knobs, device, inputs, prepared, out)

    def kernel_name(self, knobs: Knobs) -> str:
        """`engine_experts@3fa9c1d2`."""
        return f"engine_experts@{digest([hash_of(f'{MODULE}:engine_experts')])[:8]}"

    def interpreted(self) -> bool:
        """Whether the kernels run under Triton's interpreter."""
        return is_interpreted(find_kernel(f"{MODULE}:engine_experts"))


def _sum_of_parts(parts: "torch.Tensor", out: "torch.Tensor") -> None:
    """out [M, N] = the sum over the second dimension of parts [M, topk, N]."""
    import torch

    torch.sum(parts, dim=1, out=out)


def _group(spec: GemmSpec) -> int:
    """Elements along K that share a scale; 0 where scales do not vary along K."""
    return spec.w_scale.block[1] if spec.w_scale and spec.w_scale.granularity == "block" else 0


@lru_cache(maxsize=4096)
def _planned(
    form: EngineForm, spec: GemmSpec, items: tuple[tuple[str, Scalar], ...], device: Device, interpreted: bool
) -> Planned:
    knobs = dict(items)
    dtypes = dtypes_of(spec, engine_scratch(spec, knobs))
    made = engine_steps(form, spec, knobs, device, interpreted=interpreted)
    return tuple((step, replace(step.build(dtypes), line_info=True)) for step in made)


ENGINES: Mapping[str, EngineExperts] = {form.label: EngineExperts(form=form) for form in (VLLM, SGLANG)}
