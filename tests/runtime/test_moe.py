"""fused_moe: operands checked, tuned rows found, libraries without a row; end to end on the CPU."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moe_problems import routed_operands
from torch._subclasses.fake_tensor import FakeTensorMode

from gemmpipe.backends.aten import Torch
from gemmpipe.core.data import Candidate, Knobs
from gemmpipe.core.device import cpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.runtime import fused_moe, release_prepared, reload
from gemmpipe.runtime.binding import is_capturing
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.moe import _bind
from gemmpipe.runtime.select import RunnableCandidate
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.runtime.weight_cache import WEIGHT_CACHE
from gemmpipe.tables.store import render

FMOE = load_family("fmoe")


class Renamed(Torch):
    """Calls run another method than the one that is tabulated."""

    def called_knobs(self, spec: GemmSpec, knobs: Knobs) -> Knobs:
        return {"method": "expert_loop"} if knobs == {"method": "tabulated"} else knobs


FP8 = torch.float8_e4m3fn
Made = tuple[GemmSpec, Inputs, Weights]


def made(token: int, q_type: str = "none", **key: object) -> Made:
    sizes = {"token": token, "model_dim": 128, "inter_dim": 96, "expert": 6, "topk": 2, "q_type": q_type, **key}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = FMOE.spec(make_problem(FMOE, sizes, defaults, "sm_90", "test"))
    generator = torch.Generator().manual_seed(token)
    weights = FMOE.make_weights(spec, generator)
    return spec, FMOE.make_inputs(spec, generator), weights


def run(case: Made, **changes: object) -> torch.Tensor:
    spec, inputs, weights = case
    assert spec.experts is not None
    arguments: dict[str, object] = {"x": inputs.x, "w1": weights.w, "w2": weights.w2}
    arguments |= {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    arguments |= {"w1_scale": weights.w_scale, "w2_scale": weights.w2_scale}
    arguments |= {"activation": spec.experts.activation, "doweight_stage1": spec.experts.weight_first}
    with torch.no_grad():
        return fused_moe(**{**arguments, **changes})  # type: ignore[arg-type]


def wrong(case: Made, out: torch.Tensor) -> float:
    spec, inputs, weights = case
    return error_ratio(out, FMOE.reference(spec, inputs, weights), *FMOE.tolerance(spec))


@pytest.mark.parametrize(
    "key",
    [{}, {"act_type": "gelu", "use_g1u1": 0}, {"doweight_stage1": 1}, {"q_type": "per_token"}, {"q_type": "block"}],
)
def test_untuned_it_is_right_and_counted(key: dict[str, object]) -> None:
    case = made(5, **key)  # type: ignore[arg-type]
    assert wrong(case, run(case)) < 0.01
    assert torch.equal(run(case), run(case))
    (untuned,) = LOG.untuned.values()
    assert untuned.key.startswith("fmoe token=5 model_dim=128 inter_dim=96 expert=6 topk=2")
    assert untuned.calls >= 2


def test_operands_of_other_forms() -> None:
    _, inputs, weights = case = made(6, "per_token")
    assert weights.w_scale is not None
    assert weights.w2_scale is not None
    assert inputs.topk_ids is not None
    expected = run(case)
    assert torch.equal(run(case, topk_ids=inputs.topk_ids.long()), expected)
    assert torch.equal(run(case, w1_scale=weights.w_scale[..., 0], w2_scale=weights.w2_scale[..., 0]), expected)
    assert torch.equal(run(case, x=inputs.x.view(2, 3, -1)).view(6, -1), expected)
    padded = torch.zeros(6, 130, dtype=inputs.x.dtype)[:, :128].copy_(inputs.x)
    assert torch.equal(run(case, x=padded), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: {"w2": c[2].w2[:, :, :80]},
            r"w1 \[6, 192, 128\] and w2 \[6, 128, 80\] disagree, expected w2 \[6, 128, 96\] or w1 \[6, 160, 128\]$",
        ),
        (
            lambda c: {"w2": c[2].w2[:, :100]},
            r"^fused_moe: w2 \[6, 100, 96\], expected \[6, 128, 96\] for x \[5, 128\] and w1 \[6, 192, 128\]$",
        ),
        (lambda c: {"w2": c[2].w2.mT}, r"^fused_moe: w2 \[6, 96, 128\], expected \[6, 128, 96\] for x"),
        (
            lambda c: {"w1": c[2].w[:, :, :100]},
            r"^fused_moe: w1 \[6, 192, 100\], expected \[6, 192, 128\] for x \[5, 128\] and w2 \[6, 128, 96\]$",
        ),
        (lambda c: {"w1": c[2].w[:, :150, :100]}, r"^fused_moe: w1 \[6, 150, 100\], expected \[6, 192, 128\] for x"),
        (
            lambda c: {"x": c[1].x[:, :100]},
            r"^fused_moe: x \[5, 100\], expected \[\.\.\., 128\] for w1 \[6, 192, 128\] and w2 \[6, 128, 96\]$",
        ),
        (
            lambda c: {"w2": c[2].w2[:4]},
            r"w1 \[6, 192, 128\] and w2 \[4, 128, 96\] disagree, expected one number of experts$",
        ),
        (lambda c: {"w1": c[2].w[0]}, r"w1 \[192, 128\], expected 3 dimensions"),
        (lambda c: {"topk_ids": c[1].topk_ids[:3]}, r"topk_ids \[3, 2\], expected \[5, 2\]"),
        (lambda c: {"topk_ids": c[1].topk_weights}, "topk_ids is float32, expected int32"),
        (lambda c: {"topk_ids": c[1].topk_ids.bool()}, "topk_ids is bool, expected int32"),
        (lambda c: {"w1_scale": torch.ones(6, 192, 1)}, "w1_scale: given, expected none for bfloat16 weights$"),
        (
            lambda c: {"w1": c[2].w.to(FP8), "w2": c[2].w2.to(FP8)},
            "^fused_moe: w1_scale: none, expected float32 scales for float8_e4m3fn weights$",
        ),
        (lambda c: {"w1": c[2].w.float()}, "^fused_moe: w1 is float32, expected bfloat16 as x, or fp8 with scales$"),
        (lambda c: {"w2_scale": torch.ones(6, 128, 1)}, "w2_scale .*expected none for these types"),
        (
            lambda c: {"activation": "relu"},
            "^fused_moe: activation: 'relu', expected one of silu, gelu; did you mean 'gelu'.$",
        ),
        (
            lambda c: {"activation": "swiglu"},
            "^fused_moe: activation: 'swiglu' is not computed, expected silu or gelu$",
        ),
        (lambda c: {"x": c[1].x.float()}, "^fused_moe: x is float32, expected bfloat16 or float16$"),
        (
            lambda c: {"topk_ids": torch.zeros(5, 7, dtype=torch.int32), "topk_weights": torch.zeros(5, 7)},
            "^fused_moe: topk 7, expected at most the 6 experts$",
        ),
    ],
)
def test_errors_are_one_line(change: Callable[[Made], dict[str, object]], message: str) -> None:
    case = made(5)
    with pytest.raises(UserError, match=message) as caught:
        run(case, **change(case))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["x", "w1", "w2", "topk_weights", "topk_ids"])
@pytest.mark.parametrize(("value", "what"), [(None, "None"), ([[1.0]], "of type list")])
def test_an_argument_that_is_no_tensor_is_reported(word: str, value: object, what: str) -> None:
    with pytest.raises(UserError, match=f"^fused_moe: {word} is {what}, expected a tensor$"):
        run(made(5), **{word: value})


def test_gradients_are_refused_rather_than_lost() -> None:
    _, inputs, weights = made(5)
    routing = (inputs.topk_weights, inputs.topk_ids)
    with pytest.raises(UserError, match=r"no gradients.*no_grad"):
        fused_moe(inputs.x.requires_grad_(), weights.w, weights.w2, *routing)  # type: ignore[arg-type]


def test_without_tokens() -> None:
    _, inputs, weights = case = made(5)
    assert inputs.topk_ids is not None
    assert inputs.topk_weights is not None
    routing = {"topk_ids": inputs.topk_ids[:0], "topk_weights": inputs.topk_weights[:0]}
    assert run(case, x=inputs.x[:0], **routing).shape == (0, 128)
    assert not LOG.untuned
    assert weights.w2 is not None


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arguments: {"w2": None}, "fused_moe: w2 is None, expected a tensor"),
        (lambda arguments: {"w2": arguments["w2"][0]}, r"fused_moe: w2 \[128, 96\], expected 3 dimensions"),
        (lambda arguments: {"x": arguments["x"][:, :64]}, r"fused_moe: x \[0, 64\], expected \[\.\.\., 128\] for w1"),
        (lambda arguments: {"x": arguments["x"].float()}, "fused_moe: x is float32, expected bfloat16 or float16"),
        (
            lambda arguments: {"topk_ids": arguments["topk_ids"].new_empty(1, 2)},
            r"topk_ids \[1, 2\], expected \[0, 2\]",
        ),
        (lambda arguments: {"w1_scale": torch.ones(6, 192, 1)}, "w1_scale: given, expected none for bfloat16 weights"),
    ],
)
def test_without_tokens_the_rest_is_still_checked(
    change: Callable[[dict[str, torch.Tensor]], dict[str, object]], message: str, place: str
) -> None:
    case = made(5)
    arguments = {name: tensor.to(place) for name, tensor in _operands(case).items()}
    arguments |= {name: arguments[name][:0] for name in ("x", "topk_weights", "topk_ids")}
    assert run(case, **arguments).shape == (0, 128)
    assert run(case, **{**arguments, "x": arguments["x"].view(3, 0, 128)}).shape == (3, 0, 128)
    with pytest.raises(UserError, match=message):
        run(case, **{**arguments, **change(arguments)})


@pytest.mark.compile
def test_under_autocast_as_torchs_linear() -> None:
    _, inputs, weights = case = made(5)
    assert weights.w2 is not None
    wide = {"x": inputs.x.float(), "w1": weights.w.float(), "w2": weights.w2.float()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(case, **wide), run(case))
        compiled = torch.compile(lambda **arguments: run(case, **arguments), fullgraph=True, backend="eager")
        assert torch.equal(compiled(**wide), run(case))


def test_the_first_call_counts() -> None:
    run(made(5))
    (untuned,) = LOG.untuned.values()
    assert untuned.calls == 1


@pytest.fixture
def kept_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens were tuned: fp32 copies of both products' weights, kept."""
    device, defaults = cpu_device(), KernelDefaults(dtype=None, out_dtype=None, bias=None)
    sizes = {"token": 16, "model_dim": 128, "inter_dim": 96, "expert": 6, "topk": 2}
    key = dict(make_problem(FMOE, sizes, defaults, device.gfx, "test").key)
    row = {"gfx": device.gfx, "cu_num": device.cu_num, **key, "libtype": "torch", "us": 1.0}
    path = tmp_path / "tuned_fmoe.csv"
    path.write_text(render([{**row, "config": json.dumps({"method": "expert_loop_float32_copy"})}], FMOE, ()))
    monkeypatch.setenv("GEMMPIPE_CONFIG_FMOE", str(path))
    reload()


@pytest.mark.usefixtures("kept_copies")
def test_what_was_made_of_the_weights_is_of_both() -> None:
    spec, inputs, weights = case = made(16)
    assert weights.w2 is not None
    assert wrong(case, run(case)) < 0.01
    other = (spec, inputs, replace(weights, w2=weights.w2.flip(0).contiguous()))
    assert wrong(other, run(other)) < 0.01, "another second weight with the same first one"
    assert wrong(case, run(case)) < 0.01
    weights.w2.mul_(2)
    assert wrong(case, run(case)) < 0.01, "changed in place"
    held = len(WEIGHT_CACHE.entries)
    assert release_prepared(weights.w2) == 1
    assert len(WEIGHT_CACHE.entries) == held - 1


@pytest.mark.usefixtures("kept_copies")
def test_in_a_graph_nothing_is_prepared_and_nothing_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gemmpipe.runtime.binding.is_capturing", lambda device: True)
    held, case = len(WEIGHT_CACHE.entries), made(16)
    assert wrong(case, run(case)) < 0.01
    assert (len(WEIGHT_CACHE.entries), len(dispatch_of("fmoe").calls)) == (held, 0)
    monkeypatch.setattr("gemmpipe.runtime.binding.is_capturing", is_capturing)
    assert wrong(case, run(case)) < 0.01
    assert (len(WEIGHT_CACHE.entries), len(dispatch_of("fmoe").calls)) == (held + 1, 1)
    monkeypatch.setattr("gemmpipe.runtime.binding.is_capturing", lambda device: True)
    later = made(16, use_g1u1=1)
    assert wrong(later, run(later)) < 0.01, "the key is known, these weights are not"
    assert [record.getMessage().count("captured in a graph before") for record in caplog.records] == [1]


def test_shape_propagation_gets_shapes() -> None:
    case = made(5)
    _spec, _inputs, _weights = case
    expected = run(case).shape
    with FakeTensorMode() as mode:
        fake = {k: mode.from_tensor(v) for k, v in _operands(case).items()}
        assert run(case, **fake).shape == expected
    assert run(case, **{k: v.to("meta") for k, v in _operands(case).items()}).shape == expected


def _operands(case: Made) -> dict[str, torch.Tensor]:
    _, inputs, weights = case
    named = {"x": inputs.x, "w1": weights.w, "w2": weights.w2}
    named |= {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


@pytest.mark.usefixtures("kept_copies")
def test_a_tuned_row_is_used_for_fewer_tokens_too() -> None:
    for token, step in ((16, "exact"), (5, "padded"), (300, "fallback")):
        case = made(token)
        assert wrong(case, run(case)) < 0.01
        (answer,) = (found for key, found in LOG.steps.items() if f"token={token} " in key)
        assert answer == step
    assert len(dispatch_of("fmoe").calls) == 3


@pytest.mark.compile
def test_a_compiler_sees_an_operator() -> None:
    spec, inputs, weights = case = made(5)
    with torch.no_grad():
        compiled = torch.compile(fused_moe, fullgraph=True, backend="eager")
        out = compiled(inputs.x, weights.w, weights.w2, inputs.topk_weights, inputs.topk_ids)
    assert torch.equal(out, run(case))
    assert out.shape == (spec.m, spec.n)


@pytest.mark.slow
@pytest.mark.e2e
def test_tune_then_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real stages on the CPU, then the run time uses their table."""
    items = "shapes.items=[{token: [2, 16], model_dim: 128, inter_dim: 96, expert: 6, topk: 2}]"
    arguments = ("kernel=fmoe", "device=cpu", "shapes=list", items, "format=[csv,vllm]", f"output={tmp_path}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", "gemmpipe", *arguments, "stages.bench.timer.iters=3"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"token +model_dim +inter_dim +expert +topk +time", done.stdout)
    (table,) = re.findall(r"^export GEMMPIPE_CONFIG_FMOE=(.+)$", done.stdout, re.MULTILINE)
    monkeypatch.setenv("GEMMPIPE_CONFIG_FMOE", table)
    reload()
    for token in (2, 16):
        case = made(token)
        assert wrong(case, run(case)) < 0.01
    assert set(LOG.steps.values()) == {"exact"}
    assert replace(made(2)[0], m=16) == made(16)[0]


def test_calls_run_the_knobs_that_the_implementation_gives_them() -> None:
    case = made(5)
    runnable = RunnableCandidate(implementation=Renamed(), candidate=Candidate.of("torch", {"method": "tabulated"}))
    assert wrong(case, _bind(runnable, case[0], cpu_device())(routed_operands(*case))) < 0.01
