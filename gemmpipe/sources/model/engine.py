"""Problems of a served model: the products that an engine multiplies, at the row counts of its batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError
from gemmpipe.engines.batch_sizes import (
    OTHER_GIB,
    BatchLimits,
    decode_sizes,
    default_limits,
    knows_memory,
    prefill_sizes,
    sglang_prefill_sizes,
)
from gemmpipe.engines.kernel_choice import BLOCKS, EXPERTS_BLOCKS, EXPERTS_SIXTEEN, KernelRule
from gemmpipe.engines.launch import ServerArguments
from gemmpipe.engines.own_kernel import kind_of_layers, own_kernel
from gemmpipe.engines.packages import SGLANG, VLLM
from gemmpipe.family import Family, GemmSpec, KernelDefaults, load_family, shipped_families
from gemmpipe.family.dtypes import X_SCALE_COLUMN
from gemmpipe.family.layouts import ROW_MAJOR
from gemmpipe.family.problem import MAX_SIZE
from gemmpipe.sources.model.linear import ConfigJson, Linear
from gemmpipe.sources.model.quantization import quantization_of
from gemmpipe.sources.model.rules import language_model
from gemmpipe.sources.model.source import ModelShapes, batch_sizes

_WITH_LIBRARIES = (BLOCKS, EXPERTS_BLOCKS, EXPERTS_SIXTEEN)
"""Kinds of layers whose default kernel may be none of the libraries that are timed anyway."""
_FLAGS = {
    VLLM: {
        "tp": "--tensor-parallel-size",
        "max_num_seqs": "--max-num-seqs",
        "max_num_batched_tokens": "--max-num-batched-tokens",
        "capture_sizes": "--cudagraph-capture-sizes",
        "max_capture_size": "--max-cudagraph-capture-size",
    },
    SGLANG: {
        "tp": "--tp-size",
        "ep": "--ep-size",
        "max_num_seqs": "--max-running-requests",
        "max_num_batched_tokens": "--chunked-prefill-size",
        "capture_sizes": "--cuda-graph-bs-decode",
        "max_capture_size": "--cuda-graph-max-bs-decode",
    },
}
"""The arguments of a server by the keys of `shapes=engine`: vLLM 0.25.1 to 0.33.0, SGLang 0.5.23."""
_FUSED = ("DeepseekV3ForCausalLM",)
_FUSED_GLM = ("Glm4MoeForCausalLM",)
_VALIDATED_EXPERTS = 256
_UNFUSED_QUANTIZATION = ("w4afp8", "modelopt_fp4")


@dataclass(frozen=True, kw_only=True)
class EngineShapes(ModelShapes):
    """As `ModelShapes`, for a server: Ms are the batch sizes of its CUDA graphs, then those of prefill.

    `nsets: engine` are these; numbers replace them. The output embedding multiplies one row per request only. Arguments
    that are null have the engine's default for the device.
    """

    engine: Literal["vllm", "sglang"]
    own_kernel: bool
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    capture_sizes: Sequence[int] | None
    max_capture_size: int | None
    prefill: Literal["powers", "captured", "none"]
    memory_gib: int | None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_capture_size", "memory_gib"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_SIZE:
                raise ValueError(f"{name}={value}, expected a whole number from 1 to {MAX_SIZE}")

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once. Raises UserError: the field and the reason, or a kernel that the engine does not need."""
        where, config = self._config()
        wanted = self._family_filter(family, defaults, gfx, config, where)
        if self.quantization == "config" and wanted.quantization is None and not wanted.reads_16_bit:
            raise UserError(
                f"kernel={family.name}: {where} has no quantization_config: the engine multiplies weights in 16 bits; "
                f"expected kernel={sixteen_bit_family()}, or shapes.quantization=ignore"
            )
        found = super().problems(family, defaults, gfx)
        chosen = defaults.key.get(X_SCALE_COLUMN.name)
        return found if chosen is not None else [self._in_engines_order(each, family, gfx) for each in found]

    def engine_libraries(self, family: Family, defaults: KernelDefaults, gfx: str) -> tuple[str, ...]:
        """Those of the engine's default kernels for these products; the libraries of 16 bits are always timed."""
        rules = [self._own_rule(family.spec(each), gfx) for each in self.problems(family, defaults, gfx)]
        return tuple(dict.fromkeys(name for rule in rules if rule is not None for name in rule.libraries))

    def _own_rule(self, spec: GemmSpec, gfx: str) -> KernelRule | None:
        """The engine's default kernel of a product with scales by blocks, or of experts; None for others."""
        kind = kind_of_layers(spec)
        if not self.own_kernel or kind not in _WITH_LIBRARIES or spec.w_layout != ROW_MAJOR:
            return None
        return own_kernel(self.engine, kind, gfx, (spec.n, spec.k))

    def _in_engines_order(self, problem: Problem, family: Family, gfx: str) -> Problem:
        """The problem with the order of x's scales that the engine's quantiser writes for it."""
        rule = self._own_rule(family.spec(problem), gfx)
        if rule is None or not rule.scales:
            return problem
        name = X_SCALE_COLUMN.name
        return replace(problem, key=tuple((n, rule.scales if n == name else value) for n, value in problem.key))

    def assumed(self, gfx: str) -> str:
        """The memory of the server's device, where neither the user nor the architecture gives it."""
        limits = (self.max_num_seqs, self.max_num_batched_tokens)
        if self.nsets != "engine" or self.memory_gib is not None or None not in limits or knows_memory(gfx):
            return ""
        return f"batches of a device with {OTHER_GIB} GiB; shapes.memory_gib= gives that of the server's"

    def limits(self, gfx: str) -> BatchLimits:
        """The server's limits of a batch."""
        found = default_limits(self.engine, gfx, self.tp, self.memory_gib)
        requests, tokens = self.max_num_seqs or found.requests, self.max_num_batched_tokens or found.tokens
        captured = found.captured
        if self.max_num_seqs is not None:
            captured = min(captured, 2 * requests if self.engine == VLLM else requests)
        return BatchLimits(requests=requests, tokens=tokens, captured=min(self.max_capture_size or captured, tokens))

    def row_counts(self, linear: Linear, gfx: str) -> list[int]:
        """The Ms of a product. Raises UserError about shapes.nsets."""
        limits = self.limits(gfx)
        if self.nsets != "engine":
            sizes = batch_sizes(self.nsets)
        else:
            sizes = sorted({*decode_sizes(self.engine, limits, self._capture_sizes), *self._prefill_sizes(limits)})
        if linear.layer != "lm_head":
            return sizes
        return [size for size in sizes if size <= limits.requests] or sizes[:1]

    @cached_property
    def _capture_sizes(self) -> tuple[int, ...] | None:
        if self.capture_sizes is None:
            return None
        return tuple(batch_sizes(self.capture_sizes))

    def _prefill_sizes(self, limits: BatchLimits) -> list[int]:
        if self.prefill == "none":
            return []
        if self.prefill == "captured" and self.engine == SGLANG:
            return sglang_prefill_sizes(limits.tokens)
        return prefill_sizes(limits)

    def linears(self, config: ConfigJson, where: str, *, batched: bool) -> list[Linear]:
        """The products of one device as the engine merges them. Raises UserError for a layout that it does not have."""
        if self.engine == VLLM and self.ep not in (1, self.tp):
            raise UserError(f"shapes.ep: {self.ep}; vLLM's expert parallelism has shapes.tp={self.tp} devices, or none")
        found = super().linears(config, where, batched=batched)
        if self.engine == SGLANG and (more := self._fused_shared_experts(config)):
            return list(_with_shared_experts(found, more))
        return found

    def _fused_shared_experts(self, config: ConfigJson) -> int:
        """The number of shared experts that SGLang computes as further routed ones; 0 if it computes an MLP.

        `shared_experts_fusion_disable_reason` of DeepSeek-V3 and GLM-4.5 on CUDA, for a server without flags.
        """
        fields = language_model(config)
        named = config.get("architectures") or fields.get("architectures")
        architecture = named[0] if isinstance(named, list | tuple) and named else named
        shared = fields.get("n_shared_experts")
        quantised = config.get("quantization_config")
        method = str(quantised.get("quant_method", "")) if isinstance(quantised, dict) else ""
        if not isinstance(shared, int) or self.ep > 1 or method in _UNFUSED_QUANTIZATION:
            return 0
        if architecture in _FUSED:
            return shared if shared == 1 and fields.get("n_routed_experts") == _VALIDATED_EXPERTS else 0
        return shared if architecture in _FUSED_GLM else 0

    def server(self) -> ServerArguments:
        """The server that the problems are for."""
        flags = _FLAGS[self.engine]
        given: list[str] = []
        for name, flag in flags.items():
            value = getattr(self, name)
            if value is None or (name in ("tp", "ep") and value == 1):
                continue
            given += [flag, *map(str, value if isinstance(value, list | tuple) else [value])]
        if self.engine == VLLM and self.ep > 1:
            given.append("--enable-expert-parallel")
        return ServerArguments(engine=self.engine, model=self._model_argument(), arguments=tuple(given))

    def _model_argument(self) -> str:
        path = Path(self.path or "MODEL")
        if path.name == "config.json":
            return str(path.parent)
        return str(path) if path.suffix != ".json" else "MODEL"


def server_for(engine: str, shapes: Mapping[str, object], model: str | None = None) -> ServerArguments:
    """The server of an engine for a run with these options of `shapes`, whose rows are those of one of its devices.

    Its arguments are those of `shapes=engine`, where this is the engine there, else the tensor parallelism alone.
    `model` replaces the model of the options.
    """
    names = {field.name for field in fields(EngineShapes)}
    given = {"own_kernel": True, **{name: value for name, value in shapes.items() if name in names}}
    if names <= set(given) and given["engine"] == engine:
        try:
            server = EngineShapes(**given).server()  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass  # options of another version
        else:
            return server if model is None else replace(server, model=model)
    tp = shapes.get("tp")
    parallel = (_FLAGS[engine]["tp"], str(tp)) if isinstance(tp, int) and tp > 1 else ()
    return ServerArguments(engine=engine, arguments=parallel, **({} if model is None else {"model": model}))


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The products of a model on one device of a server."""

    sizes: Mapping[str, tuple[tuple[int, int], ...]]
    """Kind of layers -> (N, K), each once; none of experts. A kind that the model does not have is absent."""
    quantization: str
    """The checkpoint's quantisation; empty for 16 bits."""
    family: str | None
    """The family of most linear layers; None if no kernel of ours computes them."""
    experts: str | None
    """Why no kernel of ours computes the experts; empty if one does, None without experts."""


def served_model(engine: str, path: str, tp: int, ep: int, gfx: str) -> ServedModel:
    """A model as an engine serves it. Raises UserError for one that cannot be read, or not be divided."""
    unset: dict[str, None] = dict.fromkeys(
        ("config", "max_num_seqs", "max_num_batched_tokens", "capture_sizes", "max_capture_size", "memory_gib")
    )
    source = EngineShapes(
        engine=engine,  # type: ignore[arg-type]
        path=path,
        tp=tp,
        ep=ep,
        nsets=[1],
        quantization="config",
        prefill="none",
        own_kernel=False,
        **unset,
    )
    where, config = source._config()
    source.linears(config, where, batched=False)  # a model that cannot be read is an error here
    main = family_of_checkpoint(Path(path))
    plain = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    found: dict[str, set[tuple[int, int]]] = {}
    for family in map(load_family, shipped_families()):
        try:
            problems = source.problems(family, plain, gfx)
        except UserError:
            if family.name == main:
                raise
            continue  # the model has no product of this family
        for spec in map(family.spec, problems):
            if kind := kind_of_layers(spec):
                found.setdefault(kind, set()).update([] if spec.experts else [(spec.n, spec.k)])
    quantization = quantization_of(config, where)
    return ServedModel(
        sizes={kind: tuple(sorted(sizes)) for kind, sizes in found.items()},
        quantization=quantization.what if quantization is not None else "",
        family=main,
        experts=source.experts_reason(gfx),
    )


def sixteen_bit_family() -> str:
    """The family of a model's layers in 16 bits."""
    return next(name for name in shipped_families() if load_family(name).lm_head)


def family_of_checkpoint(path: Path) -> str | None:
    """The family of most linear layers of a model, by its config.json; None if it cannot be read, or no family fits."""
    source = ModelShapes(path=str(path), config=None, tp=1, ep=1, nsets=[1], quantization="config")
    try:
        where, config = source._config()
        found = quantization_of(config, where)
    except UserError:
        return None  # reported when the source reads it
    if found is None:
        return sixteen_bit_family()
    return found.families[0] if found.families else None


def _with_shared_experts(products: Sequence[Linear], count: int) -> Iterator[Linear]:
    """The products with shared experts among the routed ones, which every token chooses."""
    for product in products:
        if product.layer.startswith("shared_experts."):
            continue
        if product.experts:
            topk = product.topk + count if product.topk else 0
            yield replace(product, experts=product.experts + count, topk=topk)
        else:
            yield product
