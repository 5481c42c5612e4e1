"""Triton's own tuner on gemmpipe's kernels: its choice, its time limit, and launches by Triton's JIT."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import triton

from gemmpipe.backends.autotune import Autotune
from gemmpipe.core.data import Candidate
from gemmpipe.family import load_family
from gemmpipe.launch import triton_autotune
from gemmpipe.launch.triton_autotune import run_autotune

SPACE = {"block_m": [16, 32], "splits": [1, 2], "warps": [4, 8]}
OLD = triton.__version__.startswith("3.6") and int(numpy.__version__.split(".")[1]) >= 4


def _run(mode: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("_autotune.py")
    done = subprocess.run(
        [sys.executable, str(script), mode], input=json.dumps(cases), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="triton 3.6 interprets with numpy before 2.4 only")
def test_the_choice_of_a_worker_goes_to_the_finals() -> None:
    cases = [
        {"family": "a8w8_blockscale", "mnk": [20, 128, 256], **SPACE},
        {"family": "a16w16_atomic", "mnk": [20, 48, 272], "dtype": "float16", **SPACE},
        {"family": "a16w16", "mnk": [20, 48, 272], "dtype": "float16", "limit_s": 0, **SPACE},
    ]
    for case, found in zip(cases, _run("interpreted", cases), strict=True):
        assert (found["status"], found["among"]) == ("ok", True)
        assert found["time_us"] > 0
        tried, of, seconds = found["tuning"]
        assert (tried, of) == (1 if case.get("limit_s") == 0 else 8, 8)
        assert seconds > 0
        assert found["finals"] == [["autotune", "ok", 0.0], ["triton", "ok", 0.0]]
        assert {"autotune", "checks", "finals"} <= set(found["purposes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gfx", "products"),
    [
        ("sm_90", [("a8w8_blockscale", 1)]),
        pytest.param("sm_90", [("a16w16", 1), ("a8w8_bpreshuffle", 16)], marks=pytest.mark.slow),
        pytest.param("gfx942", [("a8w8_blockscale", 16)], marks=pytest.mark.slow),
    ],
)
def test_tritons_jit_compiles_our_kernels_with_its_specialisation(gfx: str, products: list[tuple[str, int]]) -> None:
    """Triton's JIT makes constants of one row and one group or split; gemmpipe's builds do not."""
    narrow = {"block_m": [16], "splits": [1, 4], "warps": [4]}
    cases = [{"family": family, "gfx": gfx, "mnk": [m, 256, 1024], **narrow} for family, m in products]
    assert [found["compiled"] for found in _run("compiled", cases)] == [2] * len(cases)


def test_a_family_with_several_launches_is_unsupported(h200: Any) -> None:
    [tuned] = Autotune(limit_s=None).implementations(load_family("fmoe"))
    assert "has several" in str(tuned.unsupported_reason(None, {}, h200))  # type: ignore[arg-type]
    [tuned] = Autotune(limit_s=None).implementations(load_family("a16w16"))
    assert tuned.unavailable(h200) is None
    assert tuple(tuned.configs(None, h200, None)) == ()  # type: ignore[arg-type]


def test_no_configuration_starts_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(triton_autotune.time, "monotonic", lambda: now[0])
    begun: list[float] = []

    def bench(call: Any, quantiles: Any) -> list[float]:
        now[0] += 4.0
        return [call()] * 3

    limited = triton_autotune._TimeLimitedBench(bench, 10.0, before_each=lambda: begun.append(now[0]))
    times = [limited(lambda i=i: float(i), (0.5, 0.2, 0.8))[0] for i in range(6)]
    assert times == [0.0, 1.0, 2.0, *[float("inf")] * 3], "a configuration that began before the limit is finished"
    assert (limited.tried, begun) == (3, [0.0, 4.0, 8.0])


def test_no_timed_configuration_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. if every configuration needs more shared memory than the device has."""
    family = load_family("a16w16")
    [tuned] = Autotune(limit_s=None).implementations(family)
    launches, out = _launches(tuned.kernel, family)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, **kwargs: None)
    with pytest.raises(RuntimeError, match="none of 2 configurations could be timed"):
        run_autotune(launches, out, None, lambda: None, bench=lambda call, quantiles: [float("inf")] * 3)
    best = run_autotune(launches, out, None, lambda: None, bench=lambda call, quantiles: [call() or 0.25] * 3)
    assert (best.index, best.time_us, best.tuning.of) == (0, 250.0, 2)
    alone = run_autotune(launches[:1], out, None, lambda: None, bench=lambda call, quantiles: [1.0] * 3)
    assert (alone.index, alone.time_us, alone.tuning.tried) == (0, None, 0), "Triton does not time a single one"


def _launches(kernel: Any, family: Any) -> tuple[list[Any], torch.Tensor]:
    from gemmpipe.core.device import arch_device
    from gemmpipe.family import KernelDefaults
    from gemmpipe.family.problem import make_problem

    device, defaults = arch_device("sm_90"), KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": 16, "N": 64, "K": 128}, defaults, "sm_90", "case"))
    generator = torch.Generator().manual_seed(7)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    out = torch.empty(spec.out_shape, dtype=torch.bfloat16)
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_stages": 2}
    knobs = [kernel.normalise(spec, {**sizes, "num_warps": warps}, device) for warps in (4, 8)]
    assert len({Candidate.of("triton", k) for k in knobs}) == 2
    return [kernel.launch(spec, k, device, inputs, kernel.prepare(spec, weights, k), out) for k in knobs], out
