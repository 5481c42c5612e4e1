"""The shared value types: problems, candidates, builds, trials, devices, buckets."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from gemmpipe.core.renamed import renamed_members

Scalar = str | int | float | bool | None
Knobs = Mapping[str, Scalar]

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class Status(StrEnum):
    """Outcome of a trial; `Trial.time_us` is set if and only if the trial has timed samples."""

    OK = "ok"
    PRUNED = "pruned"  # stopped early because it was slower: its times are valid, with fewer samples
    UNSUPPORTED = "unsupported"
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    INCORRECT = "incorrect"
    TIMEOUT = "timeout"
    DIED = "died"

    @classmethod
    def _missing_(cls, value: object) -> "Status | None":
        """Names of three statuses in journals of version 0.1.0 and earlier."""
        earlier = {"dropped": cls.PRUNED, "unfit": cls.UNSUPPORTED, "wrong": cls.INCORRECT}
        return earlier.get(value) if isinstance(value, str) else None


for _old, _status in {"DROPPED": Status.PRUNED, "UNFIT": Status.UNSUPPORTED, "WRONG": Status.INCORRECT}.items():
    setattr(Status, _old, _status)  # names of version 0.1.0, for users' own stages and searches

TIMED = frozenset({Status.OK, Status.PRUNED})
"""Statuses of trials that have a valid time."""
NOISY = 1.5
"""A choice with p80 over p20 of its samples above this is noisy."""


def canonical_json(value: object) -> str:
    """The canonical JSON: sorted keys, no spaces."""
    return _ENCODER.encode(value)


def digest(value: object) -> str:
    """12 hex digits of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:12]


@renamed_members(siblings="shape_group")
@dataclass(frozen=True, kw_only=True)  # no slots, as in all types often sent between processes: slots pickle slowly
class Problem:
    """One tuning problem: a family and the values of its key columns, in the family's order."""

    family: str
    key: tuple[tuple[str, Scalar], ...]
    weight: float = 1.0
    """Number of such calls in the workload."""
    layer: str = ""
    rows_column: str = "M"
    """The key column with the number of rows of x."""

    def __getitem__(self, column: str) -> Scalar:
        return dict(self.key)[column]

    @cached_property
    def rows(self) -> int:
        """M, the rows of the product."""
        return int(self[self.rows_column] or 0)

    @cached_property
    def shape_group(self) -> tuple[tuple[str, Scalar], ...]:
        """The key without M; problems with equal groups share weights, and buckets span them."""
        return tuple(item for item in self.key if item[0] != self.rows_column)

    @cached_property
    def id(self) -> str:
        """Readable and unique within a run: `a16w16 M=1 N=1280 K=8192 ...`; columns with value None are omitted."""
        return f"{self.family} " + " ".join(f"{name}={value}" for name, value in self.key if value is not None)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute a product: a backend (`libtype`) and its normalised knobs."""

    backend: str
    items: tuple[tuple[str, Scalar], ...]

    @classmethod
    def of(cls, backend: str, knobs: Knobs) -> "Candidate":
        """The candidate with these knobs, in canonical (sorted) order."""
        return cls(backend=backend, items=tuple(sorted(knobs.items())))

    @property
    def knobs(self) -> dict[str, Scalar]:
        """The knobs as a new dict."""
        return dict(self.items)

    @cached_property  # read at every step of a trial
    def id(self) -> str:
        """12 hex digits of a hash of backend and knobs; the same on every machine and version."""
        return digest([self.backend, dict(self.items)])


@dataclass(frozen=True, kw_only=True)
class Build:
    """One kernel to compile; shared by all problems with the same types, constants and alignment.

    `kernel` is `module:attribute` of the JIT function. `signature` maps each parameter to a Triton type
    (`*fp8e4nv`, `fp32`, `i32`, `constexpr`), `constants` each constexpr to its value, `aligned` names the
    parameters known to be divisible by 16, `options` are `num_warps`, `num_stages` and the vendor's. `boxes` are the
    box shapes (elements per TMA copy) of tensor descriptors that are not powers of two, which a Triton type cannot
    express.
    """

    kernel: str
    source_hash: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Scalar], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, Scalar], ...]
    boxes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    line_info: bool = False
    """True if the binary has line information, like every binary that a JIT function compiles by itself: the code
    that ptxas generates depends on it."""

    @cached_property
    def id(self) -> str:
        """12 hex digits of a hash of all that determines the binary except the target and the compiler's version."""
        parts = [self.kernel, self.source_hash, self.signature, self.constants, self.aligned, self.options]
        return digest([*parts, "line_info"] if self.line_info else parts)


@dataclass(frozen=True, kw_only=True)
class BuildFacts:
    """The result of compiling a build; None for numbers that the compiler does not report."""

    compile_s: float
    shared_bytes: int | None = None
    registers: int | None = None
    spills: int | None = None
    error: str = ""
    cached: bool = False
    """True if it came from Triton's disk cache."""


ARCH_PATTERN = re.compile(r"gfx[0-9a-f]{3,5}|sm_\d{2,3}[a-z]?|cpu_\w{1,40}", re.ASCII)
"""Accepted values of `gfx`, which becomes part of file names."""


def is_plausible_time_us(us: object) -> bool:
    """True if `us` can be a measured time in microseconds: between 1 ns and 11 days."""
    return isinstance(us, int | float) and not isinstance(us, bool) and 1e-3 <= us <= 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device, or an architecture to compile for."""

    kind: str
    """`cuda`, `hip` or `cpu`; `none` in a run that only handles files."""
    index: int
    name: str
    gfx: str
    """`sm_90`, `gfx942`, `cpu_avx2` ..."""
    cu_num: int
    """Compute units, SMs or cores."""
    shared_bytes: int
    """Maximum shared memory (LDS) per block."""
    cache_bytes: int
    """Size of the last-level cache; operands rotate over several times this size."""
    warp_size: int
    uuid: str = ""
    shared: bool = False
    """True if other work uses the device too: a run takes little of its memory, and its times are provisional."""

    @property
    def vendor(self) -> str:
        """`nvidia`, `amd` or `cpu`."""
        return {"cuda": "nvidia", "hip": "amd"}.get(self.kind, "cpu")

    @property
    def torch_name(self) -> str:
        """torch's name of the device: `cuda:0` (also on AMD) or `cpu`."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The effort of another tuner (Triton's autotuner, ...) to choose a candidate."""

    seconds: float
    tried: int
    """Configurations timed."""
    of: int
    """Configurations given to the tuner; more than `tried` if a time limit stopped it."""
    compiled: int
    """Those that Triton's cache did not have."""


@renamed_members(asked="requested_launches", look="effective_launches")
@dataclass(frozen=True, kw_only=True)
class Trial:
    """One attempt on one candidate of one problem at one stage.

    `samples_us` are the times in the order taken; in the finals sample i of every candidate belongs to round i.
    """

    stage: str
    problem: str
    candidate: Candidate
    status: Status
    launches: int = 0
    """Timed launches."""
    requested_launches: int = 0
    """Launches that a search requested; 0: equal to `launches`. The numbers differ since short kernels are timed in
    blocks, and much slower candidates only once."""
    samples_us: tuple[float, ...] = ()
    full_clocks_us: float | None = None
    """The median at full clocks, of a product that is timed at both clocks: samples are geometric means of both."""
    err_ratio: float | None = None
    extra_weight_bytes: int = 0
    shared: bool = False
    """True if another process used the device during the trial."""
    no_dependent_launch: bool = False
    """True if none could be made before its replays, though the device has such launches (launch/replays.py)."""
    error: str = ""
    tuning: Tuning | None = None
    """Set if another tuner chose the candidate in this attempt."""

    @property
    def effective_launches(self) -> int:
        """Length of the measurement; of two trials, the one with more requested launches is more accurate."""
        return self.requested_launches or self.launches

    @cached_property
    def time_us(self) -> float | None:
        """The median sample in microseconds, or None without samples."""
        return median(self.samples_us) if self.samples_us else None


SCREENING, FINALS = "screen", "bench"
"""`Trial.stage` of screening and of the problems' finals, in journals and tables."""


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@renamed_members(must="required_knobs", holds="contains", admits="accepts")
@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A range of M for which a format stores one candidate of one (N, K).

    `low` < M <= `high` (None: no limit). `required_knobs` are knob values that a candidate needs to be stored there,
    `backends` the ones that the format can express (empty: any).
    """

    format: str
    name: str
    low: int
    high: int | None
    required_knobs: tuple[tuple[str, Scalar], ...] = ()
    backends: tuple[str, ...] = ()

    def contains(self, m: int) -> bool:
        """True if this M is in the range."""
        return m > self.low and (self.high is None or m <= self.high)

    def accepts(self, candidate: Candidate) -> bool:
        """True if the format can store this candidate in the bucket."""
        knobs = candidate.knobs
        expressible = not self.backends or candidate.backend in self.backends
        return expressible and all(knobs.get(name) == value for name, value in self.required_knobs)
