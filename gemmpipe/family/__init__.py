"""What a kernel family declares, and what every implementation of a product promises.

What a product costs at least: operations, and bytes that must move.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs, Problem, Scalar
from gemmpipe.core.errors import UserError, suggest, suggest_or_list
from gemmpipe.core.renamed import accept_old_methods, renamed_members
from gemmpipe.core.spec import Experts, GemmSpec, Inputs, Scaling, Weights
from gemmpipe.family.aiter_table import AiterTable

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


__all__ = [  # all that a family's module needs, the words of its products among it
    "Experts",
    "Family",
    "GemmSpec",
    "Implementation",
    "Inputs",
    "KernelDefaults",
    "KeyColumn",
    "Launch",
    "Prepared",
    "Scaling",
    "Weights",
    "load_family",
    "shipped_families",
]

Launch = Callable[[], "torch.Tensor"]
"""Computes the product once and returns the output [M, N]; asynchronous on a GPU, safe to capture in a graph."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """What a candidate made of the weights, once; `extra_bytes` is the memory it costs beside them."""

    weights: Weights
    extra: object = None
    extra_bytes: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Operands:
    """One set of what a launch works on: `out` is [M, N]."""

    inputs: Inputs
    prepared: Prepared
    out: "torch.Tensor"


_OLD_METHODS = {
    "form_knobs": "prepare_knobs",
    "in_finals": "finals_implementation",
    "knobs_of": "knobs_from_row",
    "misfit": "unsupported_reason",
    "orders": "timed_scale_orders",
    "points": "configs",
    "rule": "default_config",
    "wasteful": "dominated_reason",
}


class Implementation(ABC):
    """A provider of candidates for every product it can compute; stateless, picklable, cheap to construct."""

    label: str
    """The `libtype` of its candidates."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        accept_old_methods(cls, _OLD_METHODS)

    def unavailable(self, device: Device) -> str | None:
        """Why it cannot run on this machine, or None."""
        return None

    @abstractmethod
    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every raw configuration, before normalising and fitting."""

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """The configuration that would really run: what is stored is what ran."""
        return knobs

    @abstractmethod
    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that the normalised knobs break, or None when they fit."""

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` why knobs that fit cannot win: a search passes them over, the run time runs them."""
        return None

    def default_config(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """The normalised configuration to run where nothing was measured, or None to leave that to a library."""
        return None

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis or a value that no candidate of it could have: said before anything runs."""
        return

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...] | None:
        """The knobs that its candidates can have: any other would be overlooked. None: it does not say."""
        return None

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """What a row of another program's table means, which has no `config`; None: it does not say enough."""
        return None

    def prepare_knobs(self, spec: GemmSpec, knobs: Knobs) -> Knobs:
        """Those of the knobs that decide what `prepare` makes: candidates alike in them share it."""
        return knobs

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """What must be compiled before it can run."""
        return ()

    def kernel_name(self, knobs: Knobs) -> str:
        """A name for reports and tables, with `@` and the kernel's hash where there is source."""
        return self.label

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """Weight-side work, done once a weight and never timed."""
        return Prepared(weights=weights)

    @abstractmethod
    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call without arguments that computes the product, into `out` [M, N] where it can choose."""

    def timed_scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """The memory orders of x's block scales in which its consumer may give them: the finals time each."""
        return spec.x_scale_orders

    def finals_implementation(self) -> "Implementation":
        """What is checked and timed in the finals under its label, where screening may do with a stand-in."""
        return self

    def binder(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Callable[[Operands], Launch]:
        """`bind` for several sets of operands, which are made alike."""
        return lambda own: self.bind(spec, knobs, device, own.inputs, own.prepared, own.out)


accept_old_methods(Implementation, _OLD_METHODS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelDefaults:
    """The user's `kernel.*` words that fill key columns a source does not give; None is the family's own."""

    dtype: str | None
    out_dtype: str | None
    bias: bool | None
    key: Mapping[str, Scalar] = field(default_factory=dict)
    """Values for other key columns, by name; for `Family.key_defaults` also what the source's row says itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyColumn:
    """A key column: `kind` is `int`, `bool`, `flag` (0 or 1), `dtype` or `str`.

    `default` fills a source without it (None: required).
    """

    name: str
    kind: str
    default: Scalar = None
    aliases: tuple[str, ...] = ()
    words: tuple[tuple[str, str], ...] = ()
    """(what a source may say, in lower case; what it means): the only values of a `str` column; empty: any."""
    others: tuple[tuple[str, str], ...] = ()
    """Further ones, read and never offered: other programs' spellings, and what the kernels do not compute."""
    optional: bool = False
    """Whether a key may have no value (None), which stands for any: a table has the column only where a row does."""


@renamed_members(further_columns="extra_columns", further_cells="extra_cells")
@dataclass(frozen=True, kw_only=True)
class Family:
    """A kernel family: how its problems are named, made, checked and computed."""

    name: str
    key_columns: tuple[KeyColumn, ...]
    csv_name: str
    """File name of its native tuned table."""
    json_tag: str
    """`A16W16`, `A8W8_BLOCKSCALE`: in Triton JSON file names."""
    entry_point: str
    """The run-time function, `gemm_a16w16`."""
    key_defaults: Callable[[KernelDefaults, str], Mapping[str, Scalar]]
    """(kernel words, gfx) -> values for key columns that a source leaves open. Raises UserError."""
    spec: Callable[[Problem], GemmSpec]
    """Raises UserError when the key's values contradict each other."""
    make_weights: Callable[[GemmSpec, "torch.Generator"], Weights]
    """Signed random weights on the generator's device."""
    make_inputs: Callable[[GemmSpec, "torch.Generator"], Inputs]
    reference: Callable[[GemmSpec, Inputs, Weights], "torch.Tensor"]
    """The product in fp32 [M, N]; rows [0, x.shape[0]) of whatever inputs are given."""
    tolerance: Callable[[GemmSpec], tuple[float, float]]
    """(atol as a share of the row's RMS, rtol): justified in the family's own words."""
    flops: Callable[[GemmSpec], float]
    bytes_moved: Callable[[GemmSpec], float]
    baseline: tuple[str, ...]
    """Labels of the library paths; the fastest fit one is the baseline."""
    implementations: tuple[Implementation, ...]
    json_buckets: str = "aiter"
    """The preset of M ranges in its Triton JSON files, unless the user names another."""
    aiter_table: AiterTable | None = None
    """aiter's table of these products, where it has one; its file has the name of the native one."""
    engine_kernels: Mapping[str, Implementation] = field(default_factory=dict)
    """By inference engine (`vllm`): a kernel of the form that the engine's own has, under the engine's label."""
    extra_columns: tuple[str, ...] = ()
    """Columns that its native table has beside those of all families, for other tools to read."""
    extra_cells: Callable[[Mapping[str, Scalar]], Mapping[str, Scalar]] | None = None
    """A row of the native table -> its cells in these columns."""
    lm_head: bool = False
    """Whether engines run a model's lm_head through this family (they leave it in 16 bits)."""
    rows_column: str = "M"
    """The key column that says how many rows x has."""
    module: str = ""
    """What `load_family` found it under: the name to find it by in another process."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """The key columns that size a product, its rows left out: `N K`, or `B N K`."""
        return tuple(
            c.name for c in self.key_columns if c.kind == "int" and c.default is None and c.name != self.rows_column
        )

    def problem(self, key: tuple[tuple[str, Scalar], ...], weight: float = 1.0, layer: str = "") -> Problem:
        """The problem of these key columns and values, which are in the family's order."""
        return Problem(family=self.name, key=key, weight=weight, layer=layer, rows_column=self.rows_column)


def shipped_families() -> list[str]:
    """The names of the families in gemmpipe.kernels."""
    from gemmpipe.core.paths import PACKAGE

    return sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))


def load_family(name: str) -> Family:
    """The family `gemmpipe.kernels.<name>`, or of a user's module on the path, in a package when the name has a dot.

    Raises UserError when there is none, and whatever a user's module raises.
    """
    shipped = shipped_families()
    place = f"gemmpipe.kernels.{name}" if name in shipped else name
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        beside = f"no family '{name}', and no module of that name beside the folders of --config-dir"
        raise UserError(f"kernel.family: {beside}{suggest_or_list(name, shipped)}") from None
    if not hasattr(module, "FAMILY"):
        raise UserError(f"kernel.family: {place} has no FAMILY{suggest('FAMILY', vars(module))}")
    if not isinstance(module.FAMILY, Family):
        raise UserError(f"kernel.family: {place}.FAMILY is {type(module.FAMILY).__name__}, expected a gemmpipe Family")
    return replace(module.FAMILY, module=name)


def flops(spec: GemmSpec) -> float:
    """2 * M * N * K, times the batch."""
    return 2.0 * spec.batch * spec.m * spec.n * spec.k


def bytes_moved(spec: GemmSpec) -> float:
    """Every operand read once and the output written once, scales and bias included."""
    from gemmpipe.family.operands import storage_bytes

    x = storage_bytes(spec.x_dtype, spec.m * spec.k) + _scale_bytes(spec.x_scale, spec.m, spec.k)
    w = storage_bytes(spec.w_dtype, spec.n * spec.k) + _scale_bytes(spec.w_scale, spec.n, spec.k)
    out = storage_bytes(spec.out_dtype, spec.m * spec.n + (spec.n if spec.bias else 0))
    return float(spec.batch * (x + w + out))


def _scale_bytes(scaling: Scaling | None, rows: int, columns: int) -> int:
    from gemmpipe.family.operands import scale_count, storage_bytes

    return storage_bytes(scaling.dtype, scale_count(scaling, rows, columns)) if scaling else 0
