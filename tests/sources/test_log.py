"""Logs of servers, with the lines as vLLM, SGLang and aiter print them."""

from dataclasses import replace
from pathlib import Path

import pytest

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError
from gemmpipe.engines.server_log import log_lines
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.sources.records import LogShapes

NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)
VLLM = "/vllm/model_executor/layers/quantization/utils/configs/"
LOG = f"""\
INFO 11-21 05:31:00 [config.py:1] compilation_config={{'cudagraph_capture_sizes': [8, 4, 2, 1], 'x': 1}}
WARNING 11-21 05:31 [fp8_utils.py:851] Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! \
Config file not found at {VLLM}N=17408,K=5120,device_name=NVIDIA_L40S,dtype=fp8_w8a8,block_shape=[128,128].json
[2025-10-28 09:42:18 TP1] Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! Config file \
not found at /sglang/N=5120,K=8704,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json
[2025-10-28 09:42:18 TP0] Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! Config file \
not found at /sglang/N=5120,K=8704,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json
[TP0] Config file not found at /sglang/N=4096,K=4096,device_name=NVIDIA_L40S,dtype=fp8_w8a8_channelwise.json
WARNING [fused_moe.py:727] Using default MoE config. Performance might be sub-optimal! Config file not found at \
['/vllm/configs/E=512,N=128,device_name=NVIDIA_H20-3e.json', '/other/E=512,N=128,device_name=NVIDIA_H20-3e.json']
WARNING Config file not found at /c/E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json
ERROR Config file not found at /etc/other.json
\x1b[32m[aiter]\x1b[0m shape is M:6, N:6144, K:4096, not found tuned config in \
/tmp/aiter_configs/a8w8_blockscale_tuned_gemm.csv, will use default config!
[aiter] shape is M:64, N:16384, K:5120, q_dtype_w:torch.int8, not found tuned config in \
/aiter/configs/a8w8_tuned_gemm.csv, will use default config!
[aiter] shape is M:1024, N:151936, K:5120 dtype='torch.bfloat16' otype='torch.float32' bias=True, scaleAB=False, \
bpreshuffle=False, not found tuned config in /tmp/aiter_configs/bf16_tuned_gemm.csv, will use default config! using \
torch solution:0
[aiter] shape is M:16, N:7168, K:2048, not found tuned config in CKGEMM or asmGEMM, will use default config!
[aiter] [fused_moe] using 2stage default for ('gfx942', 304, 32, 7168, 256, 256, 8, <ActivationType.Silu: 0>, \
'torch.bfloat16', 'torch.float8_e4m3fnuz', 'torch.float8_e4m3fnuz', 'QuantType.per_1x128', True, False)
"""


def made(folder: Path, family: str, text: str = LOG, **more: object) -> list[Problem]:
    (folder / "server.log").write_text(text)
    fields = {"nsets": [1, 64], "rows_of": None, "model_dim": None, "topk": None, **more}
    source = LogShapes(path=str(folder / "server.log"), **fields)  # type: ignore[arg-type]
    return source.problems(load_family(family), NOTHING, "gfx942" if family == "fmoe" else "sm_90")


def sizes(found: list[Problem]) -> list[tuple[object, ...]]:
    return [(p["M"], p["N"], p["K"], p.weight) for p in found]


def test_each_line_once_at_every_m(tmp_path: Path) -> None:
    assert sizes(made(tmp_path, "a8w8_blockscale")) == [
        *((m, 17408, 5120, 1.0) for m in (1, 64)),
        *((m, 5120, 8704, 1.0) for m in (1, 64)),
        (6, 6144, 4096, 1.0),
    ]
    assert [p["M"] for p in made(tmp_path, "a8w8_blockscale", nsets="log")][:4] == [1, 2, 4, 8]


def test_columns_from_log_lines(tmp_path: Path) -> None:
    wide = made(tmp_path, "a16w16")
    assert [tuple(v for _, v in p.key) for p in wide] == [
        (1024, 151936, 5120, True, "bfloat16", "float32", False, False)
    ]
    eight = made(tmp_path, "a8w8", nsets=[2])
    assert [(p["M"], p["N"], p["q_dtype_w"], p["granularity"]) for p in eight] == [
        (2, 4096, "float8_e4m3fn", "row"),
        (64, 16384, "int8", "row"),
    ]
    assert sizes(made(tmp_path, "a4w4_blockscale")) == [(16, 7168, 2048, 1.0)]


def test_experts(tmp_path: Path) -> None:
    found = made(tmp_path, "fmoe", nsets=[4], model_dim=2048, topk=8)
    named = ("token", "model_dim", "inter_dim", "expert", "topk", "q_type")
    assert [tuple(p[name] for name in named) for p in found] == [
        (4, 2048, 128, 512, 8, "QuantType.No"),
        (4, 2048, 256, 256, 8, "QuantType.per_1x128"),
        (32, 7168, 256, 256, 8, "QuantType.per_1x128"),
    ]
    with pytest.raises(
        UserError, match=r"server.log:\d+ \(set shapes.model_dim= shapes.topk=\): column model_dim: no value"
    ):
        made(tmp_path, "fmoe")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nothing here\n", "no product of a8w8_blockscale found, expected a server's log$"),
        ("Config file not found at /x/M=1,device_name=A,dtype=fp8_w8a8.json\n", "server.log:1: .*begin with N= or E="),
        ("shape is M:1, N:2, not found tuned config in a.csv\n", "expected `shape is M:.., N:.., K:..` before it"),
        ("[fused_moe] using 1stage default for (304, 8, 4096)\n", "3 values of an untuned fused_moe"),
    ],
)
def test_errors_are_one_line(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        made(tmp_path, "a8w8_blockscale", text)


def test_captured_sizes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no line contains captured batch sizes"):
        made(tmp_path, "a8w8_blockscale", LOG.partition("\n")[2], nsets="log")
    sglang = LOG.partition("\n")[2] + "[TP0] Capture cuda graph bs [1, 2, 24]\n"
    assert [p["M"] for p in made(tmp_path, "a8w8_blockscale", sglang, nsets="log")][:3] == [1, 2, 24]


def test_a_log_that_is_larger_than_any_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("wb") as stream:
        stream.truncate(6_000_000_000)  # sparse: nothing is written
    with pytest.raises(UserError, match="larger than 1,000,000,000 bytes"):
        next(log_lines(path))


def test_a_routing_of_the_kernels_options_must_be_possible(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    source = LogShapes(path=str(path), rows_of=None, nsets=[4], model_dim=2048, topk=8)
    with pytest.raises(UserError, match=r"^kernel\.key\.routing: '900/0' gives the busiest of 512 experts 512 times"):
        source.problems(load_family("fmoe"), replace(NOTHING, key={"routing": "900/0"}), "gfx942")
