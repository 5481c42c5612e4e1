"""A wrong kernel cannot win: errors planted as candidates of every family and format go through bench's own job."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from pairwise import few

from gemmpipe.backends.aten import Torch
from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.jobs import InFlight, WorkerContext
from gemmpipe.bench.setup import WorkerBench
from gemmpipe.bench.timer import CpuClock, Timer
from gemmpipe.core.data import Candidate, Device, Knobs, Status
from gemmpipe.core.device import cpu_device
from gemmpipe.core.nvml import ForeignProcesses
from gemmpipe.core.paths import PACKAGE, shipped
from gemmpipe.family import GemmSpec, Implementation, Inputs, KernelDefaults, Launch, Prepared, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space

FAMILIES = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))
PRODUCTS: list[tuple[str, Mapping[str, object], Mapping[str, object]]] = [
    *((name, {}, {}) for name in FAMILIES),
    ("a16w16", {"dtype": "float16", "bias": True}, {}),
    ("a16w16", {"out_dtype": "float32"}, {}),
    ("a16w16", {"dtype": "float8_e4m3fn", "bias": True}, {}),
    ("a16w16_atomic", {"dtype": "float16", "out_dtype": "float32"}, {}),
    ("a8w8", {"dtype": "int8", "bias": True}, {}),
    ("a8w8", {"dtype": "int8"}, {"granularity": "tensor"}),
    ("a8w8", {"dtype": "float8_e4m3fnuz", "out_dtype": "float16"}, {"granularity": "tensor"}),
    ("a8w8_bpreshuffle", {"dtype": "int8"}, {}),
    ("a8w8_bpreshuffle", {"bias": True}, {"granularity": "tensor"}),
    ("a8w8_blockscale", {"dtype": "float8_e4m3fnuz", "out_dtype": "float32"}, {}),
    ("a4w4_blockscale", {"out_dtype": "float32"}, {}),
    ("batched_bf16", {"dtype": "float16"}, {}),
    ("batched_a8w8", {"dtype": "int8"}, {}),
    ("fmoe", {"dtype": "float16"}, {"act_type": "gelu", "use_g1u1": 0}),
    ("fmoe", {"dtype": "fp8"}, {}),
    ("fmoe", {"dtype": "fp8"}, {"q_type": "per_token"}),
]
ROWS = 4096
ERR_RATIO = yaml.safe_load(Path(shipped("conf") / "stage" / "bench.yaml").read_text())["err_ratio"]


def _swap(out: torch.Tensor) -> None:
    out[..., [5, 6]] = out[..., [6, 5]]


def _one_row(out: torch.Tensor) -> None:
    rows = out.view(-1, out.shape[-1])
    rows[1234] = rows[1235]


def _one_nan(out: torch.Tensor) -> None:
    out.view(-1)[777] = float("nan")


ERRORS: dict[str, Callable[[torch.Tensor], None]] = {
    "none": lambda out: None,
    "columns": _swap,
    "row": _one_row,
    "nan": _one_nan,
}


@dataclass(frozen=True, kw_only=True)
class Planted(Implementation):
    """ATen's right product, then the error that the knob names; `untouched` computes nothing."""

    label = "planted"

    def configs(self, spec: GemmSpec, device: Device, space: Space) -> Iterable[Knobs]:
        return ()

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        return None

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: torch.Tensor
    ) -> Launch:
        if spec.experts is not None:
            method = {"method": "expert_loop"}
            return self._with_error(Torch().bind(spec, method, device, inputs, prepared, out), knobs, out)
        scaled = spec.w_scale is not None or spec.out_dtype != spec.x_dtype
        method = {"method": "float32_convert" if scaled else "mm"}
        return self._with_error(Torch().bind(spec, method, device, inputs, prepared, out), knobs, out)

    def _with_error(self, launch: Launch, knobs: Knobs, out: torch.Tensor) -> Launch:
        def wrong() -> torch.Tensor:
            if knobs["error"] != "untouched":
                launch()
                ERRORS[str(knobs["error"])](out)
            return out

        return wrong


@pytest.mark.parametrize(("name", "options", "key"), [*PRODUCTS[:-3], *few(PRODUCTS[-3:])])  # fmoe once
def test_errors_are_caught(name: str, options: Mapping[str, object], key: Mapping[str, object]) -> None:
    family, device = load_family(name), cpu_device()
    defaults = KernelDefaults(**{"dtype": None, "out_dtype": None, "bias": None, **options})  # type: ignore[arg-type]
    values = {"M": ROWS, "N": 64, "K": 128, "B": 2}
    values |= {"token": ROWS, "model_dim": 64, "inter_dim": 128, "expert": 4, "topk": 2}
    values = {column.name: values[column.name] for column in family.key_columns if column.name in values} | {**key}
    candidates = tuple(Candidate.of("planted", {"error": error}) for error in (*ERRORS, "untouched"))
    job = FinalsJob(
        stage="bench",
        problem=make_problem(family, values, defaults, device.gfx, "test"),
        finalists=candidates,
        library=frozenset(),
        always_timed=frozenset(),
        timer=Timer(warmup=0, iters=1, rounds=1, budget_ms=1),
        err_ratio=ERR_RATIO,
    )
    bench = WorkerBench(family, {"planted": Planted()}, device)
    trials = job.run(
        WorkerContext(
            bench=bench, clock=CpuClock(), in_flight=InFlight([0.0, 0.0]), foreign_processes=ForeignProcesses(device)
        )
    )
    found = {trial.candidate.knobs["error"]: trial.status for trial in trials}
    assert found == {
        "none": Status.OK,
        **dict.fromkeys(("columns", "row", "nan", "untouched"), Status.INCORRECT),
    }
