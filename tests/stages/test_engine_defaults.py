"""The engine's current configuration where it publishes no file: its default for that M."""

from pathlib import Path

import pytest
from moe_problems import FMOE
from search_setup import EXHAUSTIVE

from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.events import Events
from gemmpipe.family import KernelDefaults
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.formats.engine_json import Sglang
from gemmpipe.journal import Journal, Record
from gemmpipe.kernels.fmoe._engine import ENGINES
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages import Context, EngineTarget
from gemmpipe.stages.engine.files import engine_shape_group

SIZES = {"model_dim": 2048, "inter_dim": 768, "expert": 128, "topk": 8}
TARGET = EngineTarget(name="sglang", format=Sglang(device_name="NVIDIA_H200"), implementation=ENGINES["sglang"])


@pytest.fixture
def context(tmp_path: Path, no_words: KernelDefaults, h200: Device) -> Context:
    return Context(
        family=FMOE,
        defaults=no_words,
        source=InlineShapes(items=[]),
        formats=(),
        output=tmp_path / "tuned",
        device=h200,
        retune=False,
        events=Events(listeners=[]),
        run_id="r1",
        run_dir=tmp_path / "run",
        provenance={},
        space=Space(axes={}, when=(), pinned=()),
        search=EXHAUSTIVE,
        implementations=(),
        incumbents={},
        policy="p",
        journal=Journal(tmp_path / "run"),
        record=Record(),
        pool_or_none=None,
        check=lambda: None,
    )


def _problem(tokens: int, context: Context) -> Problem:
    return make_problem(FMOE, {"token": tokens, **SIZES}, context.defaults, context.device.gfx, "case")


def _rows_of_tiles(candidates: tuple[Candidate, ...]) -> list[object]:
    return [candidate.knobs["BLOCK_SIZE_M"] for candidate in candidates]


@pytest.mark.parametrize("order", [(1, 1024), (1024, 1)])
def test_experts_without_a_published_file_have_the_default_of_their_own_m(
    context: Context, order: tuple[int, int]
) -> None:
    group = engine_shape_group(TARGET, [_problem(tokens, context) for tokens in order], context)
    assert _rows_of_tiles(group.current(1)) == [16]
    assert _rows_of_tiles(group.current(1024)) == [64]  # not that of the group's first problem
    assert _rows_of_tiles(group.current_and_default(1024)) == [64]
    assert _rows_of_tiles(group.current(500)) == [64]  # an M between the problems
