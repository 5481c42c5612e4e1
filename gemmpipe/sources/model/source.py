"""Problems of a model, from its config.json, the degrees of parallelism and the batch sizes.

Batch sizes are numbers, or the name of an engine for its captured batch sizes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError, quoted_repr, suggest
from gemmpipe.core.files import read_object, suggest_path
from gemmpipe.engines.batch_sizes import VLLM_MAX_CAPTURE, vllm_capture_sizes
from gemmpipe.engines.packages import VLLM
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.family.problem import MAX_SIZE, merge_duplicates
from gemmpipe.sources import Source
from gemmpipe.sources.model.keys import EXPERTS_FAMILY, FamilyFilter
from gemmpipe.sources.model.linear import ConfigJson, Linear, check_block_alignment
from gemmpipe.sources.model.quantization import quantization_of, split_by_quantization
from gemmpipe.sources.model.rules import language_model, linears

_EXPECTED = f"expected whole numbers from 1 to {MAX_SIZE}, as in [1, 64, 4096], or vllm"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""A model on the Hugging Face Hub: OWNER/NAME."""
_ENGINES: Mapping[str, Callable[[], list[int]]] = {VLLM: lambda: vllm_capture_sizes(VLLM_MAX_CAPTURE)}


def batch_sizes(nsets: Sequence[int] | int | str) -> list[int]:
    """Each M once, in the given order. Raises UserError about shapes.nsets."""
    if isinstance(nsets, str):
        if nsets not in _ENGINES:
            raise UserError(f"shapes.nsets: '{nsets}', {_EXPECTED}{suggest(nsets, _ENGINES)}")
        return _ENGINES[nsets]()
    sizes = [nsets] if isinstance(nsets, int) else list(nsets or ())
    for m in sizes:
        if isinstance(m, bool) or not isinstance(m, int) or not 1 <= m <= MAX_SIZE:
            raise UserError(f"shapes.nsets: {quoted_repr(m)}, {_EXPECTED}")
    if not sizes:
        raise UserError(f"shapes.nsets: empty, {_EXPECTED}")
    return list(dict.fromkeys(sizes))


_MAX_DEVICES = 1024


@dataclass(frozen=True, kw_only=True)
class ModelShapes(Source):
    """The products of one device of a `tp`-way sharded decoder, each at every M of `nsets`.

    `path` is a config.json or its folder; `config` has the same fields inline. `ep` above 1 distributes whole experts
    over this number of devices. The weight is the number of calls in a forward pass. A `quantization_config` determines
    the kernels of the layers; `quantization=ignore` lets any kernel compute all of them.
    """

    path: str | None
    config: Mapping[str, object] | None
    tp: int
    ep: int
    nsets: Sequence[int] | int | str
    quantization: Literal["config", "ignore"]

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: the field and the reason."""
        where, config = self._config()
        wanted = self._family_filter(family, defaults, gfx, config, where)
        found: list[Problem] = []
        for linear, quantised in self._products(wanted, config, where):
            line = f"{where}: {linear.layer}"
            if quantised and wanted.block:
                check_block_alignment(wanted.block, linear, self.tp, line)
            if wanted.computes(linear, quantised=quantised):
                sizes = self.row_counts(linear, gfx)
                found += wanted.problems(linear, language_model(config), sizes, line, quantised=quantised)
        if not found:
            raise UserError(f"{where}: {wanted.no_product_message()}")
        return merge_duplicates(found)

    def left_out(self, family: Family, defaults: KernelDefaults, gfx: str) -> str:
        """The products of other kernels, by the checkpoint's quantisation."""
        where, config = self._config()
        wanted = self._family_filter(family, defaults, gfx, config, where)
        others = [
            each for each in self._products(wanted, config, where) if not wanted.computes(each[0], quantised=each[1])
        ]
        return wanted.others_message(others, language_model(config))

    def experts_reason(self, gfx: str) -> str | None:
        """Why no kernel of ours computes the model's experts; empty if one does, None for a model without experts."""
        where, config = self._config()
        plain = KernelDefaults(dtype=None, out_dtype=None, bias=None)
        wanted = self._family_filter(load_family(EXPERTS_FAMILY), plain, gfx, config, where)
        return wanted.experts_reason(tuple(self._products(wanted, config, where)), language_model(config))

    def _family_filter(
        self, family: Family, defaults: KernelDefaults, gfx: str, config: ConfigJson, where: str
    ) -> FamilyFilter:
        self._check_degrees()
        quantization = quantization_of(config, where) if self.quantization == "config" else None
        return FamilyFilter(family=family, defaults=defaults, gfx=gfx, quantization=quantization)

    def _products(self, wanted: FamilyFilter, config: ConfigJson, where: str) -> Iterator[tuple[Linear, bool]]:
        """(product of one device, True if it is quantised)."""
        yield from split_by_quantization(self.linears(config, where, batched=wanted.batched), wanted.quantization)

    def row_counts(self, linear: Linear, gfx: str) -> list[int]:
        """The Ms of a product. Raises UserError about shapes.nsets."""
        return batch_sizes(self.nsets)

    def linears(self, config: ConfigJson, where: str, *, batched: bool) -> list[Linear]:
        """The products of one device, by our rules."""
        return linears(config, self.tp, where, sixteen_bit=True, ep=self.ep, batched=batched)

    def _config(self) -> tuple[str, ConfigJson]:
        if (self.path is None) == (self.config is None):
            both = "are both given" if self.path else "are both empty"
            yours = "; shapes=model, csv, trace or log reads your file" if self.path else ""
            raise UserError(f"shapes.path and shapes.config {both}, expected a config.json or its fields inline{yours}")
        if self.config is not None:
            return "shapes.config", self.config
        path = Path(str(self.path)).expanduser()
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            near = suggest_path(path) if path.suffix == ".json" or not path.exists() else ""
            if _HUB_NAME.fullmatch(str(self.path)) and not path.parent.exists():
                near = f"; of a model on the Hugging Face Hub: hf download {path} config.json --local-dir {path}"
            raise UserError(f"shapes.path: no file '{file}', expected a model's config.json{near}")
        config = read_object(file)
        modelopt = file.with_name("hf_quant_config.json")
        if "quantization_config" not in config and modelopt.is_file():
            config = {**config, "quantization_config": read_object(modelopt).get("quantization")}
        return str(file), config

    def _check_degrees(self) -> None:
        for name, degree in (("tp", self.tp), ("ep", self.ep)):
            if isinstance(degree, bool) or not isinstance(degree, int) or not 1 <= degree <= _MAX_DEVICES:
                raise UserError(f"shapes.{name}: {degree!r}, expected a whole number from 1 to {_MAX_DEVICES}")
