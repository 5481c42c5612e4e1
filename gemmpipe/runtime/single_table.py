"""The run time with a single table, recording the selected rows: to verify a table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gemmpipe import runtime
from gemmpipe.family import Family, GemmSpec, Inputs, Weights
from gemmpipe.runtime.cache import BindRequest, BoundCall, CallKey
from gemmpipe.runtime.dispatch import EAGER, Dispatch
from gemmpipe.runtime.select import LookupResult
from gemmpipe.runtime.tables import load_tables

EntryPointCall = Callable[[Inputs, Weights], torch.Tensor]
"""The family's function on one set of operands."""


@dataclass(frozen=True, kw_only=True)
class SingleTableDispatch(Dispatch):
    """A dispatch that looks up in one file, queues nothing for online tuning, and records its selections."""

    selected: list[LookupResult] = field(default_factory=list)
    """One per key and layout, in the order of their first calls."""

    def clear_cache(self) -> None:
        """Drop all calls: the next ones are looked up again in the table as it was read."""
        self.calls.clear()
        self.selected.clear()

    def _store(self, key: CallKey, request: BindRequest, selected: LookupResult, call: BoundCall) -> None:
        self.selected.append(selected)
        self.calls[key] = call


def single_table_dispatch(family: Family, path: Path) -> SingleTableDispatch:
    """A dispatch of this family with the rows of one file."""
    return SingleTableDispatch(family=family, graph_pool=False, _tables=[load_tables(family, path)])


@contextmanager
def dispatching_with(dispatch: SingleTableDispatch) -> Iterator[None]:
    """Within the block calls of the family's function use this dispatch."""
    name = dispatch.family.name
    before = EAGER.get(name)
    EAGER[name] = dispatch
    try:
        yield
    finally:
        del EAGER[name]
        if before is not None:
            EAGER[name] = before


def entry_point_call(family: Family, spec: GemmSpec) -> EntryPointCall | None:
    """gemmpipe.runtime's function of the family with this product's options; None for a family without one."""
    function = getattr(runtime, family.entry_point, None) if family.entry_point in runtime.__all__ else None
    if function is None:
        return None
    out_dtype = getattr(torch, spec.out_dtype)

    def product(inputs: Inputs, w: Weights) -> torch.Tensor:
        given = {"x_scale": inputs.x_scale, "w_scale": w.w_scale, "bias": w.bias}
        scales_and_bias = {name: value for name, value in given.items() if value is not None}
        out: torch.Tensor = function(inputs.x, w.w, **scales_and_bias, out_dtype=out_dtype)
        return out

    def mixture(inputs: Inputs, w: Weights) -> torch.Tensor:
        assert spec.experts is not None
        out: torch.Tensor = function(
            inputs.x,
            w.w,
            w.w2,
            inputs.topk_weights,
            inputs.topk_ids,
            w1_scale=w.w_scale,
            w2_scale=w.w2_scale,
            activation=spec.experts.activation,
            doweight_stage1=spec.experts.weight_first,
        )
        return out

    return product if spec.experts is None else mixture
