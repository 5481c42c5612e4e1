"""What a model's experts compute between their products: key columns, or why they are no fused family's."""

from collections.abc import Mapping

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError, quoted
from gemmpipe.sources.decoder.linear import Config, Linear, Shape
from gemmpipe.sources.decoder.rule import Rule
from gemmpipe.sources.decoder.rules import rule_of

_FIELDS = ("hidden_act", "hidden_activation", "activation_function")
_WORDS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu"}
"""transformers' words -> ours; its other gelus approximate erf by tanh or a sigmoid, which is another function."""
_LIMITS = ("swiglu_limit", "swiglu_limits")


def between_products(linear: Linear, config: Config, family: str, where: str) -> Mapping[str, Scalar]:
    """`act_type`, and `doweight_stage1` where that is set. Raises UserError for experts that no fused kernel has."""
    shape = _shape(config, where)
    odd = ["biases"] if linear.bias else []
    if shape.rule.clamped or any(_limits(shape.value(name)) for name in _LIMITS):
        odd.append("a clamped SwiGLU")
    if odd:
        raise UserError(f"{where}: experts with {' and '.join(odd)}, which kernel={family} does not compute")
    field = next((name for name in _FIELDS if shape.value(name) is not None), "")
    said = shape.value(field) if field else shape.rule.activation
    word = _WORDS.get(str(said).lower())
    if word is None:
        named = field or "experts' activation"
        other = f"which kernel={family} does not compute: silu, or gelu by erf"
        raise UserError(f"{where}: {named}: {quoted(said)}, {other}")
    return {"act_type": word, **({"doweight_stage1": 1} if shape.rule.weight_first else {})}


def _shape(config: Config, where: str) -> Shape:
    """The fields by their architecture's rule; by none where transformers alone knows it (shapes=meta)."""
    try:
        architecture, rule = rule_of(config, where)
    except UserError:
        architecture, rule = "", Rule()
    return Shape(config=config, tp=1, ep=1, where=where, architecture=architecture, rule=rule)


def _limits(said: object) -> bool:
    """Whether a limit is said, for all layers or for one; 0 is none."""
    return any(said) if isinstance(said, list | tuple) else bool(said)
