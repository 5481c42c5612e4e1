"""Tuned products in an unmodified PyTorch model: linear layers with a tuned row are dispatched."""

import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import nn

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import counted
from gemmpipe.core.paths import tables_variable
from gemmpipe.runtime.api import gemm_a16w16
from gemmpipe.runtime.cache import KernelCache, device_by_index
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.operands import dtype_name
from gemmpipe.runtime.select import first_usable

FAMILY = "a16w16"
"""The family of a linear layer's product."""
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_REASONS = 3
_MARK = "_gemmpipe_tuned"  # torch 2.11's compiler guards on a layer's attributes, not on its class
_LOG = logging.getLogger("gemmpipe.runtime")


class TunedLinear(nn.Linear):
    """A patched linear layer: parameters, hooks and names are unchanged.

    One class for all layers, so that torch.compile reuses the code of the first one.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's name
        """The tuned product; torch's own after a conversion of the model to an unsupported type."""
        if self.weight.dtype not in _DTYPES:
            return super().forward(input)
        return gemm_a16w16(input, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, eq=False)
class Patched:
    """The result of `patch`; as a context manager it undoes the patch at the end."""

    layers: dict[str, nn.Linear]
    """The replaced layers by name."""
    linear_layers: int
    """The number of linear layers in the model."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why the other linear layers are not replaced, by name."""

    @property
    def replaced(self) -> int:
        """The number of replaced layers."""
        return len(self.layers)

    def undo(self) -> None:
        """Restore every replaced layer; a second call does nothing."""
        for layer in self.layers.values():
            if type(layer) is TunedLinear:
                layer.__class__ = nn.Linear  # type: ignore[assignment]
                vars(layer).pop(_MARK, None)

    def __str__(self) -> str:
        text = f"gemmpipe: {self.replaced} of {self.linear_layers} linear layers use tuned products"
        reasons = Counter(self.left_out.values()).most_common(_MOST_REASONS)
        if self.replaced or not reasons:
            return text
        why = (f"{reason} ({counted(number, 'layer')})" for reason, number in reasons)
        return f"{text}: {'; '.join(why)}"

    def __enter__(self) -> "Patched":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch(model: nn.Module) -> Patched:
    """Dispatch the products of a model's `nn.Linear` layers with a tuned row for their sizes, type and device.

    A call with an M without a row uses the fallback, and one that records gradients is torch's own: run the model
    under `torch.no_grad()` or `torch.inference_mode()`. Layers with their own forward are not replaced.
    Raises UserError for an argument that is not a module.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"patch: model is of type {type(model).__name__}, expected a torch.nn.Module")
    dispatch, known = dispatch_of(FAMILY), dict[tuple[object, ...], str]()
    layers: dict[str, nn.Linear] = {}
    left_out: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        reason = _unsupported_reason(layer)
        if not reason:
            weight = layer.weight
            key = (weight.shape, weight.dtype, weight.device, layer.bias is not None)
            if key not in known:
                known[key] = _no_row_reason(dispatch, weight, layer.bias is not None)
            reason = known[key]
        if reason:
            left_out[name] = reason
        else:
            layer.__class__ = TunedLinear
            setattr(layer, _MARK, True)
            layers[name] = layer
    patched = Patched(layers=layers, linear_layers=len(layers) + len(left_out), left_out=left_out)
    _LOG.info("%s", patched)
    return patched


def _unsupported_reason(layer: nn.Linear) -> str:
    """Why a layer's product is its own, whatever is tuned; empty if it may be replaced."""
    if type(layer) is TunedLinear:
        return "patched already"
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return f"a forward of its own ({type(layer).__name__})"
    weight = layer.weight
    if type(weight) is not nn.Parameter:  # a subclass has its own product
        return f"a weight of type {type(weight).__name__}"
    if weight.device.type not in ("cpu", "cuda"):
        return f"a weight on the device '{weight.device.type}'"
    if weight.dtype not in _DTYPES:
        return f"a weight in {dtype_name(weight.dtype)}; expected bfloat16 or float16"
    return ""


def _no_row_reason(dispatch: KernelCache, weight: torch.Tensor, bias: bool) -> str:
    """Why no M of this weight has a row with a candidate that runs here; empty if one has."""
    device, dtype = device_by_index(weight.get_device()), dtype_name(weight.dtype)
    wanted: dict[str, Scalar] = {"N": weight.shape[0], "K": weight.shape[1], "bias": bias}
    wanted |= {"dtype": dtype, "outdtype": dtype}
    tables = dispatch.tables()
    rows = tables.rows_with(device, wanted)
    if any(first_usable(dispatch.family, alternatives, device) is not None for alternatives in rows):
        return ""
    text = " ".join(f"{name}={value}" for name, value in wanted.items() if name != "outdtype")
    if rows:
        return f"{text}: its rows name candidates that cannot run here"
    if tables.rows_with(device, {}):
        return f"{text}: no row; tune it"
    variable = tables_variable(FAMILY)
    files = f"{variable} names no table with one" if os.environ.get(variable) else f"{variable} is not set"
    return f"no row for {device.name} ({device.gfx}) in any table; {files}"
