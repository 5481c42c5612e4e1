"""The roofline of a device: its peak rates, and the lower bound of a product's time that follows from them.

The rates are options of the group `roofline`, one file per model of device with the source and the date of the rates:
an H100 and an H200 have the same `gfx`. A model without a file has no floor; `roofline_or_reference` gives the H200's
where times are only compared with each other, as in the order of candidates.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import check_at_least
from gemmpipe.core.files import read_regular
from gemmpipe.core.paths import shipped
from gemmpipe.family import Family, GemmSpec, KernelDefaults
from gemmpipe.family.problem import make_problem

GROUP = "roofline"
"""The group of options, and its node in a configuration: an entry per model of device, or per architecture."""
_REFERENCE = "h200"
_OLD_NAMES = {"sm_90": _REFERENCE}
"""Entries of version 0.1.0, which had one per architecture, and their current names."""
_MAX_BYTES = 1_000_000
_SUSTAINED_FLOPS, _SUSTAINED_FLOPS_PER_BYTE = 2e10, 100.0
_NO_DEFAULTS = KernelDefaults(dtype=None, out_dtype=None, bias=None)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Peak rates of a device: bytes and operations per second, the latter by the operands' width."""

    device: str | None = None
    """The model as the driver names it, or None: all models of the architecture that the entry's name is."""
    measured: bool = True
    """False: derived from a specification, as `source` says."""
    bytes_per_s: float
    flops_16_per_s: float
    flops_8_per_s: float
    flops_4_per_s: float | None = None
    """None: 4-bit operands are converted to 16 bits."""
    launch_us: float | None = None
    """The time of an empty kernel in a graph; None: not measured."""
    source: str = ""
    """The device and the software of the measurements, or what the rates are derived from."""
    date: str = ""

    def __post_init__(self) -> None:
        rates = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_per_s")}
        check_at_least(1.0, **rates)
        check_at_least(0.0, launch_us=self.launch_us)

    def flops_per_s(self, dtype: str) -> float:
        """The peak rate of operations on weights of a dtype; other types than 8 and 4 bits have the 16-bit rate."""
        if "8" in dtype:
            return self.flops_8_per_s
        return self.flops_4_per_s if "float4" in dtype and self.flops_4_per_s is not None else self.flops_16_per_s

    def bound_us(self, family: Family, spec: GemmSpec) -> float:
        """Bytes or operations at the peak rate, whichever takes longer, in us; without the launch."""
        bound_s = max(
            family.bytes_moved(spec) / self.bytes_per_s,
            family.flops(spec) / self.flops_per_s(spec.w_dtype),
        )
        return bound_s * 1e6

    def floor_us(self, family: Family, spec: GemmSpec, launch_us: float | None = None) -> float:
        """The lower bound of one call in us: `bound_us` plus a launch.

        It is as exact as the rates, and for experts as the mean number of experts that have rows: of one call it is
        3 % lower or higher with 32 rows for 128 experts (standard deviation).

        `launch_us` is the time of an empty kernel if it was measured with the product; None: the roofline's, or no
        launch where that is not known either.
        """
        launch_us = self.launch_us if launch_us is None else launch_us
        return self.bound_us(family, spec) + (launch_us or 0.0)


@functools.cache
def shipped_rooflines() -> Mapping[str, Roofline]:
    """The shipped options of the group, by their names."""
    import yaml  # not at the top: only command lines read YAML otherwise

    found: dict[str, Roofline] = {}
    for path in sorted((shipped("conf") / GROUP).glob("[!_.]*.yaml")):
        found |= rooflines_of({GROUP: yaml.safe_load(read_regular(path, "a file of options", _MAX_BYTES))})
    return found


def reaches_power_limit(family: Family, spec: GemmSpec) -> bool:
    """True for products that a GPU computes at lower clocks when one follows another, as the layers of a prompt do.

    On an H200 (2026-11-27) launches of such products take 5 to 20 % longer after 0.1 s, as 8 experts at 1,024 tokens
    (408 to 448 us), where the fastest configuration can be another one. Those that wait for memory (512 experts at
    1,024 tokens, 410 us) and short ones (512 x 1280 x 8192, 17 us) do not.
    """
    flops = family.flops(spec)
    return flops >= _SUSTAINED_FLOPS and flops >= _SUSTAINED_FLOPS_PER_BYTE * family.bytes_moved(spec)


def rooflines_of(config: Mapping[str, Any]) -> Mapping[str, Roofline]:
    """The rooflines of a composed configuration, such as `config` in a run's manifest, by the names of the entries.

    Those of version 0.1.0 are `rates` of the stage compare; a configuration without either has none. Raises ValueError
    or TypeError for a configuration that was edited by hand.
    """
    node = config.get(GROUP) or old_rates(config)
    return {
        str(name): Roofline(**{key: value for key, value in rates.items() if key != "_target_"})
        for name, rates in node.items()
    }


def old_rates(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`stages.compare.rates` of a configuration, as version 0.1.0 named the group; empty if it has none.

    The entries have their current names.
    """
    node: Any = config
    for key in ("stages", "compare", "rates"):
        node = node.get(key) if isinstance(node, Mapping) else None
    return {_OLD_NAMES.get(str(name), str(name)): node[name] for name in node} if isinstance(node, Mapping) else {}


def find_roofline(gfx: str, device: str | None, rooflines: Mapping[str, Roofline] | None = None) -> Roofline | None:
    """The roofline of a model of device, else that of its architecture, else None.

    `device` None or empty: a row that names no model; `rooflines` None: the shipped ones.
    """
    rooflines = shipped_rooflines() if rooflines is None else rooflines
    named = [each for each in rooflines.values() if device and each.device == device]
    common = rooflines.get(gfx)
    return named[-1] if named else common if common is not None and common.device is None else None


def roofline_or_reference(gfx: str, device: str, rooflines: Mapping[str, Roofline] | None = None) -> Roofline:
    """As `find_roofline`, or the H200's: for orders and shares, which hardly depend on it."""
    return find_roofline(gfx, device, rooflines) or shipped_rooflines()[_REFERENCE]


def floor_us(
    gfx: str,
    family: Family,
    row: "Problem | Mapping[str, object]",
    *,
    device: str | None,
    launch_us: float | None = None,
    rooflines: Mapping[str, Roofline] | None = None,
) -> float | None:
    """The floor of a problem, or of a table's row with the family's key columns, in us; no device is needed.

    None for a device without a roofline (`find_roofline`). `launch_us` as for `Roofline.floor_us`. Raises UserError for
    a row without the key of a product of the family.
    """
    roofline = find_roofline(gfx, device, rooflines)
    if roofline is None:
        return None
    problem = row if isinstance(row, Problem) else make_problem(family, row, _NO_DEFAULTS, gfx, "row")
    return roofline.floor_us(family, family.spec(problem), launch_us)
