"""Mixtures of experts as vLLM and SGLang run them, with the knobs of their configuration files.

The launches are kernels of the engines' form (_engine_kernel.py); the finals call the engine's own `fused_experts` if
the engine is installed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.backends import engine_moe
from gemmpipe.backends.engine import MOE_KIND, EngineImplementation
from gemmpipe.core.data import Device, Knobs, Scalar, digest
from gemmpipe.family import Experts, GemmSpec, Inputs, Launch, Prepared
from gemmpipe.kernels.fmoe._engine_launch_plan import (
    MODULE,
    SGLANG,
    VLLM,
    EngineForm,
    engine_launch_steps,
    engine_scratch,
    exact_build,
    sums_in_torch,
    swaps_ab,
)
from gemmpipe.kernels.fmoe._launch_plan import dtypes_of
from gemmpipe.kernels.fmoe._triton import LaunchPlan, MultiLaunchImplementation, padding_reason
from gemmpipe.launch.build import find_kernel, is_interpreted
from gemmpipe.launch.workspace import TensorShape
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.params import AMD_KNOBS, KERNEL_TYPE, REQUIRED_AXES, check_axes, int_knob
from gemmpipe.templates.tiled import STAGE2_KNOBS, STAGE2_SUFFIX, kernel_hash, space_facts, stage_knobs

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

_AXES = (*REQUIRED_AXES, "GROUP_SIZE_M", *AMD_KNOBS, KERNEL_TYPE)


@dataclass(frozen=True, kw_only=True)
class EngineExperts(MultiLaunchImplementation, EngineImplementation):
    """The grouped Triton kernel of an engine with its alignment, quantisation, activation and sum.

    `calls_engine`: the engine's own function is called instead. `exact`: the products are compiled as the engine does,
    where screening has one binary for all values of GROUP_SIZE_M.
    """

    kind = MOE_KIND
    form: EngineForm
    calls_engine: bool = False
    exact: bool = False

    @property
    def label(self) -> str:  # type: ignore[override]
        """`vllm` or `sglang`."""
        return self.form.label

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis that an engine's file cannot have, a missing one, or a value out of range."""
        check_axes(space, self._axes)

    @property
    def _axes(self) -> tuple[str, ...]:
        return (*_AXES, *STAGE2_KNOBS) if self.form.apart else _AXES

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes of the engine's files."""
        return self._axes

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs. Raises UserError as `check` does."""
        self.check(space)
        return space.configs({**space_facts(spec, device), KERNEL_TYPE: "plain"})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """The knobs that the engine runs: K tiles within a group of scales, no knobs equal to their default."""
        kept: dict[str, Scalar] = {"GROUP_SIZE_M": 1, **{k: v for k, v in knobs.items() if v is not None}}
        if device.vendor != "amd":
            kept = {name: value for name, value in kept.items() if name not in AMD_KNOBS}
        kept.pop(KERNEL_TYPE, None)
        group = _scale_group(spec)
        for name in ("BLOCK_SIZE_K", f"BLOCK_SIZE_K{STAGE2_SUFFIX}"):
            size = kept.get(name)
            if self.form.clamps and group and isinstance(size, int) and size > group:
                kept[name] = group
        for name in STAGE2_KNOBS:
            if name in kept and kept[name] == kept.get(name.removesuffix(STAGE2_SUFFIX)):
                del kept[name]
        return kept

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that either product breaks, or None."""
        experts = spec.experts
        if experts is None:
            return "experts: this kernel computes routed products alone"
        if not experts.gated or experts.activation not in ("silu", "gelu"):
            return f"activation: {self.label} reads no configuration file for these experts"
        for stage in (1, 2):
            own = stage_knobs(knobs, stage)
            if reason := self._stage_violation(spec, experts, own, device, stage):
                return f"{reason} (product {stage})"
        return None

    def _stage_violation(
        self, spec: GemmSpec, experts: Experts, knobs: Knobs, device: Device, stage: int
    ) -> str | None:
        group = _scale_group(spec)
        size = int_knob(knobs, "BLOCK_SIZE_K")
        if group and (spec.k % group or experts.inner % group):
            return f"quantiser: {self.label} quantises whole groups of {group}, not {spec.k} and {experts.inner}"
        if group and (size < 1 or group % size):
            return f"scale group: BLOCK_SIZE_K={size} does not divide {group}"
        n, k = (experts.w1_rows, spec.k) if stage == 1 else (spec.n, experts.inner)
        plain = replace(spec, n=n, k=k, x_dtype=spec.w_dtype, x_scale=experts.quantised, experts=None)
        wide: dict[str, Scalar] = {**knobs, "NUM_KSPLIT": 1, "cache_modifier": ""}
        if swaps_ab(spec, knobs, device):
            wide["SWAP_AB"] = True
        return tile_violation(plain, wide, device, accumulators=2 if group else 1, parts=False, gathered=True)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for blocks that are mostly padding (an expert gets M rows at most), or None."""
        return padding_reason(spec, knobs)

    def launch_plan(self, spec: GemmSpec, knobs: Knobs, device: Device) -> LaunchPlan:
        """The launches with their builds."""
        interpreted = self.interpreted()
        exact = self.exact and not interpreted
        return _planned(self.form, spec, tuple(sorted(knobs.items())), device, interpreted=interpreted, exact=exact)

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, TensorShape]:
        """The tensors between the launches."""
        return engine_scratch(spec, knobs)

    def library_calls(
        self, spec: GemmSpec, tensors: "Mapping[str, torch.Tensor | None]"
    ) -> "list[Callable[[], object]]":
        """torch's sum of each row's parts, if the engines use it."""
        parts, out = tensors["parts"], tensors["out"]
        if not sums_in_torch(spec) or parts is None or out is None:
            return []
        return [partial(_sum_of_parts, parts.view(spec.m, -1, spec.n), out)]

    def launches_alone(self, spec: GemmSpec) -> bool:
        """False if torch adds up the parts, or if the engine's function is called."""
        return not self.calls_engine and not sums_in_torch(spec)

    def default(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """The engine's configuration without a file."""
        found = engine_moe.default_engine_config(self.label, spec)
        return None if found is None else self.normalise(spec, found, device)

    def folders(self) -> tuple[Path, ...]:
        """The folders with the files that the installed engine ships."""
        return engine_moe.folders(self.label)

    def unavailable_reason(self) -> str | None:
        """Why the engine's own function cannot be called, or None."""
        return engine_moe.unavailable_reason(self.label)

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """The function on operands without memory."""
        engine_moe.call_on_meta(self.label, spec, knobs)

    def exact_form(self) -> "EngineExperts":
        """These launches with the products compiled as the engine does."""
        return replace(self, exact=True)

    def finals_implementation(self) -> "EngineExperts":
        """The engine's own function if it can be called, else these launches in the exact form."""
        if self.calls_engine:
            return self
        return self.exact_form() if self.unavailable_reason() else replace(self, calls_engine=True)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The launches in order, or with `calls_engine` the engine's function, which returns its own output."""
        if self.calls_engine:
            return engine_moe.launch(self.label, spec, knobs, inputs, prepared.weights)
        return super().bind(spec, knobs, device, inputs, prepared, out)

    def kernel_name(self, knobs: Knobs) -> str:
        """`engine_experts@3fa9c1d2`."""
        return f"engine_experts@{digest([kernel_hash(f'{MODULE}:engine_experts')])[:8]}"

    def interpreted(self) -> bool:
        """True if the kernels run under Triton's interpreter."""
        return is_interpreted(find_kernel(f"{MODULE}:engine_experts"))


def _sum_of_parts(parts: "torch.Tensor", out: "torch.Tensor") -> None:
    """out [M, N] = the sum over the second dimension of parts [M, topk, N]."""
    import torch

    torch.sum(parts, dim=1, out=out)


def _scale_group(spec: GemmSpec) -> int:
    """Elements along K per scale; 0 if scales do not vary along K."""
    return spec.w_scale.block[1] if spec.w_scale and spec.w_scale.granularity == "block" else 0


@lru_cache(maxsize=4096)
def _planned(
    form: EngineForm,
    spec: GemmSpec,
    items: tuple[tuple[str, Scalar], ...],
    device: Device,
    *,
    interpreted: bool,
    exact: bool,
) -> LaunchPlan:
    knobs = dict(items)
    dtypes = dtypes_of(spec, engine_scratch(spec, knobs))
    made = engine_launch_steps(form, spec, knobs, device, interpreted=interpreted)
    builds = [replace(step.build(dtypes), line_info=True) for step in made]
    if exact:
        builds = [exact_build(step, build) for step, build in zip(made, builds, strict=True)]
    return tuple(zip(made, builds, strict=True))


ENGINES: Mapping[str, EngineExperts] = {form.label: EngineExperts(form=form) for form in (VLLM, SGLANG)}
