"""Listeners follow a run and report it elsewhere: experiment trackers, a stream of JSON.

A listener is chosen in the configuration (`listener=mlflow`, `listener=[mlflow,wandb]`); its YAML is keyed by its name
and names its class. A listener that fails gives one warning and is left out from then on: no run ends by it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe.core.errors import GemmpipeError, one_line
from gemmpipe.core.events import Event, Events

FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Facts of a run before its first stage."""

    pipeline: str
    folder: Path
    command: str
    kernel: str
    """The name of the kernel family."""
    options: Mapping[str, str]
    """The chosen options by group: `shapes`, `search`, `device` ..."""
    chain: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Product:
    """The result of one problem."""

    problem: str
    key: Mapping[str, object]
    backend: str
    config: str
    time_us: float
    library_us: float | None
    """The time of the best library of the run; None where no library multiplies the operands as stored."""
    speedup: float | None
    """Library over choice."""
    floor_share: float | None
    """The least time by the device's rates over the choice's time."""
    policy: str
    """How it was timed, as in the table; with `shared_cpu` or `shared_gpu` while other processes used the device."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The geometric means of the products of one regime of M."""

    label: str
    products: int
    speedup: float | None
    floor_share: float | None


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The end of a run."""

    state: str
    """`finished`, `interrupted` or `failed`."""
    exit_code: int | None
    """None for a run that ended by an error; its text is in `error`."""
    error: str = ""
    wall_s: float = 0.0
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage."""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    products: tuple[Product, ...] = ()
    regimes: tuple[Regime, ...] = ()
    unsolved: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    """Artifacts for inference engines."""
    tables: tuple[Path, ...] = ()
    """The run's manifest and tables."""
    report: Path | None = None
    """The HTML report, where the run wrote one."""


def failed(error: BaseException) -> RunOutcome:
    """The outcome of a run that an error ended."""
    state = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return RunOutcome(state=state, exit_code=None, error=text)


class Listener(ABC):
    """One follower of a run. Any exception of its methods becomes a warning of the run."""

    @abstractmethod
    def require(self) -> None:
        """Raises UserError if a package is missing: before the run, which may take hours."""

    @abstractmethod
    def start(self, run: RunStart) -> None:
        """Called before the first stage."""

    def event(self, event: Event) -> None:
        """Called for every event of the run; it delays the run, so it returns at once."""
        return

    @abstractmethod
    def finish(self, outcome: RunOutcome) -> None:
        """Called once at the end, also of a run that failed. No event follows."""

    def place(self) -> str:
        """Where a finished run can be looked at, for the user; empty if nothing was logged."""
        return ""


class Guarded:
    """A listener that cannot end the run: its first failure is a warning, and it is called no more."""

    def __init__(self, name: str, listener: Listener, events: Events) -> None:
        self._name, self._listener, self._events = name, listener, events
        self._failed = self._ended = False

    def __call__(self, event: Event) -> None:
        """Pass an event on; none after the end."""
        if not self._failed and not self._ended:
            self._call("event", event)

    def start(self, run: RunStart) -> None:
        """Pass the start on."""
        self._call("start", run)

    def finish(self, outcome: RunOutcome) -> None:
        """Pass the end on, and print where the listener has put the run."""
        self._ended = True
        self._call("finish", outcome)
        if not self._failed and (place := self._listener.place()):
            self._events.emit("line", f"{self._name}  {place}")

    def _call(self, method: str, value: object) -> None:
        if self._failed:
            return
        try:
            getattr(self._listener, method)(value)
        except Exception as error:  # noqa: BLE001 (a tracker's server or package must not end a run)
            self._failed = True  # before the warning, which is an event as well
            reason = str(error) if isinstance(error, GemmpipeError) else one_line(error)
            self._events.emit("warning", f"listener {self._name}: {reason}; it is left out, the run goes on")


def product_names(products: Sequence[Product]) -> dict[str, Product]:
    """Products by a short name of letters, digits and underscores: `M4_N1280_K8192`, with further key columns only
    where two products differ in these alone."""
    columns = list(dict.fromkeys(name for product in products for name in product.key))
    sizes = [name for name in columns if all(_is_size(product.key.get(name)) for product in products)]
    others = [n for n in columns if n not in sizes and len({str(product.key.get(n)) for product in products}) > 1]
    named = {_name(product, sizes): product for product in products}
    if len(named) < len(products):
        named = {_name(product, [*sizes, *others]): product for product in products}
    return named


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name(product: Product, columns: Sequence[str]) -> str:
    parts = [f"{name}{product.key[name]}" for name in columns if product.key.get(name) is not None]
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in "_".join(parts))
