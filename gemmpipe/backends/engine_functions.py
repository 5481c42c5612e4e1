"""Functions of inference engines that read their configuration from a file, called with a given one instead."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gemmpipe.backends.engine_compile import empty_meta, scales_shape
from gemmpipe.backends.packages import not_installed
from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import one_line

if TYPE_CHECKING:
    import torch

    from gemmpipe.family import GemmSpec, Inputs, Launch, Weights


@dataclass(frozen=True, kw_only=True)
class EngineFunction:
    """An engine's function, and the look-up of configurations in the same module, which a call replaces.

    Imported at the first call, never before: engines take seconds and gigabytes to import.
    """

    package: str
    module: str
    function: str
    """(x, w, x_scale, w_scale, block, output dtype) -> the output."""
    lookup: str
    """(N, K, block rows, block columns) -> configurations by M, or None."""
    default_items: tuple[tuple[str, Scalar], ...]
    """Its configuration without a file, but for the tile's sides along N and K."""

    @property
    def default(self) -> Mapping[str, Scalar]:
        """`default_items` as a mapping."""
        return dict(self.default_items)

    def folders(self) -> tuple[Path, ...]:
        """`configs` next to the module if the package is installed; imports nothing."""
        try:
            found = find_spec(self.package)
        except (ImportError, ValueError):
            found = None
        within = Path(*self.module.split(".")[1:-1], "configs")
        roots = [] if found is None else list(found.submodule_search_locations or ())
        return tuple(path for root in roots if (path := Path(root) / within).is_dir())

    def unavailable_reason(self) -> str | None:
        """Why it cannot be called, or None; imports the engine."""
        found = _import_module(self)
        return found if isinstance(found, str) else None

    def launch(
        self,
        operands: Sequence["torch.Tensor | None"],
        block: list[int],
        dtype: "torch.dtype",
        configuration: dict[str, Scalar] | None,
    ) -> "Launch":
        """A call with this configuration for any M; None: with the one that the engine looks up.

        Raises RuntimeError if the engine cannot be imported.
        """
        module = _import_module(self)
        if isinstance(module, str):
            raise RuntimeError(module)
        call: Callable[..., torch.Tensor] = getattr(module, self.function)
        if configuration is None:
            return lambda: call(*operands, block, dtype)

        def launch() -> "torch.Tensor":
            with patched_attribute(module, self.lookup, lambda *_: {1: configuration}):
                return call(*operands, block, dtype)

        return launch


def product_launch(
    function: EngineFunction,
    spec: "GemmSpec",
    inputs: "Inputs",
    weights: "Weights",
    dtype: "torch.dtype",
    configuration: dict[str, Scalar] | None,
) -> "Launch":
    """A call of an engine's product by blocks, which returns its own output; x_scale is passed row-major.

    Raises ValueError without block scales, RuntimeError if the engine cannot be imported.
    """
    if inputs.x_scale is None or spec.w_scale is None:
        raise ValueError("block scales are missing")
    operands = (inputs.x, weights.w, inputs.x_scale.contiguous(), weights.w_scale)
    return function.launch(operands, list(spec.w_scale.block), dtype, configuration)


def product_on_meta(function: EngineFunction, spec: "GemmSpec", configuration: dict[str, Scalar] | None) -> None:
    """Call an engine's product by blocks on operands without memory. Raises ValueError without block scales."""
    from gemmpipe.family.operands import torch_dtype

    if spec.x_scale is None or spec.w_scale is None:
        raise ValueError("block scales are missing")
    x, w = empty_meta((spec.m, spec.k), spec.x_dtype), empty_meta((spec.n, spec.k), spec.w_dtype)
    x_scale = empty_meta(scales_shape(spec.x_scale, spec.m, spec.k), spec.x_scale.dtype)
    w_scale = empty_meta(scales_shape(spec.w_scale, spec.n, spec.k), spec.w_scale.dtype)
    operands, dtype = (x, w, x_scale, w_scale), torch_dtype(spec.out_dtype)
    function.launch(operands, list(spec.w_scale.block), dtype, configuration)()


@contextmanager
def patched_attribute(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a module within the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@lru_cache
def _import_module(function: EngineFunction) -> ModuleType | str:
    """The module, or one line with the reason why it cannot be used."""
    if find_spec(function.package) is None:
        return not_installed(function.package)
    try:
        module = importlib.import_module(function.module)
    except Exception as error:  # noqa: BLE001 - engines run much code when they are imported
        return f"{function.package} cannot be imported: {one_line(error)}"
    absent = [name for name in (function.function, function.lookup) if not hasattr(module, name)]
    return f"this {function.package} has no {absent[0]} in {function.module}" if absent else module


GEMM_FUNCTIONS: Mapping[str, EngineFunction] = {
    "vllm": EngineFunction(
        package="vllm",
        module="vllm.model_executor.layers.quantization.utils.fp8_utils",
        function="w8a8_triton_block_scaled_mm",
        lookup="get_w8a8_block_fp8_configs",
        default_items=(("BLOCK_SIZE_M", 64), ("GROUP_SIZE_M", 32), ("num_warps", 4), ("num_stages", 2)),
    ),
    "sglang": EngineFunction(
        package="sglang",
        module="sglang.kernels.ops.gemm.fp8_kernel",
        function="w8a8_block_fp8_matmul_triton",
        lookup="get_w8a8_block_fp8_configs",
        default_items=(("BLOCK_SIZE_M", 64), ("GROUP_SIZE_M", 32), ("num_warps", 4), ("num_stages", 3)),
    ),
}
"""Functions of block-scaled products by engine, as of vLLM 0.25 and SGLang 0.5.23."""
