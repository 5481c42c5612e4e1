"""A block-scaled family whose engine's function runs on CPUs, and is said to take longer the less it fits M."""

from collections.abc import Iterable
from pathlib import Path

import torch

from gemmpipe.backends.engine import EngineImplementation
from gemmpipe.core.data import Device, Knobs, Problem
from gemmpipe.family import Family, GemmSpec, Inputs, KeyColumn, Launch, Prepared, Scaling, bytes_moved, flops
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.family.space import Space

torch.set_num_threads(1)


def _spec(problem: Problem) -> GemmSpec:
    m, n, k = (int(str(problem[name])) for name in ("M", "N", "K"))
    fp8 = "float8_e4m3fn"
    x_scale, w_scale = Scaling(granularity="block", block=(1, 128)), Scaling(granularity="block", block=(128, 128))
    return GemmSpec(m=m, n=n, k=k, x_dtype=fp8, w_dtype=fp8, out_dtype="bfloat16", x_scale=x_scale, w_scale=w_scale)


def time_us(m: int, knobs: Knobs) -> float:
    """The recorded time of a launch: for its tiles of rows, for their size, and for stages that it lacks."""
    rows, stages = int(str(knobs["BLOCK_SIZE_M"])), int(str(knobs["num_stages"]))
    tiles = -(-m // rows)
    return 10 * (tiles + rows / 32 + 2 * (3 - min(3, stages)))


class _Launch:
    """Copies what was computed before; `time_us` is for the clock of told.py."""

    def __init__(self, result: torch.Tensor, out: torch.Tensor, us: float) -> None:
        self._result, self._out, self.time_us = result, out, us

    def __call__(self) -> torch.Tensor:
        self._out.copy_(self._result)
        return self._out


class Said(EngineImplementation):
    """A form of the engine `vllm`."""

    label = "vllm"

    def configs(self, spec: GemmSpec, device: Device, space: Space) -> Iterable[Knobs]:
        return space.configs({"M": spec.m, "N": spec.n, "K": spec.k, "arch": device.gfx})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        amd = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
        return {name: value for name, value in knobs.items() if name not in amd}

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        return "form: it has no num_stages=7" if knobs["num_stages"] == 7 else None

    def default(self, spec: GemmSpec, device: Device) -> Knobs | None:
        sides = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128}
        return {**sides, "GROUP_SIZE_M": 32, "num_warps": 4, "num_stages": 2}

    def folders(self) -> tuple[Path, ...]:
        return ()

    def unavailable_reason(self) -> str | None:
        return "this engine is a test's"

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        raise AssertionError("only functions of engines that are here are compiled ahead")

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: torch.Tensor
    ) -> Launch:
        result = product(spec, inputs, prepared.weights).to(out.dtype)
        return _Launch(result, out, time_us(spec.m, knobs))


FAMILY = Family(
    name="engine_like",
    key_columns=tuple(KeyColumn(name=name, kind="int") for name in ("M", "N", "K")),
    csv_name="engine_like_tuned_gemm.csv",
    json_tag="ENGINE_LIKE",
    entry_point="gemm_engine_like",
    key_defaults=lambda arguments, gfx: {},
    spec=_spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(),
    engine_kernels={"vllm": Said()},
)
