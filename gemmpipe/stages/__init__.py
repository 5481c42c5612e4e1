"""What a stage is: a step from tables to tables, with what all steps of a run share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.core.data import Candidate, Device, Scalar
from gemmpipe.core.events import Events, TimeAccount
from gemmpipe.core.renamed import accept_old_methods, renamed_members
from gemmpipe.executors import Pool
from gemmpipe.family import Family, Implementation, KernelDefaults
from gemmpipe.family.space import Space
from gemmpipe.formats import Format
from gemmpipe.journal import Journal, Record
from gemmpipe.search import Search
from gemmpipe.search.history import History
from gemmpipe.sources import Source

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.backends.engine import EngineImplementation
    from gemmpipe.stages.screen.search_pool import SearchContext, SearchPool


@dataclass(frozen=True, kw_only=True)
class EngineTarget:
    """A chosen format for an engine's own function: this function is searched by itself, not by the way."""

    name: str
    """Of the format in the configuration."""
    format: Format
    implementation: "EngineImplementation"
    published: tuple[Path, ...] = ()
    """The engine's own files, or folders of them."""
    extra_key_pct: float = 0.0
    """An M beside the tuned ones gets a key of its own where the nearest key's entry is slower by more than this."""

    @property
    def finals(self) -> str:
        """What its finals are called in trials and journals, apart from those of the problems."""
        return f"{FINALS} {self.name}"


FINALS = "bench"
"""What the finals of problems are called in trials and journals."""


@renamed_members(
    account="stage_seconds",
    closing="final_lines",
    cut="cut_short",
    earlier="prior_records",
    form="engine_target",
    forms="engine_targets",
    ground="search_context",
    home="worker_of",
    homes="assignments",
    hunts="search_pool",
    lore="history",
    races="per_problem",
    running="pool_or_none",
    settle="assign",
    watch="time_account",
    words="reproduce_args",
)
@dataclass(frozen=True, kw_only=True)
class Context:
    """What every stage of a run may ask for."""

    family: Family
    defaults: KernelDefaults
    source: Source
    formats: tuple[tuple[str, Format], ...]
    """(the name in the configuration, the format)."""
    engine_targets: tuple[EngineTarget, ...] = ()
    """Those of the formats that are for an engine's own function, in a chain with a stage that searches these."""
    engine_target: EngineTarget | None = None
    """The one that is searched now; None: all candidates race."""
    output: Path
    """The folder of the artifacts."""
    device: Device
    retune: bool
    events: Events
    run_id: str
    run_dir: Path
    provenance: Mapping[str, Scalar | Mapping[str, Scalar]]
    """Versions, clocks and recipe: goes beside every artifact."""
    space: Space
    search: Search
    implementations: tuple[Implementation, ...]
    incumbents: Mapping[str, tuple[Candidate, ...]]
    """By problem id: what the output table holds already."""
    policy: str
    """How times are taken, for the tables."""
    journal: Journal
    record: Record
    """What an earlier session of this run has written."""
    pool_or_none: Pool | None
    """The workers; None where no stage of the chain needs a device."""
    check: Callable[[], None]
    """Raises Interrupted when the user asked to stop."""
    history: History = field(default_factory=History)
    """What is known of all problems of the run, and of earlier ones; searches learn from it."""
    prior_records: Sequence[Record] = ()
    """Journals of earlier runs whose times are as good as this run's."""
    cut_short: set[str] = field(default_factory=set)
    """Problems whose search the budget ended early: their rows are provisional."""
    assignments: dict[str, int] = field(default_factory=dict)
    """By problem id: the worker on whose device all its candidates are timed."""
    search_pool: "SearchPool | None" = None
    """Where searches live; None: here, a problem's at a time."""
    time_account: TimeAccount = field(default_factory=TimeAccount)
    """Where the driver's own time goes."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that stages report for the manifest."""
    unsolved: list[str] = field(default_factory=list)
    """Problems without a valid candidate, or whose recorded one is stale."""
    undecided: list[str] = field(default_factory=list)
    """Problems whose search the budget ended before anybody valid was found: who goes on may find one."""
    table: Path | None = None
    """The tuned table that the run starts from, if it does."""
    inputs: tuple[str, ...] = ()
    """The tuned tables to unite, as typed."""
    targets: tuple[str, ...] | None = None
    """Architectures to compile for; None: those of the table."""
    python_path: tuple[str, ...] = ()
    """The user's folders of Python, for processes that a stage starts."""
    reproduce_args: tuple[str, ...] = ()
    """What was typed of the kernel, its backends and devices, and the folder of the user's own: for lines to paste."""
    gated: list[str] = field(default_factory=list)
    """Faster candidates that cost more weight memory than the user offered."""
    final_lines: list[str] = field(default_factory=list)
    """What a stage that sees all batches wants said at the end of the run."""

    @property
    def per_problem(self) -> bool:
        """Whether the best of all candidates is wanted for each problem: by all formats but those of engines alone."""
        return not self.engine_targets or len(self.engine_targets) < len(self.formats)

    @property
    def finals(self) -> str:
        """What finals are called now."""
        return FINALS if self.engine_target is None else self.engine_target.finals

    def assign(self, problem: str, worker: int) -> None:
        """From now on this problem's candidates are timed on this worker's device alone."""
        self.assignments[problem] = worker
        device = self.pool.devices[worker]
        self.journal.write("home", problem=problem, device=device.uuid or device.torch_name)

    def worker_of(self, problem: str) -> int | None:
        """The worker that times this problem, also if an earlier session chose its device; None: nobody's yet."""
        names = [device.uuid or device.torch_name for device in self.pool.devices]
        before = self.record.assignments.get(problem)
        return self.assignments.get(problem, names.index(before) if before in names else None)

    def implementation(self, label: str) -> Implementation | None:
        """Who computes candidates of this `libtype`: a chosen backend, else the family's own kernels."""
        return next((i for i in (*self.implementations, *self.family.implementations) if i.label == label), None)

    @property
    def search_context(self) -> "SearchContext":
        """What searches of this run have in common."""
        from gemmpipe.stages.screen.search_pool import SearchContext

        return SearchContext(
            family=self.family.module,
            implementations=self.implementations,
            device=self.device,
            space=self.space,
            search=self.search,
            incumbents=self.incumbents,
        )

    @property
    def pool(self) -> Pool:
        """The workers, for stages that use a device."""
        assert self.pool_or_none is not None, "a stage without uses_device asked for the pool"
        return self.pool_or_none


class Stage(ABC):
    """A step of a pipeline: reads the tables it needs, returns the tables it gives."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        accept_old_methods(
            cls,
            {
                "asks_device": "needs_device_info",
                "forms": "engine_targets",
                "races": "per_problem",
                "sees_all_of": "accumulates",
            },
        )

    needs: ClassVar[tuple[str, ...]]
    gives: ClassVar[tuple[str, ...]]
    uses_device: ClassVar[bool] = False
    needs_device_info: ClassVar[bool] = False
    """Whether it must know which device this is, though it runs nothing there."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Keys at the root of the configuration that only such a stage reads: `table`, `inputs`, `target`."""
    per_problem: ClassVar[bool] = False
    """Whether it serves the race of all candidates alone: passed over where no format wants that."""
    accumulates: ClassVar[tuple[str, ...]] = ()
    """Tables that it gets of all batches so far, not of its own batch alone: what it gives is of all of them too."""

    def engine_targets(self, family: Family, formats: Mapping[str, Format]) -> tuple[EngineTarget, ...]:
        """Those of the formats whose engines' functions it searches for this family. Raises UserError."""
        return ()

    def check(self, context: Context) -> None:
        """Raises UserError for what can be told to be wrong before anything runs."""
        return

    @abstractmethod
    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The tables of `gives`, from those of `needs`."""
