"""vLLM's modes with and without the plug-in on one or more GPUs: equal outputs, and tuned rows used in each mode.

    python tests/benchmarks/vllm_modes.py OUT --write
    gemmpipe kernel=a8w8_blockscale shapes=csv shapes.path=OUT/a8w8_blockscale.csv output=OUT/tuned \
      'backend=[triton,gluon,skinny,sliced]'
    gemmpipe kernel=a16w16 shapes=csv shapes.path=OUT/a16w16.csv output=OUT/tuned 'backend=[triton,gluon,skinny,sliced]'
    gemmpipe kernel=fmoe kernel.dtype=float8_e4m3fn shapes=list output=OUT/tuned \
      'shapes.items=[{token: [1,16,256], model_dim: 1024, inter_dim: [512,256], expert: 16, topk: 4}]'
    python tests/benchmarks/vllm_modes.py OUT --limit-s 150

The backends are those whose rows the plug-in runs itself: a library's row would be answered by vLLM. Tables are those
of `GEMMPIPE_CONFIG_<FAMILY>`, else those in OUT/tuned.

Models of two layers (fp8 by blocks, bf16, a mixture in fp8) with random weights, each mode in a process of its own with
the plug-in off and on:

    eager     neither compiled nor in CUDA graphs
    graphs    compiled, in CUDA graphs; then other weights are loaded into the running engine (`updated`), the first
              again (`restored`), and others without vLLM's processing of weights (`loaded`, bf16 alone); with
              GEMMPIPE_VLLM=linear, moe, and linear,moe,quantise too
    tp2       two ranks, which communicate; `updated` and `restored` as above; skipped with one GPU
    lora      LoRA enabled: without a request for it, with an adapter, and without again
    sleep     sleep of level 1, of level 2 with the same weights loaded again, and with others

The same prompts are answered after each step. `prefill` and `decode`: mean and largest difference of the
log-probabilities of the 20 most likely tokens from the process with the plug-in off, after the same step; `tokens`:
equal tokens of all. `off` and `on`: mean difference from the first step of the same process, 0 where the weights are
the same, large where they are not: a step with stale weights fails in both. `keys`: products that tuned rows answered,
and those that vLLM's kernels answered. Details are in OUT: logs, `modes.csv`, `modes.txt`, records.
"""

import argparse
import csv
import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_small_models import SMALL, write_small

CHILD = Path(__file__).with_name("vllm_modes_child.py")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",  # the same rounding with and without the plug-in
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # multicast may be disabled on a shared host
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "NCCL_NVLS_ENABLE": "0",
    "HF_HUB_OFFLINE": "1",
    "GEMMPIPE_LOG_SELECTION": "1",
    "PYTHONUNBUFFERED": "1",
}
"""The environment's own values have precedence."""
SCOPES = {"off": "off", "on": "linear,moe", "linear": "linear", "moe": "moe", "quantise": "linear,moe,quantise"}
FAMILIES = {"a8w8_blockscale": "A8W8_BLOCKSCALE", "a16w16": "A16W16", "fmoe": "FMOE"}
TABLES = {
    "a8w8_blockscale": "a8w8_blockscale_tuned_gemm.csv",
    "a16w16": "bf16_tuned_gemm.csv",
    "fmoe": "tuned_fmoe.csv",
}
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
"""Of one process: above the first its weights changed, below the second they did not."""
TOP, END_S, TAIL_LINES = 20, 8.0, 25
ERROR_LINE = re.compile(r"(Error|Exception|error)\b.*:|CUDA error|out of memory")


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
class Running:
    """A started process."""

    process: subprocess.Popen[bytes]
    devices: list[str]
    started: float


@dataclass(kw_only=True)
class Outcome:
    """What became of a run."""

    record: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    took_s: float = 0.0


def planned(models: Sequence[str], modes: Sequence[str], gpus: int) -> list[Run]:
    """All runs, the longest first."""
    found = []
    for mode in ("tp2", "sleep", "graphs", "lora", "eager"):
        if mode not in modes or (mode == "tp2" and gpus < 2):
            continue
        for model in models:
            if mode == "eager" and "num_experts" in SMALL[model]:
                continue
            kinds = ["off", "on"]
            if mode == "graphs" and model == "dense_fp8":
                kinds.append("quantise")
            if mode == "graphs" and "num_experts" in SMALL[model]:
                kinds += ["linear", "moe"]
            found += [Run(model=model, mode=mode, kind=kind) for kind in kinds]
    return found


def environment_of(run: Run, folder: Path, devices: Sequence[str], parallel: int) -> dict[str, str]:
    """The environment of a process: compile caches of its own, products compiled by DeepGEMM shared."""
    given = os.environ
    cache = Path(given.get("VLLM_CACHE_ROOT", str(folder / "cache")))
    tables = {
        f"GEMMPIPE_CONFIG_{variable}": str(folder / "tuned" / TABLES[family])
        for family, variable in FAMILIES.items()
        if (folder / "tuned" / TABLES[family]).is_file()
    }
    paths = [str(folder / "site"), *filter(None, given.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **ENVIRONMENT,
        "DG_JIT_CACHE_DIR": str(cache / "deep_gemm"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(2, (os.cpu_count() or 2) // parallel)),
        **tables,
        **given,
        "PYTHONPATH": os.pathsep.join(paths),
        "GEMMPIPE_VLLM": SCOPES[run.kind],
        "VLLM_CACHE_ROOT": str(cache / run.name),
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
    }


def write_entry_point(folder: Path) -> None:
    """An entry point for workers that are not forks, if gemmpipe is not installed but lies on the path."""
    from importlib.metadata import entry_points

    if any(each.value == "gemmpipe.plugins.vllm:register" for each in entry_points(group="vllm.general_plugins")):
        return
    place = folder / "site" / "gemmpipe_source-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: gemmpipe-source\nVersion: 0\n")
    (place / "entry_points.txt").write_text("[vllm.general_plugins]\ngemmpipe = gemmpipe.plugins.vllm:register\n")


class Machine:
    """Runs processes, at most `parallel` at a time, each on the GPUs with the fewest processes."""

    def __init__(self, arguments: argparse.Namespace, runs: Sequence[Run]) -> None:
        self.arguments, self.waiting = arguments, list(runs)
        self.load = dict.fromkeys(arguments.devices, 0)
        self.running: dict[Run, Running] = {}
        self.outcomes: dict[Run, Outcome] = {}

    def run_all(self, until: float) -> dict[Run, Outcome]:
        """The outcomes at this time; processes that still run are ended."""
        last = 0.0
        try:
            while self.waiting or self.running:
                now = time.monotonic()
                if now > until:
                    break
                ready = self.waiting and len(self.running) < self.arguments.parallel
                if ready and now - last >= self.arguments.stagger:
                    self._start(self.waiting.pop(0))
                    last = now
                for run in list(self.running):
                    self._look(run)
                time.sleep(0.05)
        finally:
            for run in list(self.running):
                self._end(run, "not complete in time")
            for run in self.waiting:
                self.outcomes[run] = Outcome(error="not started in time")
        return self.outcomes

    def _start(self, run: Run) -> None:
        devices = sorted(self.load, key=lambda device: self.load[device])[: run.gpus]
        for device in devices:
            self.load[device] += 1
        folder: Path = self.arguments.folder
        command = [sys.executable, str(self.arguments.child), str(folder / run.model), "--mode", run.mode]
        result = folder / f"{run.name}.json.gz"
        result.unlink(missing_ok=True)
        with (folder / f"{run.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--result", str(result)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_of(run, folder, sorted(devices), self.arguments.parallel),
                start_new_session=True,
            )
        self.running[run] = Running(process=process, devices=devices, started=time.monotonic())

    def _look(self, run: Run) -> None:
        if self.running[run].process.poll() is not None:
            self._end(run, f"ended with {self.running[run].process.returncode}")

    def _end(self, run: Run, error: str) -> None:
        """Take the record of a process, if it wrote one, and end all that it started."""
        held = self.running.pop(run)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(held.process.pid, signal.SIGKILL)
        held.process.wait()
        for device in held.devices:
            self.load[device] -= 1
        took = time.monotonic() - held.started
        path = self.arguments.folder / f"{run.name}.json.gz"
        record = read_record(path)
        error = "" if record else f"{error}: {last_error(self.arguments.folder / f'{run.name}.log')}"
        self.outcomes[run] = Outcome(record=record, error=error, took_s=took)
        print(f"{run.name} {error or 'done'} ({took:.0f} s)"[:200], flush=True)


def read_record(path: Path) -> dict[str, Any]:
    """The record of a process; empty if it wrote none."""
    if not path.is_file():
        return {}
    with gzip.open(path, "rt") as stream:
        found: dict[str, Any] = json.load(stream)
    return found


def last_error(log: Path) -> str:
    """The last line of a log that looks like an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    found = [line for line in lines if ERROR_LINE.search(line)]
    return (found or lines or ["no output"])[-1][-240:]


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


def families_of(record: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """(family -> keys that tuned rows answered, family -> keys of the engine) in the first worker."""
    tuned: dict[str, int] = {}
    engine: dict[str, int] = {}
    for key, step in (record.get("dispatch") or [{}])[0].items():
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
        tuned, engine = families_of(outcome.record)
        absent = sorted(wanted_families(run) - tuned.keys())
        more = sorted(tuned.keys() - wanted_families(run))
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
TITLES = ("model", "mode", "scope", "step", "keys", "prefill", "max", "decode", "max", "tokens", "off", "on", "verdict")
WIDTHS = (11, 6, 8, 9, 7, 8, 7, 7, 7, 8, 7, 7, 60)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """At most 40 lines."""

    def line(cells: Iterable[object]) -> str:
        return " ".join(f"{cell!s:{width}}"[:width] for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()

    print(line(TITLES))
    for row in rows:
        cells = (row.get(name, "") for name in COLUMNS)
        print(line(f"{cell:.4f}" if isinstance(cell, float) else cell for cell in cells))


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
            for key, step in (outcome.record.get("dispatch") or [{}])[0].items():
                print(f"   {step:8} {key}", file=stream)
    starts = {text for run in outcomes if run.kind == "on" for text in log_lines(folder, run) if " in vLLM" in text}
    for text in sorted(starts)[:2]:
        print(text[:300])
    print_table(rows)
    wrong = sum(row["verdict"] != "ok" for row in rows)
    longest = max((each.took_s for each in outcomes.values()), default=0.0)
    print(f"{len(rows) - wrong} of {len(rows)} rows ok; {len(outcomes)} processes, the longest {longest:.0f} s")
    return wrong


def visible_devices() -> list[str]:
    """The GPUs that this process may use, without touching them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [each.strip() for each in given.split(",") if each.strip()]
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(each) for each in range(sum(line.startswith("GPU ") for line in found.splitlines()))]


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of checkpoints, tables, logs and results")
    parser.add_argument("--models", default=",".join(SMALL), help="names, separated by commas")
    parser.add_argument("--modes", default="tp2,sleep,graphs,lora,eager", help="names, separated by commas")
    parser.add_argument("--devices", default="", help="GPUs, as 0,1; all that are visible by default")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of the whole run; what is complete is printed")
    parser.add_argument("--parallel", type=int, default=14, help="processes at a time")
    parser.add_argument("--stagger", type=float, default=0.3, help="seconds between two starts")
    parser.add_argument("--write", action="store_true", help="write checkpoints and lists of products, and end")
    parser.add_argument("--print", action="store_true", help="print the table of an earlier run and end")
    parser.add_argument("--child", type=Path, default=CHILD, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    for name, known in (("models", tuple(SMALL)), ("modes", ("tp2", "sleep", "graphs", "lora", "eager"))):
        values = [each for each in getattr(arguments, name).split(",") if each]
        setattr(arguments, name, values)
        if unknown := [each for each in values if each not in known]:
            parser.error(f"--{name}: {', '.join(unknown)}: unknown; known: {', '.join(known)}")
    arguments.devices = [each for each in arguments.devices.split(",") if each] or visible_devices()
    if not arguments.devices and not arguments.write and not arguments.print:
        parser.error("--devices: no GPU is visible")
    return arguments


def stop(*_: object) -> None:
    """End by a signal as by an exception, so that the table is printed."""
    raise KeyboardInterrupt


def main(given: Sequence[str] | None = None) -> int:
    """The parent of all processes."""
    begin = time.monotonic()
    arguments = parsed(given)
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.print:
        write_small(folder, arguments.models)
    if arguments.write:
        return 0
    signal.signal(signal.SIGTERM, stop)
    runs = planned(arguments.models, arguments.modes, len(arguments.devices) if not arguments.print else 2)
    if arguments.print:
        records = {run: read_record(folder / f"{run.name}.json.gz") for run in runs}
        outcomes = {run: Outcome(record=found, error="" if found else "no record") for run, found in records.items()}
    else:
        write_entry_point(folder)
        machine = Machine(arguments, runs)
        try:
            machine.run_all(begin + arguments.limit_s - END_S)
        except KeyboardInterrupt:
            print("interrupted: what follows is incomplete", flush=True)
        outcomes = machine.outcomes
        if len(arguments.devices) < 2 and "tp2" in arguments.modes:
            print("tp2: skipped, one GPU")
    return min(report(folder, {run: outcomes[run] for run in runs if run in outcomes}), 1)


if __name__ == "__main__":
    sys.exit(main())
