"""Where a worker of a Ray cluster sits: its device, its node, and the code and versions that it finds there."""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.conditions import limits
from gemmpipe.data import Device, Scalar
from gemmpipe.device import versions
from gemmpipe.files.regular import read_regular
from gemmpipe.paths import PACKAGE

_OURS = "gemmpipe"
_MOST_BYTES = 100_000_000
_DECISIVE = ("torch", "triton", "cuda", "hip")


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What the driver must know of a worker before it gives it work."""

    device: Device
    facts: Mapping[str, Scalar]
    """What must be equal on all nodes for their times to be comparable."""
    node: str
    """Ray's name of it."""
    address: str
    package: str
    """The folder that gemmpipe was imported from."""
    code: Mapping[str, str]
    """By folder of the user's, and `gemmpipe`: a hash of its Python files; nothing for a folder that is not there."""


def here(device: Device, python_path: Sequence[str]) -> Whereabouts:
    """Those of this process, which is a Ray worker."""
    import ray

    known, util = versions(), vars(ray)["util"]
    return Whereabouts(
        device=device,
        facts={**limits(device), **{name: known.get(name) for name in _DECISIVE}},
        node=ray.get_runtime_context().get_node_id(),
        address=util.get_node_ip_address(),
        package=str(PACKAGE),
        code=code_of(tuple(python_path)),
    )


@functools.cache
def code_of(python_path: tuple[str, ...]) -> Mapping[str, str]:
    """What a run's code is here: gemmpipe's own files, and those at the top of the user's folders."""
    own = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")}  # where that is a link, it is not followed
    found = {_OURS: _hash(PACKAGE, own)}
    for folder in python_path:
        found[folder] = _hash(Path(folder), Path(folder).glob("*.py")) if Path(folder).is_dir() else ""
    return found


def _hash(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + read_regular(path, "a Python file", _MOST_BYTES))
    return digest.hexdigest()[:12]


def trouble(there: Whereabouts, first: Whereabouts, code: Mapping[str, str]) -> str | None:
    """Why a worker may not take part: its code is not the driver's, or its times would not be those of the first."""
    for folder, digest in code.items():
        found = there.code.get(folder, "")
        place = there.package if folder == _OURS else folder
        if not found:
            return f"{there.address} has no {place}: expected on every node of the Ray cluster, under the same path"
        if found != digest:
            return f"{there.address} has other code in {place} than this machine; gemmpipe ships none: install the same"
    for name, value in first.facts.items():
        if there.facts.get(name) != value:
            return (
                f"{there.address} differs from {first.address}: {name} {there.facts.get(name)} instead of {value}; "
                "tune them apart"
            )
    return None
