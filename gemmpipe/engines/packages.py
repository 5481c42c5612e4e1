"""Installed engines: version, package folder, and the folder from which dense tuned files are read."""

import importlib.metadata
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from gemmpipe.core.errors import EnvironmentProblem, UserError, suggest

VLLM, SGLANG = "vllm", "sglang"
ENGINES = (VLLM, SGLANG)
PLACES: Mapping[str, str] = {
    VLLM: "vllm/model_executor/layers/quantization/utils/configs",
    SGLANG: "sglang/kernels/ops/gemm/configs",
}
"""The folder for files of dense products: in the engine's own package, not configurable."""
TITLES: Mapping[str, str] = {VLLM: "vLLM", SGLANG: "SGLang"}
"""The engines' own spelling of their names."""


def check_engine(key: str, name: str) -> str:
    """The name of an engine in lower case. Raises UserError, naming the key, for any other name."""
    if name.lower() not in ENGINES:
        raise UserError(f"{key}: '{name}' is no engine; expected vllm or sglang{suggest(name, ENGINES)}")
    return name.lower()


def installed_version(engine: str) -> str | None:
    """The version of the installed engine; None if it is not installed here."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(engine)
    return None


def version_of_package(package: Path) -> str | None:
    """The version of the engine in a package folder, from the `dist-info` next to it; None if there is none."""
    name = package.name
    for found in importlib.metadata.distributions(name=name, path=[str(package.parent)]):
        return found.version
    return None


def package_folder(engine: str, given: str | None = None) -> Path:
    """The folder of an engine's package: `given` (`package=`), or that of this Python.

    Raises UserError for a folder that is not the engine's package, EnvironmentProblem if it is not installed.
    """
    if given is not None:
        folder = Path(given).expanduser()
        folder = folder if folder.name == engine else folder / engine
        if not (folder / "__init__.py").is_file():
            raise UserError(f"package={given}: no package '{engine}' there; expected site-packages or {engine} in it")
        return folder.resolve()
    try:
        found = find_spec(engine)
    except (ImportError, ValueError):
        found = None
    roots = [] if found is None else list(found.submodule_search_locations or ())
    if not roots:
        raise EnvironmentProblem(
            f"{TITLES[engine]} is not installed in this Python; package=DIR names the folder of its package"
        )
    return Path(roots[0]).resolve()


def dense_folder(engine: str, package: Path) -> Path:
    """The folder in the package from which the engine reads files of dense products.

    Raises EnvironmentProblem if this version has no such folder.
    """
    folder = package.parent / PLACES[engine]
    if not folder.is_dir():
        version = version_of_package(package) or "of unknown version"
        raise EnvironmentProblem(f"{TITLES[engine]} {version} has no folder {folder}; its files are in another folder")
    return folder
