"""Comparison of two sets of choices, product by product, by the intervals of their times.

A time is known up to its noise: the choice takes from `us (1 - noise)` to `us (1 + noise)`. One side is faster only if
these intervals do not meet, so that a swap of the sides swaps `faster` and `slower`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemmpipe.core.errors import UserError, check_at_least
from gemmpipe.report.choices import Choice, ChoiceTable, Key
from gemmpipe.report.results import REGIMES, Spread, spread
from gemmpipe.tables.merge import SHARED_CPU, SHARED_GPU

if TYPE_CHECKING:
    import pandas as pd

FASTER, SLOWER, SAME, UNSURE = "faster", "slower", "same", "unsure"
VERDICTS = (FASTER, SLOWER, SAME, UNSURE)
_WIDTH, _SHOWN = 120, 20
"""Characters per line and changed products of a comparison as text."""
_NOISE_PCT, _CPU_NOISE_PCT = 3.0, 30.0
"""The assumed noise of times without an interval."""
_MAX_NOISE = 0.9
"""The largest noise as a share of a time: more would make the shortest possible time negative."""


@dataclass(frozen=True, kw_only=True)
class DiffRules:
    """The options of a comparison."""

    same_within_pct: float = 1.0
    """An interval within 1 +- this is the same: runs of one program differ by about as much through clocks alone."""
    default_noise_pct: float | None = None
    """The noise of a row without an interval; None: 3, and 30 on a CPU.

    The same winner took up to 27 % longer in a second run minutes later (2 cores, 2026-11-26).
    """
    across: bool = False
    """True: rows of different devices or policies are compared too."""

    def __post_init__(self) -> None:
        check_at_least(0, same_within_pct=self.same_within_pct, default_noise_pct=self.default_noise_pct or 0)

    def noise_pct(self, choice: Choice) -> float:
        """The noise of this choice's time in percent, assumed if it has no interval."""
        if choice.noise_pct is not None:
            return choice.noise_pct
        if self.default_noise_pct is not None:
            return self.default_noise_pct
        return _CPU_NOISE_PCT if choice.gfx.startswith("cpu") else _NOISE_PCT


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One product on both sides."""

    before: Choice
    after: Choice
    ratio: float
    """After over before; below 1 is faster."""
    low: float
    high: float
    verdict: str

    @property
    def key(self) -> Key:
        """The product's key."""
        return self.after.key

    @property
    def changed_winner(self) -> bool:
        """True if backend or knobs differ."""
        return self.before.winner != self.after.winner

    def as_row(self) -> dict[str, object]:
        """The pair as a row of a table, times in microseconds."""
        return {
            **{name: int(text) if text.isdecimal() else text for name, text in self.key},
            "verdict": self.verdict,
            "before_us": self.before.time_us,
            "after_us": self.after.time_us,
            "ratio": round(self.ratio, 4),
            "ratio_low": round(self.low, 4),
            "ratio_high": round(self.high, 4),
            "before_winner": " ".join(filter(None, self.before.winner)),
            "after_winner": " ".join(filter(None, self.after.winner)),
            "changed_winner": self.changed_winner,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RegimeChange:
    """The products of one regime of M that both sides have."""

    label: str
    speedup: Spread
    """Before over after; above 1 is faster."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The comparison of two sides: `before` is A, `after` is B."""

    before: ChoiceTable
    after: ChoiceTable
    rules: DiffRules
    pairs: tuple[Pair, ...]
    new: tuple[Choice, ...]
    """Choices of products that only B has."""
    lost: tuple[Choice, ...]
    """Choices of products that only A has."""
    not_compared: tuple[tuple[Choice, Choice], ...] = ()
    """Rows of one product that devices or policies keep apart."""
    without_interval: int = 0
    """Compared rows, of both sides, with the default noise."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Pairs by verdict, in the order of VERDICTS."""

    @property
    def regimes(self) -> tuple[RegimeChange, ...]:
        """The regimes of M with pairs, and all of them."""
        return regime_changes(self.pairs)

    @property
    def changed_winners(self) -> int:
        """Pairs with another backend or other knobs."""
        return sum(pair.changed_winner for pair in self.pairs)

    @property
    def of_other_devices(self) -> int:
        """New and lost rows that were timed on a device of which the other side has no row."""
        before, after = ({(c.gfx, c.cu_num) for c in side.choices} for side in (self.before, self.after))
        return sum((c.gfx, c.cu_num) not in before for c in self.new) + sum(
            (c.gfx, c.cu_num) not in after for c in self.lost
        )

    @property
    def frame(self) -> "pd.DataFrame":
        """One row per pair: the key, `verdict`, times in microseconds, the ratio after over before, the winners."""
        import pandas as pd

        return pd.DataFrame([pair.as_row() for pair in self.pairs])

    def __repr__(self) -> str:
        from gemmpipe.report.diff_text import summary_line

        return f"<gemmpipe diff: {summary_line(self)}>"

    def __str__(self) -> str:
        from gemmpipe.report.diff_text import text_lines

        return "\n".join(text_lines(self, _WIDTH, _SHOWN))

    def _repr_html_(self) -> str:
        from gemmpipe.report.notebook import difference_html

        return difference_html(self)

    def slower_by(self, percent: float) -> list[Pair]:
        """Pairs that are slower by more than `percent`, surely: the lower end of their interval is above it."""
        return [pair for pair in self.pairs if pair.low > 1 + percent / 100]


def compare(before: ChoiceTable, after: ChoiceTable, rules: DiffRules) -> Difference:
    """Compare two sides. Raises UserError for sides of different kernels or with other key columns."""
    if before.kernel and after.kernel and before.kernel != after.kernel:
        raise UserError(f"diff: A is of kernel={before.kernel}, B of kernel={after.kernel}; expected one kernel")
    _check_keys(before, after)
    both, new, lost = _matched(before.choices, after.choices)
    apart = [] if rules.across else [(a, b) for a, b in both if not is_comparable(a, b)]
    compared = [(a, b) for a, b in both if rules.across or is_comparable(a, b)]
    pairs = tuple(_pair(a, b, rules) for a, b in compared)
    found = Counter(pair.verdict for pair in pairs)
    return Difference(
        before=before,
        after=after,
        rules=rules,
        pairs=pairs,
        new=tuple(new),
        lost=tuple(lost),
        not_compared=tuple(apart),
        without_interval=sum(c.noise_pct is None for a, b in compared if not _is_one_measurement(a, b) for c in (a, b)),
        counts={verdict: found[verdict] for verdict in VERDICTS},
    )


def is_comparable(a: Choice, b: Choice) -> bool:
    """True if both times are of one device and one timing method."""
    return _same_device(a, b) and a.policy == b.policy


def _same_device(a: Choice, b: Choice) -> bool:
    names = {name for name in (a.device, b.device) if name}  # older tables have no names
    return (a.gfx, a.cu_num) == (b.gfx, b.cu_num) and len(names) <= 1


def _check_keys(before: ChoiceTable, after: ChoiceTable) -> None:
    """Raises UserError if no product of one side can be one of the other."""
    columns = [{name for choice in side.choices for name, _ in choice.key} for side in (before, after)]
    if not all(columns):
        empty = before if not columns[0] else after
        raise UserError(f"diff: {empty.name}: no timed row; expected a run or a table with results")
    if not columns[0] & columns[1]:
        texts = [", ".join(sorted(names)) for names in columns]
        raise UserError(f"diff: A has the key columns {texts[0]}, B {texts[1]}; expected one kernel")


def _matched(
    before: Sequence[Choice], after: Sequence[Choice]
) -> tuple[list[tuple[Choice, Choice]], list[Choice], list[Choice]]:
    """(rows of both sides, only B's, only A's); a row is paired with that of its own device, else with another's."""
    left, right = _by_key(before), _by_key(after)
    both: list[tuple[Choice, Choice]] = []
    new: list[Choice] = []
    lost: list[Choice] = []
    for key in dict.fromkeys([*right, *left]):
        ours, theirs = list(left.get(key, ())), list(right.get(key, ()))
        for choice in tuple(theirs):
            same = next((other for other in ours if _same_device(other, choice)), None)
            if same is not None:
                both.append((same, choice))
                ours.remove(same)
                theirs.remove(choice)
        others = list(zip(ours, theirs, strict=False))
        both += others
        new += theirs[len(others) :]
        lost += ours[len(others) :]
    return both, new, lost


def _by_key(choices: Iterable[Choice]) -> dict[Key, list[Choice]]:
    found: dict[Key, list[Choice]] = {}
    for choice in choices:
        found.setdefault(choice.key, []).append(choice)
    return found


def _pair(before: Choice, after: Choice, rules: DiffRules) -> Pair:
    least_before, most_before = _bounds(before, rules)
    least_after, most_after = _bounds(after, rules)
    ratio, low, high = after.time_us / before.time_us, least_after / most_before, most_after / least_before
    if _is_one_measurement(before, after):
        low = high = 1.0
    elif on_shared_device(before, after):  # what else ran is unknown, so no interval excludes 1
        low, high = min(low, 1.0), max(high, 1.0)
    verdict = _verdict(low, high, 1 + rules.same_within_pct / 100)
    return Pair(before=before, after=after, ratio=ratio, low=low, high=high, verdict=verdict)


def on_shared_device(*choices: Choice) -> bool:
    """True if one was timed while other processes used its device."""
    return any(word in (SHARED_CPU, SHARED_GPU) for choice in choices for word in (choice.policy or "").split())


def _is_one_measurement(before: Choice, after: Choice) -> bool:
    """True if both sides have the row of one run: a table and its copy, or a merged table and the run."""
    return before.run_id == after.run_id and before.winner == after.winner and before.time_us == after.time_us


def _bounds(choice: Choice, rules: DiffRules) -> tuple[float, float]:
    """The shortest and longest time that the choice may take."""
    noise = min(_MAX_NOISE, rules.noise_pct(choice) / 100)
    return choice.time_us * (1 - noise), choice.time_us * (1 + noise)


def _verdict(low: float, high: float, limit: float) -> str:
    if high <= limit and low >= 1 / limit:
        return SAME
    if high < 1:
        return FASTER
    return SLOWER if low > 1 else UNSURE


def regime_changes(pairs: Sequence[Pair]) -> tuple[RegimeChange, ...]:
    """The speed-ups by regime of M, then over all pairs; keys without M count for all pairs alone."""
    found = []
    for label, low, high in (*REGIMES, ("all", -math.inf, math.inf)):
        change = spread(1 / pair.ratio for pair in pairs if low <= pair.after.rows <= high)
        if change is not None:
            found.append(RegimeChange(label=label, speedup=change))
    return tuple(found)
