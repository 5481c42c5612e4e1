"""A Llama with random weights: captures its products, tunes exactly these, and runs again with the tuned products.

    python examples/llama.py --precision bf16 --folder /tmp/llama

Shows that outputs agree, the dispatch step of every shape, also with a fifth of the row counts not tuned, and tokens
per second before and after: eager, compiled, in a CUDA graph. Runs on a CPU too (`--tiny`).
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from llama_model import Fp8Linear, Llama, Sizes, library_product, llama

import gemmpipe
from gemmpipe.runtime import dispatch_report, gemm_a8w8_blockscale
from gemmpipe.runtime.select import padding_levels

_HEAD = {"a16w16": "bf16_tuned_gemm.csv"}
FAMILIES = {"bf16": _HEAD, "fp8": {**_HEAD, "a8w8_blockscale": "a8w8_blockscale_tuned_gemm.csv"}}
"""Families of the products and their tables, by precision; the head is 16-bit."""
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024)
"""Row counts of a forward pass, all tuned."""
UNSEEN = (60, 1500)
"""Row counts that are not tuned, a fifth of all: the first pads to 64, the second has no tuned row."""
_TURNS = 5
_MAX_DECODE_BATCH = 64  # up to this, rows are a decode step of a batch; above, a prefill of one sequence
TINY = Sizes(layers=2, hidden=256, inner=512, heads=4, kv_heads=2, vocabulary=512)


def passes(model: Llama, device: str, rows: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    """(rows, logits) of one forward pass per row count: a decode step of a batch, or a prefill of one sequence."""
    for count in rows:
        batch, length = (count, 1) if count <= _MAX_DECODE_BATCH else (1, count)
        generator = torch.Generator(device=device).manual_seed(count)
        tokens = torch.randint(model.sizes.vocabulary, (batch, length), device=device, generator=generator)
        yield count, model(tokens, model.caches(batch, length), torch.arange(length, device=device))


@contextmanager
def tuned(model: Llama, on: bool) -> Iterator[None]:
    """Use gemmpipe for the model's products within the block, or torch if `on` is false."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.product = gemm_a8w8_blockscale if on else library_product
    if not on:
        yield
        return
    with gemmpipe.patch(model):
        yield


def agree(model: Llama, device: str, rows: tuple[int, ...]) -> None:
    """Compare logits with torch's, by row count. Raises AssertionError if they differ."""
    with tuned(model, False):
        expected = dict(passes(model, device, rows))
    with tuned(model, True):
        found = dict(passes(model, device, rows))
    for count in rows:
        wanted, got = expected[count].float(), found[count].float()
        shares = (got - wanted).square().mean(-1).sqrt() / wanted.std()
        middle, worst = float(shares.median()), float(shares.max())
        same = float((got.argmax(-1) == wanted.argmax(-1)).float().mean())
        print(
            f"  {count} rows: logits differ by {middle:.2%} of their spread (median token; worst {worst:.2%}), "
            f"same first choice {same:.2f}"
        )
        # Another summation order flips some last bits, which fp8 activations propagate.
        assert middle < 0.1, f"{count} rows: logits differ by {middle:.1%} of their spread"


def steps(rows: tuple[int, ...], known: tuple[int, ...]) -> None:
    """Print the dispatch steps by row count. Raises AssertionError if the tables imply other ones."""
    found: dict[int, Counter[str]] = {count: Counter() for count in rows}
    for key, step in dispatch_report().items():
        found[int(re.search(r" M=(\d+)", key)[1])][step] += 1  # type: ignore[index]
    for count, counts in found.items():
        expected = next((step for m, step in padding_levels(count, 1).items() if m in known), "fallback")
        assert set(counts) == {expected}, f"{count} rows: {dict(counts)}, expected {expected}"
    unseen = ", ".join(f"{count}: {', '.join(found[count])}" for count in rows if count not in known)
    print("  dispatch steps:", dict(sum(found.values(), Counter())), f"({unseen})" if unseen else "", flush=True)


def decode_step(model: Llama, device: str, batch: int, mode: str) -> Callable[[], object]:
    """A decode step of a batch as a function; `mode`: eager, compiled (per layer), or either in a CUDA graph."""
    tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
    caches, position = model.caches(batch, 256), torch.zeros(1, dtype=torch.long, device=device)

    compiled = [None] * len(model.layers)
    if mode.startswith("compiled"):
        for layer in model.layers:
            layer.compile(fullgraph=True)  # one compilation serves all layers
        compiled = [layer._compiled_call_impl for layer in model.layers]

    def step() -> None:
        for layer, own in zip(model.layers, compiled, strict=True):
            vars(layer)["_compiled_call_impl"] = own
        logits = model(tokens, caches, position)
        tokens.copy_(logits.argmax(-1, keepdim=True))
        position.add_(1).remainder_(256)

    for _ in range(3):
        step()
    if not mode.endswith("graph"):
        return step
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def call_rate(run: Callable[[], object], device: str, seconds: float) -> float:
    """Calls per second, measured over `seconds`."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    run()
    wait()
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(4):
            run()
        calls += 4
        wait()
    return calls / (time.perf_counter() - begin)


def compare_rates(model: Llama, device: str, seconds: float) -> None:
    """Print tokens per second by torch and by gemmpipe, by batch and mode; interleaved, since clocks drift."""
    modes = ("eager", "graph", "compiled", "compiled graph") if device == "cuda" else ("eager",)
    for batch in (1, 16, 64):
        for mode in modes:
            steps, rates = {}, {False: [], True: []}
            for on in (False, True):
                with tuned(model, on):
                    steps[on] = decode_step(model, device, batch, mode)
            for _ in range(_TURNS):
                for on in (False, True):
                    with tuned(model, on):
                        rates[on].append(batch * call_rate(steps[on], device, seconds / _TURNS / 2))
            before, after = (median(rates[on]) for on in (False, True))
            ratio = median(b / a for a, b in zip(rates[False], rates[True], strict=True))
            print(f"  decode, batch {batch}, {mode}: {before:,.0f} -> {after:,.0f} tokens/s ({ratio:.2f}x)", flush=True)


def flow(args: argparse.Namespace) -> None:
    """Capture, tune and run again, each in its own process."""
    folder = Path(args.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    captured, device = folder / f"captured_{args.precision}.csv", args.device
    environment = {**os.environ, "GEMMPIPE_CAPTURE": str(captured)}
    again = [*sys.argv[1:], "--folder", str(folder)]
    _run([sys.executable, "-m", "gemmpipe.capture", __file__, *again, "--only", "once"], folder, environment)
    for family, table in FAMILIES[args.precision].items():
        shapes = ["shapes=csv", f"shapes.path={captured.name}", "format=csv", "output=tuned", f"device={device}"]
        tune = [sys.executable, "-m", "gemmpipe", *args.pipeline.split(), f"kernel={family}", *shapes]
        _run(tune, folder, None)
        environment[f"GEMMPIPE_CONFIG_{family.upper()}"] = str(folder / "tuned" / table)
    del environment["GEMMPIPE_CAPTURE"]
    _run([sys.executable, __file__, *again, "--only", "tuned"], folder, environment)


def _run(command: list[str], folder: Path, environment: dict[str, str] | None) -> None:
    print("$", " ".join(command[1:]), flush=True)
    begin = time.monotonic()
    subprocess.run(command, cwd=folder, env=environment, check=True)
    print(f"# {time.monotonic() - begin:.0f} s", flush=True)


@torch.inference_mode()
def show(model: Llama, args: argparse.Namespace) -> None:
    """Print the effect of the tuned tables. Raises AssertionError if a captured shape is not found in them."""
    device = args.device
    with gemmpipe.patch(model) as patched:
        print(patched)
    known, all_ = tuple(args.rows), (*args.rows, *args.unseen)
    print("captured and tuned row counts:")
    agree(model, device, known)
    steps(known, known)
    print(f"with {len(args.unseen)} of {len(all_)} not tuned:")
    agree(model, device, all_)
    steps(all_, known)
    compare_rates(model, device, args.seconds)


def main() -> None:
    """The whole flow, or one part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=sorted(FAMILIES), default="bf16")
    parser.add_argument("--folder", default="llama_demo")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pipeline", default="tune", help="the pipeline, and further arguments of gemmpipe")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per measured rate")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--unseen", type=int, nargs="+", default=UNSEEN)
    parser.add_argument(
        "--only",
        choices=("once", "tuned"),
        help="one forward pass per row count; or the effect of tables",
    )
    args = parser.parse_args()
    if args.only is None:
        flow(args)
        return
    model = llama(TINY if args.tiny else Sizes(layers=args.layers), args.precision, args.device)
    if args.only == "tuned":
        show(model, args)
        return
    with torch.inference_mode():
        for _ in passes(model, args.device, tuple(args.rows)):
            pass


if __name__ == "__main__":
    main()
