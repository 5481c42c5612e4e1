"""How engines cut a decoder's layers into products, by its config.json and the degrees of parallelism."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gemmpipe.errors import UserError
from gemmpipe.sources.decoder.attention import attention
from gemmpipe.sources.decoder.feedforward import COUNTS, feedforward, inputs_of_layers, lm_head
from gemmpipe.sources.decoder.linear import Config, Linear, Shape, check_names
from gemmpipe.sources.decoder.rule import Rule
from gemmpipe.sources.decoder.rules import language_model, rule_of


def linears(
    config: Config, tp: int, where: str, *, sixteen_bit: bool, ep: int = 1, batched: bool = False
) -> list[Linear]:
    """Every product of the language model; with `sixteen_bit` also those that engines never quantise (lm_head ...).

    `batched` gives instead the batched ones, which decode makes of latent attention. Raises UserError: which field,
    and why it cannot be.
    """
    fields = language_model(config)
    architecture, rule = rule_of(config, where)
    for each in (config, fields):
        check_names(each, where)
    shape = Shape(config=fields, tp=tp, ep=ep, where=where, architecture=architecture, rule=rule)
    latent = rule.attention != "latent" and shape.says("kv_lora_rank")
    if latent or (not rule.sparse and any(shape.says(name) for name in COUNTS)):
        raise UserError(f"{where}: {architecture} with experts or latent attention: no rule for it")
    found = [_named(linear, rule) for linear in _all(shape) if linear.places and bool(linear.batch) == batched]
    return [linear for linear in found if sixteen_bit or batched or not linear.sixteen_bit]


def _all(shape: Shape) -> Iterator[Linear]:
    yield from attention(shape)
    yield from feedforward(shape)
    if shape.rule.inputs_of_layers:
        yield from inputs_of_layers(shape)
    yield lm_head(shape)


def _named(linear: Linear, rule: Rule) -> Linear:
    """With the names that a checkpoint of this architecture gives the matrices."""
    modules = tuple(_renamed(module, rule.names) for module in linear.modules)
    return linear if modules == linear.modules else replace(linear, modules=modules)


def _renamed(module: str, names: Mapping[str, str]) -> str:
    return next((new + module.removeprefix(old) for old, new in names.items() if module.startswith(old)), module)
