"""The engine's current configuration where it publishes no file: its default for that M."""

from pathlib import Path

import pytest
from moe_problems import FMOE
from stage_contexts import stage_context

from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.family import KernelDefaults
from gemmpipe.family.problem import make_problem
from gemmpipe.formats.engine_json import Sglang
from gemmpipe.kernels.fmoe._engine import ENGINES
from gemmpipe.stages import Context, EngineTarget
from gemmpipe.stages.engine.files import engine_shape_group

SIZES = {"model_dim": 2048, "inter_dim": 768, "expert": 128, "topk": 8}
TARGET = EngineTarget(name="sglang", format=Sglang(device_name="NVIDIA_H200"), implementation=ENGINES["sglang"])


@pytest.fixture
def context(tmp_path: Path, no_words: KernelDefaults, h200: Device) -> Context:
    return stage_context(tmp_path, FMOE, no_words, h200)


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
