"""Batch sizes of engines' graphs, against the functions of their sources."""

from types import SimpleNamespace

import pytest
from engine_sources import function, source_of

from gemmpipe.engines.batch_sizes import default_limits, sglang_capture_sizes, sglang_prefill_sizes, vllm_capture_sizes

HOOK = "sglang/srt/arg_groups/cuda_graph_hook.py"


@pytest.mark.parametrize("most", [1, 8, 48, 160, 256, 300, 512, 1000])
def test_sglangs_decode(most: int) -> None:
    text = source_of("sglang", "0.5.23", HOOK)
    config = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm=None)
    theirs = function(text, "generate_decode_cuda_graph_batch_sizes", resolving_view=lambda _: config)
    assert sglang_capture_sizes(most) == sorted(theirs(None, most))


@pytest.mark.parametrize("most", [512, 2048, 4096, 8192, 16384])
def test_sglangs_prefill(most: int) -> None:
    theirs = function(source_of("sglang", "0.5.23", HOOK), "generate_prefill_cuda_graph_batch_sizes")
    assert sglang_prefill_sizes(most) == theirs(most)


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0"])
@pytest.mark.parametrize(
    ("memory", "name", "gfx"),
    [
        (80, "NVIDIA H100", "sm_90"),
        (141, "NVIDIA H200", "sm_90"),
        (24, "NVIDIA L4", "sm_89"),
        (80, "NVIDIA A100", "sm_80"),
    ],
)
def test_vllms_defaults(version: str, memory: int, name: str, gfx: str) -> None:
    text = source_of("vllm", version, "vllm/engine/arg_utils.py")
    platform = SimpleNamespace(
        get_device_total_memory=lambda: memory * 2**30,
        get_device_name=lambda: name,
        is_device_capability=lambda _: False,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    # The function imports an enumeration of vLLM's: its two members stand in.
    lines = [line for line in text.splitlines() if "from vllm.usage.usage_lib import UsageContext" not in line]
    contexts = SimpleNamespace(LLM_CLASS="LLM_CLASS", OPENAI_API_SERVER="OPENAI_API_SERVER")
    theirs = function(
        "\n".join(lines), "get_batch_defaults", current_platform=platform, GiB_bytes=2**30, UsageContext=contexts
    )
    tokens, requests = theirs(None, 1)
    ours = default_limits("vllm", gfx, 1, memory)
    assert (ours.tokens, ours.requests) == (tokens["OPENAI_API_SERVER"], requests["OPENAI_API_SERVER"])


def test_vllms_graphs() -> None:
    assert vllm_capture_sizes(512)[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert len(vllm_capture_sizes(512)) == 51
    assert vllm_capture_sizes(6) == [1, 2, 4]
