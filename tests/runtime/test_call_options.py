"""Calls with `y`, `config`, `dtype` and `skip_reduce`: the kernel that runs, its output, and errors."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import triton

from gemmpipe.core.errors import UserError
from gemmpipe.family import shipped_families
from gemmpipe.runtime import fused_moe, gemm_a8w8_blockscale, gemm_a16w16, gemm_a16w16_atomic, reload
from gemmpipe.runtime.call_options import _share_memory
from gemmpipe.runtime.dispatch import WITH_OPTIONS
from gemmpipe.runtime.fixed_config import DoesNotFit

MM = {"backend": "torch", "method": "mm"}
TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 2}
ALWAYS = ("a16w16", "a8w8_blockscale", "batched_a8w8", "fmoe")
"""A family of each kind: plain, scaled by blocks, batched, experts."""
Activations = Callable[..., torch.Tensor]
WriteTable = Callable[..., Path]
Interpreted = tuple[Path, list[dict[str, Any]]]
SCRIPT = Path(__file__).parent / "_interpreted_script.py"


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    """The folder and the results of the script."""
    folder = tmp_path_factory.mktemp("script") / "configs"
    return folder, _interpret(folder, ALWAYS)


def _interpret(folder: Path, families: Sequence[str]) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), str(folder), *families]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


old_numpy = pytest.mark.skipif(
    triton.__version__.startswith("3.6") and int(numpy.__version__.split(".")[1]) >= 4,
    reason="triton 3.6 interprets with numpy before 2.4 only",
)


@pytest.mark.slow
@old_numpy
def test_a_familys_own_kernel_runs_a_configuration_into_a_given_output(interpreted: Interpreted) -> None:
    _, found_by_family = interpreted
    for name, found in zip(ALWAYS, found_by_family[:-1], strict=True):
        assert found["same"] and found["alone"] and found["error"] < 0.01, name


@old_numpy
@pytest.mark.slow
def test_every_other_familys_own_kernel_runs_a_configuration_into_a_given_output(tmp_path: Path) -> None:
    others = [name for name in shipped_families() if name not in ALWAYS]
    for name, found in zip(others, _interpret(tmp_path / "configs", others)[:-1], strict=True):
        assert found["same"] and found["alone"] and found["error"] < 0.01, name


@old_numpy
def test_a_tuning_script_drives_our_kernels_as_it_is_written(interpreted: Interpreted) -> None:
    folder, (*_, found) = interpreted
    assert found["best"]
    assert found["unfit"] == float("inf")
    assert list(found["found"]) == ["small", "wide"]
    assert found["found"]["wide"]["BLOCK_SIZE_M"] == 32  # required by that bucket; small has the faster one
    written = json.loads((folder / "sm_90-GEMM-A8W8_BLOCKSCALE-N=32-K=128.json").read_text())
    assert written == found["found"]


@old_numpy
def test_a_bias_is_not_lost_in_kernels_that_have_none(interpreted: Interpreted) -> None:
    _, (*_, found) = interpreted
    assert len(found["biased"]) == 3
    assert max(found["biased"]) < 0.01


def test_y_is_written_by_the_tuned_kernel(row: Any, table: WriteTable, x: Activations, w: torch.Tensor) -> None:
    table(row(4, "torch", {"method": "float32_convert"}))
    with torch.no_grad():
        expected = gemm_a16w16(x(4), w)
        y = torch.full((4, 64), float("nan"), dtype=torch.bfloat16)
        assert gemm_a16w16(x(4), w, y=y) is y and torch.equal(y, expected)
        (dispatch,) = WITH_OPTIONS.values()
        assert len(dispatch.calls) == 1 and not dispatch._missed
        strided = torch.empty(4, 128, dtype=torch.bfloat16)[:, ::2]
        assert gemm_a16w16(x(4), w, y=strided) is strided and torch.equal(strided, expected)
        table(row(4, "torch", {"method": "mm"}))
        assert gemm_a16w16(x(4), w, y=y) is y
        (dispatch,) = WITH_OPTIONS.values()  # looked up again after a reload
        assert torch.equal(y, gemm_a16w16(x(4), w))


def test_padded_rows_and_a_bias_are_written_into_y_too(
    row: Any, table: WriteTable, x: Activations, w: torch.Tensor
) -> None:
    table(row(16, "torch", {"method": "mm"}, bias=True))
    bias, y = torch.randn(64).bfloat16(), torch.empty(2, 7, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert gemm_a16w16(x(2, 7), w, bias, y=y) is y
        torch.testing.assert_close(y, torch.nn.functional.linear(x(2, 7), w, bias))


def test_a_given_configuration_overrides_the_tables(
    row: Any, table: WriteTable, x: Activations, w: torch.Tensor
) -> None:
    table(row(4, "torch", {"method": "float32_convert"}))
    with torch.no_grad():
        assert torch.equal(gemm_a16w16(x(4), w, config=MM), x(4) @ w.T)
        given, *_ = [found for key, found in WITH_OPTIONS.items() if key[0] == "a16w16"]
        (call,) = given.calls.values()
        gemm_a16w16(x(4), w, config=dict(MM))
        assert list(given.calls.values()) == [call]  # bound once
    reload()
    assert not WITH_OPTIONS


def test_configurations_are_forgotten_in_the_end(
    x: Activations, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmpipe.runtime.fixed_config._MAX_DISPATCHES", 2)
    with torch.no_grad():
        for method in ("mm", "float32_convert", "float32_copy", "mm"):
            gemm_a16w16(x(4), w, config={**MM, "method": method})
    assert len(WITH_OPTIONS) == 2


def test_the_arguments_of_scripts(x: Activations, w: torch.Tensor) -> None:
    y = torch.empty(4, 64)
    with torch.no_grad():
        assert gemm_a16w16_atomic(x(4), w, dtype=torch.float32).dtype == torch.float32
        assert gemm_a16w16_atomic(x(4), w, torch.float32, y) is y
        assert gemm_a16w16(x(4), w, dtype=torch.bfloat16, skip_reduce=False).dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert gemm_a16w16(x(4).float(), w, config=MM).dtype == torch.bfloat16


def test_a_compiled_call_takes_both(x: Activations, w: torch.Tensor) -> None:
    def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gemm_a16w16(x, w, y=y, config=MM)

    y = torch.zeros(4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend="eager")(x(4), y)
        assert torch.equal(y, gemm_a16w16(x(4), w, config=MM))


def test_experts_take_both() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w1, w2 = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, 32), (4, 32, 32), (4, 32, 16)))
    weights, ids = torch.rand(3, 2, generator=generator), torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32)
    expected = fused_moe(x, w1, w2, weights, ids)
    y = torch.empty_like(x)
    assert fused_moe(x, w1, w2, weights, ids, y=y) is y and torch.equal(y, expected)
    pool = torch.zeros(6, 32, dtype=torch.bfloat16)
    shared, beside = pool[:3].copy_(x), pool[3:]
    assert fused_moe(shared, w1, w2, weights, ids, y=beside) is beside and torch.equal(beside, expected)
    assert fused_moe(shared, w1, w2, weights, ids, y=shared) is shared and torch.equal(shared, expected)
    with pytest.raises(DoesNotFit, match=r"^fused_moe: config: no GPU"):
        fused_moe(x, w1, w2, weights, ids, config=TILES)
    with pytest.raises(UserError, match=r"^fused_moe: y is float32, expected bfloat16 as x"):
        fused_moe(x, w1, w2, weights, ids, y=y.float())


def test_memory_is_shared_where_elements_are() -> None:
    pool = torch.zeros(4, 8)
    assert _share_memory(pool, pool[1:3]) and _share_memory(pool[1:3], pool[2:])
    assert not _share_memory(pool[:2], pool[2:]) and not _share_memory(pool, torch.zeros(4, 8))
    assert _share_memory(pool[:, :4], pool[:, 4:])  # strides: not looked at closer
    assert not _share_memory(pool.to("meta"), pool.to("meta"))
    assert not _share_memory(pool, pool[:0])
    rows = numpy.zeros((4, 8), numpy.float32)
    assert _share_memory(torch.from_numpy(rows[:3]), torch.from_numpy(rows[1:]))  # two storages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"BLOCK_SIZE_M": 16}}, "config: triton needs BLOCK_SIZE_N, which is not given"),
        ({"config": TILES}, "config: no GPU: Triton compiles for GPUs"),
        ({"config": {**TILES, "BLOCK_M": 1}}, "config: triton has no knob 'BLOCK_M'; did you mean 'BLOCK_SIZE_M'?"),
        ({"config": {**TILES, "num_warps": "4"}}, "config: num_warps: '4', expected an integer"),
        ({"config": {**TILES, "num_warps": torch.ones(64)}}, "config: num_warps: float32 [64], expected a number"),
        ({"config": {"backend": "tritn"}}, "config: backend: 'tritn', expected one of triton, gluon, streamed"),
        (
            {"config": {**TILES, "kernel_type": "skiny"}},
            "config: kernel_type: 'skiny', expected one of plain, warp_",
        ),
        ({"config": torch.ones(64)}, "config: float32 [64], expected knobs such as"),
        ({"config": [("a", 1)]}, "config: [('a', 1)], expected knobs such as"),
        ({"y": torch.empty(4, 63)}, "y [4, 63], expected [4, 64]"),
        ({"y": 3}, "y is 3, expected a tensor or None"),
        ({"y": torch.empty(4, 64), "dtype": torch.bfloat16}, "y is float32, expected bfloat16 as dtype"),
        ({"y": torch.empty(4, 64, requires_grad=True)}, "y records gradients"),
        ({"y": torch.empty(4, 64, device="meta")}, "y is on meta, expected cpu as x"),
        ({"skip_reduce": True}, "skip_reduce: the parts of a split are added up here, expected False"),
        ({"dtype": torch.ones(64)}, "dtype is float32 [64], expected a torch.dtype"),
        ({"out_dtype": torch.ones(64)}, "out_dtype is float32 [64], expected a torch.dtype"),
    ],
)
def test_an_error_is_one_line_without_a_tensors_values(
    arguments: dict[str, Any], message: str, x: Activations, w: torch.Tensor
) -> None:
    with torch.no_grad(), pytest.raises(UserError) as caught:
        gemm_a16w16(x(4), w, **arguments)
    assert str(caught.value).startswith(f"gemm_a16w16: {message}")
    assert "\n" not in str(caught.value)


def test_a_configuration_is_checked_also_without_rows(x: Activations, w: torch.Tensor) -> None:
    assert gemm_a16w16(x(0), w, config=MM).shape == (0, 64)
    assert gemm_a16w16(x(0), w, config=TILES).shape == (0, 64), "a config that does not fit has nothing to run"
    with pytest.raises(UserError, match=r"^gemm_a16w16: config: backend: 'tritn', expected one of"):
        gemm_a16w16(x(0), w, config={"backend": "tritn"})
    operands = torch.ones(0, 32), torch.ones(4, 32, 32), torch.ones(4, 32, 16), torch.ones(0, 2)
    ids = torch.zeros(0, 2, dtype=torch.int32)
    mixture = [each.bfloat16() for each in operands[:3]]
    with pytest.raises(UserError, match=r"^fused_moe: config: triton has no knob 'BLOCK_M'"):
        fused_moe(*mixture, operands[3], ids, config={**TILES, "BLOCK_M": 1})


def test_a_tensor_in_place_of_an_option_is_shown_as_shape_and_type(x: Activations, w: torch.Tensor) -> None:
    with pytest.raises(UserError, match=r"^gemm_a16w16_atomic: out_dtype is float32 \[64\], expected a torch.dtype$"):
        gemm_a16w16_atomic(x(4), w, torch.randn(64))
    for name in ("bpreshuffle", "skip_reduce"):
        with pytest.raises(UserError, match=rf"^gemm_a16w16: {name} is float32 \[2\], expected True or False$"):
            gemm_a16w16(x(4), w, **{name: torch.ones(2)})
    ids = torch.zeros(3, 2, dtype=torch.int32)
    experts = (torch.ones(3, 32), torch.ones(4, 32, 32), torch.ones(4, 32, 16), torch.ones(3, 2), ids)
    with pytest.raises(UserError, match=r"^fused_moe: activation: float32 \[2, 2\], expected a text$"):
        fused_moe(*experts, activation=torch.ones(2, 2))
    with pytest.raises(UserError, match=r"^fused_moe: doweight_stage1 is float32 \[2\], expected True or False$"):
        fused_moe(*experts, doweight_stage1=torch.ones(2))
    with pytest.raises(UserError, match=r"^gemm_a8w8_blockscale: x_scale is of type float, expected a tensor or None$"):
        gemm_a8w8_blockscale(x(4), w, 1.0, None, config=TILES)


def test_gradients_are_refused(x: Activations, w: torch.Tensor) -> None:
    with pytest.raises(UserError, match=r"^gemm_a16w16: calls with y or config record no gradients"):
        gemm_a16w16(x(4).requires_grad_(), w, config=MM)
