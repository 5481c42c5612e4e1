"""Launch of the kernel in the engines' form (_engine_kernel.py), with the engines' knobs and operand layouts alone.

Screening runs few binaries: GROUP_SIZE_M is an argument. In the exact form of the finals each binary has the
instructions of the engine's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.family.dtypes import OUT_DTYPES
from gemmpipe.kernels.a8w8_blockscale._gluon import scale_violation
from gemmpipe.launch.build import find_kernel, is_interpreted
from gemmpipe.launch.launch import KernelImplementation, KernelLaunch
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.params import (
    AMD_KNOBS,
    KERNEL_TYPE,
    NEUTRAL_VALUES,
    SCALE_BLOCK,
    check_axes,
    int_knob,
    operand_pointers,
    size_arguments,
    tile_constants,
)
from gemmpipe.templates.tiled import kernel_hash, select_arguments, space_facts, tile_counts

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

_KERNEL = "gemmpipe.kernels.a8w8_blockscale._engine_kernel:engine_product"
ENGINE_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", *AMD_KNOBS)
"""The knobs of both engines' plain kernel."""
_FOREIGN_KNOBS: Mapping[str, Scalar] = {"NUM_KSPLIT": 1, "SPLIT_K": 1, "cache_modifier": "", "SWAP_AB": False}
"""Knobs of other kernels with their neutral value; a candidate with another value is unsupported."""
_POINTERS = ("x_ptr", "w_ptr", "out_ptr", "x_scale_ptr", "w_scale_ptr")
"""In the engines' order, as that of the integers is: places of parameters are a part of the instructions."""
_DIVISIBILITY_INTEGERS = ("N", "K", "scale_rows", "scale_step", "x_stride", "w_stride", "out_stride")
"""Integers whose divisibility decides how wide a load or store may be."""
_MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class EngineBlockscale(KernelImplementation):
    """The engines' kernel; `label` is the engine's name."""

    label: str
    stepped: bool
    """True if pointers to scales advance in steps (SGLang) instead of being computed for each K block (vLLM)."""
    masks_always: bool
    """True if loads are masked even when K is a whole number of tiles (vLLM)."""
    exact: bool = False
    """True if integers are specialised as in the engine's own call, and GROUP_SIZE_M is a constant of the binary."""

    def check(self, space: "Space") -> None:
        """Raises UserError for an unknown axis or a value out of range."""
        check_axes(space, (*ENGINE_KNOBS, *_FOREIGN_KNOBS, KERNEL_TYPE))

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The knobs that the engine passes to its kernel."""
        return ENGINE_KNOBS

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs without duplicates: a single row or column of tiles has one GROUP_SIZE_M."""
        self.check(space)
        known = self.knob_names(spec, device)
        lacking = {name: value for name, value in _FOREIGN_KNOBS.items() if name not in known}
        seen: set[tuple[Scalar, ...]] = set()
        for point in space.configs(
            {**space_facts(spec, device), KERNEL_TYPE: "plain"}, AMD_KNOBS if device.kind != "hip" else ()
        ):
            if any(point.get(name, value) != value for name, value in lacking.items()):
                continue
            if 1 in tile_counts(spec, point):
                point = {**point, "GROUP_SIZE_M": 1}
            values = tuple(point.values())
            if values not in seen:
                seen.add(values)
                yield point

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """The engine's knobs alone, values unchanged, since a file's entry is used for other M too."""
        kept = {name: value for name, value in knobs.items() if value is not None and name != KERNEL_TYPE}
        if device.vendor != "amd":
            kept = {name: value for name, value in kept.items() if name not in AMD_KNOBS}
        return {
            name: value for name, value in kept.items() if name not in _FOREIGN_KNOBS or value != _FOREIGN_KNOBS[name]
        }

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The engine's knobs, scales of 1x128 and 128x128, tiles as for every tiled kernel."""
        if odd := [name for name in knobs if name not in ENGINE_KNOBS]:
            return f"form: {self.label}'s kernel has no {odd[0]}={knobs[odd[0]]}"
        if spec.bias or spec.out_dtype not in OUT_DTYPES:
            return f"form: expected no bias and an output of {' or '.join(OUT_DTYPES)}"
        if reason := scale_violation(spec, int_knob(knobs, "BLOCK_SIZE_K")):
            return reason
        if max(spec.m * spec.k, spec.n * spec.k, spec.m * spec.n) > _MAX_ELEMENTS:
            return f"size: an operand has over {_MAX_ELEMENTS} elements, the engine's kernel has 32-bit offsets"
        return tile_violation(spec, {**NEUTRAL_VALUES, **knobs}, device, accumulators=2, parts=False)

    def finals_implementation(self) -> "EngineBlockscale":
        """The exact form: a written configuration is timed as the engine compiles it."""
        return replace(self, exact=True)

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One build; M = 1 is a constant, as in Triton's own calls."""
        integers, kinds_of = self.integers(spec), operand_pointers(spec)
        pointers = {name: kinds_of[name] for name in _POINTERS}
        constants, divisible = self._specialisation(integers, knobs)
        ragged = spec.k % int_knob(knobs, "BLOCK_SIZE_K") != 0
        constants |= {**tile_constants(knobs), "MASKED": self.masks_always or ragged, "STEPPED": self.stepped}
        kinds = {**pointers, **dict.fromkeys((*integers, "group_m"), "i32"), **dict.fromkeys(constants, "constexpr")}
        build = Build(
            kernel=_KERNEL,
            source_hash=kernel_hash(_KERNEL),
            signature=tuple(kinds.items()),
            constants=tuple(constants.items()),
            aligned=(*pointers, *divisible),
            options=tuple((name, knobs[name]) for name in ("num_stages", "num_warps", *AMD_KNOBS) if name in knobs),
            line_info=True,
        )
        return (build,)

    def _specialisation(self, integers: Mapping[str, int], knobs: Knobs) -> tuple[dict[str, Scalar], list[str]]:
        """The integers that are constants of the binary, and those that the compiler takes as divisible by 16.

        Exact: as Triton specialises the engine's call, in which GROUP_SIZE_M is a constant. Else one binary serves all
        groups, and all M but 1.
        """
        if not self.exact:
            ones: dict[str, Scalar] = {"M": 1} if integers["M"] == 1 else {}
            return ones, [name for name in _DIVISIBILITY_INTEGERS if integers[name] % 16 == 0]
        constants: dict[str, Scalar] = {name: 1 for name, value in integers.items() if value == 1}
        constants["group_m"] = int_knob(knobs, "GROUP_SIZE_M")
        return constants, [name for name, value in integers.items() if value % 16 == 0 and name not in constants]

    def integers(self, spec: GemmSpec) -> dict[str, int]:
        """Every integer parameter but for the group's height, in the order of the kernel's signature."""
        own = size_arguments(spec, scale_group=SCALE_BLOCK)
        names = ("x_stride", "w_stride", "out_stride", "x_scale_stride", "w_scale_stride")
        blocks = {"scale_rows": SCALE_BLOCK, "scale_step": SCALE_BLOCK}
        return {**{n: own[n] for n in "MNK"}, **blocks, **{name: own[name] for name in names}}

    def kernel_name(self, knobs: Knobs) -> str:
        """`engine_product@3fa9c1d2`."""
        return f"{_KERNEL.split(':')[1]}@{kernel_hash(_KERNEL)[:8]}"

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """One program per tile; x_scale is read row-major, as engines store it for their Triton kernels."""
        (build,) = self.builds(spec, knobs, device)
        tiles_m, tiles_n = tile_counts(spec, knobs)
        scales = inputs.x_scale
        if scales is None:
            raise ValueError("block scales are missing")
        given = {
            **self.integers(spec),
            "group_m": int_knob(knobs, "GROUP_SIZE_M"),
            "x_ptr": inputs.x,
            "w_ptr": prepared.weights.w,
            "x_scale_ptr": scales.contiguous(),
            "w_scale_ptr": prepared.weights.w_scale,
            "out_ptr": out,
        }
        return KernelLaunch(build=build, grid=(tiles_m * tiles_n, 1, 1), arguments=select_arguments(build, given))

    def interpreted(self) -> bool:
        """True if the kernel runs under Triton's interpreter."""
        return is_interpreted(find_kernel(_KERNEL))
