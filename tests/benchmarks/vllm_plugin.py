"""vLLM with and without the plug-in on a GPU: decode and prefill tokens per second, kernels of a step, agreement.

    python tests/benchmarks/vllm_plugin.py --folder OUT --write    # the models' configurations alone
    gemmpipe kernel=a8w8_blockscale shapes=model shapes.path=OUT/qwen3_8b_fp8 'shapes.nsets=[1,16,64,256,2048]'
    python tests/benchmarks/vllm_plugin.py --folder OUT --limit-s 540 --profile 1,16,64,256,prefill --predict FILE

All processes (each model with the default, GEMMPIPE_VLLM=off, and with the plug-in) start together and stay alive: six
fit into 139 GiB, a cache of compiled graphs each. Then they measure in turn, default and plug-in of each model, three
times, the plug-in first in the second, while all others on their GPU wait. Weights are random, of the same seed in
both. Decode at batch 1, 16, 64 and 256: the time for 144 tokens minus that for 16 (256: 48 minus 8), medians of two
pairs (256: three). Prefill: one prompt of 2,048 tokens, median of five; under load (`prefill_load`): 64 such prompts
one after the other. `--profile` adds the kernels of a step: launches, time, and the time before them in which nothing
ran. The log-probabilities of 16 prompts are compared with a forward in fp32 with the same weights.

`--devices 0,1` spreads the models over GPUs, both processes of a model on one: those of the dense models need 66 GiB
together, those of the mixture 65. FlashInfer's product by blocks is compiled before the processes start if FlashInfer
is installed; vLLM then chooses it by default. The backend of each kind of layer is printed from the logs.

GEMMPIPE_VLLM=linear,moe,quantise in the environment measures the plug-in with its quantisers.

`--predict FILE`: lines of N,K,M,ours_us,engine_us and perhaps dtype (fp8, bf16; experts, with N of the fused gate and
up) say what the products alone would gain. results.jsonl in the folder gets each result as it comes; `--print` prints
the tables of an earlier run from it. Start lines and selected kernels are in the logs there.
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_models import MODELS, write_models
from vllm_placement import build_flashinfer, memory_of_devices, memory_problem, placed, print_choices
from vllm_processes import Child, Failed, Starting
from vllm_summary import KINDS, WHATS, Record, print_all, rates

CHILD = Path(__file__).with_name("vllm_child.py")
SCOPES = {"default": "off", "plugin": os.environ.get("GEMMPIPE_VLLM", "linear,moe")}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GEMMPIPE_LOG_SELECTION": "1",
}
"""One process per engine, without downloads; the environment's own values have precedence."""
END_RESERVE_S = 8.0
"""Share of the whole limit for the tables and the end of the processes."""
STOPPED = threading.Event()
"""Set by an interrupt: no further command is sent."""
COMMAND_LIMITS_S = {"measure": 60.0, "profile": 60.0, "reference": 90.0, "dispatch": 10.0}


def child_command(
    arguments: argparse.Namespace, model: str, kind: str, more: Mapping[str, str]
) -> tuple[list[str], dict[str, str], Path]:
    """(command, environment, log) of a process: compile caches of its own, products compiled by DeepGEMM shared."""
    given = os.environ
    cache = Path(given.get("VLLM_CACHE_ROOT", str(arguments.folder / "cache")))
    threads = max(2, (os.cpu_count() or 2) // arguments.parallel)
    environment = {
        **ENVIRONMENT,
        "DG_JIT_CACHE_DIR": str(cache / "deep_gemm"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        **given,
        **more,
        "GEMMPIPE_VLLM": SCOPES[kind],
        "VLLM_CACHE_ROOT": str(cache / f"{model}-{kind}"),
    }
    command = [sys.executable, str(arguments.child), str(arguments.folder / model)]
    return (
        [*command, *(["--eager"] if arguments.eager else [])],
        environment,
        arguments.folder / f"{model}-{kind}.log",
    )


def plan(models: Sequence[str], repeats: int, profiled: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(model, kind, command) in the order of the run: what must be shown first."""
    pairs = [(model, kind) for model in models for kind in KINDS]
    for repeat in range(repeats):
        for model in models:
            for kind in KINDS if repeat % 2 == 0 else reversed(KINDS):  # the later one finds a warmer GPU
                yield model, kind, {"do": "measure", "repeat": repeat}
    for model, kind in pairs:
        yield model, kind, {"do": "reference"}
    for what in profiled:
        for model, kind in pairs:
            yield model, kind, {"do": "profile", "what": what}
    for model, kind in pairs:
        yield model, kind, {"do": "dispatch"}


def short_form(command: Mapping[str, Any], result: Any) -> str:
    """One line of a result."""
    if command["do"] == "measure":
        return " ".join(f"{what} {rate:.1f}" for what, rate in rates({"result": result}).items())
    return str(command.get("what", ""))


def run_plan(
    children: Mapping[str, Child], models: Sequence[str], arguments: argparse.Namespace, until: float
) -> Iterator[Record]:
    """The results as they come, until the time is over; a process that fails is left out from then on."""
    living = dict(children)
    for model, kind, command in plan(models, arguments.repeats, arguments.profile):
        name, left = f"{model}-{kind}", until - time.monotonic()
        if STOPPED.is_set():
            return
        if left <= 0:
            print("the time is over: what follows was not measured", flush=True)
            return
        if name not in living:
            continue
        start = time.monotonic()
        try:
            result = living[name].ask(command, min(left, COMMAND_LIMITS_S[command["do"]]))
        except Failed as error:
            child = living[name]
            print(f"{error}; the end of {child.log}:\n{child.log_end()}", flush=True)
            if child.process.poll() is not None:
                del living[name]
            continue
        took = time.monotonic() - start
        print(f"{name} {command['do']} {short_form(command, result)} ({took:.1f} s)", flush=True)
        yield {"model": model, "kind": kind, **command, "result": result, "took_s": took}


def run_plans(
    children: Mapping[str, Child], places: Mapping[str, str], arguments: argparse.Namespace, until: float
) -> Iterator[Record]:
    """The results of the plans of all devices, which are followed side by side."""
    results: queue.Queue[Record | None] = queue.Queue()

    def follow(models: Sequence[str]) -> None:
        try:
            for record in run_plan(children, models, arguments, until):
                results.put(record)
        finally:
            results.put(None)

    groups = [[m for m in arguments.models if places[m] == place] for place in dict.fromkeys(places.values())]
    threads = [threading.Thread(target=follow, args=(models,), daemon=True) for models in groups]
    for thread in threads:
        thread.start()
    for _ in threads:
        yield from iter(results.get, None)


def measure(arguments: argparse.Namespace, places: Mapping[str, str], until: float) -> list[Record]:
    """Start all processes, follow the plan, and end them."""
    built = build_flashinfer(min(arguments.start_s, until - time.monotonic()), arguments.folder / "flashinfer.log")
    variables = {m: {**built, **({"CUDA_VISIBLE_DEVICES": places[m]} if places[m] else {})} for m in arguments.models}
    names = [(model, kind) for model in arguments.models for kind in KINDS]
    commands = {f"{m}-{kind}": child_command(arguments, m, kind, variables[m]) for m, kind in names}
    starting, records = Starting(commands), list[Record]()
    try:
        ready = starting.run(min(until, time.monotonic() + arguments.start_s), arguments.parallel, arguments.stagger)
        print(f"{len(ready)} of {len(commands)} processes are ready", flush=True)
        with (arguments.folder / "results.jsonl").open("w") as stream:
            for record in run_plans(ready, places, arguments, until):
                records.append(record)
                print(json.dumps(record), file=stream, flush=True)
    except (KeyboardInterrupt, SystemExit):
        STOPPED.set()
        print("interrupted: what follows was not measured", flush=True)
    finally:
        for child in (*starting.ready.values(), *starting.running.values()):
            child.end()
    return records


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--layers", type=int, default=None, help="their number, in place of the model's own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="neither compiled nor in CUDA graphs")
    parser.add_argument("--devices", default="", help="GPUs over which the models are spread, as 0,1")
    parser.add_argument("--profile", default="", help=f"of {','.join(WHATS)}: whose kernels are timed")
    parser.add_argument("--predict", type=Path, default=None, help="CSV file of products' times")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of the whole run; what is measured is printed")
    parser.add_argument("--start-s", type=float, default=600.0, help="limit of the start")
    parser.add_argument("--parallel", type=int, default=6, help="processes that start at a time")
    parser.add_argument("--stagger", type=float, default=1.0, help="seconds between two starts")
    parser.add_argument("--write", action="store_true", help="write the models' configurations and end")
    parser.add_argument("--print", action="store_true", help="print the tables of results.jsonl and end")
    parser.add_argument("--child", type=Path, default=CHILD, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    for name, known in (("models", tuple(MODELS)), ("profile", WHATS)):
        values = [each for each in getattr(arguments, name).split(",") if each]
        setattr(arguments, name, values)
        if unknown := [each for each in values if each not in known]:
            parser.error(f"--{name}: {', '.join(unknown)}: unknown; known: {', '.join(known)}")
    arguments.devices = [each for each in arguments.devices.split(",") if each]
    if arguments.predict is not None and not arguments.predict.is_file():
        parser.error(f"--predict: {arguments.predict}: no such file")
    return arguments


def stop(*_: object) -> None:
    """End by a signal as by an exception, so that the tables are printed."""
    raise SystemExit(124)


def main(given: Sequence[str] | None = None) -> None:
    """The parent of all processes."""
    begin = time.monotonic()
    arguments = parsed(given)
    folder = arguments.folder
    if not arguments.print:
        write_models(folder, arguments.models, arguments.layers)
    if arguments.write:
        return
    signal.signal(signal.SIGTERM, stop)
    configs = {name: json.loads((folder / name / "config.json").read_text()) for name in arguments.models}
    if arguments.print:
        records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    else:
        places = placed(configs, arguments.devices or [""])
        if reason := memory_problem(configs, places, memory_of_devices(arguments.devices)):
            sys.exit(f"--devices: {reason}")
        records = measure(arguments, places, begin + arguments.limit_s - END_RESERVE_S)
    print_choices({f"{m}-{kind}": folder / f"{m}-{kind}.log" for m in arguments.models for kind in KINDS})
    print_all(records, configs, folder, arguments.predict)


if __name__ == "__main__":
    main()
