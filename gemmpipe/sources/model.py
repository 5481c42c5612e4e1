"""Problems of a model, from its config.json, the degree of tensor parallelism and the batch sizes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.data import Problem
from gemmpipe.errors import UserError
from gemmpipe.family import Family, GemmSpec, KernelDefaults
from gemmpipe.jsonfile import read_object
from gemmpipe.problem import MAX_SIZE, make_problem, unite
from gemmpipe.sources import Source
from gemmpipe.sources.architectures import Linear, linears


@dataclass(frozen=True, kw_only=True)
class Model(Source):
    """The products of one device of a `tp`-way sharded decoder, each at every M of `nsets`.

    `path` is a config.json or the folder that holds it; `config` holds the same fields inline. The weight is the
    number of calls in a forward pass.
    """

    path: str | None
    config: Mapping[str, object] | None
    tp: int
    nsets: Sequence[int]

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: which field, and why it cannot be."""
        where, config = self._config()
        if isinstance(self.tp, bool) or not isinstance(self.tp, int) or not 1 <= self.tp <= 1024:
            raise UserError(f"shapes.tp: {self.tp!r}, expected a whole number from 1 to 1024")
        sizes = self._sizes()
        has_bias = any(column.name == "bias" for column in family.key_columns) and defaults.bias is None
        found: list[Problem] = []
        for linear in linears(config, self.tp, where, sixteen_bit=family.lm_head):
            line = f"{where}: {linear.layer}"
            values: dict[str, object] = {"N": linear.n, "K": linear.k}
            if has_bias and linear.bias:
                values["bias"] = True
            made = (
                make_problem(family, {"M": m, **values}, defaults, gfx, line, float(linear.calls), linear.layer)
                for m in sizes
            )
            first = next(made)
            _check_blocks(family.spec(first), linear, self.tp, line)
            if not linear.experts:  # grouped products belong to a family of their own
                found += [first, *made]
        return unite(found)

    def _config(self) -> tuple[str, Mapping[str, object]]:
        if (self.path is None) == (self.config is None):
            both = "are both given" if self.path else "are both empty"
            raise UserError(f"shapes.path and shapes.config {both}, expected a config.json or its fields inline")
        if self.config is not None:
            return "shapes.config", self.config
        path = Path(str(self.path)).expanduser()
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            raise UserError(f"shapes.path: no file '{file}', expected a model's config.json")
        return str(file), read_object(file)

    def _sizes(self) -> list[int]:
        sizes = [self.nsets] if isinstance(self.nsets, int) else list(self.nsets or ())
        for m in sizes:
            if isinstance(m, bool) or not isinstance(m, int) or not 1 <= m <= MAX_SIZE:
                raise UserError(f"shapes.nsets: {m!r}, expected whole numbers from 1, as in [1, 64, 4096]")
        if not sizes:
            raise UserError("shapes.nsets: empty, expected whole numbers from 1, as in [1, 64, 4096]")
        return list(dict.fromkeys(sizes))


def _check_blocks(spec: GemmSpec, linear: Linear, tp: int, where: str) -> None:
    """Engines refuse to load block-scaled weights whose scale tiles a cut would divide."""
    if spec.w_scale is None or spec.w_scale.granularity != "block":
        return
    rows, columns = spec.w_scale.block
    for size, block, what in _cut_sizes(linear, tp, rows, columns):
        if size % block:
            raise UserError(f"{where}: {what} {size} with tp {tp}: engines need a multiple of {block} for block scales")


def _cut_sizes(linear: Linear, tp: int, rows: int, columns: int) -> Iterator[tuple[int, int, str]]:
    if linear.cut == "row" and tp > 1:
        yield linear.k, columns, "K"
    parts = linear.parts or (linear.n,)
    if linear.cut == "column" and tp > 1:
        yield from ((part, rows, "N of a part") for part in parts)
    else:
        # Uncut, only a part that another one follows must end on a tile.
        yield from ((part, rows, "N of a part") for part in parts[:-1])
