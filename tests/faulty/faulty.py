"""A family whose candidates fail in every way that a kernel can: each on purpose, by its knob KIND."""

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from gemmpipe.backends.autotune import Autotuned
from gemmpipe.core.data import Build, Device, Knobs, Problem
from gemmpipe.family import (
    Family,
    GemmSpec,
    Implementation,
    Inputs,
    KeyColumn,
    Launch,
    Prepared,
    Weights,
    bytes_moved,
    flops,
)
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.family.space import Space
from gemmpipe.launch.triton_autotune import AutotuneResult

torch.set_num_threads(1)  # tests run beside each other: threads that wait for a core make launches look long


def _spec(problem: Problem) -> GemmSpec:
    m, n, k = (int(str(problem[name])) for name in ("M", "N", "K"))
    return GemmSpec(m=m, n=n, k=k, x_dtype="float32", w_dtype="float32", out_dtype="float32")


def _first_time(name: str) -> bool:
    """True for the first question of a worker of this driver."""
    driver = multiprocessing.parent_process()
    try:
        Path(tempfile.gettempdir(), f"faulty-{driver.pid if driver else 0}-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _eat() -> None:
    held = []
    while True:
        held.append(b"x" * 50_000_000)
        time.sleep(0.002)


_LAUNCHES: dict[str, int] = {}


def _nth(kind: str) -> int:
    _LAUNCHES[kind] = _LAUNCHES.get(kind, 0) + 1
    return _LAUNCHES[kind]


def _once(kind: str, act: Callable[[], object]) -> Callable[[], None]:
    def launch() -> None:
        if _first_time(kind):
            act()

    return launch


def _later(kind: str, act: Callable[[], object]) -> Callable[[], None]:
    def launch() -> None:
        if _nth(kind) > 1:
            act()

    return launch


def _hang() -> None:
    _first_time("hang")  # for those who wait until it hangs
    time.sleep(3600)


def _die_then_raise() -> None:
    if _first_time("die_then_raise"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("once it died, now it raises")


def _die(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


ENDS: dict[str, Callable[[], object]] = {
    "raise_launch": _raise(RuntimeError("this kernel\ncannot")),
    "raise_odd": _raise(ValueError("not even a RuntimeError")),
    "segfault": lambda: ctypes.string_at(0),
    "kill": _die(signal.SIGKILL),
    "hang": _hang,
    "exit": lambda: os._exit(3),
    "sys_exit": lambda: sys.exit(3),
    "eat": _eat,
    "no_memory": lambda: torch.empty(1 << 60),
    "hang_once": _once("hang_once", lambda: time.sleep(3600)),
    "die_once": _once("die_once", _die(signal.SIGKILL)),
    "die_then_raise": _die_then_raise,
    "slow": lambda: time.sleep(0.004),
    "raise_later": _later("raise_later", _raise(RuntimeError("only later"))),
    "odd_later": _later("odd_later", _raise(ValueError("only later"))),
    "die_later": _later("die_later", _die(signal.SIGKILL)),
    "hang_later": _later("hang_later", lambda: time.sleep(3600)),
}
"""Faults before the product is computed."""


def _spoil_row(out: torch.Tensor) -> None:
    out[-1] *= 1.5


SPOILS: dict[str, Callable[[torch.Tensor], object]] = {
    "spoil_nan": lambda out: out[0, :1].fill_(float("nan")),
    "permute": lambda out: out.copy_(out.flip(1)),
    "spoil_row": _spoil_row,
    "wrong_at_8": lambda out: out.mul_(1.5) if len(out) == 8 else None,
}
"""Faults after it."""


class Faulty(Implementation):
    """KINDs in ENDS and SPOILS are wrong in their way, all others right (`..._once` but for their first launch)."""

    label = "faulty"

    def configs(self, spec: GemmSpec, device: Device, space: Space) -> Iterable[Knobs]:
        return space.configs({"M": spec.m, "N": spec.n, "K": spec.k})

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        return "kind: unfit by name" if knobs["KIND"] == "unfit" else None

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        if not str(knobs["KIND"]).startswith("compile_"):
            return ()
        constants = tuple(knobs.items())  # one build a candidate
        kernel = f"faulty_compiler:{knobs['KIND']}"
        return (Build(kernel=kernel, source_hash="", signature=(), constants=constants, aligned=(), options=()),)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: torch.Tensor
    ) -> Launch:
        kind, pace_s = str(knobs["KIND"]), float(str(knobs["PACE_MS"])) / 1e3
        if kind == "raise_bind":
            raise RuntimeError("cannot be bound")
        if kind == "kill_even":
            kind = "right" if spec.m % 2 else "kill"
        begin, spoil = ENDS.get(kind, lambda: None), SPOILS.get(kind, lambda out: None)
        x, w_t = inputs.x, prepared.weights.w.t()

        def launch() -> torch.Tensor:
            begin()
            if pace_s:
                time.sleep(pace_s)
            if kind != "untouched":
                torch.mm(x, w_t, out=out)
                spoil(out)
            return out

        return launch


class _Deadly(Autotuned):
    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        return Prepared(weights=weights)

    def choose(self, *args: object, **kwargs: object) -> AutotuneResult:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("dead")


class DeadlyTuner:
    """A backend in the place of `autotune`, whose choosing kills the worker."""

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        return (_Deadly(kernel=None, limit_s=None),)


def _make_inputs(spec: GemmSpec, generator: torch.Generator) -> Inputs:
    if spec.m == 666:
        raise ValueError("no operands of 666 rows")
    return make_inputs(spec, generator)


FAMILY = Family(
    name="faulty",
    key_columns=tuple(KeyColumn(name=name, kind="int") for name in ("M", "N", "K")),
    csv_name="faulty_tuned_gemm.csv",
    json_tag="FAULTY",
    entry_point="gemm_faulty",
    key_defaults=lambda arguments, gfx: {},
    spec=_spec,
    make_weights=make_weights,
    make_inputs=_make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Faulty(),),
)
