"""The table of vllm_modes.py: each step with the plug-in compared with the same step without it."""

import csv
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXPECTED = {
    "dense_fp8": {"a8w8_blockscale", "a16w16"},
    "dense_bf16": {"a16w16"},
    "mixture_fp8": {"a8w8_blockscale", "a16w16", "fmoe"},
}
"""Families whose rows must answer; a16w16 is the output head in models in fp8."""
MOE_FAMILY = "fmoe"
CHANGED = {"updated", "loaded", "adapter", "replaced"}
"""Steps with other weights than the first."""
LIMITS = {"dense_fp8": 0.15, "dense_bf16": 0.15, "mixture_fp8": 0.4}
"""Mean differences between plug-in off and on above which a step deviates: a router's choices differ by rounding."""
OWN_LIMIT, CHANGED_LIMIT = 0.02, 0.5
"""Limits of one process: above the first its weights changed, below the second they did not."""
TOP, KERNELS = 20, 12


@dataclass(frozen=True, kw_only=True)
class Run:
    """A process: a model in a mode, with the plug-in in a scope."""

    model: str
    mode: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.mode}-{self.kind}"

    @property
    def gpus(self) -> int:
        return 2 if self.mode == "tp2" else 1


@dataclass(kw_only=True)
class Outcome:
    """The result of a run."""

    record: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    took_s: float = 0.0


def differences(ones: Sequence[Any], others: Sequence[Any]) -> tuple[list[float], list[float], int, int]:
    """(differences of the first token, of the following, equal tokens, all tokens) of two lists of outputs.

    A token is compared while all tokens before it are equal. One that is absent from the other's log-probabilities
    counts with the least of those.
    """
    first, following, equal, count = [], [], 0, 0
    for one, other in zip(ones, others, strict=True):
        for at, (here, there) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            count += 1
            if one["tokens"][:at] != other["tokens"][:at]:
                continue
            equal += one["tokens"][at] == other["tokens"][at]
            least = min(there.values())
            top = sorted(here, key=lambda token: -here[token])[:TOP]
            (first if at == 0 else following).extend(abs(here[token] - there.get(token, least)) for token in top)
    return first, following, equal, count


def families_of(steps: Mapping[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    """(family -> keys that tuned rows answered, family -> keys of the engine) in a worker."""
    tuned: dict[str, int] = {}
    engine: dict[str, int] = {}
    for key, step in steps.items():
        counted = tuned if step in ("exact", "padded") else engine
        family = key.split()[0]
        counted[family] = counted.get(family, 0) + 1
    return tuned, engine


def wanted_families(run: Run) -> set[str]:
    """The families whose rows must answer in a run."""
    wanted = EXPECTED[run.model]
    if run.mode == "lora":  # experts with LoRA are vLLM's
        wanted = wanted - {MOE_FAMILY}
    return {"linear": wanted - {MOE_FAMILY}, "moe": wanted & {MOE_FAMILY}, "off": set()}.get(run.kind, wanted)


def step_row(run: Run, step: str, own: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: a step with the plug-in, and the same without it."""
    row: dict[str, Any] = {"model": run.model, "mode": run.mode, "scope": run.kind, "step": step, "verdict": ""}
    here, there = (each["steps"].get(step, {"error": "no such step"}) for each in (own, base))
    if "error" in here or "error" in there:
        both = "error" in here and "error" in there
        row["verdict"] = f"{'off fails too' if both else 'off fails' if 'error' in there else 'FAILS'}: " + str(
            here.get("error") or there.get("error")
        )
        return row
    first, following, equal, count = differences(there["outputs"], here["outputs"])
    moved = [
        statistics.fmean(differences(each["steps"]["first"]["outputs"], each["steps"][step]["outputs"])[0])
        if "outputs" in each["steps"]["first"]
        else float("nan")
        for each in (base, own)
    ]
    row |= {
        "prefill_mean": statistics.fmean(first),
        "prefill_max": max(first),
        "decode_mean": statistics.fmean(following) if following else float("nan"),
        "decode_max": max(following, default=float("nan")),
        "tokens": f"{equal}/{count}",
        "own_off": moved[0],
        "own_on": moved[1],
    }
    row["verdict"] = verdict(run, step, row)
    return row


def verdict(run: Run, step: str, row: Mapping[str, Any]) -> str:
    """`ok`, or what is wrong."""
    limit = LIMITS[run.model]
    found = []
    if not row["prefill_mean"] <= limit or row["decode_mean"] > limit:
        found.append("DEVIATES")
    if step in CHANGED:
        found += [f"{kind} UNCHANGED" for kind in ("off", "on") if row[f"own_{kind}"] < CHANGED_LIMIT]
    elif step != "first":
        found += [f"{kind} CHANGED" for kind in ("off", "on") if row[f"own_{kind}"] > OWN_LIMIT]
    return ", ".join(found) or "ok"


def table_rows(outcomes: Mapping[Run, Outcome]) -> Iterator[dict[str, Any]]:
    """The rows of all runs with the plug-in; `again` is a row only if it is wrong."""
    for run, outcome in outcomes.items():
        if run.kind == "off":
            continue
        base = outcomes.get(Run(model=run.model, mode=run.mode, kind="off"), Outcome(error="not run"))
        if outcome.error or base.error:
            both = outcome.error and base.error
            text = f"off {'fails too' if both else 'fails'}" if base.error else "FAILS"
            place = {"model": run.model, "mode": run.mode, "scope": run.kind, "step": "start"}
            yield {**place, "verdict": f"{text}: {outcome.error or base.error}"}
            continue
        workers = [families_of(steps) for steps in outcome.record.get("dispatch") or [{}]]
        tuned, engine = workers[0]
        wanted = wanted_families(run)
        absent = sorted(wanted - set.intersection(*(set(answered) for answered, _ in workers)))
        more = sorted(set.union(*(set(answered) for answered, _ in workers)) - wanted)
        for step in outcome.record["steps"]:
            row = step_row(run, step, outcome.record, base.record)
            row["keys"] = f"{sum(tuned.values())}/{sum(engine.values())}"
            if step == "first" and (absent or more):
                text = [f"NO ROWS: {each}" for each in absent] + [f"NOT IN SCOPE: {each}" for each in more]
                row["verdict"] = ", ".join([*text, *([] if row["verdict"] == "ok" else [row["verdict"]])])
            if step != "again" or row["verdict"] != "ok":
                yield row


COLUMNS = ("model", "mode", "scope", "step", "keys", "prefill_mean", "prefill_max", "decode_mean", "decode_max")
COLUMNS += ("tokens", "own_off", "own_on", "verdict")
TITLES = ("model", "mode", "scope", "keys", "prefill", "max", "decode", "max", "tokens", "same", "other", "verdict")
WIDTHS = (11, 6, 8, 7, 7, 7, 7, 7, 8, 7, 7, 70)
MAX_PROBLEMS = 14
"""Lines for steps that are not ok."""


def summary(rows: Sequence[Mapping[str, Any]]) -> list[object]:
    """The cells of one run: the largest of its steps; `same`, `other`: how far its own weights moved its results."""
    first = rows[0]
    found: list[object] = [first["model"], first["mode"], first["scope"], first.get("keys", "")]
    for name in ("prefill_mean", "prefill_max", "decode_mean", "decode_max"):
        values = [row[name] for row in rows if name in row]
        found.append(max(values) if values else "")
    pairs = [row["tokens"].split("/") for row in rows if "tokens" in row]
    found.append("/".join(str(sum(int(pair[at]) for pair in pairs)) for at in (0, 1)) if pairs else "")
    same = [row["own_on"] for row in rows if "own_on" in row and row["step"] not in CHANGED]
    other = [row["own_on"] for row in rows if "own_on" in row and row["step"] in CHANGED]
    found += [max(same) if same else "", min(other) if other else ""]
    wrong = [row for row in rows if row["verdict"] != "ok"]
    steps = " ".join(row["step"] for row in rows)
    found.append(f"ok: {steps}" if not wrong else f"{len(wrong)} of {len(rows)} steps not ok")
    return found


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line per run, and one per step that is not ok."""

    def line(cells: Iterable[object]) -> str:
        texts = (f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells)
        return " ".join(f"{cell:{width}}"[:width] for cell, width in zip(texts, WIDTHS, strict=True)).rstrip()

    print(line(TITLES))
    for run in dict.fromkeys((row["model"], row["mode"], row["scope"]) for row in rows):
        print(line(summary([row for row in rows if (row["model"], row["mode"], row["scope"]) == run])))
    wrong = [row for row in rows if row["verdict"] != "ok"]
    for row in wrong[:MAX_PROBLEMS]:
        own = f", own {row['own_off']:.3f} {row['own_on']:.3f}" if "own_on" in row else ""
        means = f", prefill {row['prefill_mean']:.3f}, decode {row['decode_mean']:.3f}" if "prefill_mean" in row else ""
        print(f"{row['model']} {row['mode']} {row['scope']} {row['step']}: {row['verdict']}{means}{own}"[:190])
    if len(wrong) > MAX_PROBLEMS:
        print(f"... and {len(wrong) - MAX_PROBLEMS} more, in modes.csv")


def log_lines(folder: Path, run: Run) -> list[str]:
    """The plug-in's lines of a log: at start, and what it leaves to vLLM."""
    path = folder / f"{run.name}.log"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    wanted = re.compile(r"gemmpipe \S+ in vLLM|gemmpipe: left to|Selected \S+ for |Using .*(backend|MoE)")
    found = [re.sub(r"^.*?\] ", "", line) for line in lines if wanted.search(line)]
    return list(dict.fromkeys(found))


def report(folder: Path, outcomes: Mapping[Run, Outcome]) -> int:
    """Print the tables and write the details; returns how many rows are not ok."""
    rows = list(table_rows(outcomes))
    with (folder / "modes.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    with (folder / "modes.txt").open("w") as stream:
        for run, outcome in outcomes.items():
            steps = outcome.record.get("steps", {})
            took = " ".join(f"{name} {each['took_s']:.1f}" for name, each in steps.items())
            print(f"== {run.name}: {outcome.took_s:.0f} s; {took} {outcome.error}", file=stream)
            for text in log_lines(folder, run):
                print(f"   {text}", file=stream)
            for rank, keys in enumerate(outcome.record.get("dispatch") or []):
                for key, step in keys.items():
                    print(f"   rank {rank} {step:8} {key}", file=stream)
            kernels = sorted(outcome.record.get("kernels", {}).items(), key=lambda item: -item[1][1])
            for name, (launches, us, *_) in kernels[:KERNELS]:
                print(f"   {launches:6.0f} launches {us:8.1f} us  {name}", file=stream)
    starts = {text for run in outcomes if run.kind == "on" for text in log_lines(folder, run) if " in vLLM" in text}
    for text in sorted(starts)[:2]:
        print(text[:300])
    print_table(rows)
    wrong = sum(row["verdict"] != "ok" for row in rows)
    longest = max((each.took_s for each in outcomes.values()), default=0.0)
    print(f"{len(rows) - wrong} of {len(rows)} rows ok; {len(outcomes)} processes, the longest {longest:.0f} s")
    return wrong
