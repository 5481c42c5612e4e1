"""SGLang's real layers with the plug-in, on a CPU: linear layers of one rank and of two, fp8, LoRA.

Usage: python _sglang_program.py SOURCES PACKAGES FOLDER; prints one JSON line. As `_vllm_program.py`, whose tables and
pretended device it uses.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
from _vllm_program import K, N, block_weight, error, pretend_an_h200, random, write_rows
from sglang_import import import_sglang


def layer_of(kind: str, rank: int, quantised: bool, bias: bool = False) -> Any:
    """A layer of N x K on this rank of two, as SGLang builds it."""
    import torch
    from sglang.srt.layers import linear
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    config = None
    if quantised:
        config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    given: dict[str, Any] = {"bias": bias, "quant_config": config, "params_dtype": torch.bfloat16, "prefix": kind}
    if kind == "replicated":
        return linear.ReplicatedLinear(K, N, **given)
    group = SimpleNamespace(rank_in_group=rank, world_size=2)
    with mock.patch.object(linear, "_resolve_linear_group", return_value=group):
        if kind == "column":
            return linear.ColumnParallelLinear(K, 2 * N, **given)
        if kind == "merged":
            return linear.MergedColumnParallelLinear(K, [N, N], **given)
        return linear.RowParallelLinear(2 * K, N, **given)


def load(layer: Any, kind: str, seed: int) -> Any:
    """Load a whole weight by SGLang's own loaders; returns it in fp32."""
    n, k = {"replicated": (N, K), "row": (N, 2 * K)}.get(kind, (2 * N, K))
    if hasattr(layer, "weight_scale_inv"):
        weight, scale, exact = block_weight(n, k, seed)
        tensors = {"weight": (weight, 1), "weight_scale_inv": (scale, 128)}
    else:
        full = (random(n, k, seed=seed) * k**-0.5).bfloat16()
        exact, tensors = full.float(), {"weight": (full, 1)}
    for name, (tensor, rows) in tensors.items():
        param = getattr(layer, name)
        if kind != "merged":
            param.weight_loader(param, tensor)
            continue
        for shard in (0, 1):
            param.weight_loader(param, tensor[shard * N // rows : (shard + 1) * N // rows], shard)
    layer.quant_method.process_weights_after_loading(layer)
    return exact


def part_of(exact: Any, kind: str, rank: int) -> Any:
    """A rank's part of a whole weight."""
    import torch

    if kind == "replicated":
        return exact
    if kind == "row":
        return exact[:, rank * K : (rank + 1) * K]
    if kind == "column":
        return exact[rank * N : (rank + 1) * N]
    half = N // 2
    return torch.cat([exact[at + rank * half : at + (rank + 1) * half] for at in (0, N)])


def look_up_again() -> None:
    from gemmpipe.plugins.engine_dispatch import clear_dispatches
    from gemmpipe.runtime.selection_log import LOG

    clear_dispatches()
    LOG.steps.clear()


@contextmanager
def alone(linear: Any, all_reduce: Any) -> Iterator[None]:
    """A rank without communication: `all_reduce` gets what it would reduce."""
    replaced = {"tensor_model_parallel_all_reduce": all_reduce}
    replaced |= {"use_symmetric_memory": lambda *_, **named: nullcontext(), "is_allocation_symmetric": lambda: False}
    replaced["get_parallel"] = lambda: SimpleNamespace(tp_group=None, attn_tp_group=None)
    replaced["should_skip_mlp_all_reduce"] = lambda: False
    with ExitStack() as stack:
        for name, found in replaced.items():
            stack.enter_context(mock.patch.object(linear, name, found))
        yield


def ranks(quantised: bool) -> dict[str, Any]:
    """[rank, M, step, error, all-reduces] of layers of both ranks, with weights loaded twice."""
    from sglang.srt.layers import linear

    from gemmpipe.runtime import dispatch_report

    found: dict[str, Any] = {}
    for kind in ("replicated", "column", "merged", "row"):
        report = []
        for rank in (0,) if kind == "replicated" else (0, 1):
            reduced: list[Any] = []

            def record(partial: Any, *more: Any, reduced: list[Any] = reduced, **named: Any) -> Any:
                reduced.append(partial)
                return partial

            with alone(linear, record):
                layer = layer_of(kind, rank, quantised, bias=kind == "row" and not quantised)
                for seed in (4, 5):  # weights are replaced in place
                    exact = part_of(load(layer, kind, seed), kind, rank)
                    if layer.bias is not None:
                        layer.bias.data.fill_(3)
                    for m in (16, 9, 40):
                        look_up_again()
                        reduced.clear()
                        x = random(m, K, seed=m).bfloat16()
                        out = layer(x)
                        out = out[0] if isinstance(out, tuple) else out
                        added = 3 if layer.bias is not None and rank == 0 else 0
                        (step,) = dispatch_report().values()
                        report.append([rank, m, step, error(out, x.float() @ exact.t() + added), len(reduced)])
        found[kind] = report
    return found


def bf16(folder: Path) -> dict[str, Any]:
    return ranks(False)


def blocks(folder: Path) -> dict[str, Any]:
    return ranks(True)


def columns(folder: Path) -> dict[str, Any]:
    """M -> (step, strides of x's scales, error, copied operands) where SGLang calls DeepGEMM, which is not run.

    Its own quantiser writes the scales, and our kernel reads them where they lie.
    """
    from sglang.srt.layers.quantization import fp8_utils

    from gemmpipe.runtime import dispatch_report

    layer = layer_of("replicated", 0, True)
    exact = load(layer, "replicated", 7)
    layer.quant_method.w8a8_block_fp8_linear = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    plain, strides, copied, found = fp8_utils.per_token_group_quant_fp8, set(), [], {}

    def quantise(*given: Any, **options: Any) -> Any:
        made = plain(*given, **options)
        strides.add(made[1].stride())
        return made

    with (
        mock.patch.object(fp8_utils, "per_token_group_quant_fp8", quantise),
        mock.patch("gemmpipe.runtime.operands.log_copied", lambda name, tensor: copied.append(name)),
    ):
        for m in (16, 9, 1):
            look_up_again()
            strides.clear()
            copied.clear()
            x = random(m, K, seed=m).bfloat16()
            out = [layer.quant_method.apply(layer, x) for _ in range(2)][1]
            (step,) = dispatch_report().values()
            found[m] = [step, sorted(strides), error(out, x.float() @ exact.t()), len(copied)]
    return found


def lora(folder: Path) -> dict[str, Any]:
    """SGLang's wrapper over a layer with rows: its backend's part is added to our product."""
    import torch
    from sglang.srt.lora import layers

    from gemmpipe.runtime import dispatch_report

    added = random(16, N, seed=3).bfloat16()
    layer = layer_of("column", 0, False)
    exact = part_of(load(layer, "column", 6), "column", 0)

    def forward_with_base(wrapper: Any, x: Any, base: Callable[[], Any], *more: Any) -> Any:
        return base().add_(added)  # in place, as the backend's kernels, which need a GPU

    flags = dict.fromkeys(("supports_lora_a_overlap", "skip_inactive_lora_batches", "skip_inactive_dense_lora"), False)
    backend = SimpleNamespace(get_batch_info=SimpleNamespace, **flags, forward_with_base=forward_with_base)
    plain = torch.tensor
    with mock.patch.object(torch, "tensor", lambda *given, pin_memory=False, **named: plain(*given, **named)):
        wrapper = layers.ColumnParallelLinearWithLoRA(layer, backend)
    wrapper.set_lora_info(None, None)
    look_up_again()
    x = random(16, K, seed=16).bfloat16()
    out = wrapper(x)[0]
    (step,) = dispatch_report().values()
    return {"step": step, "error": error(out, x.float() @ exact.t() + added.float())}


def parallel_state(folder: Path) -> dict[str, Any]:
    """What the benchmark on a GPU initialises for SGLang's experts, which ask for the group of tensor parallelism."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang_linear import initialise_parallel_state

    get_context().override_server_args().install()
    said = initialise_parallel_state()
    return {"said": said, "size": get_parallel().tp_group.world_size}


_CASES = (bf16, blocks, columns, lora, parallel_state)
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {case.__name__: case for case in _CASES}


def main(sources: str, packages: str, folder: str) -> None:
    import_sglang(Path(sources), Path(packages))
    import torch

    from gemmpipe.plugins import sglang as plugin

    place = Path(folder)
    os.environ["XDG_DATA_HOME"] = str(place)
    os.environ["GEMMPIPE_GIVEN_TABLES_ONLY"] = "1"
    with ExitStack() as stack:
        device = pretend_an_h200(stack)
        stack.enter_context(mock.patch("gemmpipe.runtime.cache.device_by_index", return_value=device))
        from sglang.kernels.ops.gemm import fp8_kernel

        stack.enter_context(mock.patch.object(fp8_kernel, "get_device_name", return_value="NVIDIA H200"))
        stack.enter_context(mock.patch.object(plugin, "runs_model", return_value=True))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        sizes = [{"M": m, "N": N, "K": K} for m in (1, 16)]
        write_rows(place, device, "a16w16", [*sizes, *({**size, "bias": True} for size in sizes)], None)
        write_rows(place, device, "a8w8_blockscale", sizes, None)
        inactive = plugin.set_up()
        assert not inactive, inactive
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()
        found = {name: case(place) for name, case in CASES.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
