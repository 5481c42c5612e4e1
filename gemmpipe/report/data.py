"""The contents of a report: the products, trials, builds and conditions of a run, or of tuned tables alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemmpipe.core.data import Trial

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family

TABLE = "table"
"""The state of data without a run; the others are those of `run_folder`."""

REPORTED = (
    "baseline",
    "runner_up_us",
    "extra_weight_bytes",
    "policy",
    "layer",
    "run_id",
    "device",
    "gfx",
    "cu_num",
    "place",
    "chosen_by",
)
"""Columns of `RunData.products` in addition to those of `results.product_results`, `floor_us`, `share` (of the floor,
1 at the floor) and `shape` (the sizes without M, as text). `chosen_by`: `select`; where the run has not selected yet,
`finals` or `search`, whose times were compared."""


@dataclass(frozen=True, kw_only=True)
class TimedTrial:
    """A trial and when it ended, in seconds since the first session began (None: not recorded)."""

    trial: Trial
    t_s: float | None


@dataclass(frozen=True, kw_only=True)
class TimedBuild:
    """A compiled build."""

    t_s: float | None
    compile_s: float
    registers: int | None
    spills: int | None
    shared_bytes: int | None
    error: str


@dataclass(frozen=True, kw_only=True)
class Resource:
    """The wall time of the driver, of the compile slots or of a worker, in seconds by activity."""

    name: str
    wall_s: float
    busy_s: Mapping[str, float]
    idle_s: float


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """Configurations that were not tried, for one reason."""

    backend: str
    reason: str
    status: str
    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class Gated:
    """A candidate faster than the choice that takes more weight memory than allowed."""

    problem: str
    backend: str
    config: str
    time_us: float
    chosen_us: float | None
    extra_weight_bytes: int
    limit_pct: float | None = None
    """The least `stages.select.max_extra_weight_pct` that allows it; None: not recorded."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a report. Empty sequences and None: not recorded, as in tables alone."""

    family: "Family"
    origin: str
    """The run's folder or the tables, as named."""
    state: str
    state_word: str
    """The state as `gemmpipe runs` names it: also `partial`, `failed` or `damaged`."""
    products: "pd.DataFrame"
    """One row per problem with a time; see `REPORTED`."""
    problems: int
    """Problems of the run, with or without a choice."""
    trials: Sequence[TimedTrial] = ()
    """In the order of writing."""
    builds: Sequence[TimedBuild] = ()
    conditions: Sequence[Mapping[str, Any]] = ()
    """`t_s`, `device`, `sm_mhz`, `memory_mhz`, `temperature_c`, `power_w`, `processes`."""
    excluded: Sequence[Excluded] = ()
    recorded: int = 0
    """For a replay: the configurations of its recording, of which the search requested some; 0 for a run."""
    resources: Sequence[Resource] = ()
    gated: Sequence[Gated] = ()
    memory_options: Sequence[Mapping[str, Any]] = ()
    """Rows of memory_options.csv: by amount of weight memory what would be faster (`report.screen.memory_limits`)."""
    unsolved: Sequence[str] = ()
    undecided: Sequence[str] = ()
    captured: bool = False
    """True if the problems and their numbers of calls were recorded in a running program."""
    has_times: bool = False
    """True if rows of the journal have times."""
    wall_s: float | None = None
    """Seconds of the last session."""
    total_s: float | None = None
    """Seconds of all sessions; None where it is not known."""
    started: str = ""
    command: str = ""
    exit_code: int | None = None
    sessions: int = 0
    provenance: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By run id: versions, device, conditions, command."""
    config: Mapping[str, Any] | None = None
    files: Sequence[str] = ()
    notes: Sequence[str] = ()
    """Missing and omitted parts, as sentences."""

    @property
    def shape_title(self) -> str:
        """The sizes of a product without its rows: `N x K`."""
        return " x ".join(self.family.sizes)

    @property
    def run_text(self) -> str:
        """The state of a run, and of how many problems it has a choice if not of all."""
        some = len(self.products) < self.problems
        return f"{self.state_word}: {len(self.products):,} of {self.problems:,} problems" if some else self.state_word

    @property
    def finished(self) -> bool:
        """True if no further rows are to be expected."""
        return self.state in (TABLE, "finished")
