"""compare on a GPU: every entry of one problem, Triton's own tuner and the floor included."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ARGS = ("kernel=a8w8_blockscale", "shapes=list", "shapes.items=[{M: [1, 64, 512], N: 1280, K: 2048}]")
ENGINE = {
    str(m): {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16, "num_warps": 4,
             "num_stages": 3}
    for m in (1, 64)
}  # fmt: skip


def _gemmpipe(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gemmpipe", *args], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout


def test_every_entry_is_timed(tmp_path: Path) -> None:
    (tmp_path / "N=1280,K=2048,device_name=X,dtype=fp8_w8a8,block_shape=[128,128].json").write_text(json.dumps(ENGINE))
    _gemmpipe(tmp_path, *ARGS, "search.budget_trials=24", "timer@stages.bench.timer=quick")
    text = _gemmpipe(tmp_path, "compare", *ARGS, f"stages.lineup.vllm=[{tmp_path}]", "backend.autotune.limit_s=5")
    [path] = tmp_path.glob("outputs/runs/compare/*/compared.csv")
    compared = pd.read_csv(path).set_index(["M", "name"])
    timed = {"tuned", "own kernels", "untuned", "vllm", "triton.autotune", "same_size mm", "same_size empty"}
    timed |= {f"same_size {kind}" for kind in ("rowwise", "tensorwise", "blockwise")}
    for m in (1, 64, 512):
        for name in timed:
            row = compared.loc[(m, name)]
            assert (row["status"], row["us"] > 0) == ("ok", True), (m, name, row["error"])
        chosen = compared.loc[(m, "triton.autotune")]
        assert 1 <= chosen["tried"] <= chosen["of"]
        assert 0 < chosen["tuning_s"] < 5 + 20, "the limit, and one configuration started before it"
        assert {"BLOCK_SIZE_M", "num_warps"} <= set(json.loads(chosen["config"]))
        assert compared.loc[(m, "tuned")]["over_floor"] > 0.8
    assert "triton.autotune: chose in" in text
    assert "same_size empty *" in text


def test_tritons_tuner_times_the_whole_of_a_small_space(tmp_path: Path) -> None:
    """Also split-K with atomics: without zeroing the output before each launch its check would fail."""
    space = ["space.BLOCK_SIZE_M=[16,32]", "space.BLOCK_SIZE_N=[64]", "space.BLOCK_SIZE_K=[64]", "space.num_warps=[4]",
             "space.num_stages=[2,3]", "space.NUM_KSPLIT=[1,4]", "space.GROUP_SIZE_M=[1]"]  # fmt: skip
    args = ["kernel=a16w16_atomic", "shapes=list", "shapes.items=[[16,512,2048]]", "backend=[triton,torch,autotune]"]
    _gemmpipe(tmp_path, "compare", *args, *space, "backend.autotune.limit_s=null")
    [path] = tmp_path.glob("outputs/runs/compare/*/compared.csv")
    row = pd.read_csv(path).set_index("name").loc["triton.autotune"]
    assert (row["status"], row["tried"]) == ("ok", row["of"])
    assert row["of"] >= 4
