"""vLLM's modes with and without the plug-in on one or more GPUs: equal outputs, and tuned rows used in each mode.

    python tests/benchmarks/vllm_modes.py OUT --write
    gemmpipe kernel=a8w8_blockscale shapes=csv shapes.path=OUT/a8w8_blockscale.csv output=OUT/tuned \
      'backend=[triton,gluon,skinny,sliced]'
    gemmpipe kernel=a16w16 shapes=csv shapes.path=OUT/a16w16.csv output=OUT/tuned 'backend=[triton,gluon,skinny,sliced]'
    gemmpipe kernel=fmoe kernel.dtype=float8_e4m3fn shapes=list output=OUT/tuned \
      'shapes.items=[{token: [1,16,256], model_dim: 1024, inter_dim: [512,256], expert: 16, topk: 4}]'
    python tests/benchmarks/vllm_modes.py OUT --limit-s 150

The backends are those whose rows the plug-in runs itself: a library's row would be answered by vLLM. Tables are those
of `GEMMPIPE_CONFIG_<FAMILY>`, then those in OUT/tuned.

Models of two layers (fp8 by blocks, bf16, a mixture in fp8) with random weights, each mode in a process of its own with
the plug-in off and on:

    eager     neither compiled nor in CUDA graphs
    graphs    compiled, in CUDA graphs; then other weights are loaded into the running engine (`updated`), the first
              again (`restored`), and others without vLLM's processing of weights (`loaded`, bf16 alone); with
              GEMMPIPE_VLLM=linear, moe, and linear,moe,quantise too
    tp2       two ranks, which communicate; `updated` and `restored` as above; skipped with one GPU
    lora      LoRA enabled: without a request for it, with an adapter, and without again
    sleep     sleep of level 1, of level 2 with the same weights loaded again, and with others

The same prompts are answered after each step. A line of the table is a process with the plug-in: `prefill` and `decode`
are the mean and largest difference of the log-probabilities of the 20 most likely tokens from the process with the
plug-in off, after the same step, of the worst step; `tokens`: equal tokens of all. `same` and `other`: how far the
results moved from the first step of the same process, where the weights are the same (0) and where they are not
(large): a step with stale weights fails in both. `keys`: products that tuned rows answered, and those that vLLM's
kernels answered. A step that is not ok has a line of its own. Details are in OUT: `modes.csv` by step, `modes.txt`,
logs, records.
"""

import argparse
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_modes_report import Outcome, Run, report
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
END_S = 8.0
ERROR_LINE = re.compile(r"(Error|Exception|error)\b.*:|CUDA error|out of memory")


@dataclass(kw_only=True)
class Running:
    """A started process."""

    process: subprocess.Popen[bytes]
    devices: list[str]
    started: float


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
    tables = {}
    for family, variable in FAMILIES.items():
        own = folder / "tuned" / TABLES[family]
        found = [given.get(f"GEMMPIPE_CONFIG_{variable}", ""), str(own) if own.is_file() else ""]
        tables[f"GEMMPIPE_CONFIG_{variable}"] = os.pathsep.join(filter(None, found))
    paths = [str(folder / "site"), *filter(None, given.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **ENVIRONMENT,
        "DG_JIT_CACHE_DIR": str(cache / "deep_gemm"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(2, (os.cpu_count() or 2) // parallel)),
        **given,
        **{name: files for name, files in tables.items() if files},
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
    folder: Path = arguments.folder.resolve()
    arguments.folder = folder
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
