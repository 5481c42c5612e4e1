"""The products of a model that a kernel family computes, and their keys, with the experts' activation columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.family import Family, GemmSpec, KernelDefaults, load_family
from gemmpipe.family.dtypes import DTYPES_16BIT
from gemmpipe.family.problem import check_routing, make_problem
from gemmpipe.sources.model.linear import ArchitectureRule, ConfigJson, Linear, ModelShape
from gemmpipe.sources.model.quantization import Quantization
from gemmpipe.sources.model.rules import rule_of

EXPERTS_FAMILY = "fmoe"
"""The kernel family of a model's experts."""
_FIELDS = ("hidden_act", "hidden_activation", "activation_function")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu"}
"""transformers' names -> ours; its other gelus approximate erf by tanh or a sigmoid, a different function."""
_LIMITS = ("swiglu_limit", "swiglu_limits")


def activation_columns(linear: Linear, config: ConfigJson, family: str, where: str) -> Mapping[str, Scalar]:
    """`act_type`, and `doweight_stage1` if set. Raises UserError for experts that no fused kernel computes."""
    shape = _model_shape(config, where)
    if odd := _odd_parts(linear, shape):
        raise UserError(f"{where}: experts with {odd}, which kernel={family} does not compute")
    name, activation = _activation(shape)
    word = _ACTIVATIONS.get(str(activation).lower())
    if word is None:
        other = f"which kernel={family} does not compute; expected silu, or gelu by erf"
        raise UserError(f"{where}: {name}: {quoted_repr(activation)}, {other}")
    return {"act_type": word, **({"doweight_stage1": 1} if shape.rule.weight_first else {})}


def _odd_parts(linear: Linear, shape: ModelShape) -> str:
    """What experts have that no fused kernel computes: `biases and a clamped SwiGLU`; empty for nothing."""
    odd = ["biases"] if linear.bias else []
    if shape.rule.clamps_activation or any(_has_limit(shape.value(name)) for name in _LIMITS):
        odd.append("a clamped SwiGLU")
    return " and ".join(odd)


def _activation(shape: ModelShape) -> tuple[str, object]:
    """(the field with the experts' activation, its value)."""
    field = next((name for name in _FIELDS if shape.value(name) is not None), "")
    return field or "experts' activation", shape.value(field) if field else shape.rule.activation


def _model_shape(config: ConfigJson, where: str) -> ModelShape:
    """The fields by their architecture's rule; by a plain rule for one that only transformers has (shapes=meta)."""
    try:
        architecture, rule = rule_of(config, where)
    except UserError:
        architecture, rule = "", ArchitectureRule()
    return ModelShape(config=config, tp=1, ep=1, where=where, architecture=architecture, rule=rule)


def _has_limit(value: object) -> bool:
    """True if a limit is set, for all layers or for one; 0 is none."""
    return any(value) if isinstance(value, list | tuple) else bool(value)


_GATED = 2


@dataclass(frozen=True, kw_only=True)
class FamilyFilter:
    """A family, the kernel's defaults, and the checkpoint's quantisation (None: not recorded, any family matches)."""

    family: Family
    defaults: KernelDefaults
    gfx: str
    quantization: Quantization | None

    @property
    def columns(self) -> frozenset[str]:
        """The names of the family's key."""
        return frozenset(column.name for column in self.family.key_columns)

    @property
    def batched(self) -> bool:
        """True if it computes batched products."""
        return "B" in self.columns

    @property
    def grouped(self) -> bool:
        """True if it computes experts."""
        return "expert" in self.columns

    @property
    def reads_16_bit(self) -> bool:
        """True if the family's weights have 16 bits."""
        return self._sample_spec().w_dtype in DTYPES_16BIT

    def computes(self, linear: Linear, *, quantised: bool) -> bool:
        """True if this family computes it: plain, batched or grouped, quantised or in 16 bits."""
        if bool(linear.experts) != self.grouped or bool(linear.batch) != self.batched:
            return False
        if self.grouped and len(linear.parts) != _GATED:
            return False  # an expert's down projection is computed together with its up projection
        if self.batched:
            return True
        if linear.sixteen_bit:
            return self.family.lm_head
        if self.quantization is None:
            return True
        if not quantised:
            return self._sample_spec().w_dtype in DTYPES_16BIT
        return bool(self.quantization.experts) if self.grouped else self.family.name in self.quantization.families

    def problems(
        self, linear: Linear, config: ConfigJson, sizes: Sequence[int], where: str, *, quantised: bool
    ) -> list[Problem]:
        """The product at each M; `config` are the language model's fields. Raises UserError beginning with `where`."""
        values = self._grouped(linear, config, where, quantised=quantised) if self.grouped else self._plain(linear)
        if self.quantization and quantised and not self.grouped:
            values |= self.quantization.columns(self.columns)
        try:
            found = [
                make_problem(
                    self.family,
                    {self.family.rows_column: m, **values},
                    self.defaults,
                    self.gfx,
                    where,
                    float(linear.calls),
                    linear.layer,
                )
                for m in sizes
            ]
            for problem in found[:1]:
                check_routing(self.family, problem, values, self.defaults, where)
            return found
        except UserError as error:
            if not (self.grouped and quantised and self.quantization) or str(error).startswith("kernel."):
                raise
            reason = str(error).removeprefix(f"{where}: ")
            raise UserError(
                f"{where}: {self.quantization.what}: {reason}; shapes.quantization=ignore takes them in 16 bits"
            ) from None

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """The (rows, columns) of the scale blocks of the family's weights, or None."""
        if self.quantization is not None:
            return self.quantization.block
        scaling = self._sample_spec().w_scale
        return scaling.block if scaling is not None and scaling.granularity == "block" else None

    def no_product_message(self) -> str:
        """The reason why a model has no product for this family, and the options to set instead."""
        if self.quantization is None:
            what = "experts" if self.grouped else "batched products" if self.batched else "products"
            return f"no {what} in this model, which kernel={self.family.name} would compute"
        return f"no products for kernel={self.family.name}: {self._stored_as()}"

    def experts_reason(self, products: Sequence[tuple[Linear, bool]], config: ConfigJson) -> str | None:
        """Why no kernel of ours computes a model's experts; empty if one does, None for a model without experts.

        `products` are (product, True if it is quantised); `config` are the language model's fields.
        """
        experts = [(linear, quantised) for linear, quantised in products if linear.experts]
        if not experts:
            return None
        plain = KernelDefaults(dtype=None, out_dtype=None, bias=None)
        fused = replace(self, family=load_family(EXPERTS_FAMILY), defaults=plain)
        shape = _model_shape(config, EXPERTS_FAMILY)
        for linear, quantised in experts:
            if odd := _odd_parts(linear, shape):
                return odd
            name, activation = _activation(shape)
            if str(activation).lower() not in _ACTIVATIONS:
                return f"{name} {quoted_repr(activation)}"
            if len(linear.parts) != _GATED:
                continue
            try:
                fused.problems(linear, config, (1,), EXPERTS_FAMILY, quantised=quantised)
            except UserError as error:
                return self.quantization.what if quantised and self.quantization else str(error)
            return (
                "" if fused.computes(linear, quantised=quantised) or not self.quantization else self.quantization.what
            )
        return "no gate"

    def others_message(self, products: Sequence[tuple[Linear, bool]], config: ConfigJson) -> str:
        """A clause on the products that this family does not compute; empty if none is relevant."""
        plain = sum(not linear.experts and not linear.sixteen_bit for linear, _ in products)
        parts = [f"{plain} products of other kernels ({self._stored_as()})"] if plain and self.quantization else []
        reason = None if self.grouped else self.experts_reason(products, config)
        if reason is not None:
            kernel = f"no kernel of ours: {reason}" if reason else f"kernel={EXPERTS_FAMILY}"
            parts.append(f"the experts ({kernel})")
        return ", ".join(parts)

    def _stored_as(self) -> str:
        """The checkpoint's quantisation and the kernels for it."""
        assert self.quantization is not None
        kernels = " or ".join(f"kernel={name}" for name in self.quantization.families) or "no kernel of ours"
        return (
            f"quantization_config is {self.quantization.what} ({kernels}; kernel=a16w16 for 16-bit layers); "
            "shapes.quantization=ignore takes all layers"
        )

    def _sample_spec(self) -> GemmSpec:
        """A spec with arbitrary sizes, for the properties that do not depend on them."""
        sizes: dict[str, Scalar] = {c.name: 1024 for c in self.family.key_columns if c.kind == "int"}
        return self.family.spec(make_problem(self.family, {**sizes, "topk": 1}, self.defaults, self.gfx, "kernel"))

    def _plain(self, linear: Linear) -> dict[str, Scalar]:
        values: dict[str, Scalar] = {"N": linear.n, "K": linear.k}
        if linear.batch:
            values["B"] = linear.batch
        if linear.bias and "bias" in self.columns and self.defaults.bias is None:
            values["bias"] = True
        return values

    def _grouped(self, linear: Linear, config: ConfigJson, where: str, *, quantised: bool) -> dict[str, Scalar]:
        if not linear.topk:
            raise UserError(f"{where}: no field 'num_experts_per_tok', which kernel={self.family.name} needs")
        values: dict[str, Scalar] = {
            "model_dim": linear.k,
            "inter_dim": linear.parts[0],
            "expert": linear.experts,
            "topk": linear.topk,
            "use_g1u1": 1,
        }
        if "act_type" in self.columns:  # the user's own family without that column has a fixed activation
            values |= activation_columns(linear, config, self.family.name, where)
        if self.quantization is not None:
            values["q_type"] = self.quantization.experts if quantised else "No"
        return values
