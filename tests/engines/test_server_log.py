"""Lines of real servers about their kernels: vLLM 0.25.1 and 0.33.0, SGLang 0.5.23."""

import re
from pathlib import Path

import pytest
from engine_sources import source_of

from gemmpipe.core.errors import UserError
from gemmpipe.engines.kernel_choice import BLOCKS, EXPERTS_BLOCKS, EXPERTS_SIXTEEN, ROWS
from gemmpipe.engines.server_log import read_server_log

CONFIGS = "/vllm/model_executor/layers/quantization/utils/configs/"
FILE = "N=1536,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
VLLM = f"""\
INFO 11-21 05:31:00 [startup.py:96] non-default args: {{'model_tag': 'x', 'linear_backend': 'triton', 'tp': 4}}
INFO 11-21 05:31:04 [core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model='x'
INFO 11-21 05:31:05 [plugin.py:1] gemmpipe 0.2.0 in vLLM 0.33.0 on NVIDIA H200: takes over linear bf16 (90 rows)
INFO 11-21 05:31:20 [__init__.py:779] Selected TritonFp8BlockScaledMMKernel for Fp8LinearMethod
INFO 11-21 05:31:20 [__init__.py:779] Selected CutlassFp8BlockScaledMMKernel for Fp8LinearMethod
INFO 11-21 05:31:21 [fp8.py:421] Using TRITON Fp8 MoE backend out of potential backends: ['TRITON', 'DEEPGEMM'].
INFO 11-21 05:31:22 [fp8_utils.py:947] Using configuration from {CONFIGS}{FILE} for W8A8 Block FP8 kernel.
WARNING 11-21 05:31:22 [fp8_utils.py:955] Using default W8A8 Block FP8 kernel config. Performance might be \
sub-optimal! Config file not found at {CONFIGS}{FILE.replace("1536", "576")}
"""
SGLANG = """\
[2026-11-21 05:31:00] server_args={'model_path': 'x', 'tp_size': 8, 'fp8_gemm_runner_backend': 'auto', \
'moe_runner_backend': 'triton', 'moe_a2a_backend': 'none', 'ep_size': 1}
[2026-11-21 05:31:09] Using MoE kernel config from /sgl/configs/triton_3_6_0/E=128,N=768,device_name=NVIDIA_H200.json.
[2026-11-21 05:31:09] Config file not found at /s/configs/triton_3_6_0/E=8,N=768,block_shape=[128, 128].json. Fallback \
to triton version 3.4.0 and use MoE kernel config from /s/configs/triton_3_4_0/E=8,N=768,block_shape=[128, 128].json.
"""


def log(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "server.log"
    path.write_text(text)
    return path


def test_vllm(tmp_path: Path) -> None:
    found = read_server_log(log(tmp_path, VLLM))
    assert (found.engine, found.version) == ("vllm", "0.33.0")
    assert found.flags["linear_backend"] == "triton"
    assert found.kernels_of(BLOCKS) == ("TritonFp8BlockScaledMMKernel", "CutlassFp8BlockScaledMMKernel")
    assert found.kernels_of(ROWS) == ()
    assert found.kernels_of(EXPERTS_BLOCKS) == ("TRITON",)
    assert found.kernels_of(EXPERTS_SIXTEEN) == ()
    assert found.read == [CONFIGS + FILE]
    assert found.missing == [CONFIGS + FILE.replace("1536", "576")]
    assert found.device == "NVIDIA H200"
    assert found.plugin == ["gemmpipe 0.2.0 in vLLM 0.33.0 on NVIDIA H200: takes over linear bf16 (90 rows)"]


def test_sglang(tmp_path: Path) -> None:
    found = read_server_log(log(tmp_path, SGLANG))
    assert found.engine == "sglang"
    expected = {"fp8_gemm_backend": "auto", "moe_runner_backend": "triton", "moe_a2a_backend": "none", "ep_size": "1"}
    assert expected.items() <= found.flags.items()
    other = "/s/configs/triton_3_4_0/E=8,N=768,block_shape=[128, 128].json"
    assert found.read == ["/sgl/configs/triton_3_6_0/E=128,N=768,device_name=NVIDIA_H200.json", other]
    assert found.missing == [other.replace("3_4", "3_6")], "a name with a blank is one name"


def test_a_file_that_is_looked_for_in_two_folders_is_missing_once(tmp_path: Path) -> None:
    text = f"WARNING Using default MoE config. Config file not found at /tuned/{FILE}, /vllm/configs/{FILE}\n"
    assert read_server_log(log(tmp_path, text)).missing == [f"/tuned/{FILE}"]


def test_arguments_with_objects_are_read_as_far_as_they_are_plain(tmp_path: Path) -> None:
    line = "non-default args: {'moe_backend': 'triton', 'dtype': <Half object>, 'max_num_seqs': 64}\n"
    found = read_server_log(log(tmp_path, line))
    assert (found.flags["moe_backend"], found.flags["max_num_seqs"]) == ("triton", "64")


def test_what_is_no_servers_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no line of vLLM or SGLang about its kernels"):
        read_server_log(log(tmp_path, "nothing\n" * 3))
    with pytest.raises(UserError, match="cannot be read"):
        read_server_log(tmp_path / "absent.log")


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0"])
@pytest.mark.parametrize(
    ("path", "texts"),
    [
        ("vllm/model_executor/kernels/linear/__init__.py", ["Selected %s for %s"]),
        ("vllm/model_executor/layers/fused_moe/oracle/fp8.py", ["Using {backend.value} Fp8 MoE backend out "]),
        (
            "vllm/model_executor/layers/fused_moe/oracle/unquantized.py",
            ["Using {backend.value} Unquantized MoE backend out "],
        ),
        (
            "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
            ["Using configuration from %s for W8A8 Block FP8 kernel.", "Config file not found at %s"],
        ),
        ("vllm/model_executor/layers/fused_moe/fused_moe.py", ["Using configuration from %s for MoE layer."]),
        ("vllm/v1/engine/core.py", ["Initializing a V1 LLM engine (v%s) with config: %s"]),
    ],
)
def test_these_are_vllms_lines(version: str, path: str, texts: list[str]) -> None:
    source = re.sub(r'"\s*f?"', "", source_of("vllm", version, path))  # strings over several lines
    for text in texts:
        assert text in source, text


def test_these_are_sglangs_lines() -> None:
    moe = source_of("sglang", "0.5.23", "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py")
    assert "Using MoE kernel config from {config_file_path}." in moe
    assert "and use MoE kernel config from {try_config_file_path}." in moe
    dense = source_of("sglang", "0.5.23", "sglang/kernels/ops/gemm/fp8_kernel.py")
    assert "Using configuration from {config_file_path} for W8A8 Block FP8 kernel." in dense
    engine = source_of("sglang", "0.5.23", "sglang/srt/entrypoints/engine.py")
    assert "server_args={_server_args_for_logging(server_args)}" in engine
