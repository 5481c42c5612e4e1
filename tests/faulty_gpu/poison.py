"""A family whose candidates do to a GPU what broken kernels do: an illegal access, no end, too much memory."""

import time
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from gemmpipe.core.data import Device, Knobs, Problem
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, KeyColumn, Launch, Prepared, bytes_moved, flops
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.family.space import Space


@triton.jit
def stray_store(out_ptr, offset):
    """Writes where nothing is mapped: the context is lost from here on."""
    tl.store(out_ptr + offset.to(tl.int64) * 1_000_000_000, 1.0)


@triton.jit
def endless(out_ptr):
    """Spins for ever on a value that nobody writes."""
    while tl.load(out_ptr, volatile=True) != 12345.0:
        pass


def _spec(problem: Problem) -> GemmSpec:
    m, n, k = (int(str(problem[name])) for name in ("M", "N", "K"))
    return GemmSpec(m=m, n=n, k=k, x_dtype="float32", w_dtype="float32", out_dtype="float32")


class Poison(Implementation):
    """The fault of a KIND, at every launch."""

    label = "poison"

    def configs(self, spec: GemmSpec, device: Device, space: Space) -> Iterable[Knobs]:
        return space.configs({"M": spec.m, "N": spec.n, "K": spec.k})

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        return None if device.kind == "cuda" else "no GPU: these are a GPU's faults"

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: torch.Tensor
    ) -> Launch:
        kind, x, w_t = knobs["KIND"], inputs.x, prepared.weights.w.t()
        pace_s = float(str(knobs["PACE_MS"])) / 1e3

        def launch() -> torch.Tensor:
            if pace_s:
                time.sleep(pace_s)
            if kind == "illegal":
                stray_store[(1,)](out, 4_000)
            elif kind == "endless":
                endless[(1,)](out)
            elif kind == "too_much":
                torch.empty(10**13, device=out.device)
            torch.mm(x, w_t, out=out)
            if kind == "wrong":
                out[-1] *= 1.5
            return out

        return launch


FAMILY = Family(
    name="poison",
    key_columns=tuple(KeyColumn(name=name, kind="int") for name in ("M", "N", "K")),
    csv_name="poison_tuned_gemm.csv",
    json_tag="POISON",
    entry_point="gemm_poison",
    key_defaults=lambda arguments, gfx: {},
    spec=_spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Poison(),),
)
