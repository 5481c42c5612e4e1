"""States of vLLM's real layers with the plug-in: ranks of tensor parallelism, LoRA, reloaded and sleeping weights.

Cases of `_vllm_program.py`, whose tables and pretended device they use. A rank is its group alone: its all-reduce
records the partial sums.
"""

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from _vllm_program import EXPERTS, K, N, block_layer, block_weight, error, linear_layer, plugin_log, random, row_layer

RANK = 8
"""Rank of the LoRA adapters."""


@contextmanager
def rank_of_two(rank: int, reduced: list[Any]) -> Iterator[None]:
    """A process's place among two of tensor parallelism; `reduced` gets what it passes to all-reduce."""
    import vllm.distributed.parallel_state as groups

    def all_reduce(partial: Any) -> Any:
        reduced.append(partial.clone())
        return partial

    with mock.patch.object(groups, "_TP", SimpleNamespace(world_size=2, rank_in_group=rank, all_reduce=all_reduce)):
        yield


def fp8_config() -> Any:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])


def parallel_layer(kind: str, quantised: bool, bias: bool = False) -> Any:
    """A layer of N x K on this rank, as vLLM builds it."""
    import torch
    from vllm.model_executor.layers import linear

    given: dict[str, Any] = {"bias": bias, "quant_config": fp8_config() if quantised else None, "prefix": kind}
    torch.set_default_dtype(torch.bfloat16)
    try:
        if kind == "column":
            return linear.ColumnParallelLinear(K, 2 * N, **given)
        if kind == "merged":
            return linear.MergedColumnParallelLinear(K, [N, N], **given)
        if kind == "qkv":
            return linear.QKVParallelLinear(K, N // 4, 4, 2, **given)
        return linear.RowParallelLinear(2 * K, N, **given)
    finally:
        torch.set_default_dtype(torch.float32)


def parts_of(kind: str) -> list[tuple[Any, slice]]:
    """(the shard's name of vLLM's loader, its rows of the whole weight) of a layer."""
    if kind == "merged":
        return [(0, slice(0, N)), (1, slice(N, 2 * N))]
    if kind == "qkv":
        return [("q", slice(0, N)), ("k", slice(N, N + N // 2)), ("v", slice(N + N // 2, 2 * N))]
    return [(None, slice(None))]


def load(layer: Any, kind: str, seed: int) -> Any:
    """Load a whole weight by vLLM's own loaders; returns it in fp32."""
    n, k = (N, 2 * K) if kind == "row" else (2 * N, K)
    tensors: dict[str, tuple[Any, int]] = {}
    if hasattr(layer, "weight_scale_inv"):
        weight, scale, exact = block_weight(n, k, seed)
        tensors = {"weight": (weight, 1), "weight_scale_inv": (scale, 128)}
    else:
        full = (random(n, k, seed=seed) * k**-0.5).bfloat16()
        exact = full.float()
        tensors = {"weight": (full, 1)}
    for name, (tensor, rows) in tensors.items():
        for shard, place in parts_of(kind):
            param = getattr(layer, name)
            part = tensor[slice(place.start and place.start // rows, place.stop and place.stop // rows)]
            param.weight_loader(param, part, *([] if shard is None else [shard]))
    return exact


def rows_of_rank(kind: str, rank: int) -> list[int]:
    """The rows of the whole weight that a rank of two computes, in its order."""
    found: list[int] = []
    for _, place in parts_of(kind):
        every = range(2 * N)[place]
        found += every[rank * len(every) // 2 : (rank + 1) * len(every) // 2]
    return found


def look_up_again() -> None:
    """The next call of each key is looked up, and its step reported."""
    from gemmpipe.plugins.engine_dispatch import clear_dispatches
    from gemmpipe.runtime.selection_log import LOG

    clear_dispatches()
    LOG.steps.clear()


def steps() -> list[str]:
    """The steps of the keys that were looked up since."""
    from gemmpipe.runtime import dispatch_report

    return list(dispatch_report().values())


def tensor_parallel(folder: Path, device: Any) -> dict[str, Any]:
    """Layers of both ranks: errors of what they compute, and how often they reduce."""
    import torch

    found: dict[str, Any] = {}
    for quantised in (False, True):
        for kind in ("column", "merged", "row") if quantised else ("column", "merged", "qkv", "row"):
            bias, sums, report = kind == "row" and not quantised, {}, []
            for rank in (0, 1):
                reduced: list[Any] = []
                with rank_of_two(rank, reduced):
                    layer = parallel_layer(kind, quantised, bias)
                    exact = load(layer, kind, 4)
                    if bias:
                        layer.bias.data.fill_(3)
                    layer.quant_method.process_weights_after_loading(layer)
                    for m in (16, 9, 40):
                        look_up_again()
                        x = random(m, exact.shape[1], seed=m).bfloat16()
                        given = x[:, rank * K : (rank + 1) * K].contiguous() if kind == "row" else x
                        out = layer(given)[0]
                        (step,) = steps()
                        whole = x.float() @ exact.t() + (3 if bias else 0)
                        if kind == "row":
                            sums[m] = sums.get(m, 0) + reduced[-1].float()
                            wrong = error(sums[m], whole) if rank else 0.0
                        else:
                            wrong = error(out, whole[:, rows_of_rank(kind, rank)])
                        report.append([rank, m, step, wrong, len(reduced)])
                        reduced.clear()
                    assert list(layer.weight.shape) == [N, K]
            found[f"{kind} {'fp8' if quantised else 'bf16'}"] = report
    torch.set_default_dtype(torch.float32)
    return found


def adapted(layer: Any, kind: str, config: Any, punica: Any) -> Any:
    """The layer in vLLM's wrapper with adapters of random weights; returns (wrapper, B A of this rank)."""
    import torch
    from vllm.lora import layers

    wrapper: Any = {
        "replicated": layers.ReplicatedLinearWithLoRA,
        "column": layers.ColumnParallelLinearWithLoRA,
        "merged": layers.MergedColumnParallelLinearWithLoRA,
        "qkv": layers.MergedQKVParallelLinearWithLoRA,
        "row": layers.RowParallelLinearWithLoRA,
    }[kind](layer)
    wrapper.create_lora_weights(2, config, None)
    wrapper.set_mapping(punica)
    wide, deep = (N, 2 * K) if kind == "row" else (N if kind == "replicated" else 2 * N, K)
    sizes = [len(range(wide)[place]) for _, place in parts_of(kind)]
    left = [random(RANK, deep, seed=10 + i).bfloat16() * 0.05 for i in range(len(sizes))]
    right = [random(size, RANK, seed=20 + i).bfloat16() for i, size in enumerate(sizes)]
    wrapper.set_lora(0, *((left, right) if len(sizes) > 1 else (left[0], right[0])))
    return wrapper, torch.cat([b.float() @ a.float() for a, b in zip(left, right, strict=True)])


def lora(folder: Path, device: Any) -> dict[str, Any]:
    """vLLM's wrappers over layers that the plug-in took: base + B A x, for tokens with and without an adapter."""
    import torch
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.utils import torch_utils

    torch_utils.PIN_MEMORY = False
    punica = PunicaWrapperCPU(64, 64, "cpu")
    config = LoRAConfig(max_lora_rank=RANK, max_loras=2, lora_dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for quantised in (False, True):
        for kind in ("replicated", "column", "merged", "qkv", "row"):
            if quantised and kind == "qkv":
                continue  # its parts are no whole blocks at these sizes
            reduced: list[Any] = []
            with rank_of_two(0, reduced):
                if kind == "replicated":
                    layer, exact = block_layer() if quantised else bf16_layer()
                else:
                    layer = parallel_layer(kind, quantised)
                    exact = load(layer, kind, 5)
                    layer.quant_method.process_weights_after_loading(layer)
                wrapper, product = adapted(layer, kind, config, punica)
                exact, product = rank_zero(kind, exact), rank_zero(kind, product)
                report = []
                for m, prefill in ((16, False), (16, True), (9, False), (40, True)):
                    index = (1,) * (m // 2) + (0,) * (m - m // 2)  # no adapter: a second slot of zeros
                    punica.update_metadata(LoRAMapping(index, index, is_prefill=prefill), [1, None], 2, 1000)
                    look_up_again()
                    x = random(m, K, seed=m).bfloat16()
                    out = wrapper(x)
                    (step,) = steps()
                    expected = x.float() @ exact.t()
                    expected[: m // 2] += x[: m // 2].float() @ product.t()
                    out = out[0] if isinstance(out, tuple) else out
                    report.append([m, step, error(out, expected)])
            found[f"{kind} {'fp8' if quantised else 'bf16'}"] = report
    return found


def rank_zero(kind: str, whole: Any) -> Any:
    """Rank 0's part of a whole weight."""
    if kind == "replicated":
        return whole
    return whole[:, :K] if kind == "row" else whole[rows_of_rank(kind, 0)]


def bf16_layer() -> tuple[Any, Any]:
    layer = linear_layer(None)
    full = (random(N, K, seed=1) * K**-0.5).bfloat16()
    layer.weight.data.copy_(full)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, full.float()


def layerwise_reload(folder: Path, device: Any) -> dict[str, Any]:
    """vLLM's own reload of a model with layers of two kinds: in the same memory, and with the new weights."""
    import torch
    from vllm.model_executor.model_loader import reload

    found: dict[str, Any] = {}
    with rank_of_two(1, []):
        layers = {f"{kind} {q}": parallel_layer(kind, q) for kind in ("merged", "row") for q in (False, True)}
        model = torch.nn.Module()
        for name, layer in layers.items():
            model.add_module(name, layer)
        reload.record_metadata_for_reloading(model)
        before: dict[str, list[int]] = {}
        for time in range(3):
            if time:
                reload.initialize_layerwise_reload(model)
            exact = {name: load(layer, name.split()[0], 30 + time) for name, layer in layers.items()}
            if time:
                reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
            else:
                for layer in layers.values():
                    layer.quant_method.process_weights_after_loading(layer)
            for name, layer in layers.items():
                kind = name.split()[0]
                part = exact[name][:, K:] if kind == "row" else exact[name][rows_of_rank(kind, 1)]
                report = []
                for m in (16, 40):
                    x = random(m, K, seed=m).bfloat16()
                    report.append(error(layer(x)[0], x.float() @ part.t()))
                places = [each.data_ptr() for each in layer.parameters()]
                same = before.setdefault(name, places) == places
                found[f"{name} {time}"] = {"errors": report, "same_memory": same}
    return found


def held_tensors(storages: set[int]) -> int:
    """Tensors of this process, besides parameters, in one of these storages."""
    import torch

    gc.collect()
    return sum(
        type(each) is torch.Tensor  # no parameter, and none of a compiler's
        and not each.is_meta
        and each.untyped_storage().data_ptr() in storages
        for each in gc.get_objects()
    )


def sleep(folder: Path, device: Any) -> dict[str, Any]:
    """Memory of weights released and made again elsewhere, as after a sleep of level 2: nothing is kept of them."""
    import torch

    from gemmpipe.runtime.weight_cache import WEIGHT_CACHE

    found: dict[str, Any] = {}
    for name, make in (("blocks", block_layer), ("rows", row_layer), ("bf16", bf16_layer)):
        layer, exact = make()
        x = random(16, K, seed=7).bfloat16()
        look_up_again()
        first = error(layer.quant_method.apply(layer, x), x.float() @ exact.t())
        held = held_tensors({each.untyped_storage().data_ptr() for each in layer.parameters()})
        kept = {key: each.detach().clone() for key, each in layer.named_parameters()}
        sizes = {key: each.untyped_storage().nbytes() for key, each in layer.named_parameters()}
        for each in layer.parameters():
            each.untyped_storage().resize_(0)
        others = [torch.empty(size, dtype=torch.uint8).fill_(127) for size in sizes.values()]  # another owner's
        for key, each in layer.named_parameters():
            each.untyped_storage().resize_(sizes[key])
            full = kept[key]
            doubled = key != "weight" or name == "bf16"  # the scales, or the weight
            each.data.copy_(full * 2 if doubled else full)
        woken = error(layer.quant_method.apply(layer, x), x.float() @ exact.t() * 2)
        alive = [weakref.ref(each) for each in layer.parameters()]
        step = steps()
        del layer, each, others
        gc.collect()
        found[name] = {
            "errors": [first, woken],
            "held": held,
            "alive": sum(each() is not None for each in alive),
            "steps": step,
            "forms": len(WEIGHT_CACHE.entries),
        }
    return found


def loading(folder: Path, device: Any) -> dict[str, Any]:
    """A product while weights are loaded into vLLM's pool, as of MLA: nothing is looked up, compiled or allocated."""
    from vllm.device_allocator.cumem import CuMemAllocator

    layer, exact = bf16_layer()
    x = random(16, K, seed=8).bfloat16()
    look_up_again()
    found: dict[str, Any] = {}
    pool = CuMemAllocator()
    with mock.patch.object(CuMemAllocator, "instance", pool):
        for tag in ("weights", CuMemAllocator.default_tag):
            pool.current_tag = tag
            wrong = error(layer.quant_method.apply(layer, x), x.float() @ exact.t())
            found[tag] = [steps(), wrong]
    return found


def experts_object(name: str, weights: Any, parallel: Any) -> Any:
    """vLLM's Triton experts with these weights' scales."""
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    made = TritonExperts.__new__(TritonExperts)
    scheme = FUSED_MOE_UNQUANTIZED_CONFIG
    if name == "fp8":
        scheme = fp8_w8a8_moe_quant_config(w1_scale=weights.w_scale, w2_scale=weights.w2_scale, block_shape=[128, 128])
    made.moe_config, made.quant_config = SimpleNamespace(moe_parallel_config=parallel), scheme
    made.quantization_emulation = False
    made.activation_config = SimpleNamespace(clamp_limit=None)  # since 0.29
    return made


def parallel_config(**fields: Any) -> Any:
    """vLLM's own configuration of how experts are spread, of one device but for `fields`."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    values: dict[str, Any] = {}
    for each in dataclasses.fields(FusedMoEParallelConfig):
        plain: Any = 1 if each.name.endswith("_size") else 0 if each.name.endswith("_rank") else False
        values[each.name] = "allgather_reducescatter" if each.name == "all2all_backend" else plain
    return FusedMoEParallelConfig(**{**values, **fields})


def lora_context() -> Any:
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

    names = [each.name for each in dataclasses.fields(MoELoRAContext) if each.default is dataclasses.MISSING]
    return MoELoRAContext(**dict.fromkeys(names))


def mixture_of(name: str, tokens: int) -> tuple[Any, Any, Any, Any]:
    """(family's spec, weights, inputs, expected result)."""
    import torch

    from gemmpipe.family import KernelDefaults, load_family
    from gemmpipe.family.problem import make_problem

    family = load_family("fmoe")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    values = {**EXPERTS, "token": tokens, "q_type": "per_1x128" if name == "fp8" else "none"}
    spec = family.spec(make_problem(family, values, defaults, "sm_90", "test"))
    generator = torch.Generator().manual_seed(tokens)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    return spec, weights, inputs, family.reference(spec, inputs, weights)


def run_experts(made: Any, weights: Any, inputs: Any, out: Any) -> bool:
    """Call `apply` as vLLM does; True if vLLM's own kernels are reached, which need its library."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    given = {"output": out, "hidden_states": inputs.x, "w1": weights.w, "w2": weights.w2}
    given |= {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids, "activation": MoEActivation.SILU}
    given |= {"global_num_experts": -1, "apply_router_weight_on_input": False}
    names = ("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")
    with mock.patch.object(made, "moe_problem_size", side_effect=ZeroDivisionError):
        try:
            made.apply(**given, **dict.fromkeys(names))
        except (ZeroDivisionError, AttributeError):
            return True
    return False


def experts_states(folder: Path, device: Any) -> dict[str, Any]:
    """Experts that sleep, with LoRA, and spread over devices; and how often the log says that they are left."""
    import torch

    from gemmpipe.plugins.vllm_notice import NOTICE

    lines, ended = plugin_log()
    found: dict[str, Any] = {}
    NOTICE._left.clear()
    for name in ("bf16", "fp8"):
        spec, weights, inputs, expected = mixture_of(name, 4)
        made = experts_object(name, weights, parallel_config())
        out = torch.empty(spec.out_shape, dtype=torch.bfloat16)
        engine = [run_experts(made, weights, inputs, out) for _ in range(2)]
        errors = [error(out, expected)]
        own = [each for each in (weights.w, weights.w2, weights.w_scale, weights.w2_scale) if each is not None]
        places, forms = {each.untyped_storage().data_ptr() for each in own}, len(own)
        held = held_tensors(places) - forms
        second = weights.w2_scale if name == "fp8" else weights.w2  # of the second product: the result doubles
        doubled = second.clone() * 2
        second.untyped_storage().resize_(0)
        second.untyped_storage().resize_(doubled.numel() * doubled.element_size())
        second.copy_(doubled)
        engine.append(run_experts(made, weights, inputs, out))
        errors.append(error(out, expected * 2))
        made.set_lora_context(lora_context())
        with_lora = [run_experts(made, weights, inputs, out) for _ in range(3)]
        deferred = made.expects_unquantized_inputs
        alive = [weakref.ref(each) for each in own]
        spread = []
        for fields in ({"use_ep": True, "ep_size": 2}, {"dp_size": 2}, {"dp_size": 2, "use_ep": True}):
            other = experts_object(name, weights, parallel_config(**fields))
            spread += [run_experts(other, weights, inputs, out), not other.expects_unquantized_inputs]
        del weights, own, made, other, second
        gc.collect()
        found[name] = {
            "engine": engine,
            "errors": errors,
            "held": held,
            "lora": with_lora,
            "deferred": deferred,
            "alive": sum(each() is not None for each in alive),
            "spread": spread,
        }
    ended()
    return {**found, "lines": [line for line in lines if line.startswith("gemmpipe: left")]}


def quantisers_hold_nothing(folder: Path, device: Any) -> dict[str, Any]:
    """The quantise operators keep no tensor of a call."""
    import torch

    x, residual = (random(6, 256, seed=seed).bfloat16() for seed in (1, 2))
    weight = random(256, seed=3).abs().bfloat16()
    result, scale = torch.empty(6, 256, dtype=torch.float8_e4m3fn), torch.empty(6, 2)
    torch.ops.gemmpipe.rms_norm_per_block_quant(result, x, weight, scale, 1e-6, None, residual, 128, False)
    alive = [weakref.ref(each) for each in (x, residual, weight, result, scale)]
    del x, residual, weight, result, scale
    gc.collect()
    return {"alive": sum(each() is not None for each in alive)}


STATES = (
    tensor_parallel,
    lora,
    layerwise_reload,
    sleep,
    loading,
    experts_states,
    quantisers_hold_nothing,
)
"""The cases, in their order."""
