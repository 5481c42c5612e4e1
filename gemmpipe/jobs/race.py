"""Who of some finalists is timed further, and when their race is decided."""

from dataclasses import dataclass, field

from gemmpipe.data import Candidate, median
from gemmpipe.jobs import LONG_US, Bind
from gemmpipe.paired import paired_ratio
from gemmpipe.timer import Replay

# (rounds, ratio to the fastest): slower than this is not timed further. Of 576 finals on H200s (2026-11-21) these put
# out the winner of all rounds twice, 3.8 and 0.01 % behind the one that was left.
_OUTRUN = ((1, 1.3), (2, 1.15), (3, 1.08), (5, 1.05), (8, 1.03), (15, 1.02))
_OUTRUN_LONG = ((1, 1.15), (2, 1.08), (3, 1.05))  # one launch of 20 ms and more is its own average
_FAR = 2.0  # times the fastest, of a launch alone, where short ones differ less: no round at all
_RESTS = 1.1  # times the fastest: a baseline has been compared with after so many rounds as decide a race
# Rounds after which a race ends where no rival is faster than this times the fastest, with an interval of 95 %: in 288
# finals (H200, 2026-11-21) what was chosen then is within 0.11 % of the choice of 30 rounds.
_DECIDED_AFTER = 10
_DECIDED = 0.998
_STATED_PCT = 2.0  # a run should not state more noise than this where more rounds can say less


@dataclass(kw_only=True)
class Runner:
    """A finalist whose product was looked at, in every layout of x's scales that the problem may have."""

    candidate: Candidate
    position: int
    err_ratio: float
    first_us: tuple[float, ...]
    """Of one launch by itself, in each layout."""
    binds: tuple[Bind, ...]
    """One a layout, as are the replays."""
    far: bool = False
    """Whether that was all."""
    replays: tuple[Replay, ...] = ()
    rounds: int = 0
    per_sample: int = 1
    extra_bytes: int = 0
    samples: list[float] = field(default_factory=list)
    """One a round, of the layout in which it is slower so far: nobody chooses the layout of a call."""
    outrun: bool = False
    _taken: list[list[float]] = field(default_factory=list)
    """One a round of each layout."""

    @property
    def time_us(self) -> float:
        """Of one launch by itself, in the layout in which it is slower."""
        return max(self.first_us)

    @property
    def launches(self) -> int:
        """Those that were timed."""
        return (sum(map(len, self._taken)) or len(self.samples)) * self.per_sample

    def begin(self, *, first: bool) -> None:
        """Forget all samples; `first`: but for the first launches, which are long enough to count."""
        self._taken = [[time_us] if first else [] for time_us in self.first_us]
        self.samples, self.outrun = [self.time_us] if first else [], False

    def run(self) -> None:
        """A round: a replay in each layout, one after the other."""
        for samples, replay in zip(self._taken, self.replays, strict=True):
            samples.append(replay())
        self.samples = max(self._taken, key=median)

    def behind(self, rival: "Runner") -> float:
        """The ratio of this one's time to the rival's: the median over the rounds that both ran."""
        return median([mine / other for mine, other in zip(self.samples, rival.samples, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a race is run; candidates are given by their ids, as in FinalsJob."""

    library: frozenset[str]
    kept: frozenset[str]
    unchecked: frozenset[str] = frozenset()

    def baseline(self, runners: list[Runner]) -> Runner | None:
        """The library path to compare with, going by the launch alone."""
        library = [r for r in runners if r.candidate.id in self.library]
        return min(library, key=lambda r: (r.extra_bytes, r.time_us), default=None)

    def is_far(self, runner: Runner, ready: list[Runner]) -> bool:
        """Whether a launch tells that no round is needed. `ready` are right and can race: what they reach counts."""
        if runner.candidate.id in self.kept:
            return False
        rivals = (r for r in ready if r.extra_bytes <= runner.extra_bytes and r.candidate.id not in self.unchecked)
        return runner.time_us > _FAR * min((r.time_us for r in rivals), default=float("inf"))

    def decided(self, racing: list[Runner]) -> bool:
        """Whether more rounds could only choose among those that are alike, however much memory one may afford."""
        turn = max((len(runner.samples) for runner in racing), default=0)
        if turn < _DECIDED_AFTER or any(runner.candidate.id in self.kept for runner in racing):
            return False
        budgets = {runner.extra_bytes for runner in racing}
        return all(_settled([r for r in racing if r.extra_bytes <= budget]) for budget in budgets)

    def still_racing(self, racing: list[Runner]) -> list[Runner]:
        """Outrun is who has a rival that needs no more weight memory and is faster by the limit of this round.

        Compared round by round: when clocks sag in the middle of a race, medians of the same kernel a round apart lie
        on either side.
        """
        times = {r.candidate.id: median(r.samples) for r in racing}
        rounds = max((len(r.samples) for r in racing), default=0)
        library = [r for r in racing if r.candidate.id in self.library]
        baseline = min(library, key=lambda r: (r.extra_bytes, times[r.candidate.id]), default=None)
        stay = []
        for runner in racing:
            rivals = (r for r in racing if r.extra_bytes <= runner.extra_bytes)
            rival = min(rivals, key=lambda r: times[r.candidate.id])
            known = _OUTRUN if times[rival.candidate.id] < LONG_US else _OUTRUN_LONG
            limit = min((ratio for after, ratio in known if rounds >= after), default=float("inf"))
            kept = runner is baseline or runner.candidate.id in self.kept
            runner.outrun = not kept and runner.behind(rival) > limit
            if not runner.outrun and not (runner is baseline and self._rests(runner, rival)):
                stay.append(runner)
        return stay

    def _rests(self, baseline: Runner, rival: Runner) -> bool:
        """Whether the baseline's ratio is known well enough for one that decides nothing."""
        if baseline.candidate.id in self.kept or len(baseline.samples) < _DECIDED_AFTER:
            return False
        ratio = paired_ratio(baseline.samples, rival.samples)
        return ratio.low > _RESTS and ratio.noise_pct <= _STATED_PCT


def _settled(racing: list[Runner]) -> bool:
    """Whether nobody may be faster than the fastest, and how far they are apart is known."""
    fastest = min(racing, key=lambda r: (median(r.samples), r.candidate.id))
    ratios = [paired_ratio(r.samples, fastest.samples) for r in racing if r is not fastest]
    return all(ratio.low > _DECIDED and ratio.noise_pct <= _STATED_PCT for ratio in ratios)
