"""Tuned products in an unmodified PyTorch model: linear layers with a tuned row are dispatched."""

import logging
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.runtime.api import gemm_a16w16
from gemmpipe.runtime.cache import KernelCache, device_by_index
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.operands import dtype_name
from gemmpipe.runtime.select import first_usable

FAMILY = "a16w16"
"""The family of a linear layer's product."""
_DTYPES = (torch.bfloat16, torch.float16)
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
        return f"gemmpipe: {self.replaced} of {self.linear_layers} linear layers use tuned products"

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
    dispatch, known = dispatch_of(FAMILY), dict[tuple[object, ...], bool]()
    layers: dict[str, nn.Linear] = {}
    total = 0
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        total += 1
        if type(layer) is not nn.Linear or "forward" in vars(layer):
            continue
        weight = layer.weight
        if type(weight) is not nn.Parameter or weight.device.type not in ("cpu", "cuda"):
            continue  # a subclass has its own product
        key = (weight.shape, weight.dtype, weight.device, layer.bias is not None)
        if key not in known:
            known[key] = _has_row(dispatch, weight, layer.bias is not None)
        if known[key]:
            layer.__class__ = TunedLinear
            setattr(layer, _MARK, True)
            layers[name] = layer
    patched = Patched(layers=layers, linear_layers=total)
    _LOG.info("%s", patched)
    return patched


def _has_row(dispatch: KernelCache, weight: torch.Tensor, bias: bool) -> bool:
    """True if any M of this weight has a row with a candidate that runs here."""
    device, dtype = device_by_index(weight.get_device()), dtype_name(weight.dtype)
    wanted: dict[str, Scalar] = {"N": weight.shape[0], "K": weight.shape[1], "bias": bias}
    wanted |= {"dtype": dtype, "outdtype": dtype}
    rows = dispatch.tables().rows_with(device, wanted)
    return any(first_usable(dispatch.family, alternatives, device) is not None for alternatives in rows)
