"""The figures of a finished run from its selections: speed-up by regime of M, library paths, winners, near ties.

A speed-up is the time of the best library of the same run over the time of the choice. A library that has no such
product is not compared with: torch then converts the operands and multiplies the copies, which no engine runs.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmpipe.core.data import NOISY, Problem, median
from gemmpipe.family.roofline import find_roofline
from gemmpipe.tables.merge import BOTH_CLOCKS, SHARED_CPU, SHARED_GPU

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family, GemmSpec
    from gemmpipe.family.roofline import Roofline

REGIMES: tuple[tuple[str, int, float], ...] = (
    ("M <= 64", 1, 64),
    ("M 65 to 256", 65, 256),
    ("M 257 to 1023", 257, 1023),
    ("M >= 1024", 1024, math.inf),
)
"""Regimes of M: label, least and largest M. Few rows are bound by memory, many by arithmetic."""

DIRECT, PADDED, CONVERTED, NO_LIBRARY = "direct", "padded", "converted", ""
"""How the library computes a product: as it is stored; with rows padded to a multiple that it requires; only after
conversion of the operands to a wider type; not at all."""
COMPARABLE = frozenset({DIRECT, PADDED})
"""The kinds of library paths that speed-ups are stated over."""

_CONVERTING = "torch"  # the backend that multiplies any operands, if need be through a conversion
_DIRECT_METHODS = frozenset({"mm", "int_mm", "grouped_mm", "scaled_grouped_mm"})
SHARED = (SHARED_CPU, SHARED_GPU)
"""Words in the policy of a row that was timed while other processes used the device."""
LOW_SHARE = 0.6
"""A choice below this share of the floor leaves much to gain."""

PRODUCTS = (
    "problem",
    "rows",
    "libtype",
    "own",
    "kernelName",
    "config",
    "us",
    "tflops",
    "p20_us",
    "p80_us",
    "library",
    "library_us",
    "stays",
    "either_order",
    "speedup",
    "speedup_low",
    "speedup_high",
    "floor_us",
    "floor_share",
    "floor_measured",
    "near_ties",
    "runner_up",
    "noise_pct",
    "noisy",
    "weight",
    "policy",
)
"""Columns of `product_results` after the family's key columns. `rows` is M, `own` is True for a kernel of the family,
`library` one of DIRECT, PADDED, CONVERTED, NO_LIBRARY; `stays` is True if the choice is that library path itself, which
is no speed-up; `speedup` is `library_us` over `us`, paired by round where that
is stored (older tables have the interval of the paired ratio alone: its geometric middle), else of the medians;
`either_order` is True if x's block scales may come in either memory order: a library's time then contains its copy;
`floor_share` is `floor_us`, the least time by the device's rates, over `us`: 1 is the fastest that is possible;
`floor_measured` is False where these rates are derived from a specification;
`policy` is how the row was timed (`is_shared`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A geometric mean with its least and largest value."""

    mean: float
    least: float
    most: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RegimeResult:
    """The products of one regime of M."""

    label: str
    products: int
    speedup: Spread | None
    """Over the best library of the run; None if no library computes any of these products."""
    padded: int
    """Products compared with the library's time at the M that it pads to."""
    stay: int
    """Products whose choice is the library path itself, and that `speedup` leaves out."""
    converted: int
    """Products that the library computes after conversion alone, and that `speedup` leaves out."""
    shared: int
    """Products of `speedup` that were timed while other processes used the device."""
    floor_share: Spread | None
    """Share of the floor that the choices reach; None without rates of the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """The figures of all products of a run."""

    products: int
    own: int
    """Products with a kernel of the family as the choice."""
    winners: tuple[tuple[str, int], ...]
    """(backend, products), the most frequent first."""
    regimes: tuple[RegimeResult, ...]
    converted: Spread | None
    """Speed-up over torch's conversion and product, of the products that no library computes directly and whose choice
    is another one."""
    stay: int
    """Products whose choice is the library path itself: no speed-up counts them."""
    stay_converted: int
    """Products whose choice is torch's conversion and product itself."""
    without_library: int
    """Products without a timed library path."""
    near_ties: int
    """Products with a candidate that the run cannot tell from the choice."""
    noisy: int
    noise_pct: float | None
    """Median over the products of the difference between choice and runner-up that the run cannot resolve; None where
    less than half of the products have a runner-up."""
    shared: int
    """Products that were timed while other processes used the device."""
    worst: tuple[str, float] | None
    """The product with the least share of the floor (problem id, share); None without rates of the device."""


def product_results(
    selections: "pd.DataFrame", family: "Family", rooflines: "Mapping[str, Roofline] | None" = None
) -> "pd.DataFrame":
    """One row per problem of a selections table, or of a tuned table's rows: the family's key and `PRODUCTS`.

    Rows of buckets (`format` not empty) are left out. Missing columns give missing values. `rooflines` are the rates of
    devices (a run's own: `rooflines_of(manifest["config"])`); None: the shipped ones.
    """
    import pandas as pd

    own = selections[selections["format"].fillna("") == ""] if "format" in selections else selections
    keys = [column.name for column in family.key_columns]
    labels = {implementation.label for implementation in family.implementations}
    records: Sequence[Mapping[Hashable, Any]] = own.to_dict("records")
    rows = [{**_key_cells(record, keys), **_result_cells(record, family, labels, rooflines)} for record in records]
    _pad_libraries(rows, [k for k in keys if k != family.rows_column])
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*keys, *PRODUCTS])))


def run_figures(products: "pd.DataFrame") -> RunFigures:
    """The figures of the products of `product_results`."""
    is_converted, stays = products["library"] == CONVERTED, products["stays"].astype(bool)
    converted = [s for s in products.loc[is_converted & ~stays, "speedup"] if not _is_missing(s)]
    noise = [float(value) for value in products["noise_pct"] if not _is_missing(value)]
    shares = {p: s for p, s in zip(products["problem"], products["floor_share"], strict=True) if not _is_missing(s)}
    return RunFigures(
        products=len(products),
        own=int(products["own"].sum()),
        winners=tuple(Counter(products["libtype"]).most_common()),
        regimes=regime_results(products),
        converted=spread(converted),
        stay=int((stays & ~is_converted).sum()),
        stay_converted=int((stays & is_converted).sum()),
        without_library=int((products["library"] == NO_LIBRARY).sum()),
        near_ties=sum(1 for ties in products["near_ties"] if not _is_missing(ties) and ties > 0),
        noisy=int(products["noisy"].sum()),
        noise_pct=median(noise) if 2 * len(noise) >= len(products) > 0 else None,
        shared=sum(map(is_shared, products["policy"])),
        worst=min(shares.items(), key=lambda item: item[1], default=None),
    )


def regime_results(products: "pd.DataFrame") -> tuple[RegimeResult, ...]:
    """The regimes of M that have products, in ascending order."""
    found = []
    for label, low, high in REGIMES:
        part = products[(products["rows"] >= low) & (products["rows"] <= high)]
        if not len(part):
            continue
        comparable, stays = part["library"].isin(COMPARABLE), part["stays"].astype(bool)
        compared = part[comparable & ~stays]
        found.append(
            RegimeResult(
                label=label,
                products=len(part),
                speedup=spread(s for s in compared["speedup"] if not _is_missing(s)),
                padded=int((part["library"] == PADDED).sum()),
                stay=int((comparable & stays).sum()),
                converted=int((part["library"] == CONVERTED).sum()),
                shared=sum(map(is_shared, compared["policy"])),
                floor_share=spread(s for s in part["floor_share"] if not _is_missing(s)),
            )
        )
    return tuple(found)


def derived_rates_text(products: "pd.DataFrame") -> str:
    """What the floor is not, for products of `product_results`; empty where it has measured rates alone."""
    derived = any(measured is False for measured in products["floor_measured"])
    return "the floor's rates are derived from a specification, not measured" if derived else ""


def both_clocks_text(policies: Collection[object]) -> str:
    """What the times of products at a GPU's power limit are, from the policies of all products; empty without one."""
    count = sum(BOTH_CLOCKS in str(policy or "").split() for policy in policies)
    if not count:
        return ""
    of = "all" if count == len(policies) else f"{count:,} of {len(policies):,}"
    times = f"the times of {of} products are means" if len(policies) > 1 else "the time is the mean"
    return f"{times} of full and sustained clocks"


def is_shared(policy: object) -> bool:
    """True for the policy of a row that was timed while other processes used the device."""
    return not set(SHARED).isdisjoint(str(policy or "").split())


def spread(values: Iterable[float]) -> Spread | None:
    """The geometric mean, least and largest of positive values; None without a value."""
    given = [float(value) for value in values]
    if not given:
        return None
    mean = math.exp(sum(map(math.log, given)) / len(given))
    return Spread(mean=mean, least=min(given), most=max(given), count=len(given))


def _key_cells(record: Mapping[Hashable, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {name: None if _is_missing(value := record.get(name)) else value for name in keys}


def _result_cells(
    record: Mapping[Hashable, Any], family: "Family", own: set[str], rooflines: "Mapping[str, Roofline] | None"
) -> dict[str, Any]:
    """The cells of one selection, compared with its own library path."""
    us, library_us = (_number(record.get(name)) for name in ("us", "baseline_us"))
    p20_us, p80_us = (_number(record.get(name)) for name in ("p20_us", "p80_us"))
    low, high = (_number(record.get(name)) for name in ("ratio_low", "ratio_high"))
    paired = _number(record.get("ratio")) or (math.sqrt(low * high) if low and high else None)
    ratio = paired or (us / library_us if us and library_us else None)
    problem = problem_of(record, family)
    device = record.get("device")
    roofline = find_roofline(str(record.get("gfx")), None if _is_missing(device) else str(device), rooflines)
    floor_us = roofline.floor_us(family, family.spec(problem)) if roofline is not None else None
    return {
        "problem": problem.id,
        "rows": problem.rows,
        **{name: record.get(name) for name in ("libtype", "kernelName", "config", "runner_up")},
        "own": record.get("libtype") in own,
        "us": us,
        "tflops": family.flops(family.spec(problem)) / us / 1e6 if us else None,
        "p20_us": p20_us,
        "p80_us": p80_us,
        "library": _library_kind(record, family.spec(problem)) if library_us else NO_LIBRARY,
        "library_us": library_us,
        "stays": record.get("libtype") not in own and _is_library_path(record, us, library_us),
        "either_order": len(family.spec(problem).x_scale_orders) > 1,
        "speedup": 1 / ratio if ratio else None,
        "speedup_low": 1 / high if high else None,
        "speedup_high": 1 / low if low else None,
        "floor_us": floor_us,
        "floor_share": floor_us / us if floor_us and us else None,
        "floor_measured": roofline.measured if roofline is not None else None,
        "near_ties": _number(record.get("near_ties")),
        "noise_pct": _number(record.get("noise_pct")),
        "noisy": bool(p20_us and p80_us and p80_us > NOISY * p20_us),
        "weight": _number(record.get("weight")),
        "policy": None if _is_missing(record.get("policy")) else record["policy"],
    }


def problem_of(record: Mapping[Hashable, Any], family: "Family") -> Problem:
    """The problem of a row with the family's key; missing optional cells have their defaults."""
    from gemmpipe.family.problem import parse_key_value

    gfx = str(record.get("gfx") or "")
    key = []
    for column in family.key_columns:
        value = record.get(column.name)
        missing = _is_missing(value)
        key.append((column.name, column.default if missing else parse_key_value(column, _whole(value), gfx)))
    return family.problem(tuple(key))


def _whole(value: Any) -> Any:
    """A float without a fraction as an int: a column of integers with a missing cell is read as floats."""
    plain = value.item() if hasattr(value, "item") else value
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


def _library_kind(record: Mapping[Hashable, Any], spec: "GemmSpec") -> str:
    """How the baseline computes this product. Tables name no baseline: there the rules of its operands decide."""
    if spec.x_scale is None and spec.w_scale is None:
        return DIRECT  # a conversion is then a choice of the library's fastest path, not the only path
    name, method = record.get("baseline"), _method(record)
    if method is not None:
        return DIRECT if method in _DIRECT_METHODS else CONVERTED
    if not _is_missing(name):
        return CONVERTED if name == _CONVERTING and spec.x_dtype != "int8" else DIRECT
    return DIRECT if has_direct_path(spec, str(record.get("gfx"))) else CONVERTED


def _is_library_path(record: Mapping[Hashable, Any], us: float | None, library_us: float | None) -> bool:
    """True for a choice that has the times of its library path, and is of the same backend where that is recorded."""
    name, bounds = record.get("baseline"), [_number(record.get(each)) for each in ("ratio_low", "ratio_high")]
    same = _is_missing(name) or name == record.get("libtype")
    return us is not None and us == library_us and same and all(bound in (None, 1) for bound in bounds)


def _method(record: Mapping[Hashable, Any]) -> str | None:
    """torch's method of the baseline; None if another library computed it, or it is not recorded."""
    import json

    text = record.get("baseline_config")
    if _is_missing(text) or record.get("baseline") != _CONVERTING:
        return None
    try:
        knobs = json.loads(str(text))
    except ValueError:
        return None
    method = knobs.get("method") if isinstance(knobs, dict) else None
    return method if isinstance(method, str) else None


def is_multiplied_as_stored(spec: "GemmSpec", gfx: str) -> bool:
    """True if a library multiplies operands like these on this architecture as they are stored, without conversion."""
    return _library_kind({"gfx": gfx}, spec) == DIRECT


def has_direct_path(spec: "GemmSpec", gfx: str) -> bool:
    """True if a library multiplies scaled operands like these on this architecture as they are stored."""
    from gemmpipe.backends.scaled_mm import scaled_mm_violation
    from gemmpipe.core.data import Device

    if gfx.startswith("cpu") or spec.x_dtype == "int8":
        return spec.x_dtype == "int8"
    kind = "hip" if gfx.startswith("gfx") else "cuda"
    device = Device(
        kind=kind,
        index=0,
        name="",
        gfx=gfx,
        cu_num=1,
        shared_bytes=0,
        cache_bytes=0,
        warp_size=64 if kind == "hip" else 32,
    )
    return scaled_mm_violation(spec, device) is None


def _pad_libraries(rows: list[dict[str, Any]], shape: Sequence[str]) -> None:
    """Compare rows without a direct library path with the library's time at the padded M, where the run has it.

    Callers of such a library pad the rows to its multiple: the product of that size is what they wait for.
    """
    from gemmpipe.backends.scaled_mm import ROW_MULTIPLE

    direct = {(*(row[k] for k in shape), row["rows"]): row["library_us"] for row in rows if row["library"] == DIRECT}
    for row in rows:
        padded = -(-row["rows"] // ROW_MULTIPLE) * ROW_MULTIPLE
        library_us = direct.get((*(row[k] for k in shape), padded))
        if row["library"] == CONVERTED and padded != row["rows"] and library_us and row["us"]:
            row |= {"library": PADDED, "library_us": library_us, "speedup": library_us / row["us"], "stays": False}
            row |= {"speedup_low": None, "speedup_high": None}  # not timed in the same rounds


def _number(value: Any) -> float | None:
    """A finite number from 0 on, or None: tables may be anyone's."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _is_missing(value: Any) -> bool:
    return value is None or value != value or value == ""
