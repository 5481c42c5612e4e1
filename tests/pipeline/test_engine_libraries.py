"""The own library of the engine that serves a model is timed with the rest, unless the user chooses the backends."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_configs import FP8_BY_BLOCKS, QWEN_8B

from gemmpipe.cli.main import main
from gemmpipe.core.data import Device
from gemmpipe.core.device import cpu_device
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import Event, Events
from gemmpipe.engines.own_kernel import own_kernel
from gemmpipe.pipeline.plan import Plan, with_engine_libraries

CONFIG = {**QWEN_8B, "quantization_config": FP8_BY_BLOCKS}


@pytest.fixture(autouse=True)
def sglang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model in the current folder; no engine is installed, and nothing turns DeepGEMM off."""

    def missing(engine: str) -> Path:
        raise EnvironmentProblem(engine)

    monkeypatch.setattr("gemmpipe.engines.own_kernel.package_folder", missing)
    monkeypatch.setattr("gemmpipe.engines.own_kernel.installed_version", lambda engine: None)
    monkeypatch.delenv("SGLANG_ENABLE_JIT_DEEPGEMM", raising=False)
    own_kernel.cache_clear()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    yield
    own_kernel.cache_clear()


def planned(plans: list[Plan], device: Device, *arguments: str) -> tuple[Plan, list[Event]]:
    """The plan of a command line for SGLang on this device, and what the user is told."""
    said: list[Event] = []
    options = ("shapes=engine", "shapes.engine=sglang", "shapes.path=config.json", "shapes.nsets=[16]")
    assert main([*arguments, *options]) == 0
    return with_engine_libraries(plans[-1], device, Events(listeners=[said.append])), said


def test_one_command_times_the_engines_library(plans: list[Plan], h200: Device) -> None:
    plan, said = planned(plans, h200)
    assert set(plan.backends) - set(plans[-1].backends) == {"deepgemm"}
    assert plan.backends["deepgemm"].label == "deepgemm"
    (line,) = [event.text for event in said if event.kind == "line"]
    assert line == "also timed: deepgemm, which the engine itself calls for these products"
    (problem, *_) = plan.source.problems(plan.family, plan.defaults, h200.gfx)
    assert problem["x_scale"] == "column"


def test_a_library_that_cannot_be_timed_is_a_warning(
    plans: list[Plan], h200: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmpipe.backends.deepgemm.DeepGemm.unavailable", lambda self, device: "not installed")
    _, said = planned(plans, h200)
    (warning,) = [event.text for event in said if event.kind == "warning"]
    assert warning == "deepgemm, the engine's own library, cannot be timed here: not installed"


@pytest.mark.parametrize(
    "arguments",
    [
        ("backend=[triton,torch]",),
        ("shapes.own_kernel=false",),
        ("capture",),
        ("kernel=a16w16", "shapes.quantization=ignore"),
    ],
)
def test_it_is_not_added(plans: list[Plan], h200: Device, arguments: tuple[str, ...]) -> None:
    plan, said = planned(plans, h200, *arguments)
    assert plan.backends == plans[-1].backends
    assert said == []


def test_on_a_cpu_nothing_is_added(plans: list[Plan]) -> None:
    plan, said = planned(plans, cpu_device())
    assert plan.backends == plans[-1].backends
    assert said == []
