"""Where vllm_plugin.py's models lie: which GPU has which model, FlashInfer built once, the backends that vLLM chose."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_models import cache_bytes

KINDS = 2
"""Processes of a model: with the default and with the plug-in."""
PROCESS_GIB = 1.5
"""Memory of a process besides weights and cache: context, activations, graphs, kernels."""
FLASHINFER_BUILD = """
from flashinfer.jit.gemm import gen_fp8_blockscale_gemm_sm90_module
module = gen_fp8_blockscale_gemm_sm90_module()
if not module.is_aot:
    module.build(False)
"""
FLASHINFER_SWITCH = "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"
CHOICES = (
    (r"Selected (\S+) for (\S+)", "{1}: {0}"),
    (r"Using (\S+) attention backend", "attention: {0}"),
    (r"Using '?(\S+?)'? (?:\S+ )?MoE backend", "experts: {0}"),
    (r"(gemmpipe \S+ in vLLM .*)", "{0}"),
    (r"gemmpipe: (left to the engine: .*)", "{0}"),
)
"""(pattern of a line of vLLM's log, what is said of it)."""


def weights_gib(config: Mapping[str, Any]) -> float:
    """The weights of one of vllm_models.MODELS."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    inner = config["intermediate_size"]
    inner = config["num_experts"] * config["moe_intermediate_size"] if "num_experts" in config else inner
    linear = layers * (hidden * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    size = 1 if "quantization_config" in config else 2
    return (linear * size + 2 * config["vocab_size"] * hidden * 2) / 2**30


def model_gib(config: dict[str, Any]) -> float:
    """The memory of both processes of a model."""
    return KINDS * (weights_gib(config) + cache_bytes(config) / 2**30 + PROCESS_GIB)


def placed(configs: Mapping[str, dict[str, Any]], devices: Sequence[str]) -> dict[str, str]:
    """Model -> device: the largest first, each on the device with the least so far."""
    used = dict.fromkeys(devices, 0.0)
    found: dict[str, str] = {}
    for model in sorted(configs, key=lambda name: -model_gib(configs[name])):
        found[model] = min(used, key=lambda device: used[device])
        used[found[model]] += model_gib(configs[model])
    return found


def memory_problem(configs: Mapping[str, dict[str, Any]], places: Mapping[str, str], total: Mapping[str, float]) -> str:
    """Why the models do not fit into the devices' memory (GiB); empty if they do, or if that is unknown."""
    for device, gib in total.items():
        held = {model: model_gib(configs[model]) for model, place in places.items() if place == device}
        if sum(held.values()) > gib:
            text = ", ".join(f"{model} {size:.0f}" for model, size in held.items())
            return f"GPU {device} has {gib:.0f} GiB; {text} need {sum(held.values()):.0f}: choose fewer with --models"
    return ""


def memory_of_devices(devices: Sequence[str]) -> dict[str, float]:
    """Device -> GiB, as nvidia-smi says; empty without it."""
    command = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = dict(re.findall(r"^(\d+), (\d+)$", line)[0] for line in lines if re.match(r"^\d+, \d+$", line))
    return {device: int(found[device]) / 1024 for device in devices if device in found}


def build_flashinfer(limit_s: float, log: Path) -> dict[str, str]:
    """Compile FlashInfer's block-scaled product once, if vLLM would choose it; variables for the processes.

    Without its compiled form each process would compile it at its first call, one after the other. A build that fails
    or takes too long switches that product off, in both kinds alike.
    """
    if os.environ.get(FLASHINFER_SWITCH, "1") == "0" or importlib.util.find_spec("flashinfer") is None:
        print("FlashInfer: not used", flush=True)
        return {}
    if importlib.util.find_spec("flashinfer_cubin") is None and shutil.which("nvcc") is None:
        print("FlashInfer: not used, neither nvcc nor flashinfer_cubin", flush=True)
        return {}
    start = time.monotonic()
    environment = {"MAX_JOBS": str(os.cpu_count() or 2), "FLASHINFER_CUDA_ARCH_LIST": "9.0a", **os.environ}
    try:
        with log.open("wb") as stream:
            done = subprocess.run(
                [sys.executable, "-c", FLASHINFER_BUILD],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=limit_s,
                check=False,
            )
        failed = f"ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = "took too long"
    if failed:
        end = log.read_text(errors="replace").splitlines()[-3:]
        print(f"FlashInfer: the build {failed}, switched off in all processes: {' | '.join(end)[-400:]}", flush=True)
        return {FLASHINFER_SWITCH: "0"}
    print(f"FlashInfer: built in {time.monotonic() - start:.0f} s", flush=True)
    return {}


def choices(lines: Iterable[str]) -> list[str]:
    """The backends that vLLM's log names, each once, in its order."""
    found: dict[str, None] = {}
    for line in lines:
        for pattern, text in CHOICES:
            if match := re.search(pattern, line):
                found.setdefault(text.format(*match.groups()))
                break
    return list(found)


def print_choices(logs: Mapping[str, Path]) -> None:
    """The backend of each kind of layer in each process."""
    for name, log in logs.items():
        found = choices(log.read_text(errors="replace").splitlines()) if log.is_file() else []
        if found:
            print(f"{name}: {'; '.join(found)[:600]}")
