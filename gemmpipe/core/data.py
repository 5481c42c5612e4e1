"""The nouns: problems, candidates, builds, trials, and the device they belong to."""

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
    """How a trial ended; `time_us` is set exactly when something was timed."""

    OK = "ok"
    PRUNED = "pruned"  # behind before the end of its measurement: its times are valid, but not of full length
    UNSUPPORTED = "unsupported"
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    INCORRECT = "incorrect"
    TIMEOUT = "timeout"
    DIED = "died"

    @classmethod
    def _missing_(cls, value: object) -> "Status | None":
        """Journals of version 0.1.0 and before use other words for three statuses."""
        earlier = {"dropped": cls.PRUNED, "unfit": cls.UNSUPPORTED, "wrong": cls.INCORRECT}
        return earlier.get(value) if isinstance(value, str) else None


for _old, _status in {"DROPPED": Status.PRUNED, "UNFIT": Status.UNSUPPORTED, "WRONG": Status.INCORRECT}.items():
    setattr(Status, _old, _status)  # what users' own stages and searches of version 0.1.0 ask for


def canonical_json(value: object) -> str:
    """The canonical JSON: sorted keys, no blanks."""
    return _ENCODER.encode(value)


def digest(value: object) -> str:
    """12 hex digits of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:12]


@renamed_members(siblings="shape_group")
@dataclass(frozen=True, kw_only=True)  # no slots, as in whatever is sent between processes often: pickled in Python
class Problem:
    """One thing to tune: a family and the values of its key columns, in the family's order."""

    family: str
    key: tuple[tuple[str, Scalar], ...]
    weight: float = 1.0
    """How often the workload makes this call."""
    layer: str = ""
    rows_column: str = "M"
    """The key column that says how many rows x has."""

    def __getitem__(self, column: str) -> Scalar:
        return dict(self.key)[column]

    @cached_property
    def rows(self) -> int:
        """M, the rows of the product."""
        return int(self[self.rows_column] or 0)

    @cached_property
    def shape_group(self) -> tuple[tuple[str, Scalar], ...]:
        """What problems share that differ in M alone: they share weights, and buckets span them."""
        return tuple(item for item in self.key if item[0] != self.rows_column)

    @cached_property
    def id(self) -> str:
        """Readable and unique within a run: `a16w16 M=1 N=1280 K=8192 ...`; columns without a value are left out."""
        return f"{self.family} " + " ".join(f"{name}={value}" for name, value in self.key if value is not None)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute: a backend (`libtype`) and its normalised knobs."""

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

    @cached_property  # asked for at every step of a trial
    def id(self) -> str:
        """12 hex digits of backend and knobs; the same on every machine and version."""
        return digest([self.backend, dict(self.items)])


@dataclass(frozen=True, kw_only=True)
class Build:
    """One kernel to compile; serves every problem that needs the same types, constants and alignment.

    `kernel` is `module:attribute` of the JIT function. `signature` maps each parameter to a Triton type
    (`*fp8e4nv`, `fp32`, `i32`, `constexpr`), `constants` each constexpr to its value, `aligned` names the
    parameters known to be divisible by 16, `options` are `num_warps`, `num_stages` and the vendor's. `boxes` are those
    of tensor descriptors that are no powers of two, which a type cannot say: the copy engine brings so much at a time.
    """

    kernel: str
    source_hash: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Scalar], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, Scalar], ...]
    boxes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    line_info: bool = False
    """Whether the binary says which lines it comes from, as every binary that a JIT function compiles by itself does:
    what ptxas makes of a kernel depends on it."""

    @cached_property
    def id(self) -> str:
        """12 hex digits of everything that decides the binary but the target and the compiler's version."""
        said = [self.kernel, self.source_hash, self.signature, self.constants, self.aligned, self.options]
        return digest([*said, "line_info"] if self.line_info else said)


@dataclass(frozen=True, kw_only=True)
class BuildFacts:
    """What compiling a build gave; None where this compiler does not say."""

    compile_s: float
    shared_bytes: int | None
    registers: int | None
    spills: int | None
    error: str = ""
    cached: bool = False
    """Whether Triton's disk cache had it already."""


ARCH_PATTERN = re.compile(r"gfx[0-9a-f]{3,5}|sm_\d{2,3}[a-z]?|cpu_\w{1,40}", re.ASCII)
"""What `gfx` may say; it becomes part of file names."""


def is_plausible_time_us(us: object) -> bool:
    """Whether a number, of microseconds, can have been measured: no call takes a nanosecond or less, or 11 days."""
    return isinstance(us, int | float) and not isinstance(us, bool) and 1e-3 <= us <= 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device, or an architecture to compile for; limits in bytes, per block where the hardware says so."""

    kind: str
    """`cuda`, `hip` or `cpu`; `none` where a run only handles files."""
    index: int
    name: str
    gfx: str
    """`sm_90`, `gfx942`, `cpu_avx2` ..."""
    cu_num: int
    """Compute units, SMs or cores."""
    shared_bytes: int
    """The most shared memory (LDS) that one block may ask for."""
    cache_bytes: int
    """The last-level cache; operands rotate over several times this much."""
    warp_size: int
    uuid: str = ""
    shared: bool = False
    """Whether other work runs on it meanwhile: it gets little of the memory, and its times are provisional."""

    @property
    def vendor(self) -> str:
        """`nvidia`, `amd` or `cpu`."""
        return {"cuda": "nvidia", "hip": "amd"}.get(self.kind, "cpu")

    @property
    def torch_name(self) -> str:
        """What torch calls it: `cuda:0` (also on AMD) or `cpu`."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What it took another tuner to choose a candidate."""

    seconds: float
    tried: int
    """Configurations that it timed."""
    of: int
    """Configurations that it was given; more than `tried` where a limit cut it short."""
    compiled: int
    """Those that Triton's cache did not have."""


@renamed_members(asked="requested_launches", look="effective_launches")
@dataclass(frozen=True, kw_only=True)
class Trial:
    """One attempt on one candidate of one problem at one stage.

    `samples_us` are the raw times in the order taken; in the finals sample i of every candidate belongs to round i.
    """

    stage: str
    problem: str
    candidate: Candidate
    status: Status
    launches: int = 0
    """That were timed."""
    requested_launches: int = 0
    """Launches that a search asked for; 0: as many. Short ones are timed in blocks, who is far behind but once."""
    samples_us: tuple[float, ...] = ()
    err_ratio: float | None = None
    extra_weight_bytes: int = 0
    shared: bool = False
    """Whether another process used the device meanwhile."""
    error: str = ""
    tuning: Tuning | None = None
    """Where the candidate was chosen in this attempt, by another tuner."""

    @property
    def effective_launches(self) -> int:
        """How long a look it was: of two, the one that asked for more launches is to be believed."""
        return self.requested_launches or self.launches

    @cached_property
    def time_us(self) -> float | None:
        """The median sample, or None where nothing was timed."""
        return median(self.samples_us) if self.samples_us else None


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@renamed_members(must="required_knobs", holds="contains", admits="accepts")
@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A range of M for which a format stores one candidate of one (N, K).

    `low` < M <= `high` (None: no limit); `required_knobs` are knob values a candidate needs to be stored there, and
    `backends` the ones a format can express (empty: any).
    """

    format: str
    name: str
    low: int
    high: int | None
    required_knobs: tuple[tuple[str, Scalar], ...] = ()
    backends: tuple[str, ...] = ()

    def contains(self, m: int) -> bool:
        """Whether this M belongs here."""
        return m > self.low and (self.high is None or m <= self.high)

    def accepts(self, candidate: Candidate) -> bool:
        """Whether the format can store this candidate here."""
        knobs = candidate.knobs
        expressible = not self.backends or candidate.backend in self.backends
        return expressible and all(knobs.get(name) == value for name, value in self.required_knobs)
