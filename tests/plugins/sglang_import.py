"""Imports a real SGLang, unpacked from its wheel without its libraries, on a machine without a GPU.

As `vllm_import.py` does for vLLM: packages that its layers do not call here are empty stand-ins if they are missing.
"""

import importlib
import sys
import types
from pathlib import Path

import vllm_import

UNUSED = frozenset(
    [
        "IPython",
        "decord",
        "deep_gemm",
        "flashinfer",
        "orjson",
        "outlines",
        "sentencepiece",
        "sgl_kernel",
        "soundfile",
        "torchao",
        "torchvision",
        "tvm_ffi",
    ]
)
"""Packages of kernels, of the front end and of other models."""


def import_sglang(sources: Path, packages: Path) -> None:
    """SGLang from a folder with the package and its dist-info; call it once, in a process of its own."""
    for name in ("include", "csrc"):  # folders without Python files, which SGLang looks for
        (sources / "sglang" / "kernels" / "jit" / name).mkdir(exist_ok=True)
    sys.path += [str(sources), str(packages)]
    vllm_import.UNUSED |= UNUSED
    sys.meta_path.append(vllm_import._Finder())
    import torch  # noqa: F401  # before `dill`, which torch would find

    importlib.import_module("sglang.srt")
    dill = types.ModuleType("dill")
    dill.dumps, dill.loads, dill.__spec__ = (lambda value: b""), (lambda value: value), None  # type: ignore[attr-defined]
    sys.modules["dill"] = dill
