"""Problems of a model, from its config.json, the degrees of parallelism and the batch sizes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gemmpipe.data import Problem
from gemmpipe.errors import UserError
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.files.jsonfile import read_object
from gemmpipe.problem import unite
from gemmpipe.sources import Source
from gemmpipe.sources.architectures import linears
from gemmpipe.sources.batch_sizes import batch_sizes
from gemmpipe.sources.decoder.blocks import check_blocks
from gemmpipe.sources.decoder.linear import Config, Linear
from gemmpipe.sources.decoder.quantization import apart, quantization_of
from gemmpipe.sources.decoder.rules import language_model
from gemmpipe.sources.decoder.wanted import Wanted

_MOST_DEVICES = 1024


@dataclass(frozen=True, kw_only=True)
class Model(Source):
    """The products of one device of a `tp`-way sharded decoder, each at every M of `nsets`.

    `path` is a config.json or the folder that holds it; `config` holds the same fields inline. `ep` above 1 deals whole
    experts out over so many devices. The weight is the number of calls in a forward pass. A `quantization_config` says
    which kernel computes which layer; `quantization=ignore` lets any kernel compute all of them.
    """

    path: str | None
    config: Mapping[str, object] | None
    tp: int
    ep: int
    nsets: Sequence[int] | int | str
    quantization: Literal["config", "ignore"]

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: which field, and why it cannot be."""
        where, config = self._config()
        sizes = batch_sizes(self.nsets)
        wanted = self._wanted(family, defaults, gfx, config, where)
        found: list[Problem] = []
        for linear, quantised in self._products(wanted, config, where):
            line = f"{where}: {linear.layer}"
            if quantised and wanted.block:
                check_blocks(wanted.block, linear, self.tp, line)
            if wanted.takes(linear, quantised=quantised):
                found += wanted.problems(linear, language_model(config), sizes, line, quantised=quantised)
        if not found:
            raise UserError(f"{where}: {wanted.nothing()}")
        return unite(found)

    def left_out(self, family: Family, defaults: KernelDefaults, gfx: str) -> str:
        """Which products other kernels compute, as the checkpoint stores them."""
        where, config = self._config()
        wanted = self._wanted(family, defaults, gfx, config, where)
        others = [
            each for each in self._products(wanted, config, where) if not wanted.takes(each[0], quantised=each[1])
        ]
        return wanted.others(others)

    def _wanted(self, family: Family, defaults: KernelDefaults, gfx: str, config: Config, where: str) -> Wanted:
        self._check_degrees()
        quantization = quantization_of(config, where) if self.quantization == "config" else None
        return Wanted(family=family, defaults=defaults, gfx=gfx, quantization=quantization)

    def _products(self, wanted: Wanted, config: Config, where: str) -> Iterator[tuple[Linear, bool]]:
        """Every product of one device, and whether it is quantised there."""
        yield from apart(self.linears(config, where, batched=wanted.batched), wanted.quantization)

    def linears(self, config: Config, where: str, *, batched: bool) -> list[Linear]:
        """The products of one device, by our rules."""
        return linears(config, self.tp, where, sixteen_bit=True, ep=self.ep, batched=batched)

    def _config(self) -> tuple[str, Config]:
        if (self.path is None) == (self.config is None):
            both = "are both given" if self.path else "are both empty"
            yours = "; shapes=model, csv, trace or log reads a file of yours" if self.path else ""
            raise UserError(f"shapes.path and shapes.config {both}, expected a config.json or its fields inline{yours}")
        if self.config is not None:
            return "shapes.config", self.config
        path = Path(str(self.path)).expanduser()
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            raise UserError(f"shapes.path: no file '{file}', expected a model's config.json")
        config = read_object(file)
        beside = file.with_name("hf_quant_config.json")  # where ModelOpt keeps it
        if "quantization_config" not in config and beside.is_file():
            config = {**config, "quantization_config": read_object(beside).get("quantization")}
        return str(file), config

    def _check_degrees(self) -> None:
        for name, degree in (("tp", self.tp), ("ep", self.ep)):
            if isinstance(degree, bool) or not isinstance(degree, int) or not 1 <= degree <= _MOST_DEVICES:
                raise UserError(f"shapes.{name}: {degree!r}, expected a whole number from 1 to {_MOST_DEVICES}")
