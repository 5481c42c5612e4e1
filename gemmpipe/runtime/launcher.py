"""A loaded kernel bound to everything but its addresses: what a call of the run time launches."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from gemmpipe.launching.builds import Loaded

BoundLaunch = Callable[[int, list[object]], None]
_DIRECT = "3.6."
"""The Triton whose compiled launcher is called without the Python function around it: seen to run, 0.6 us less."""
_DESCRIPTORS_KEPT = 1024  # of an operand; one is some 300 bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """Fill a copy of `values` at the places of the pointers, then `launch(stream, values)`.

    Pointers are given as integers, which the launcher takes without asking the driver about each of them. The kernel
    runs on the device that was current when it was loaded, on the stream of this handle.
    """

    launch: BoundLaunch
    values: tuple[object, ...]
    """Every argument in the order of the signature; None where an address is to be filled in."""
    places: Mapping[str, int]
    """Where each parameter stands in `values`."""


def bound(loaded: Loaded, grid: tuple[int, int, int], cluster: int, arguments: Mapping[str, object]) -> Bound:
    """`arguments` names every parameter that is neither constant nor address."""
    known = {**dict(loaded.build.constants), **arguments}
    places = {name: place for place, (name, _) in enumerate(loaded.build.signature)}
    return Bound(launch=_launch(loaded, grid, cluster), values=tuple(known.get(name) for name in places), places=places)


def _launch(loaded: Loaded, grid: tuple[int, int, int], cluster: int) -> BoundLaunch:
    from triton import __version__ as version

    run, function = loaded.kernel.run, loaded.kernel.function
    (x, y, z), metadata = loaded.laid_out(grid, cluster)
    if version.startswith(_DIRECT) and type(run).__name__ == "CudaLauncher" and not _scratch_bytes(run):
        start, together, early = run.launch, run.launch_cooperative_grid, run.launch_pdl

        def direct(stream: int, values: list[object]) -> None:
            start(x, y, z, stream, function, together, early, None, None, metadata, None, None, None, *values)

        return direct

    def launch(stream: int, values: list[object]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *values)

    return launch


def _scratch_bytes(run: Any) -> int:
    return int(run.global_scratch_size) + int(run.profile_scratch_size)


class _Address:
    """Stands in for the tensor of a descriptor, without keeping its memory alive."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class Descriptors(dict[int, object]):
    """Tensor descriptors by address, made like `pattern` when first asked for."""

    def __init__(self, pattern: object) -> None:
        super().__init__()
        self._pattern = copy(pattern)
        self._pattern.base = None  # type: ignore[attr-defined]

    def __missing__(self, address: int) -> object:
        made = copy(self._pattern)
        made.base = _Address(address)  # type: ignore[attr-defined]
        if len(self) >= _DESCRIPTORS_KEPT:
            self.clear()
        self[address] = made
        return made
