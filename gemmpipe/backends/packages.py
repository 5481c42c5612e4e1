"""The optional packages of backends: the reasons of all backends name a missing one and its command in one form."""

from collections.abc import Mapping

REQUIREMENTS: Mapping[str, str] = {
    "vllm": "'gemmpipe[vllm]'",
    "sglang": "'gemmpipe[sglang]'",
    "nvmath": "'gemmpipe[cublaslt]'",
    "deep_gemm": "'gemmpipe[vllm]'",  # within vLLM's wheel: PyPI's deep-gemm 1.0.0 has neither headers nor fp8_gemm_nt
    "flashinfer": "flashinfer-python",
    "tvm_ffi": "apache-tvm-ffi",
    "quack": "quack-kernels",
}
"""By module: what pip installs, our extra where there is one."""


def not_installed(module: str, detail: str = "") -> str:
    """`the package quack is not installed: pip install quack-kernels`; `detail` continues the first part."""
    requirement = REQUIREMENTS.get(module)
    command = "" if requirement is None else f": pip install {requirement}"
    return f"the package {module} is not installed{detail}{command}"


def also_missing(reason: str, missing: str | None) -> str:
    """The reason why a device cannot run a backend, then what is missing on any device, if something is."""
    return reason if missing is None else f"{reason}; also, {missing}"
