"""The benchmark of vLLM's modes, without vLLM and a GPU: its checkpoints, its processes and its table."""

import csv
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import vllm_models
import vllm_modes
import vllm_modes_report
import vllm_placement
import vllm_small_models
from vllm_modes_report import Run

STAND_IN = """
import gzip, json, os, sys, time
folder, mode, result = sys.argv[1], sys.argv[sys.argv.index("--mode") + 1], sys.argv[sys.argv.index("--result") + 1]
model, scope = os.path.basename(folder), os.environ["GEMMPIPE_VLLM"]
print("(EngineCore) INFO [vllm.py:1] gemmpipe 0.2.0 in vLLM 0.25.1 on NVIDIA H100: takes over linear", flush=True)
if model == "dense_bf16" and mode == "eager" and scope != "off":
    print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
    sys.exit(1)
if model == "dense_bf16" and mode == "sleep":
    time.sleep(60)
def outputs(base):
    return [{"tokens": [7, 8], "logprobs": [{"7": base, "8": base - 1}, {"8": base, "7": base - 1}]}]
off = scope == "off"
steps = {"first": {"took_s": 1, "outputs": outputs(-1.0 if off else -1.01)}}
steps["again"] = steps["first"]
if mode == "graphs":
    stale = model == "dense_fp8" and scope == "linear,moe"
    steps["updated"] = {"took_s": 1, "outputs": steps["first"]["outputs"] if stale else outputs(-3.0)}
if mode == "sleep":
    steps["woken"] = {"took_s": 1, "outputs": outputs(-1.0)}
    steps["reloaded"] = {"took_s": 1, "error": "RuntimeError: no"} if off else {"took_s": 1, "outputs": outputs(-9.0)}
keys = {} if off else {"a16w16 M=1": "exact", "a8w8_blockscale M=1": "padded", "a16w16 M=2": "engine"}
if model == "mixture_fp8" and "moe" in scope:
    keys["fmoe token=1"] = "exact"
with gzip.open(result, "wt") as stream:
    json.dump({"steps": steps, "dispatch": [keys], "start_s": 1}, stream)
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Models that count as written, and the stand-in for vLLM."""
    for name in vllm_small_models.SMALL:
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete").write_text("")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return tmp_path


def table(folder: Path) -> dict[tuple[str, str, str, str], dict[str, str]]:
    with (folder / "modes.csv").open(newline="") as stream:
        return {(r["model"], r["mode"], r["scope"], r["step"]): r for r in csv.DictReader(stream)}


@pytest.mark.e2e
def test_each_step_is_compared_with_the_plugin_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(folder), "--child", str(folder / "stand_in.py"), "--devices", "0,1", "--stagger", "0"]
    assert vllm_modes.main([*given, "--modes", "tp2,graphs,eager", "--limit-s", "100"]) == 1
    found = table(folder)
    right = found["mixture_fp8", "graphs", "on", "updated"]
    assert right["verdict"] == "ok"
    assert right["keys"] == "3/1"
    assert right["tokens"] == "2/2"
    assert float(right["own_on"]) == pytest.approx(1.99)
    assert float(found["dense_fp8", "tp2", "on", "first"]["prefill_mean"]) == pytest.approx(0.01)
    assert found["dense_fp8", "graphs", "on", "updated"]["verdict"] == "DEVIATES, on UNCHANGED"
    assert "illegal memory access" in found["dense_bf16", "eager", "on", "start"]["verdict"]
    assert found["mixture_fp8", "graphs", "linear", "first"]["verdict"] == "ok"
    # an engine in bf16 alone has no fp8 layer
    assert found["dense_bf16", "tp2", "on", "first"]["verdict"] == "NOT IN SCOPE: a8w8_blockscale"
    assert not any(step == "again" for _, _, _, step in found)
    assert (folder / "dense_fp8-tp2-on.log").read_text().splitlines()[-1] == "0,1"
    printed = capsys.readouterr().out
    assert "gemmpipe 0.2.0 in vLLM 0.25.1 on NVIDIA H100: takes over linear" in printed
    assert len(printed[printed.index("gemmpipe 0.2.0") :].splitlines()) <= 40
    assert vllm_modes.main([*given, "--print", "--modes", "tp2"]) == 1
    assert table(folder).keys() == {key for key in found if key[1] == "tp2"}


@pytest.mark.slow  # it waits for the limit of a process
def test_a_process_that_takes_too_long_is_a_row(folder: Path) -> None:
    given = [str(folder), "--child", str(folder / "stand_in.py"), "--devices", "0", "--stagger", "0"]
    limit = str(vllm_modes.END_S + 6)
    assert vllm_modes.main([*given, "--modes", "tp2,sleep", "--models", "dense_bf16,dense_fp8", "--limit-s", limit])
    found = table(folder)
    assert found["dense_bf16", "sleep", "on", "start"]["verdict"].startswith("off fails too: not complete in time")
    assert found["dense_fp8", "sleep", "on", "woken"]["verdict"] == "ok"
    assert found["dense_fp8", "sleep", "on", "reloaded"]["verdict"] == "off fails: RuntimeError: no"
    assert not any(mode == "tp2" for _, mode, _, _ in found)


def test_tokens_after_a_difference_are_not_compared() -> None:
    one = [{"tokens": [1, 2, 3], "logprobs": [{"1": -1.0, "2": -2.0}, {"2": -1.0}, {"3": -1.0}]}]
    other = [{"tokens": [1, 3, 3], "logprobs": [{"1": -1.5, "9": -4.0}, {"3": -1.0}, {"3": -7.0}]}]
    # 2 is absent from the other's: it counts as the least of those
    assert vllm_modes_report.differences(one, other) == ([0.5, 2.0], [0.0], 1, 3)


def test_runs_are_planned_for_the_gpus() -> None:
    names = [run.name for run in vllm_modes.planned(list(vllm_small_models.SMALL), ["tp2", "graphs", "eager"], 2)]
    assert names[0] == "dense_fp8-tp2-off"
    assert {"mixture_fp8-graphs-linear", "mixture_fp8-graphs-moe", "dense_fp8-graphs-quantise"} <= set(names)
    assert "mixture_fp8-eager-on" not in names
    assert not vllm_modes.planned(["dense_fp8"], ["tp2"], 1)
    assert vllm_modes_report.wanted_families(Run(model="mixture_fp8", mode="lora", kind="on")) == {
        "a8w8_blockscale",
        "a16w16",
    }
    assert vllm_modes_report.wanted_families(Run(model="mixture_fp8", mode="graphs", kind="moe")) == {"fmoe"}


@pytest.mark.parametrize("name", list(vllm_small_models.SMALL))
def test_checkpoints_have_the_tensors_of_the_model(name: str) -> None:
    config = {**vllm_small_models.SMALL[name], "hidden_size": 256, "vocab_size": 64, "num_hidden_layers": 1}
    one, other = (vllm_small_models.checkpoint(config, seed) for seed in (1, 2))
    assert one.keys() == other.keys()
    place = "model.layers.0.mlp.experts.15" if "mixture" in name else "model.layers.0.mlp"
    weight = one[f"{place}.down_proj.weight"]
    assert weight.shape == (256, 512 if "mixture" in name else 3072)
    full = weight.float()
    if "fp8" in name:
        scale = one[f"{place}.down_proj.weight_scale_inv"]
        assert scale.shape == tuple(size // 128 for size in weight.shape)
        full = full * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert float(full.std()) * weight.shape[1] ** 0.5 == pytest.approx(
        1.0, abs=0.25
    )  # blocks have scales of 0.5 to 1.5
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    settings, tensors = vllm_small_models.adapter(config)
    assert settings["r"] == vllm_small_models.RANK
    assert tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"].shape == (8, 2048)
    assert tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"].shape == (256, 8)


def test_products_are_those_of_one_rank_of_one_and_of_two() -> None:
    found = vllm_small_models.product_sizes()
    assert len(found["a8w8_blockscale"]) == 8
    assert {(4096, 1024), (2048, 1024), (1024, 1536)} <= set(found["a8w8_blockscale"])
    assert set(found["a16w16"]) - set(found["a8w8_blockscale"]) == {(8192, 1024), (16, 1024)}


def test_models_are_spread_over_devices_by_their_memory() -> None:
    configs = vllm_models.MODELS
    places = vllm_placement.placed(configs, ["0", "1"])
    assert places == {"qwen3_30b_fp8": "0", "qwen3_8b_bf16": "1", "qwen3_8b_fp8": "1"}
    dense = {name: configs[name] for name in ("qwen3_8b_fp8", "qwen3_8b_bf16")}
    assert set(vllm_placement.placed(dense, ["0", "1"]).values()) == {"0", "1"}
    assert vllm_placement.memory_problem(configs, places, {"0": 79.0, "1": 79.0}) == ""
    both = dict.fromkeys(configs, "0")
    assert vllm_placement.memory_problem(configs, both, {"0": 79.0}).startswith("GPU 0 has 79 GiB; qwen3_8b_fp8 26")
    assert vllm_placement.memory_problem(configs, both, {"0": 139.0}) == ""


def test_backends_are_read_from_a_log() -> None:
    lines = [
        "INFO 11-23 [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN']",
        "INFO [__init__.py:666] Selected GemmpipeFp8BlockKernel for Fp8LinearMethod",
        "INFO [__init__.py:666] Selected GemmpipeFp8BlockKernel for Fp8LinearMethod",
        "INFO [fp8.py:405] Using 'TRITON' Fp8 MoE backend out of potential backends: ['AITER', 'TRITON']",
        "INFO [x.py:1] gemmpipe: left to the engine: experts: LoRA",
    ]
    assert vllm_placement.choices(lines) == [
        "attention: FLASH_ATTN",
        "Fp8LinearMethod: GemmpipeFp8BlockKernel",
        "experts: TRITON",
        "left to the engine: experts: LoRA",
    ]
