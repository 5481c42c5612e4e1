"""The Python API with real callables on the CPU: choices, survived failures, files, and scripts' assumptions."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmpipe
import gemmpipe.tune as api
from gemmpipe.core.device import cpu_device, gpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.tune import (
    benchmark_config,
    get_search_space,
    save_configs_to_json,
    tune_and_save_configs,
    tune_kernel,
)
from gemmpipe.tune.family_kernel import family_of_tag
from gemmpipe.tune.kernel import NoneValid
from gemmpipe.tune.measuring import Mismatch, measure, nan_filled_memory

Config = dict[str, Any]

torch.set_num_threads(1)  # tests run in parallel: threads that wait for a core would lengthen launches


def _product(m: int = 16, n: int = 48, k: int = 256) -> Callable[[Config], tuple[Callable[[], torch.Tensor], object]]:
    """A factory as in scripts: `BLOCK_K` is the number of parts of the sum over K, `kind` the failure."""
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)

    def make(config: Config) -> tuple[Callable[[], torch.Tensor], object]:
        out = torch.empty(m, n)
        if config.get("kind") == "cannot be made":
            raise KeyError("num_warps")

        def run() -> torch.Tensor:
            if config.get("kind") == "raises":
                raise RuntimeError("out of\nshared memory")
            if config.get("kind") == "untouched":
                return out
            out.zero_()
            for start in range(0, k, config["BLOCK_K"]):
                out.addmm_(x[:, start : start + config["BLOCK_K"]], w[:, start : start + config["BLOCK_K"]].T)
            if config.get("kind") == "wrong":
                out[-1, -1] += 100
            return out

        return run, x @ w.T

    return make


def test_the_facade_holds_the_names_of_the_scripts() -> None:
    names = {"tune_kernel", "benchmark_config", "get_search_space", "save_configs_to_json", "tune_and_save_configs"}
    assert set(api.__all__) == names


def test_the_fastest_right_configuration_wins(caplog: pytest.LogCaptureFixture) -> None:
    space = [
        {"BLOCK_K": 256, "kind": "wrong"},
        {"BLOCK_K": 256, "kind": "raises"},
        {"BLOCK_K": 256, "kind": "cannot be made"},
        {"BLOCK_K": 256, "kind": "untouched"},
        {"BLOCK_K": 1},
        {"BLOCK_K": 256},
    ]
    with caplog.at_level(logging.WARNING, logger="gemmpipe.tune"):
        assert tune_kernel(space, _product()) == {"BLOCK_K": 256}
    (record,) = caplog.records
    assert record.getMessage().startswith("4 of 6 configurations skipped; the first: {'BLOCK_K': 256, 'kind': 'wrong'}")


def test_the_callback_edits_what_is_used_and_returned_but_not_the_space() -> None:
    space = [{"BLOCK_K": 128, "num_warps": 4}, {"BLOCK_K": 256, "num_warps": 4}]
    used: list[Config] = []

    def make(config: Config) -> tuple[Callable[[], torch.Tensor], object]:
        used.append(dict(config))
        return _product()(config)

    def callback(config: Config) -> None:
        config.pop("num_warps")
        config["waves_per_eu"] = 2

    best = tune_kernel(space, make, callback, num_iters=3)
    assert best in used == [{"BLOCK_K": 128, "waves_per_eu": 2}, {"BLOCK_K": 256, "waves_per_eu": 2}]
    assert all("num_warps" in config for config in space)


def test_no_valid_configuration_is_one_line_with_the_first_reason() -> None:
    with pytest.raises(NoneValid, match=r"none of 1 configurations is valid; the first: .*RuntimeError: out of shared"):
        tune_kernel([{"BLOCK_K": 256, "kind": "raises"}], _product())
    with pytest.raises(NoneValid, match="none of 0 configurations is valid: the search space is empty"):
        tune_kernel([], _product())


def test_benchmark_config_times_what_is_right() -> None:
    run, ground_truth = _product()({"BLOCK_K": 256})
    slow, _ = _product()({"BLOCK_K": 1})
    assert 0 < benchmark_config(run, ground_truth) < benchmark_config(slow, ground_truth) < math.inf


def test_benchmark_config_survives_a_mismatch_and_lack_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    run, ground_truth = _product()({"BLOCK_K": 256, "kind": "wrong"})
    assert benchmark_config(run, ground_truth) == math.inf
    assert "not timed: Mismatch: Tensor-likes are not close" in caplog.text

    def greedy() -> torch.Tensor:
        raise torch.OutOfMemoryError("800 GiB")

    assert benchmark_config(greedy, ground_truth) == math.inf
    with pytest.raises(RuntimeError, match="out of"):
        benchmark_config(_product()({"BLOCK_K": 256, "kind": "raises"})[0], ground_truth)


@pytest.mark.parametrize("kind", ["device", "ptxas", "the script's own check"])
def test_refusals_are_survived(kind: str) -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    def greedy() -> torch.Tensor:
        if kind == "device":
            raise errors.OutOfResources(300_000, 232_448, "shared memory")
        if kind == "ptxas":
            raise errors.PTXASError("uses too much shared data")
        raise AssertionError("BLOCK_SIZE_K must be 128")

    assert benchmark_config(greedy, torch.zeros(1)) == math.inf


def test_no_launch_is_the_callers_error() -> None:
    with pytest.raises(UserError, match=r"^num_iters: 0, expected a whole number from 1$"):
        benchmark_config(lambda: torch.zeros(1), torch.zeros(1), num_iters=0)
    with pytest.raises(UserError, match=r"^num_iters: 0"):
        tune_kernel([{}], _product(), num_iters=0)


def test_every_launch_is_compared() -> None:
    calls: list[int] = []

    def run() -> torch.Tensor:
        calls.append(1)
        return torch.full((4,), float(len(calls) == 8))

    with pytest.raises(Mismatch, match="wrong in one launch"):
        measure(run, torch.zeros(4), num_iters=10, atol=1e-2, rtol=1e-2)
    assert len(calls) == 15  # 5 to warm up, 10 timed


@pytest.mark.parametrize(
    ("output", "truth", "message"),
    [
        (torch.zeros(2), torch.zeros(3), "shape"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), "dtype"),
        ((torch.zeros(2), torch.zeros(2)), torch.zeros(2), "returned 2 tensors, expected 1"),
        (None, torch.zeros(2), "returned None, expected a tensor"),
        (torch.zeros(2), None, "the ground truth is None, expected a tensor"),
        (torch.zeros(2), torch.zeros(2).numpy(), "the ground truth is of type ndarray, expected a tensor"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), "not close"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "not equal|not close"),
    ],
)
def test_what_is_no_match(output: object, truth: object, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        measure(lambda: output, truth, num_iters=1, atol=1e-2, rtol=1e-2)


def test_several_outputs_and_small_formats_are_compared() -> None:
    fp8 = torch.randn(8, 8).to(torch.float8_e4m3fn)
    outputs = {"ids": torch.arange(8), "q": fp8, "rest": [torch.ones(2), None]}
    assert len(measure(lambda: outputs, outputs, num_iters=2, atol=0, rtol=0)) == 2
    other = outputs | {"q": (fp8.float() + 1).to(torch.float8_e4m3fn)}
    with pytest.raises(Mismatch):
        measure(lambda: outputs, other, num_iters=2, atol=1e-2, rtol=1e-2)


def test_memory_is_filled_only_inside() -> None:
    with nan_filled_memory():
        assert bool(torch.empty(3).isnan().all())
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_search_spaces() -> None:
    full, small = get_search_space(), get_search_space(small=True)
    assert len(full) == 28_125
    assert len({json.dumps(config) for config in full}) == 28_125
    assert 1 < len(small) < 50
    for name, values in {
        "BLOCK_SIZE_M": {16, 32, 64, 128, 256},
        "BLOCK_SIZE_N": {16, 32, 64, 128, 256},
        "BLOCK_SIZE_K": {32, 64, 128},
        "GROUP_SIZE_M": {1, 8, 16, 32, 64},
        "num_warps": {2, 4, 8},
        "num_stages": {1, 2, 3, 4, 5},
        "waves_per_eu": {1, 2, 4, 6, 8},
        "matrix_instr_nonkdim": {16},
    }.items():
        assert {config[name] for config in full} == values
        assert {config[name] for config in small} <= values


def _by_size(m: int, n: int, k: int, dtype: object, search_space: object) -> Config:
    assert (n, k, dtype, search_space) == (48, 64, torch.bfloat16, [])
    if m == 7:
        raise NoneValid("none of 0 configurations is valid")
    return {"BLOCK_SIZE_M": m}


def _save(tmp_path: Path, sizes: list[int], **more: Any) -> dict[str, Config]:
    return tune_and_save_configs(sizes, 48, 64, torch.bfloat16, [], tmp_path / "new", "gfx942", "X", _by_size, **more)


def test_results_are_sorted_into_buckets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = _save(tmp_path, [4096, 1, 7, 256, 257, 2048])
    expected = {
        "small_M": {"BLOCK_SIZE_M": 256},
        "medium_M": {"BLOCK_SIZE_M": 2048},
        "large_M": {"BLOCK_SIZE_M": 4096},
    }
    path = tmp_path / "new" / "gfx942-GEMM-X.json"
    assert list(json.loads(path.read_text()).items()) == list(expected.items()) == list(found.items())
    assert path.read_text().startswith('{\n    "small_M": {\n        "BLOCK_SIZE_M": 256\n')
    assert caplog.messages == ["M=7: none of 0 configurations is valid"]


def test_other_buckets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = _save(tmp_path, [16, 32, 64, 100, 128, 300], buckets="atomic")
    assert list(found) == ["small", "medium_M32", "medium_M64", "medium_M128", "xlarge"]
    assert caplog.messages == ["M=100: {'BLOCK_SIZE_M': 100} fits no bucket"]
    assert list(_save(tmp_path, [1, 3, 9000], buckets="m_leq")) == ["M_LEQ_1", "M_LEQ_4", "any"]
    with pytest.raises(UserError, match=r"^buckets: 'aitre'"):
        _save(tmp_path, [1], buckets="aitre")


def test_a_bucket_with_a_required_value_is_tuned_over_configs_that_have_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[int, list[int]] = {}

    def tune(m: int, n: int, k: int, dtype: object, space: Any) -> Config:
        seen[m] = [config["BLOCK_SIZE_M"] for config in space]
        return dict(space[-1])  # the largest block wins, which is not the bucket's

    space = [{"BLOCK_SIZE_M": size} for size in (16, 32, 64)]
    arguments = (48, 64, torch.bfloat16, space, tmp_path, "gfx942", "X", tune)
    found = tune_and_save_configs([16, 32, 64, 128, 256], *arguments, buckets="atomic")
    assert seen == {16: [16, 32, 64], 32: [32], 64: [64], 256: [16, 32, 64]}
    assert {name: config["BLOCK_SIZE_M"] for name, config in found.items()} == {
        "small": 64,
        "medium_M32": 32,
        "medium_M64": 64,
        "large": 64,
    }
    assert caplog.messages == [
        "M=128: no configuration of the search space has BLOCK_SIZE_M=128, as medium_M128 requires"
    ]


@pytest.mark.parametrize("tag", ["MINE", "A8W8BLOCKSCALE-N=1024-K=1024", "FMOE", 3])
def test_without_a_function_the_tag_names_a_family(tag: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^tag: .* does not begin with a family's tag, expected one of A16W16, .* or tune="
    ):
        tune_and_save_configs([1], 48, 64, torch.bfloat16, [], tmp_path, "gfx942", tag)


@pytest.mark.parametrize(
    ("tag", "family"),
    [
        ("A16W16", "a16w16"),
        ("A16W16-ATOMIC-N=1-K=2", "a16w16_atomic"),
        ("A8W8_BLOCKSCALE-N=1024-K=1024", "a8w8_blockscale"),
        ("A8W8_BLOCKSCALE_PRESHUFFLED-N=1-K=2", "a8w8_blockscale_bpreshuffle"),
        ("BATCHED_A16W16-B=16-N=512-K=128", "batched_bf16"),
    ],
)
def test_a_tag_names_the_family_with_such_files(tag: str, family: str) -> None:
    assert family_of_tag(tag).name == family


@pytest.mark.parametrize(
    ("tag", "dtype", "message"),
    [
        ("A16W16", "bfloat17", "'bfloat17', expected a dtype"),
        ("BATCHED_A16W16", torch.bfloat16, "tag: column B: no value"),
        ("A8W8", torch.int64, "'int64', expected a dtype"),
    ],
)
def test_no_product_of_the_family_is_reported(tag: str, dtype: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        tune_and_save_configs([1], 48, 64, dtype, [{}], tmp_path, "gfx942", tag)


def test_the_architecture_is_named_as_in_files_and_tables() -> None:
    expected = gpu_device(0).gfx if torch.cuda.is_available() else cpu_device().gfx
    assert gemmpipe.get_arch() == expected


def test_nothing_valid_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoneValid, match=r"N=48 K=64: no M of \[7\]"):
        _save(tmp_path, [7])
    with pytest.raises(UserError, match="batch_sizes"):
        _save(tmp_path, [0])
    assert not list(tmp_path.rglob("*.json"))


def test_configs_found_before_a_failure_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def tune(m: int, *rest: object) -> Any:
        if m == 512:
            raise KeyboardInterrupt
        return {"BLOCK_SIZE_M": m} if m == 16 else None

    with pytest.raises(KeyboardInterrupt):
        tune_and_save_configs([512, 16], 48, 64, torch.bfloat16, [], tmp_path, "gfx942", "X", tune)
    assert caplog.messages == ["stopped at M=512; found so far: {'small_M': {'BLOCK_SIZE_M': 16}}"]
    with pytest.raises(UserError, match=r"^tune: None returned for M=32, expected a configuration"):
        tune_and_save_configs([16, 32], 48, 64, torch.bfloat16, [], tmp_path, "gfx942", "X", tune)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    save_configs_to_json("a.json", tmp_path, [{"num_warps": 4}])
    with pytest.raises(UserError, match=r"a\.json: .* expected numbers"):
        save_configs_to_json("a.json", tmp_path, {"small_M": {"dtype": torch.bfloat16}})
    assert json.loads((tmp_path / "a.json").read_text()) == [{"num_warps": 4}]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    x, w = torch.randn(512, 2048, device="cuda"), torch.randn(2048, 2048, device="cuda")

    def make(config: Config) -> tuple[Callable[[], torch.Tensor], object]:
        out = torch.empty(512, 2048, device="cuda")

        def run() -> torch.Tensor:
            if config["kind"] == "waits":
                torch.cuda.synchronize()
            if config["kind"] == "untouched":
                return out
            for _ in range(config["times"]):
                torch.mm(x, w.T, out=out)
            return out

        return run, x @ w.T

    space = [{"times": 1, "kind": "untouched"}, *({"times": times, "kind": "right"} for times in (4, 1, 2))]
    assert tune_kernel(space, make) == {"times": 1, "kind": "right"}
    right, truth = make({"times": 1, "kind": "right"})
    waits, _ = make({"times": 1, "kind": "waits"})
    event_us, host_us = benchmark_config(right, truth), benchmark_config(waits, truth)
    assert 5 < event_us < host_us * 1.5 < 10_000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tune_kernel({"A": [1]}, print), r"search_space: \{'A': \[1\]\}, expected a list of configurations"),
        (lambda: tune_kernel(3, print), "search_space: 3, expected a list"),
        (lambda: tune_kernel([{"A": 1}, 2], print), r"search_space\[1\]: 2, expected a list"),
        (lambda: tune_kernel([{"A": 1}], 3), "make_run_and_gt_fn: 3, expected a function"),
        (lambda: tune_kernel([{"A": 1}], print, num_iters="x"), "num_iters: 'x', expected a whole number from 1"),
        (lambda: benchmark_config(3, 3), "run: 3, expected a function"),
        (lambda: tune_and_save_configs(3, 3, 3, "x", [], "", "d", "t", print), "batch_sizes: 3, expected whole"),
        (
            lambda: tune_and_save_configs([1], torch.ones(4), 3, "x", [], "", "d", "t", print),
            r"N: float32 \[4\], expected",
        ),
        (lambda: tune_and_save_configs(["a"], 3, 3, "x", [], "", "d", "t", print), r"batch_sizes: \['a'\], expected"),
    ],
)
def test_arguments_of_the_wrong_type_are_reported_in_a_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as caught:
        call()
    assert "\n" not in str(caught.value)
