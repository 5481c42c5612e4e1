"""Times of an engine's alternatives for a run's products: its own function, libraries, and our kernels."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemmpipe import journal
from gemmpipe.core.data import FINALS, TIMED
from gemmpipe.formats.engine_json import EngineJson
from gemmpipe.pipeline.export import Choices

WITH_FILE, WITHOUT_FILE, TUNED, BASELINE = "with file", "without file", "tuned", "baseline"
"""The engine's function with the run's file, and as it is without; the best of all candidates, and the baseline."""
_Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class OptionTimes:
    """One way to compute a run's products: time by problem, in microseconds."""

    option: str
    """`WITH_FILE`, `WITHOUT_FILE`, `TUNED`, `BASELINE` or a backend's label."""
    times_us: Mapping[_Key, float]

    def total_us(self, problems: Iterable[_Key], weights: Mapping[_Key, float]) -> float:
        """The time of these problems by their number of calls."""
        return sum(self.times_us[key] * weights.get(key, 1.0) for key in problems)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The options with times for the same problems, the fastest first."""

    problems: tuple[_Key, ...]
    weights: Mapping[_Key, float]
    options: tuple[OptionTimes, ...]
    left_out: tuple[str, ...]
    """Options that lack the time of a problem that others have."""

    @property
    def is_weighted(self) -> bool:
        """True if numbers of calls are known: a table has none, and a list of problems counts each once."""
        return any(self.weights.get(key, 1.0) != 1.0 for key in self.problems)

    def total_us(self, option: OptionTimes) -> float:
        """The time of all problems, by their number of calls."""
        return option.total_us(self.problems, self.weights)


def compare_options(choices: Choices, engine: str, form: EngineJson) -> Comparison:
    """The options of a run (or a table) for an engine. Problems are those that all complete options share."""
    family = choices.family
    rows_column = family.rows_column
    names = [column.name for column in family.key_columns]
    found: dict[str, dict[_Key, float]] = {}
    weights: dict[_Key, float] = {}
    for row in choices.selections.to_dict("records"):
        kind, us = str(row.get("format") or ""), row.get("us")
        if kind not in ("", engine) or us is None or us != us:
            continue
        rows = row.get("bucket") if kind else row.get(rows_column)
        key = tuple((name, str(rows if name == rows_column else row.get(name))) for name in names)
        found.setdefault(WITH_FILE if kind else TUNED, {})[key] = float(us)
        if not kind or key not in weights:
            weights[key] = float(row.get("weight") or 1.0)
        if (current := row.get("baseline_us")) is not None and current == current:
            found.setdefault(WITHOUT_FILE if kind else BASELINE, {})[key] = float(current)
    if choices.is_run:
        for label, times in _finals(choices.place, names).items():
            found.setdefault(label, {}).update(times)
    return _complete(found, weights)


def _finals(folder: Path, names: list[str]) -> dict[str, dict[_Key, float]]:
    """Backend -> problem -> the time of its fastest correct candidate in a run's finals."""
    record = journal.read(folder)
    keys = {str(row["id"]): row["key"] for row in record.problems}
    found: dict[str, dict[_Key, float]] = {}
    for trial in record.at(FINALS):
        key = keys.get(trial.problem)
        if trial.status not in TIMED or trial.time_us is None or not isinstance(key, Mapping):
            continue
        name = tuple((each, str(key.get(each))) for each in names)
        times = found.setdefault(trial.candidate.backend, {})
        times[name] = min(times.get(name, trial.time_us), trial.time_us)
    return found


def _complete(found: Mapping[str, Mapping[_Key, float]], weights: Mapping[_Key, float]) -> Comparison:
    """Options with a time for each problem that the most complete option of the engine or of ours has."""
    wanted = [set(times) for option, times in found.items() if option in (WITH_FILE, TUNED)]
    problems = set.intersection(*wanted) if wanted else set()
    if not problems and wanted:
        problems = max(wanted, key=len)
    whole = {option: times for option, times in found.items() if problems and problems <= set(times)}
    ordered = tuple(sorted(problems))
    options = [OptionTimes(option=option, times_us=times) for option, times in whole.items()]
    return Comparison(
        problems=ordered,
        weights=weights,
        options=tuple(sorted(options, key=lambda each: each.total_us(ordered, weights))),
        left_out=tuple(sorted(set(found) - set(whole))),
    )
