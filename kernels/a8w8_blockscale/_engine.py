"""Launching the kernel of the engines' form: their knobs, their operands' layouts, and no others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.kernels.a8w8_blockscale._fits import scale_misfit
from gemmpipe.launching.builds import find_kernel, is_interpreted
from gemmpipe.launching.launches import Kernel, KernelLaunch
from gemmpipe.operand_types import OUT
from gemmpipe.templates.axes import AMD_ONLY, KIND, NEUTRAL, check_axes, integer
from gemmpipe.templates.fits import tile_misfit
from gemmpipe.templates.signature import SCALE_BLOCK, operand_pointers, sizes, tile_sizes
from gemmpipe.templates.tiled import facts_of, hash_of, needed_by, tiles_of

if TYPE_CHECKING:
    import torch

    from gemmpipe.space import Space

_KERNEL = "gemmpipe.kernels.a8w8_blockscale._engine_kernel:engine_product"
_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", *AMD_ONLY)
_NEITHER: Mapping[str, Scalar] = {"NUM_KSPLIT": 1, "SPLIT_K": 1, "cache_modifier": "", "SWAP_AB": False}
"""Knobs of other kernels, with the value that means nothing: who has another is not of this form."""
_DECIDING = ("N", "K", "scale_rows", "scale_step", "x_stride", "w_stride", "out_stride")
"""Integers whose divisibility decides how wide a load or store may be."""
_LARGEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class BlockscaleOfEngine(Kernel):
    """`label` is the engine's name; `stepped` and `masks_always` are what its kernel does (see the kernel)."""

    label: str
    stepped: bool
    """Whether it walks along the scales (SGLang) instead of computing each place (vLLM)."""
    masks_always: bool
    """Whether loads are masked where K is a whole number of tiles too (vLLM)."""

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis that no kernel has, or a value out of range."""
        check_axes(space, (*_KNOBS, *_NEITHER, KIND))

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """Those that the engine passes on."""
        return _KNOBS

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points; where a single row or column of tiles has one order, one order of tiles."""
        self.check(space)
        seen: set[tuple[Scalar, ...]] = set()
        for point in space.points({**facts_of(spec, device), KIND: "plain"}, AMD_ONLY if device.kind != "hip" else ()):
            if 1 in tiles_of(spec, point):
                point = {**point, "GROUP_SIZE_M": 1}
            values = tuple(point.values())
            if values not in seen:
                seen.add(values)
                yield point

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """The engine's knobs alone: as they are, since a file's entry serves other Ms too."""
        kept = {name: value for name, value in knobs.items() if value is not None and name != KIND}
        if device.vendor != "amd":
            kept = {name: value for name, value in kept.items() if name not in AMD_ONLY}
        return {name: value for name, value in kept.items() if name not in _NEITHER or value != _NEITHER[name]}

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The engine's knobs, scales of 1x128 and 128x128, tiles as for every tiled kernel."""
        if odd := [name for name in knobs if name not in _KNOBS]:
            return f"form: {self.label}'s kernel has no {odd[0]}={knobs[odd[0]]}"
        if spec.bias or spec.out_dtype not in OUT:
            return "form: no bias, and an output of 16 or 32 bits"
        if reason := scale_misfit(spec, integer(knobs, "BLOCK_SIZE_K")):
            return reason
        if max(spec.m * spec.k, spec.n * spec.k, spec.m * spec.n) > _LARGEST:
            return f"size: an operand of more than {_LARGEST} elements, the engine's kernel counts them in 32 bits"
        return tile_misfit(spec, {**NEUTRAL, **knobs}, device, accumulators=2, parts=False)

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One build; as Triton itself does at a call, an M of 1 is a constant."""
        integers, pointers = self._integers(spec), operand_pointers(spec)
        del pointers["bias_ptr"]
        constants: dict[str, Scalar] = {"M": 1} if spec.m == 1 else {}
        constants |= tile_sizes(knobs)
        ragged = spec.k % integer(knobs, "BLOCK_SIZE_K") != 0
        constants |= {"MASKED": self.masks_always or ragged, "STEPPED": self.stepped}
        kinds = {**pointers, **dict.fromkeys(integers, "i32"), **dict.fromkeys(constants, "constexpr")}
        build = Build(
            kernel=_KERNEL,
            source_hash=hash_of(_KERNEL),
            signature=tuple(kinds.items()),
            constants=tuple(constants.items()),
            aligned=(*pointers, *(name for name in _DECIDING if integers[name] % 16 == 0)),
            options=tuple((name, knobs[name]) for name in ("num_stages", "num_warps", *AMD_ONLY) if name in knobs),
            line_info=True,
        )
        return (build,)

    def _integers(self, spec: GemmSpec) -> dict[str, int]:
        """Every integer parameter, in the order of the kernel's."""
        own = sizes(spec, scale_group=SCALE_BLOCK)
        names = ("x_stride", "w_stride", "out_stride", "x_scale_stride", "w_scale_stride")
        blocks = {"scale_rows": SCALE_BLOCK, "scale_step": SCALE_BLOCK}
        return {**{n: own[n] for n in "MNK"}, **blocks, **{name: own[name] for name in names}, "group_m": 1}

    def kernel_name(self, knobs: Knobs) -> str:
        """`engine_product@3fa9c1d2`."""
        return f"{_KERNEL.split(':')[1]}@{hash_of(_KERNEL)[:8]}"

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """One program a tile; x_scale is read row by row, as engines store it for their Triton kernels."""
        (build,) = self.builds(spec, knobs, device)
        tiles_m, tiles_n = tiles_of(spec, knobs)
        scales = inputs.x_scale
        if scales is None:
            raise ValueError("block scales are missing")
        given = {
            **self._integers(spec),
            "group_m": integer(knobs, "GROUP_SIZE_M"),
            "x_ptr": inputs.x,
            "w_ptr": prepared.weights.w,
            "x_scale_ptr": scales.contiguous(),
            "w_scale_ptr": prepared.weights.w_scale,
            "out_ptr": out,
        }
        return KernelLaunch(build=build, grid=(tiles_m * tiles_n, 1, 1), arguments=needed_by(build, given))

    def interpreted(self) -> bool:
        """Whether the kernel runs under Triton's interpreter."""
        return is_interpreted(find_kernel(_KERNEL))
