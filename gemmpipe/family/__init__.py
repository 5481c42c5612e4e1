"""Declaration of a kernel family, and the interface of its implementations.

Also the minimal cost of a product: operations, and bytes that must move.
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


__all__ = [  # all that a family's module needs, with the description of its products
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
"""Computes the product once and returns the output [M, N]; asynchronous on a GPU, can be captured in a graph."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Weights as a candidate needs them, made once; `extra_bytes` is the memory in addition to the weights."""

    weights: Weights
    extra: object = None
    extra_bytes: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Operands:
    """One operand set of a launch: inputs, prepared weights, and the output [M, N]."""

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
        """The reason why it cannot run on this machine, or None."""
        return None

    @abstractmethod
    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every raw configuration, before normalisation and the check of `unsupported_reason`."""

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """The configuration that runs in fact, so that tables store what ran."""
        return knobs

    @abstractmethod
    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that the normalised knobs break, or None if they can run."""

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` why knobs that can run cannot win: a search skips them, the runtime accepts them."""
        return None

    def default_config(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """The normalised configuration to run without measurements, or None if a library is used then."""
        return None

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis or a value that none of its candidates can have, before anything runs."""
        return

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...] | None:
        """The knobs that its candidates can have, as any other is ignored. None: not known."""
        return None

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """The knobs of a row of another program's table, which has no `config`; None if the row does not suffice."""
        return None

    def prepare_knobs(self, spec: GemmSpec, knobs: Knobs) -> Knobs:
        """The knobs that `prepare` depends on: candidates with equal ones share its result."""
        return knobs

    def called_knobs(self, spec: GemmSpec, knobs: Knobs) -> Knobs:
        """The knobs by which the run time's calls run these, under torch's settings when a call is first bound.

        With the same `prepare_knobs`, whose form of the weight is kept.
        """
        return knobs

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """The builds that must be compiled before it can run."""
        return ()

    def kernel_name(self, knobs: Knobs) -> str:
        """The name in reports and tables, with `@` and the kernel's hash if its source is available."""
        return self.label

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """Work on the weight, done once per weight and never timed."""
        return Prepared(weights=weights)

    @abstractmethod
    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call without arguments that computes the product, into `out` [M, N] if it can choose the output."""

    def timed_scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """The memory orders of x's block scales that callers may pass; the finals time each."""
        return spec.x_scale_orders

    def finals_implementation(self) -> "Implementation":
        """The implementation that the finals check and time under its label, if screening uses a substitute."""
        return self

    def binder(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Callable[[Operands], Launch]:
        """`bind` for several operand sets of equal shapes, dtypes and layouts."""
        return lambda operands: self.bind(spec, knobs, device, operands.inputs, operands.prepared, operands.out)


accept_old_methods(Implementation, _OLD_METHODS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelDefaults:
    """The user's `kernel.*` values, which fill key columns that a source leaves out; None: the family's default."""

    dtype: str | None
    out_dtype: str | None
    bias: bool | None
    key: Mapping[str, Scalar] = field(default_factory=dict)
    """Values of other key columns, by name; for `Family.key_defaults` also the values in the source's row."""


@renamed_members(words="choices")
@dataclass(frozen=True, kw_only=True, slots=True)
class KeyColumn:
    """A key column: `kind` is `int`, `bool`, `flag` (0 or 1), `dtype` or `str`.

    `default` is the value for sources without the column (None: required).
    """

    name: str
    kind: str
    default: Scalar = None
    aliases: tuple[str, ...] = ()
    choices: tuple[tuple[str, str], ...] = ()
    """(spelling in a source, in lower case; value): the only values of a `str` column; empty: any value."""
    others: tuple[tuple[str, str], ...] = ()
    """More of them, read but not listed in messages: spellings of other programs, and values that kernels lack."""
    optional: bool = False
    """True if a key may have no value (None), which matches any; a table has the column only if a row has a value."""
    condition: bool = False
    """True for an optional column with a condition of the measurement, not a property of the product: calls at run time
    have no value in it, and match rows with any value."""


@renamed_members(further_columns="extra_columns", further_cells="extra_cells")
@dataclass(frozen=True, kw_only=True)
class Family:
    """A kernel family: the keys, operands, reference, tolerance and implementations of a kind of matrix product."""

    name: str
    key_columns: tuple[KeyColumn, ...]
    csv_name: str
    """File name of its native tuned table."""
    json_tag: str
    """In the names of Triton JSON files, such as `A16W16` or `A8W8_BLOCKSCALE`."""
    entry_point: str
    """The runtime function, such as `gemm_a16w16`."""
    key_defaults: Callable[[KernelDefaults, str], Mapping[str, Scalar]]
    """(`kernel.*` values, gfx) -> values of key columns that a source leaves out. Raises UserError."""
    spec: Callable[[Problem], GemmSpec]
    """Raises UserError if the values of the key contradict each other."""
    make_weights: Callable[[GemmSpec, "torch.Generator"], Weights]
    """Signed random weights on the generator's device."""
    make_inputs: Callable[[GemmSpec, "torch.Generator"], Inputs]
    reference: Callable[[GemmSpec, Inputs, Weights], "torch.Tensor"]
    """The product in fp32 [M, N] of the rows that the given inputs have, [0, x.shape[0])."""
    tolerance: Callable[[GemmSpec], tuple[float, float]]
    """(atol as a fraction of the row's RMS, rtol); the family's module gives the reasons."""
    flops: Callable[[GemmSpec], float]
    bytes_moved: Callable[[GemmSpec], float]
    baseline: tuple[str, ...]
    """Labels of the library paths; the fastest that can run is the baseline."""
    implementations: tuple[Implementation, ...]
    json_buckets: str = "aiter"
    """The preset of M ranges in its Triton JSON files, unless the user chooses another."""
    aiter_table: AiterTable | None = None
    """aiter's table of these products, or None; its file has the name of the native table."""
    engine_kernels: Mapping[str, Implementation] = field(default_factory=dict)
    """By inference engine (`vllm`): a kernel with the structure of the engine's own, labelled as the engine."""
    library_kernels: Mapping[str, Implementation] = field(default_factory=dict)
    """By library backend (`deepgemm`): launches around the library's kernels, labelled as the backend."""
    extra_columns: tuple[str, ...] = ()
    """Columns of its native table in addition to those of all families, for other tools."""
    extra_cells: Callable[[Mapping[str, Scalar]], Mapping[str, Scalar]] | None = None
    """A row of the native table -> its cells in `extra_columns`."""
    lm_head: bool = False
    """True if engines run a model's lm_head through this family (they leave it in 16 bits)."""
    rows_column: str = "M"
    """The key column with the number of rows of x."""
    module: str = ""
    """The name for `load_family`, also in another process."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """The key columns with the sizes of a product, without its rows: `N K`, or `B N K`."""
        return tuple(
            c.name for c in self.key_columns if c.kind == "int" and c.default is None and c.name != self.rows_column
        )

    def size_text(self, problem: Problem) -> str:
        """The sizes of a problem, its rows first: `256x1280x8192`."""
        return "x".join(str(problem[name]) for name in (self.rows_column, *self.sizes))

    def problem(self, key: tuple[tuple[str, Scalar], ...], weight: float = 1.0, layer: str = "") -> Problem:
        """The problem of a key: (column, value) pairs in the family's order."""
        return Problem(family=self.name, key=key, weight=weight, layer=layer, rows_column=self.rows_column)


def shipped_families() -> list[str]:
    """The names of the families in gemmpipe.kernels."""
    from gemmpipe.core.paths import PACKAGE

    return sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))


def load_family(name: str) -> Family:
    """The family of `gemmpipe.kernels.<name>`, or of a user's module on the path; a dotted name is one in a package.

    Raises UserError if there is none, and any error that a user's module raises.
    """
    shipped = shipped_families()
    path = f"gemmpipe.kernels.{name}" if name in shipped else name
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        problem = f"no family '{name}', and no such module next to the folders of --config-dir"
        raise UserError(f"kernel.family: {problem}{suggest_or_list(name, shipped)}") from None
    if not hasattr(module, "FAMILY"):
        raise UserError(f"kernel.family: {path} has no FAMILY{suggest('FAMILY', vars(module))}")
    if not isinstance(module.FAMILY, Family):
        raise UserError(f"kernel.family: {path}.FAMILY is {type(module.FAMILY).__name__}, expected a gemmpipe Family")
    return replace(module.FAMILY, module=name)


def flops(spec: GemmSpec) -> float:
    """2 * M * N * K, times the batch."""
    return 2.0 * spec.batch * spec.m * spec.n * spec.k


def bytes_moved(spec: GemmSpec) -> float:
    """Bytes if every operand, with scales and bias, is read once and the output is written once."""
    from gemmpipe.family.operands import storage_bytes

    x = storage_bytes(spec.x_dtype, spec.m * spec.k) + _scale_bytes(spec.x_scale, spec.m, spec.k)
    w = storage_bytes(spec.w_dtype, spec.n * spec.k) + _scale_bytes(spec.w_scale, spec.n, spec.k)
    out = storage_bytes(spec.out_dtype, spec.m * spec.n + (spec.n if spec.bias else 0))
    return float(spec.batch * (x + w + out))


def _scale_bytes(scaling: Scaling | None, rows: int, columns: int) -> int:
    from gemmpipe.family.operands import scale_count, storage_bytes

    return storage_bytes(scaling.dtype, scale_count(scaling, rows, columns)) if scaling else 0
