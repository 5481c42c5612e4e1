"""Tables of vllm_plugin.py, from its records: rates and ratios, the prediction, kernels of a step, the reference."""

import csv
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_models import DECODES, PREFILL, products

Record = dict[str, Any]
"""A line of results.jsonl: model, kind, do, repeat or what, result."""
KINDS = ("default", "plugin")
WHATS = (*map(str, DECODES), "prefill", "prefill_load")
COLUMNS = ("model", "what", "default_tokens_per_s", "plugin_tokens_per_s", "ratio", "lowest", "highest", "predicted")
COLUMNS += ("default_step_us", "plugin_step_us", "predicted_saving_us", "repeats")
GROUPS = (
    ("attention", r"flash|fmha|attention|attn|reshape_and_cache|rotary|rope|prepare_varlen"),
    (
        "products",
        r"gemm|nvjet|cutlass|cublas|splitk|split_sum|_mm_|matmul|fused_moe|experts|w8a8|blockscale|sliced|streamed",
    ),
    ("products", r"linear_kernel|warp_specialised|skinny|gemv|product|\bdense|grouped|stage_"),
    ("quantisers", r"quant|amax|fp8e4"),
    ("norms", r"rms|norm|rsqrt"),
    ("experts' order", r"moe_align|topk|count_and_sort|silu|act_and_mul"),
)
"""(group, names), in the order of the search: a norm that inductor joined with a quantiser is a quantiser."""
SHOWN = 12


def chosen(records: Iterable[Record], **wanted: object) -> list[Record]:
    """The records with these fields."""
    return [each for each in records if all(each.get(name) == value for name, value in wanted.items())]


def rates(record: Record) -> dict[str, float]:
    """Tokens per second of one measurement: what -> median."""
    found = {batch: statistics.median(each) for batch, each in record["result"]["decode"].items()}
    return found | {what: statistics.median(record["result"][what]) for what in WHATS if what in record["result"]}


def step_us(what: str, rate: float) -> float:
    """The time of a step, or of the prefill, at this rate."""
    return 1e6 * (PREFILL if what.startswith("prefill") else int(what)) / rate


def read_predictions(path: Path | None) -> dict[tuple[int, int, int, str], float]:
    """(N, K, M, dtype) -> us that our product is faster; dtype is empty where the file has none."""
    if path is None:
        return {}
    with path.open(newline="") as stream:
        return {
            (int(row["N"]), int(row["K"]), int(row["M"]), row.get("dtype") or ""): float(row["engine_us"])
            - float(row["ours_us"])
            for row in csv.DictReader(stream)
            if row["engine_us"] and row["ours_us"]
        }


def predicted_saving(
    config: dict[str, Any], what: str, known: dict[tuple[int, int, int, str], float]
) -> tuple[float, list[str]]:
    """(us that a step gains by its products, the layers without a line in the file)."""
    total, absent = 0.0, []
    for each in products(config):
        rows = PREFILL if what.startswith("prefill") else int(what)
        if each.layer == "lm_head" and what.startswith("prefill"):
            rows = 1
        keys = [(each.n, each.k, rows, dtype) for dtype in (each.dtype, "")]
        found = next((known[key] for key in keys if key in known and (key[3] or each.dtype != "experts")), None)
        if found is None:
            absent.append(f"{each.layer} {each.n}x{each.k}")
        else:
            total += each.count * found
    return total, absent


def ratio_rows(
    records: Sequence[Record], model: str, config: dict[str, Any], known: dict[tuple[int, int, int, str], float]
) -> Iterator[list[object]]:
    """A line of COLUMNS for each batch and the prefill; repetitions that both kinds have are compared."""
    by_repeat = {
        kind: {r["repeat"]: rates(r) for r in chosen(records, model=model, kind=kind, do="measure")} for kind in KINDS
    }
    both = sorted(by_repeat["default"].keys() & by_repeat["plugin"].keys())
    if not both:
        return
    for what in by_repeat["default"][both[0]]:
        pairs = [(by_repeat["default"][repeat][what], by_repeat["plugin"][repeat][what]) for repeat in both]
        ratios = [after / before for before, after in pairs]
        before, after = (statistics.median(values) for values in zip(*pairs, strict=True))
        saving, absent = predicted_saving(config, what, known)
        complete = bool(known) and not any(not each.startswith(("lm_head", "gate ")) for each in absent)
        step = step_us(what, before)
        predicted = f"{step / (step - saving):.3f}" if known and len(absent) < len(products(config)) else ""
        yield [
            *(model, what, f"{before:.1f}", f"{after:.1f}"),
            *(f"{each:.3f}" for each in (statistics.median(ratios), min(ratios), max(ratios))),
            predicted + ("" if complete or not predicted else "*"),
            *(f"{each:.0f}" for each in (step, step_us(what, after))),
            f"{saving:.0f}" if predicted else "",
            len(both),
        ]


def print_ratios(rows: Sequence[Sequence[object]], path: Path) -> None:
    """The table, and the same as a CSV file."""
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([COLUMNS, *rows])
    short = ("model", "what", "default", "plugin", "ratio", "lowest", "highest", "predicted")
    for row in [(*short, "step us", "step us", "predicted gain", "repeats"), *rows]:
        print(f"{row[0]!s:14} {row[1]!s:>12}" + "".join(f" {value!s:>9}" for value in row[2:]))
    if any(str(row[7]).endswith("*") for row in rows):
        print("*: the file of --predict has no line for some of the layers; they count as equal")


def group_of(kernel: str) -> str:
    """The group of a kernel, by its name."""
    lowered = kernel.lower()
    return next((group for group, names in GROUPS if re.search(names, lowered)), "others")


def profile_text(
    records: Sequence[Record], model: str, what: str, steps_us: dict[str, float]
) -> tuple[list[str], list[str]]:
    """(all lines, the short form) of the kernels of a step, default and plug-in side by side; empty without both."""
    given = {kind: chosen(records, model=model, kind=kind, do="profile", what=what) for kind in KINDS}
    if not all(given.values()):
        return [], []
    before, after = (given[kind][-1]["result"] for kind in KINDS)
    zero = [0.0, 0.0, 0.0]

    def difference(name: str) -> float:
        first, second = before.get(name, zero), after.get(name, zero)
        return float(second[1] + second[2] - first[1] - first[2])

    def line(name: str) -> str:
        sides = (before.get(name, zero), after.get(name, zero))
        shown = " |".join(f"{n:7.1f}{us:9.1f}{gap:8.1f}" for n, us, gap in sides)
        return f"{shown} |{difference(name):9.1f}  {name}"

    names = sorted({*before, *after}, key=lambda name: -abs(difference(name)))
    sums = [
        f"{model} {what}: per step: launches, us, us waited before | plug-in likewise | plug-in - default (both us)"
    ]
    for group in (*dict.fromkeys(group for group, _ in GROUPS), "others"):
        totals = [
            [sum(v[i] for n, v in side.items() if group_of(n) == group) for i in range(3)] for side in (before, after)
        ]
        shown = " |".join(f"{n:7.1f}{us:9.1f}{gap:8.1f}" for n, us, gap in totals)
        sums.append(f"{shown} |{sum(totals[1][1:]) - sum(totals[0][1:]):9.1f}  = {group}")
    for kind, side in zip(KINDS, (before, after), strict=True):
        busy = sum(values[1] for values in side.values())
        step = steps_us.get(kind)
        gaps = "" if step is None else f", step {step:.1f} us, gaps {step - busy:.1f} us"
        sums.append(f"  {kind}: kernels {busy:.1f} us{gaps}")
    grouped = sorted(names, key=group_of)
    return [*sums, *(f"{line(name)}  [{group_of(name)}]" for name in grouped)], [*sums, *map(line, names[:SHOWN])]


def deviation(values: Sequence[Sequence[float | None]], wanted: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """(mean, maximum) of absolute differences, and how many values are absent."""
    pairs = [(one, two) for ones, twos in zip(values, wanted, strict=True) for one, two in zip(ones, twos, strict=True)]
    found = [abs(one - two) for one, two in pairs if one is not None]
    return (statistics.fmean(found), max(found), len(pairs) - len(found)) if found else (0.0, 0.0, len(pairs))


def reference_lines(records: Sequence[Record], model: str) -> Iterator[str]:
    """Deviations of default and plug-in from the reference in fp32, by the number of rows of the products."""
    given = {kind: chosen(records, model=model, kind=kind, do="reference") for kind in KINDS}
    held = {kind: each[-1]["result"] for kind, each in given.items() if each}
    for kind, result in held.items():
        for rows, each in result["rows"].items():
            mean, largest, absent = deviation(each["values"], result["reference"])
            same = sum(first == top[0] for first, top in zip(each["first"], result["tokens"], strict=True))
            note = f", {absent} tokens not reported" if absent else ""
            start = f"{model} {kind}, {rows} rows: from the reference: mean {mean:.4f}, largest {largest:.4f}"
            yield f"{start}; first token {same} of {len(each['first'])}{note}"
    if len(held) == len(KINDS):
        one, two = (held[kind] for kind in KINDS)
        same_weights = one["tokens"] == two["tokens"]
        largest = deviation(one["reference"], two["reference"])[1]
        yield f"{model}: the two references differ by {largest:.1e}{'' if same_weights else ': NOT the same weights'}"


def print_all(
    records: Sequence[Record], configs: dict[str, dict[str, Any]], folder: Path, predict: Path | None
) -> None:
    """Everything that the records hold; texts of profiles go to files too."""
    known = read_predictions(predict)
    rows = [row for model, config in configs.items() for row in ratio_rows(records, model, config, known)]
    print_ratios(rows, folder / "summary.csv")
    for model in configs:
        for text in reference_lines(records, model):
            print(text)
        for what in WHATS:
            measured = {row[1]: row for row in rows if row[0] == model}.get(what)
            steps = {} if measured is None else dict(zip(KINDS, map(float, map(str, measured[8:10])), strict=True))
            full, short = profile_text(records, model, what, steps)
            if full:
                (folder / f"profile-{model}-{what}.txt").write_text("\n".join(full) + "\n")
                print("\n".join(text[:180] for text in short))
