"""An engine's experts: into its own output, by rows alone, with constant work per call."""

import gc
from typing import Any

import pytest
import torch
from executed_lines import steps
from moe_problems import routed_operands

from gemmpipe.backends.engine_function import VllmFunction
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.plugins import engine_dispatch
from gemmpipe.plugins.engine_experts import engine_experts
from gemmpipe.runtime import dispatch_report
from gemmpipe.runtime.moe import RoutedOperands

SIZES = {"model_dim": 128, "inter_dim": 96, "expert": 6, "topk": 2}
FMOE = load_family("fmoe")


def made(token: int) -> tuple[Any, RoutedOperands]:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = FMOE.spec(make_problem(FMOE, {**SIZES, "token": token}, defaults, "sm_90", "test"))
    generator = torch.Generator().manual_seed(token)
    weights, inputs = FMOE.make_weights(spec, generator), FMOE.make_inputs(spec, generator)
    return (spec, inputs, weights), routed_operands(spec, inputs, weights)


def test_a_row_writes_the_engines_output(rows) -> None:
    rows("fmoe", "torch", {"method": "expert_loop_float32"}, {**SIZES, "token": 5})
    case, given = made(5)
    out = torch.full((5, 128), float("nan"), dtype=torch.bfloat16)
    for _ in range(2):
        assert engine_experts().run(given, out)
        assert error_ratio(out, FMOE.reference(*case), *FMOE.tolerance(case[0])) < 0.01
        out.fill_(float("nan"))
    assert list(dispatch_report().values()) == ["exact"]


def test_without_a_row_the_output_is_unchanged(rows) -> None:
    rows("fmoe", "torch", {"method": "expert_loop_float32_copy"}, {**SIZES, "token": 5})
    for token in (5, 40):  # a row that keeps a copy of the weights, and none
        _, given = made(token)
        out = torch.full((token, 128), 3.0, dtype=torch.bfloat16)
        for _ in range(2):
            assert not engine_experts().run(given, out)
            assert bool((out == 3).all())
    assert set(dispatch_report().values()) == {"engine"}


def test_a_row_of_the_engines_own_function_leaves_the_experts_to_it(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmFunction, "unavailable", lambda self, device: None)
    path = rows("fmoe", "vllm_function", {}, {**SIZES, "token": 5})
    assert "vllm_function" in path.read_text()
    _, given = made(5)
    out = torch.full((5, 128), 3.0, dtype=torch.bfloat16)
    with monkeypatch.context() as bound:
        bound.setattr(VllmFunction, "bind", lambda *_: pytest.fail("the engine calls its function itself"))
        assert not engine_experts().run(given, out)
    assert bool((out == 3).all())
    assert set(dispatch_report().values()) == {"engine"}


def test_operands_of_no_mixture_and_outputs_with_gaps_are_the_engines(rows) -> None:
    rows("fmoe", "torch", {"method": "expert_loop_float32"}, {**SIZES, "token": 5})
    _, given = made(5)
    out = torch.empty(5, 128, dtype=torch.bfloat16)
    assert not engine_experts().run(given, torch.empty(5, 256, dtype=torch.bfloat16)[:, :128])
    wrong = RoutedOperands(**{**vars(given), "activation": "swiglu"})
    assert not engine_experts().run(wrong, out)
    assert wrong.key in engine_experts().declined


def test_in_a_graph_capture_only_known_keys_are_tuned(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    rows("fmoe", "torch", {"method": "expert_loop"}, {**SIZES, "token": 5})
    _, given = made(5)
    out = torch.empty(5, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(engine_dispatch, "is_capturing", lambda device: True)
    assert not engine_experts().run(given, out)
    monkeypatch.undo()
    assert engine_experts().run(given, out)


@pytest.mark.parametrize(("token", "calls"), [(5, 300), (40, 10_000)])
def test_the_work_of_a_call_stays_constant(rows, token: int, calls: int) -> None:
    rows("fmoe", "torch", {"method": "expert_loop"}, {**SIZES, "token": 5})
    _, given = made(token)
    out, experts = torch.empty(token, 128, dtype=torch.bfloat16), engine_experts()
    for _ in range(5):
        experts.run(given, out)
    before, held = steps(lambda: experts.run(given, out)), (len(experts.calls), len(experts.declined))
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(calls):
        experts.run(given, out)
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    assert (len(experts.calls), len(experts.declined)) == held
    assert steps(lambda: experts.run(given, out)) == before
