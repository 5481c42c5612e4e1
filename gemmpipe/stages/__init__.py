"""The interface of a stage, a step from tables to tables, and the Context that all stages of a run share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.core.data import FINALS as FINALS
from gemmpipe.core.data import Candidate, Device, Problem, Scalar
from gemmpipe.core.events import Events, TimeAccount
from gemmpipe.core.renamed import accept_old_methods, renamed_members
from gemmpipe.core.shell import shell_join
from gemmpipe.executors import BuildsAhead, Pool
from gemmpipe.family import Family, Implementation, KernelDefaults
from gemmpipe.family.roofline import Roofline
from gemmpipe.family.space import Space
from gemmpipe.formats import Format
from gemmpipe.journal import Journal, Record
from gemmpipe.search import Search
from gemmpipe.search.history import History
from gemmpipe.sources import Source

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.backends import Backend
    from gemmpipe.backends.engine import EngineImplementation
    from gemmpipe.stages.cpu_budget import CpuBudget
    from gemmpipe.stages.screen.search_pool import SearchContext, SearchPool


@dataclass(frozen=True, kw_only=True)
class EngineTarget:
    """A chosen format for an engine's own function, which has a search and finals of its own."""

    name: str
    """The format's name in the configuration."""
    format: Format
    implementation: "EngineImplementation"
    published: tuple[Path, ...] = ()
    """The engine's own configuration files, or folders of them."""
    extra_key_pct: float = 0.0
    """An M between the tuned ones gets a key of its own where the nearest key's entry is slower by more than this."""
    exact_from: int | None = None
    """From this M on it gets one where the nearest key's entry is slower at all; None: never."""

    @property
    def finals(self) -> str:
        """The stage name of its finals in trials and journals, different from that of the problems' finals."""
        return f"{FINALS} {self.name}"


@dataclass(frozen=True, kw_only=True)
class NamedBackend:
    """A backend that the user named with `backend=`, by itself or in a group such as `peers`."""

    option: str
    """The word that was typed."""
    name: str
    """The backend's name in the configuration; a group has several."""
    labels: tuple[str, ...]
    """Of its implementations for this family; none if the family has no kernel of this kind."""


POLL_S = 0.5
"""The longest wait of a stage for results, in seconds; between two waits it checks for a request to stop."""


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
    """The configuration, the resources and the state of a run, for its stages."""

    family: Family
    defaults: KernelDefaults
    source: Source
    formats: tuple[tuple[str, Format], ...]
    """(the name in the configuration, the format)."""
    engine_targets: tuple[EngineTarget, ...] = ()
    """The formats for engines' own functions, in a chain with a stage that searches these."""
    engine_target: EngineTarget | None = None
    """The target that is searched now; None: the problems, with all candidates."""
    output: Path
    """The folder of the artifacts."""
    device: Device
    retune: bool
    events: Events
    run_id: str
    run_dir: Path
    provenance: Mapping[str, Scalar | Mapping[str, Scalar]]
    """Versions, clocks and recipe, written next to every artifact."""
    space: Space
    search: Search
    implementations: tuple[Implementation, ...]
    named_backends: list[NamedBackend] = field(default_factory=list)
    """Those of which no stage has said yet whether they can be timed."""
    row_backends: "dict[str, Backend]" = field(default_factory=dict)
    """By label: libraries that were not chosen, and that rows of the run's table name."""
    incumbents: Mapping[str, tuple[Candidate, ...]]
    """By problem id: the choices of the output table."""
    rooflines: Mapping[str, Roofline] = field(default_factory=dict)
    """By name, as configured; a device without an entry has no floor."""
    policy: str
    """How times are taken, as the tables store it; times of different policies are not compared."""
    journal: Journal
    record: Record
    """The journal of earlier sessions of this run."""
    pool_or_none: Pool | None
    """The workers; None where no stage of the chain needs a device."""
    check: Callable[[], None]
    """Raises Interrupted when the user asked to stop."""
    problems: list[Problem] = field(default_factory=list)
    """The problems of the run, or of the batch that a stage is given; a stage with `problems` in `gives` sets them."""
    history: History = field(default_factory=History)
    """Trials of all problems of the run and of earlier runs; searches learn from it."""
    prior_records: Sequence[Record] = ()
    """Journals of earlier runs with times comparable to this run's."""
    cut_short: set[str] = field(default_factory=set)
    """Ids of problems with a search that the budget ended early: their rows are provisional."""
    assignments: dict[str, int] = field(default_factory=dict)
    """By problem id: the worker that times all its candidates on its device."""
    search_pools: "dict[tuple[int, int], SearchPool]" = field(default_factory=dict)
    """Pools of searches, by (launches, finalists) of the stage that opened the pool; one serves all batches."""
    builds_ahead: BuildsAhead = field(default_factory=BuildsAhead)
    """Builds that the finals need beyond screening."""
    time_account: TimeAccount = field(default_factory=TimeAccount)
    """Time of the driver, by activity."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that stages report for the manifest."""
    unsolved: list[str] = field(default_factory=list)
    """Ids of problems without a valid candidate, or with a recorded one that is stale."""
    cpu_budget: "CpuBudget | None" = None
    """The time budget for stages on a CPU, if the run has one."""
    left: list[str] = field(default_factory=list)
    """Ids of problems that this budget left for the next run."""
    undecided: list[str] = field(default_factory=list)
    """Ids of problems with a search that the budget ended before a valid candidate was found."""
    table: Path | None = None
    """The tuned table that the run starts from, if any."""
    inputs: tuple[str, ...] = ()
    """The tuned tables to unite, as typed."""
    targets: tuple[str, ...] | None = None
    """Architectures to compile for; None: those of the table."""
    python_path: tuple[str, ...] = ()
    """The user's folders of Python modules, for processes that a stage starts."""
    reproduce_args: tuple[str, ...] = ()
    """Arguments that choose the kernel, backends, devices and the user's folder, for commands that a stage prints."""
    already_tuned: list[Problem] = field(default_factory=list)
    """Problems of the source that the output has rows of."""
    finals_s: Callable[[Mapping[str, float], int], float] | None = None
    """For a screening on a GPU: the expected seconds of the finals after it, less those that its step has counted.

    From the fastest time of each problem so far, in us by problem id, and the number of finalists of each. None: those
    that the step has counted.
    """
    later_s: float = 0.0
    """The expected seconds of what the step does after these finals: the functions of other engines."""
    entry_checks: list[Callable[[Collection[str], Collection[str]], None]] = field(default_factory=list)
    """Checks of the names of a comparison's entries on some problems (names, problem ids), before these are timed.

    Each raises UserError for a name that a stage was given and that no entry has.
    """
    final_lines: list[str] = field(default_factory=list)
    """Lines that a stage prints at the end of the run, for stages that accumulate all batches."""

    @property
    def per_problem(self) -> bool:
        """True if each problem needs the best of all candidates; formats for engines' functions alone do not."""
        return not self.engine_targets or len(self.engine_targets) < len(self.formats)

    @property
    def finals(self) -> str:
        """The stage name of the current finals."""
        return FINALS if self.engine_target is None else self.engine_target.finals

    def assign(self, problem: str, worker: int) -> None:
        """Bind a problem to a worker: its candidates are timed on that device alone."""
        self.assignments[problem] = worker
        device = self.pool.devices[worker]
        self.journal.write("assignment", problem=problem, device=device.uuid or device.torch_name)

    def worker_of(self, problem: str) -> int | None:
        """The worker that times this problem, also if an earlier session chose its device; None: not assigned yet."""
        names = [device.uuid or device.torch_name for device in self.pool.devices]
        before = self.record.assignments.get(problem)
        return self.assignments.get(problem, names.index(before) if before in names else None)

    def implementation(self, label: str) -> Implementation | None:
        """The implementation of a `libtype`: of a chosen backend, the family's own kernels, the table's libraries."""
        rows = (found for backend in self.row_backends.values() for found in backend.implementations(self.family))
        known = (*self.implementations, *self.family.implementations, *rows)
        return next((i for i in known if i.label == label), None)

    @property
    def doctor_command(self) -> str:
        """The command that says why backends of this run are unavailable, and how a missing package is installed."""
        named = any(each.startswith("kernel=") for each in self.reproduce_args)
        kernel = [] if named else [f"kernel={self.family.name}"]
        return shell_join(["gemmpipe", "doctor", *kernel, *self.reproduce_args])

    def search_context(self, *, launches: int, keep: int) -> "SearchContext":
        """The inputs that searches of this run share."""
        from gemmpipe.stages.screen.search_pool import SearchContext

        return SearchContext(
            family=self.family.module,
            implementations=self.implementations,
            device=self.device,
            space=self.space,
            search=self.search,
            incumbents=self.incumbents,
            launches=launches,
            keep=keep,
        )

    def close_search_pools(self) -> None:
        """End the processes that search."""
        for search_pool in self.search_pools.values():
            search_pool.close()

    @property
    def device_count(self) -> int:
        """The devices that time; 1 before the workers start, when stages are asked for their expected time too."""
        return 1 if self.pool_or_none is None else len(self.pool_or_none.devices)

    @property
    def pool(self) -> Pool:
        """The workers; only for stages with `uses_device`."""
        assert self.pool_or_none is not None, "a stage without uses_device used the pool"
        return self.pool_or_none


class Stage(ABC):
    """A step of a pipeline: reads the tables of `needs`, returns the tables of `gives`.

    The problems are on the context: `problems` in `needs` is a condition, in `gives` it means that `run` sets them. A
    stage outside of gemmpipe gets them as the table `problems` too, and may return that table.
    """

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
    """True if it needs the facts of the device, without running anything there."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Keys at the root of the configuration that only this stage reads: `table`, `inputs`, `target`."""
    per_problem: ClassVar[bool] = False
    """True if it only serves finals of all candidates; skipped where no format needs these."""
    begins_cpu_budget: ClassVar[bool] = False
    """True if `cpu_budget_s` limits it and the device stages after it."""
    cpu_budget_share: ClassVar[float] = 0.0
    """The share of the time for finals, within `cpu_budget_s`, that is kept for it."""
    is_comparison: ClassVar[bool] = False
    """True if the finals after it time the entries of a comparison, all of them in all rounds."""
    accumulates: ClassVar[tuple[str, ...]] = ()
    """Tables that it gets with the rows of all batches so far; the tables that it gives then cover all of them too."""

    def engine_targets(self, family: Family, formats: Mapping[str, Format]) -> tuple[EngineTarget, ...]:
        """Targets for the engines' functions that it searches for this family. Raises UserError."""
        return ()

    def check(self, context: Context) -> None:
        """Raises UserError for an error that can be found before anything runs."""
        return

    def usual_s(self, device: Device) -> float:
        """Its usual seconds per problem and device, for the estimate of a run's end; 0: too short to count."""
        return 0.0

    def expected_s(self, context: Context) -> float:
        """Its expected seconds for the problems of the context, before anything of them is known."""
        return len(context.problems) * self.usual_s(context.device) / context.device_count

    @abstractmethod
    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the tables of `gives`, from those of `needs`."""
