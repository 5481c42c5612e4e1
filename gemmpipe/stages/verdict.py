"""What an implementation says of a candidate before it is tried: it fits, it does not, or its own code raised."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from gemmpipe.asking import Raised, ask
from gemmpipe.data import Build, Candidate, Device, Knobs, Status
from gemmpipe.family import GemmSpec, Implementation
from gemmpipe.space import Space
from gemmpipe.stages.needed_builds import screening_builds

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A candidate that is tried, with what that takes; or, with a status, one that is not."""

    status: Status | None = None
    reason: str = ""
    builds: tuple[Build, ...] = ()
    """What screening needs of it."""
    kernel_name: str = ""
    place: str = ""
    """`file:line` at which the implementation's own code raised, where it did."""

    @classmethod
    def failed(cls, raised: Raised) -> "Verdict":
        """Nothing was launched, but as there its own code is what failed."""
        return cls(status=Status.LAUNCH_ERROR, reason=str(raised), place=raised.place)

    @property
    def rule(self) -> str:
        """What the reason has in common with others."""
        return "its own code raised" if self.status is Status.LAUNCH_ERROR else self.reason.split(":")[0]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What an implementation names for one product on one device."""

    missing: str | None = None
    """Why nothing of it runs here."""
    points: tuple[Knobs, ...] = ()
    """Raw configurations."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """An implementation, asked about one product on one device."""

    implementation: Implementation
    spec: GemmSpec
    device: Device

    def offer(self, space: Space) -> Offer:
        """Raises Raised where the implementation cannot say."""
        own, spec, device = self.implementation, self.spec, self.device
        return ask(own, lambda: Offer(missing=own.unavailable(device), points=tuple(own.points(spec, device, space))))

    def candidate(self, point: Knobs) -> tuple[Candidate, Verdict | None]:
        """The candidate of a raw configuration; as it came, and why, where that cannot be normalised."""
        own, spec, device = self.implementation, self.spec, self.device
        try:
            return ask(own, lambda: _known(own.label, own.normalise(spec, point, device))), None
        except Raised as raised:
            return _as_it_came(own.label, point), Verdict.failed(raised)

    def verdict(self, candidate: Candidate, missing: str | None = None, *, spared: bool = False) -> Verdict:
        """`missing` is why nothing runs here; who is `spared` is tried even if it cannot win."""
        try:
            return ask(self.implementation, lambda: self._verdict(candidate, missing, spared))
        except Raised as raised:
            return Verdict.failed(raised)

    def fitting(self, offer: Offer) -> Iterator[Candidate]:
        """Each candidate of an offer that can run, once, also if it cannot win."""
        seen: set[Candidate] = set()
        for candidate, failure in map(self.candidate, offer.points):
            if candidate not in seen:
                seen.add(candidate)
                if failure is None and self.verdict(candidate, offer.missing, spared=True).status is None:
                    yield candidate

    def _verdict(self, candidate: Candidate, missing: str | None, spared: bool) -> Verdict:
        own, knobs, words = self.implementation, candidate.knobs, (self.spec, candidate.knobs, self.device)
        reason, status = missing or own.misfit(*words), Status.UNFIT
        if reason is None and not spared:
            reason, status = own.wasteful(*words), Status.DROPPED
        if reason is None:
            builds = tuple(same(b) for b in screening_builds(own, *words))
            return Verdict(builds=builds, kernel_name=own.kernel_name(knobs))
        if not isinstance(reason, str):
            raise TypeError(f"{type(reason).__name__} as the reason against a candidate, expected str or None")
        return Verdict(status=status, reason=reason)


def _known(label: str, knobs: Knobs) -> Candidate:
    """Raises TypeError where knobs are not what JSON can hold."""
    candidate: Candidate = same(Candidate.of(label, knobs))
    assert candidate.id
    return candidate


def _as_it_came(label: str, point: Knobs) -> Candidate:
    try:
        return _known(label, point)
    except (AttributeError, TypeError, ValueError):
        return Candidate.of(label, {"point": repr(point)[:300]})


@lru_cache(maxsize=1 << 15)
def same(value: T) -> T:
    """One object for equal ones, also of other problems: its id is computed once, and it is pickled once."""
    return value
