"""The tables of limits.py: geometric means of ratios by M, and the figures of each product, from its rows."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping

from peers import label_of

from gemmpipe.family.roofline import find_roofline

READ, LARGE, LINEAR = PARTS = ("read", "large", "linear")
FIELDS = ("part", "M", "N", "K", "contender", "us", "floor_us", "sm_mhz", "power_w", "device", "note")
Row = dict[str, str]
Key = tuple[int, int, int]
Times = Mapping[str, float]
"""Microseconds by label, the first word of a contender; of several contenders the least."""
AIM = 1.03
"""The aim for many rows: DeepGEMM's time over ours."""
TENSOR = ("tensor", "tensor_fast")
SHOWN = {"deepgemm": "DeepGEMM", "deepgemm_aim": f"DeepGEMM/{AIM}", "tensor_fast": "tensor_fast", "tensor": "tensor"}
SHOWN |= {"row_fast": "row_fast", "row": "row"}
"""Labels over ours: torch's products with a scale per tensor or row, with fast sums or not, and DeepGEMM's."""


def times(rows: Iterable[Row]) -> dict[Key, dict[str, float]]:
    """By (M, N, K): the least time of each label, and the floor."""
    found: dict[Key, dict[str, float]] = {}
    for row in rows:
        if row["us"]:
            of = found.setdefault((int(row["M"]), int(row["N"]), int(row["K"])), {"floor": float(row["floor_us"])})
            of[label_of(row)] = min(float(row["us"]), of.get(label_of(row), math.inf))
    return dict(sorted(found.items()))


def ratio(above: str, below: str) -> Callable[[Times], float | None]:
    """The time of one label over another's; None where one is missing."""
    return lambda of: of[above] / of[below] if above in of and below in of else None


def over_bound(of: Times) -> float | None:
    """Ours over the longer of the read and the fastest product with a scale per tensor; None where one is missing."""
    products = [of[name] for name in TENSOR if name in of]
    return of["ours"] / max(of["read"], min(products)) if products and "read" in of and "ours" in of else None


def mean_text(ratios: list[float]) -> str:
    """Geometric mean (least to most) number; a dash for none."""
    if not ratios:
        return "-"
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f}) {len(ratios)}"


def table(found: Mapping[Key, Times], asked: Mapping[str, Callable[[Times], float | None]]) -> Iterator[str]:
    """A line per ratio, a column per M; ratios that no product has are left out."""
    sizes = sorted({key[0] for key in found})
    yield "| geomean (least to most) products | " + " | ".join(f"M={m}" for m in sizes) + " |"
    yield "|" + "---|" * (len(sizes) + 1)
    for name, of in asked.items():
        cells = [[value for key, each in found.items() if key[0] == m and (value := of(each))] for m in sizes]
        if any(cells):
            yield f"| {name} | " + " | ".join(map(mean_text, cells)) + " |"


def read_lines(rows: list[Row]) -> Iterator[str]:
    """Reads and ours over the floor; the products of M = 1; the fastest ways to read."""
    found = times(rows)
    asked = {"read over floor": ratio("read", "floor"), "ours over floor": ratio("ours", "floor")}
    asked |= {"ours over read": ratio("ours", "read"), "ours over max(read, tensor)": over_bound}
    asked |= {f"{name} over floor": ratio(name, "floor") for name in TENSOR}
    yield from table(found, asked)
    empties = [of["empty"] for of in found.values() if "empty" in of]
    if empties:
        yield f"empty kernel: median {statistics.median(empties):.2f} us ({min(empties):.2f} to {max(empties):.2f})"
    ways: dict[str, int] = {}
    for key, of in found.items():
        for row in rows:
            same = (int(row["M"]), int(row["N"]), int(row["K"])) == key and row["us"]
            if same and label_of(row) == "read" and float(row["us"]) == of["read"] and key[0] == min(found)[0]:
                ways[row["contender"]] = ways.get(row["contender"], 0) + 1
    yield "fastest ways to read: " + "; ".join(f"{count} {way}" for way, count in sorted(ways.items()))
    for (m, n, k), of in found.items():
        if m == min(found)[0]:
            cells = (f"{name} {of[name]:.2f}" for name in ("floor", "read", "ours") if name in of)
            yield f"  {m}x{n}x{k}: " + ", ".join(cells) + " us"


def with_aim(of: Times) -> Times:
    """The times, with the one that is aimed at."""
    return {**of, "deepgemm_aim": of["deepgemm"] / AIM} if "deepgemm" in of else of


def large_lines(rows: list[Row]) -> Iterator[str]:
    """The figures of each product, then the ratios by M, and how many aims are ahead of the library."""
    found = {key: with_aim(of) for key, of in times(rows).items()}
    states = {(row["M"], row["N"], row["K"], label_of(row)): row for row in rows if row["us"]}
    yield f"M N K | ours us, MHz, W | over ours: {', '.join(SHOWN.values())}"
    for key, of in found.items():
        if "ours" in of:
            state = states[(*map(str, key), "ours")]  # type: ignore[index]
            cells = [f"{of[name] / of['ours']:.3f}" if name in of else "-" for name in SHOWN]
            begin = f"{'x'.join(map(str, key))} | {of['ours']:.1f} {state['sm_mhz'] or '?'} {state['power_w'] or '?'}"
            yield f"{begin} | {' '.join(cells)}"
    yield from table(found, {f"{text} over ours": ratio(name, "ours") for name, text in SHOWN.items()})
    for m in sorted({key[0] for key in found}):
        yield from state_lines(m, [row for row in rows if row["M"] == str(m) and row["us"]])
        known = [of for key, of in found.items() if key[0] == m and "deepgemm" in of]
        for name, labels in (*((each, (each,)) for each in TENSOR), ("the faster of both", TENSOR)):
            bounds = [(of["deepgemm_aim"], min(of[each] for each in labels)) for of in known if {*labels} <= {*of}]
            ahead = sum(aim < bound for aim, bound in bounds)
            yield f"M={m}: DeepGEMM/{AIM} is less than {name} on {ahead} of {len(bounds)} products"


def state_lines(m: int, rows: list[Row]) -> Iterator[str]:
    """The medians of clock and power by label."""
    cells = []
    for label in dict.fromkeys(label_of(row) for row in rows):
        of = [row for row in rows if label_of(row) == label and row["sm_mhz"] and row["power_w"]]
        if of:
            mhz, watt = (statistics.median(float(row[name]) for row in of) for name in ("sm_mhz", "power_w"))
            cells.append(f"{label} {mhz:.0f} MHz {watt:.0f} W")
    if cells:
        yield f"M={m}: " + ", ".join(cells)


def linear_lines(rows: list[Row]) -> Iterator[str]:
    """The pair over ours, over our product alone, and over the read."""
    asked = {"vLLM's pair over ours": ratio("vllm", "ours")}
    asked |= {"vLLM's pair over our product alone": ratio("vllm", "alone")}
    asked |= {"vLLM's pair over the read": ratio("vllm", "read"), "ours over our product alone": ratio("ours", "alone")}
    asked |= {"our product alone over the read": ratio("alone", "read")}
    yield from table(times(rows), asked)


def failures(rows: list[Row]) -> Iterator[str]:
    """A line per label and reason of contenders without a time."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if not row["us"]:
            counts[label_of(row), row["note"]] = counts.get((label_of(row), row["note"]), 0) + 1
    yield from (f"{label}: {count} without a time: {note}" for (label, note), count in counts.items())


def lines(rows: list[Row], parts: Iterable[str]) -> Iterator[str]:
    """The tables of the parts."""
    for device in dict.fromkeys(row["device"] for row in rows):
        roofline = find_roofline("sm_90", device)
        known = "has none of its own" if roofline is None else "measured" if roofline.measured else "derived"
        yield f"device {device}; rates of the floor: {known}"
    makers = {READ: read_lines, LARGE: large_lines, LINEAR: linear_lines}
    for part in parts:
        of = [row for row in rows if row["part"] == part]
        yield f"\n{part}: {len({(row['M'], row['N'], row['K']) for row in of})} products"
        if any(row["us"] for row in of):
            yield from makers[part](of)
        yield from failures(of)
