"""Backends that the user named and of which nothing is timed: a line each, two of a group, none of `default`'s."""

from pathlib import Path

import pytest
from stage_contexts import stage_context

from gemmpipe.core.data import Device
from gemmpipe.core.device import cpu_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.stages import Context, NamedBackend
from gemmpipe.stages.screen.candidates import SpaceReport
from gemmpipe.stages.screen.not_timed import not_timed_lines

FAMILY = load_family("a8w8_blockscale")
MISSING = {name: f"the package {name} is not installed: pip install {name}" for name in ("deepgemm", "quack", "other")}


@pytest.fixture
def context(tmp_path: Path, no_words: KernelDefaults, h200: Device) -> Context:
    arguments = ("kernel=a8w8_blockscale", "backend=[default,peers]")
    return stage_context(tmp_path, FAMILY, no_words, h200, reproduce_args=arguments)


def named(option: str, *names: str) -> list[NamedBackend]:
    return [NamedBackend(option=option, name=name, labels=(name,)) for name in names]


def test_each_backend_that_was_typed_has_a_line(context: Context) -> None:
    context.named_backends[:] = [*named("deepgemm", "deepgemm"), *named("quack", "quack"), *named("torch", "torch")]
    report = SpaceReport(missing={**MISSING, "scaled_mm": "no GPU"}, fitting={"torch"})
    assert not_timed_lines(context, report) == [
        f"deepgemm: not timed: {MISSING['deepgemm']}",
        f"quack: not timed: {MISSING['quack']}",
    ]


def test_a_group_has_two_lines(context: Context) -> None:
    context.named_backends[:] = named("peers", *MISSING)
    assert not_timed_lines(context, SpaceReport(missing=MISSING)) == [
        "deepgemm, quack, other: not timed",
        "  why, and how to install what is missing: gemmpipe doctor kernel=a8w8_blockscale 'backend=[default,peers]'",
    ]
    shared = dict.fromkeys(MISSING, "no NVIDIA GPU")
    assert not_timed_lines(context, SpaceReport(missing=shared)) == ["deepgemm, quack, other: not timed: no NVIDIA GPU"]


def test_reasons_that_no_backend_gives(context: Context, tmp_path: Path, no_words: KernelDefaults) -> None:
    """A family without kernels of this kind, its own kernels on a CPU; not sizes, which other problems may not have."""
    fused = NamedBackend(option="fused", name="fused", labels=())
    context.named_backends[:] = [fused, *named("triton", "triton")]
    of_family = "fused: not timed: a8w8_blockscale has no kernel of this kind"
    assert not_timed_lines(context, SpaceReport()) == [of_family]
    on_cpu = stage_context(tmp_path / "cpu", FAMILY, no_words, cpu_device(), named_backends=context.named_backends)
    assert not_timed_lines(on_cpu, SpaceReport()) == [
        of_family,
        "triton: not timed: no GPU: Triton compiles for GPUs",
    ]
