"""Launch of the kernels in the form of SGLang's function for sm_90 (_engine_kernel.py): SWAP_AB and SPLIT_K.

Without these knobs SGLang runs its plain kernel, and so does this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Operands, Prepared
from gemmpipe.kernels.a8w8_blockscale._engine import ENGINE_KNOBS, EngineBlockscale
from gemmpipe.launch.build import load_build
from gemmpipe.launch.workspace import WORKSPACES
from gemmpipe.templates.constraints import workspace_violation
from gemmpipe.templates.params import SWAP_AB, operand_pointers
from gemmpipe.templates.tiled import kernel_hash, select_arguments, tile_counts

if TYPE_CHECKING:
    import torch

SPLIT_K = "SPLIT_K"
"""SGLang's name of the number of splits along K."""
_MODULE = "gemmpipe.kernels.a8w8_blockscale._engine_kernel"
_PRODUCT, _SUM = f"{_MODULE}:engine_product_hopper", f"{_MODULE}:engine_split_sum"
_ARCHITECTURE = "sm_90"
_SUM_BLOCK = 256
_OPTIONS = ("num_stages", "num_warps")


def splits_of(knobs: Knobs) -> int:
    """The number of splits along K; 1 without the knob."""
    return int(str(knobs.get(SPLIT_K) or 1))


def is_hopper_form(knobs: Knobs) -> bool:
    """True if SGLang runs its kernel for sm_90 instead of the plain one."""
    return bool(knobs.get(SWAP_AB)) or splits_of(knobs) > 1


def _plain(knobs: Knobs) -> dict[str, Scalar]:
    return {name: value for name, value in knobs.items() if name not in (SWAP_AB, SPLIT_K)}


@dataclass(frozen=True, kw_only=True)
class EngineBlockscaleHopper(EngineBlockscale):
    """SGLang's kernels: the plain one, and that for sm_90 where one of its two knobs is on."""

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The plain kernel's, and on sm_90 those of the other kernel."""
        return (*ENGINE_KNOBS, SWAP_AB, SPLIT_K) if device.gfx == _ARCHITECTURE else ENGINE_KNOBS

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """As the plain kernel, and a power of two of splits in a workspace, on sm_90 alone."""
        if not is_hopper_form(knobs):
            return super().unsupported_reason(spec, knobs, device)
        if device.gfx != _ARCHITECTURE:
            return f"form: only {self.label}'s kernel for {_ARCHITECTURE} has {SWAP_AB} and {SPLIT_K}"
        splits = splits_of(knobs)
        if splits & (splits - 1):
            return f"form: {SPLIT_K}={splits} is not a power of two"
        if splits > 1 and (reason := workspace_violation(4 * splits * spec.m * spec.n)):
            return reason
        return super().unsupported_reason(spec, _plain(knobs), device)

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """The product, and for splits their sum."""
        if not is_hopper_form(knobs):
            return super().builds(spec, knobs, device)
        product = self._product_build(spec, knobs, device)
        return (product, self._sum_build(spec, splits_of(knobs))) if splits_of(knobs) > 1 else (product,)

    def _product_build(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Build:
        (plain,) = super().builds(spec, _plain(knobs), device)
        constants = {name: value for name, value in plain.constants if name != "STEPPED"}
        constants |= {"SWAPPED": bool(knobs.get(SWAP_AB)), "SPLITS": splits_of(knobs)}
        kinds = {name: kind for name, kind in plain.signature if name != "STEPPED"}
        kinds |= {"SWAPPED": "constexpr", "SPLITS": "constexpr"}
        if splits_of(knobs) > 1:
            kinds["out_ptr"] = "*fp32"
        return Build(
            kernel=_PRODUCT,
            source_hash=kernel_hash(_PRODUCT),
            signature=tuple(kinds.items()),
            constants=tuple(constants.items()),
            aligned=plain.aligned,
            options=tuple((name, value) for name, value in plain.options if name in _OPTIONS),
            line_info=True,
        )

    def _sum_build(self, spec: GemmSpec, splits: int) -> Build:
        kinds = {"parts_ptr": "*fp32", "out_ptr": operand_pointers(spec)["out_ptr"], "elements": "i32"}
        constants: dict[str, Scalar] = {"SPLITS": splits, "BLOCK": _SUM_BLOCK}
        elements = spec.m * spec.n
        if self.exact:
            constants["elements"] = elements
        return Build(
            kernel=_SUM,
            source_hash=kernel_hash(_SUM),
            signature=tuple({**kinds, **dict.fromkeys(constants, "constexpr")}.items()),
            constants=tuple(constants.items()),
            aligned=("parts_ptr", "out_ptr", *(() if self.exact or elements % 16 else ("elements",))),
            options=(),
            line_info=True,
        )

    def kernel_name(self, knobs: Knobs) -> str:
        """`engine_product_hopper@3fa9c1d2`, or the plain kernel's."""
        if not is_hopper_form(knobs):
            return super().kernel_name(knobs)
        return f"{_PRODUCT.split(':')[1]}@{kernel_hash(_PRODUCT)[:8]}"

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The plain launch; or the product, and the sum of its splits in the stream's workspace."""
        if not is_hopper_form(knobs):
            return super().bind(spec, knobs, device, inputs, prepared, out)
        builds, splits = self.builds(spec, knobs, device), splits_of(knobs)
        plain = super().launch(spec, _plain(knobs), device, inputs, prepared, out)
        target = out
        if splits > 1:
            target, _ = WORKSPACES.take(splits * spec.m * spec.n, 1, out.device)
        tiles_m, tiles_n = tile_counts(spec, knobs)
        given = {**plain.arguments, "out_ptr": target}
        product = load_build(builds[0], device).launcher(
            (tiles_m * tiles_n, splits, 1), select_arguments(builds[0], given)
        )
        if splits == 1:
            return _call(out, product)
        parts: dict[str, object] = {"parts_ptr": target, "out_ptr": out}
        if not self.exact:
            parts["elements"] = spec.m * spec.n
        add = load_build(builds[1], device).launcher((-(-spec.m * spec.n // _SUM_BLOCK), 1, 1), parts)
        return _call(out, product, add)

    def binder(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Callable[[Operands], Launch]:
        """Binds each set of operands by itself."""
        return Implementation.binder(self, spec, knobs, device)


def _call(out: "torch.Tensor", *launches: Callable[[], None]) -> Launch:
    def launch() -> "torch.Tensor":
        for each in launches:
            each()
        return out

    return launch
