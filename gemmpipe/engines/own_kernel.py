"""The kernel that a server of an engine computes a product with by default: its library, and its order of x's scales.

A table for a server must count this library as the server calls it: with another order of scales the library pays a
copy, and rows are chosen where it is faster.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.spec import GemmSpec
from gemmpipe.engines import sglang_kernels, vllm_kernels
from gemmpipe.engines.kernel_choice import (
    BLOCKS,
    EXPERTS_BLOCKS,
    EXPERTS_SIXTEEN,
    ROWS,
    SIXTEEN,
    EngineRules,
    KernelRule,
    Situation,
)
from gemmpipe.engines.packages import VLLM, installed_version, package_folder, version_of_package
from gemmpipe.family.dtypes import FP8_DTYPES

_BLACKWELL = 100
"""The first architecture on which engines keep block scales in a form of their own."""


def rules_of(engine: str, version: str | None) -> EngineRules:
    """The rules of the newest known version that is not newer; without a version, of the newest."""
    known: Sequence[EngineRules] = vllm_kernels.RULES if engine == VLLM else sglang_kernels.RULES
    if version is None:
        return known[-1]
    older = [rules for rules in known if _order(rules.version) <= _order(version)]
    return older[-1] if older else known[0]


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("+")[0].split(".")[:3])


def packages_near(package: Path | None) -> Mapping[str, bool]:
    """Packages of an engine's environment: those in its folder; without one, all that its wheel requires."""
    if package is None:
        return {
            "deep_gemm": True,
            "vllm.third_party.deep_gemm": True,
            "flashinfer": True,
            "humming": False,
            "b12x": False,
        }
    near = package.parent
    names = ("deep_gemm", "flashinfer", "humming", "b12x")
    found = {name: (near / name).is_dir() for name in names}
    return {**found, "vllm.third_party.deep_gemm": (package / "third_party" / "deep_gemm").is_dir()}


def kind_of_layers(spec: GemmSpec) -> str:
    """The kind of an engine's layers with this product; empty for one that has no kernel of its own there."""
    if spec.w_scale is None:
        if spec.experts is not None:
            return EXPERTS_SIXTEEN
        return SIXTEEN if spec.batch == 1 and spec.w_dtype == spec.x_dtype else ""
    if spec.w_dtype not in FP8_DTYPES:
        return ""
    if spec.w_scale.granularity == "block":
        return EXPERTS_BLOCKS if spec.experts is not None else BLOCKS
    return ROWS if spec.experts is None and spec.batch == 1 else ""


@cache
def own_kernel(engine: str, kind: str, gfx: str, size: tuple[int, int]) -> KernelRule | None:
    """The rule of the engine's default kernel for a kind of layers with this (N, K), in this environment.

    None where it is not known: on other devices than NVIDIA's up to Hopper, or without a rule. Looked up once in a
    process: a product has many Ms.
    """
    number = gfx.removeprefix("sm_")
    if not gfx.startswith("sm_") or not number.isdecimal() or int(number) >= _BLACKWELL:
        return None
    try:
        package = package_folder(engine)
    except EnvironmentProblem:
        package = None
    version = installed_version(engine) or (version_of_package(package) if package is not None else None)
    layer = rules_of(engine, version).layer(kind)
    if layer is None:
        return None
    packages = packages_near(package)
    return layer.chosen(Situation(gfx=gfx, variables=dict(os.environ), packages=packages, sizes=(size,))).rule
