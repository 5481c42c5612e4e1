"""Finals of a problem with two possible layouts of scales: both are checked and timed, and the slower one counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from gemmpipe.backends.aten import Torch
from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.jobs import InFlight, WorkerContext
from gemmpipe.bench.screening import ScreenJob
from gemmpipe.bench.setup import WorkerBench
from gemmpipe.bench.timer import CpuClock, TimedCall, TimedReplay, Timer
from gemmpipe.core.data import Candidate, Device, Knobs, Problem, Status, Trial
from gemmpipe.core.device import cpu_device
from gemmpipe.core.nvml import ForeignProcesses
from gemmpipe.family import GemmSpec, Implementation, Inputs, KernelDefaults, Launch, Prepared, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.search import TrialRequest

FAMILY = load_family("a8w8_blockscale")
TIMER = Timer(warmup=1, iters=2, rounds=5, budget_ms=50)
SAME, COPIES, MIXED = ("same", "copies", "mixed")
TIMES_US = {SAME: {"row": 6.0, "column": 6.0}, COPIES: {"row": 5.0, "column": 8.0}, MIXED: {"row": 1.0, "column": 1.0}}


class FixedTimeLaunch:
    """A launch with a fixed time for FixedTimeClock."""

    def __init__(self, launch: Launch, time_us: float) -> None:
        self._launch, self.time_us = launch, time_us

    def __call__(self) -> torch.Tensor:
        return self._launch()


class FixedTimeClock(CpuClock):
    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        return [self.replay(block)() for block in blocks]

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        def once() -> float:
            for launch in launches:
                launch()
            return next((each.time_us for each in launches if isinstance(each, FixedTimeLaunch)), 3.0)

        return TimedReplay(once)

    def launches_per_sample(self, time_us: float, sets: int) -> int:
        return sets


class Layouts(Torch):
    """torch's product with the times of TIMES_US; `mixed` reads M-major scales as row-major."""

    label = "layouts"
    seen: list[tuple[str, tuple[int, ...]]] = []  # noqa: RUF012 (of the class: a worker makes its own instance)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: torch.Tensor
    ) -> Launch:
        assert inputs.x_scale is not None
        name, scale = str(knobs["name"]), inputs.x_scale
        self.seen.append((name, scale.stride()))
        order = "row" if scale.is_contiguous() else "column"
        if name == MIXED and order == "column":
            inputs = replace(inputs, x_scale=scale.mT.contiguous().view(scale.shape))
        launch = super().bind(spec, knobs, device, inputs, prepared, out)
        return FixedTimeLaunch(launch, TIMES_US[name][order])  # type: ignore[return-value]


class Rows(Implementation):
    """A user's own kernel that reads row-major scales, without a declaration of it."""

    label = "rows"

    def configs(self, spec: GemmSpec, device: Device, space: Space) -> list[Knobs]:
        return [{}]

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        return None

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: torch.Tensor
    ) -> Launch:
        assert inputs.x_scale is not None
        assert inputs.x_scale.is_contiguous(), "it would read wrong numbers"
        return Torch().bind(spec, {"method": "float32_convert"}, device, inputs, prepared, out)


@pytest.fixture
def context() -> WorkerContext:
    device = cpu_device()
    Layouts.seen.clear()
    bench = WorkerBench(FAMILY, {"layouts": Layouts(), "rows": Rows()}, device)
    return WorkerContext(
        bench=bench, clock=FixedTimeClock(), in_flight=InFlight([0.0, 0.0]), foreign_processes=ForeignProcesses(device)
    )


def _problem(m: int = 8, **key: object) -> Problem:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return make_problem(FAMILY, {"M": m, "N": 128, "K": 256, **key}, defaults, "cpu_avx2", "test")


def _candidate(name: str) -> Candidate:
    return Candidate.of("layouts", {"name": name, "method": "float32_convert"})


def _finals(context: WorkerContext, problem: Problem, *names: str) -> dict[str, Trial]:
    job = FinalsJob(
        stage="bench",
        problem=problem,
        finalists=tuple(map(_candidate, names)),
        library=frozenset(),
        always_timed=frozenset(_candidate(name).id for name in names),
        timer=TIMER,
        err_ratio=0.05,
    )
    return {str(t.candidate.knobs["name"]): t for t in job.run(context)}


def test_the_slower_layout_counts_and_both_are_checked(context: WorkerContext) -> None:
    found = _finals(context, _problem(), SAME, COPIES, MIXED)
    assert found[SAME].time_us == 6.0
    assert found[COPIES].time_us == 8.0, "the fastest in one layout, but callers do not choose it"
    assert found[MIXED].status is Status.INCORRECT
    assert found[SAME].launches == 2 * len(found[SAME].samples_us) * context.bench.set_up(_problem()).sets
    assert {strides for name, strides in Layouts.seen if name == SAME} == {(2, 1), (1, 8)}


@pytest.mark.parametrize(("order", "time_us", "strides"), [("row", 5.0, (2, 1)), ("column", 8.0, (1, 8))])
def test_a_workload_of_one_layout_is_timed_in_it_alone(
    context: WorkerContext, order: str, time_us: float, strides: tuple[int, ...]
) -> None:
    found = _finals(context, _problem(x_scale=order), COPIES)
    assert found[COPIES].time_us == time_us
    assert {each for _, each in Layouts.seen} == {strides}


@pytest.mark.parametrize("sizes", [{"m": 1}, {"K": 128}])
def test_scales_that_are_in_both_layouts_are_timed_once(context: WorkerContext, sizes: dict[str, int]) -> None:
    problem = _problem(**sizes)  # type: ignore[arg-type]
    found = _finals(context, problem, SAME)
    assert found[SAME].launches == len(found[SAME].samples_us) * context.bench.set_up(problem).sets


def test_the_launch_of_a_kernel_for_row_major_scales_includes_a_copy(context: WorkerContext) -> None:
    setup = context.bench.set_up(_problem())
    launch = setup.binder(Candidate.of("rows", {}), "column")(0)
    assert setup.error_ratio(launch()) == 0
    setup.inputs(0, "column").x_scale.mul_(2)
    doubled = launch()
    torch.testing.assert_close(doubled.float(), 2 * setup.reference(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("order", "strides"), [(None, (2, 1)), ("column", (1, 8))])
def test_screening_times_one_layout(context: WorkerContext, order: str | None, strides: tuple[int, ...]) -> None:
    requests = (TrialRequest(candidate=_candidate(COPIES), launches=2),)
    job = ScreenJob(stage="screen", problem=_problem(x_scale=order), requests=requests, timer=TIMER)
    (trial,) = job.run(context)
    assert trial.status is Status.OK
    assert {each for _, each in Layouts.seen} == {strides}


def test_scales_of_both_layouts_are_the_same_numbers(context: WorkerContext) -> None:
    setup = context.bench.set_up(_problem())
    row, column = setup.inputs(0, "row"), setup.inputs(0, "column")
    assert torch.equal(row.x_scale, column.x_scale)
    assert row.x is column.x
    make: Callable[[], object] = partial(setup.inputs, 0)
    assert make().x_scale is row.x_scale  # type: ignore[attr-defined]
