"""The entries of a comparison on one problem, and the reasons why some are excluded."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gemmpipe import journal
from gemmpipe.backends.autotune import Autotuned
from gemmpipe.backends.same_size import computes_another_product
from gemmpipe.core.data import FINALS, Candidate, Problem, Trial, Tuning
from gemmpipe.core.errors import UserError
from gemmpipe.family import Family
from gemmpipe.formats.engine_json import EngineJson, nearest_key
from gemmpipe.search.features import FeatureCache, FeatureEncoder
from gemmpipe.stages import Context
from gemmpipe.stages.compare.absent import absent_candidates, pair_violation
from gemmpipe.stages.compare.chosen import condition_names, other_conditions
from gemmpipe.stages.rows import config_text
from gemmpipe.stages.screen.candidates import CandidateFilter, CandidateList
from gemmpipe.tables.merge import Row
from gemmpipe.tables.recorded import UnusableRow, candidate_of_row

TUNED, OWN, UNTUNED, AUTOTUNE = "tuned", "own kernels", "untuned", "triton.autotune"
VLLM, SGLANG = "vllm", "sglang"
NAMES = (TUNED, OWN, UNTUNED, AUTOTUNE, VLLM, SGLANG)
"""Names of entries that do not begin with a backend's label."""
_PLAIN = "triton"
_NO_JOURNAL = "a library was chosen, and the journal of that run is not here; expected stages.lineup.own=TABLE"
_NO_OWN_FINALIST = "a library was chosen, and no own kernel was in that run's finals; expected stages.lineup.own=TABLE"
_LIBRARY_ROW = "stages.lineup.own: the table's row is a library's; expected one tuned with 'backend=[{}]'"

JournalLookup = Callable[[str], journal.Record]
"""Returns the journal of a run id; an empty one where it is not found."""


@dataclass(frozen=True, kw_only=True)
class LineupEntry:
    """A name and its candidate; an entry without a candidate is excluded, for the reason given."""

    name: str
    candidate: Candidate | None = None
    reason: str = ""
    unlike: bool = False
    """True if it computes another product on purpose; its result is not checked."""
    tuning: Tuning | None = None
    run_id: str = ""
    """The tuning run that chose it."""
    condition: str = ""
    """`routing=uniform` for a row that was tuned under another condition than the problem's."""


def tuned_entries(
    listing: CandidateList, rows: Sequence[Row], alone: Sequence[Row], journals: JournalLookup, context: Context
) -> Iterator[LineupEntry]:
    """The tables' choice, and the best own kernel: the choice itself, of the table `alone`, or of that run's finals."""
    winner = _first_usable(TUNED, rows, listing, context)
    yield winner
    own = {i.label for i in context.family.implementations}
    if winner.candidate is not None and winner.candidate.backend in own and not alone:
        yield replace(winner, name=OWN)
    elif alone:
        rows_of_own = [row for row in alone if row.get("libtype") in own]
        reason = _LIBRARY_ROW.format(",".join(sorted(own)))
        yield _first_usable(OWN, rows_of_own, listing, context) if rows_of_own else LineupEntry(name=OWN, reason=reason)
    elif winner.candidate is not None and (cannot_run := _own_kernels_reason(listing, own)):
        yield LineupEntry(name=OWN, reason=cannot_run)
    elif winner.candidate is not None:
        found = _first_usable(OWN, _finalists(rows, own, listing, journals, context.family), listing, context)
        has_finals = any(_finals_of(row, listing.problem, journals, context.family) for row in rows)
        yield replace(found, reason=_NO_OWN_FINALIST) if has_finals and found.reason == _NO_JOURNAL else found


def _first_usable(name: str, rows: Sequence[Row], listing: CandidateList, context: Context) -> LineupEntry:
    """The first row with a candidate that runs here; else the reason why the first does not."""
    reasons = []
    for row in rows:
        implementation = context.implementation(str(row.get("libtype")))
        try:
            if implementation is None:
                raise UnusableRow(f"backend: '{row.get('libtype')}' is not among those chosen with backend=[...]")
            candidate = candidate_of_row(implementation, row, listing.spec, context.device)
            condition = other_conditions(row, listing.problem, context.family)
            run_id = str(row.get("run_id") or "")
            return LineupEntry(name=name, candidate=candidate, run_id=run_id, condition=condition)
        except (UnusableRow, UserError) as error:
            reasons.append(str(error))
    missing = {
        TUNED: "no row in output= or the tables in use; tune it first, or output= names its table",
        OWN: _NO_JOURNAL,
    }
    return LineupEntry(name=name, reason=reasons[0] if reasons else missing[name])


def _finalists(
    rows: Sequence[Row], own: set[str], listing: CandidateList, journals: JournalLookup, family: Family
) -> list[Row]:
    """Own kernels of the finals in which these rows were chosen, the best first; none without the journal.

    Those timed in more rounds come first: a pruned candidate has times of the early rounds alone.
    """
    for row in rows:
        record = journals(str(row.get("run_id")))
        finals = _finals_of(row, listing.problem, journals, family)
        timed = [t for t in finals if t.candidate.backend in own and t.time_us]
        if timed:
            conditions = {name: row.get(name) for name in condition_names(family)}
            fastest = sorted(timed, key=lambda t: (-len(t.samples_us), t.time_us or 0.0))
            return [{**conditions, **_row(t, record)} for t in fastest]
    return []


def _finals_of(row: Row, problem: Problem, journals: JournalLookup, family: Family) -> Sequence[Trial]:
    """The finals in which a row was chosen: those of its own condition."""
    conditions = condition_names(family)
    key = tuple((name, row.get(name) if name in conditions else value) for name, value in problem.key)
    return journals(str(row.get("run_id"))).of(FINALS, family.problem(key).id)


def _row(trial: Trial, record: journal.Record) -> Row:
    candidate = trial.candidate
    name = record.kernel_names.get(candidate.id)
    return {"libtype": candidate.backend, "config": config_text(candidate), "kernelName": name}


def journal_of(runs: Path, run_id: str) -> journal.Record:
    """The journal of a run id; an empty one where there is none."""
    folder = next((p.parent for p in sorted(runs.glob(f"*/{run_id}/{journal.NAME}"))), None)
    return journal.read(folder) if folder is not None else journal.Record()


def untuned_entry(listing: CandidateList, context: Context) -> Iterator[LineupEntry]:
    """The choice without measurements: the best own kernel by the analytic model."""
    own = {i.label for i in context.family.implementations}
    if candidates := [c for c in listing.candidates if c.backend in own]:
        estimate = FeatureCache(FeatureEncoder(), listing.spec, context.device, candidates, {}).features({}).estimate
        yield LineupEntry(name=UNTUNED, candidate=candidates[int(np.argmin(estimate))])
    elif reason := _own_kernels_reason(listing, own):
        yield LineupEntry(name=UNTUNED, reason=reason)


def _own_kernels_reason(listing: CandidateList, own: Collection[str]) -> str:
    """Why no own kernel can run, such as on a machine without a GPU; empty where one can."""
    if any(candidate.backend in own for candidate in listing.candidates):
        return ""
    excluded = listing.summary.excluded
    return next((str(e) for b, e in zip(excluded["libtype"], excluded["error"], strict=True) if b in own), "")


def other_entries(listing: CandidateList, context: Context) -> Iterator[LineupEntry]:
    """Every candidate that is not an own kernel: libraries, third parties, and products of the same size."""
    own = {i.label for i in context.family.implementations}
    for candidate in listing.candidates:
        if candidate.backend in own:
            continue
        if rule := pair_violation(context.implementation(candidate.backend), listing.spec, context.device):
            yield LineupEntry(name=_name(candidate), reason=rule)
            continue
        unlike = computes_another_product(candidate)
        yield LineupEntry(name=_name(candidate), candidate=candidate, unlike=unlike)
    for candidate, reason in absent_candidates(listing, context):
        yield LineupEntry(name=_name(candidate), reason=reason)


def _name(candidate: Candidate) -> str:
    knobs = " ".join(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in candidate.items)
    return f"{candidate.backend} {knobs}".strip()


def engine_entries(
    name: str, files: Sequence[Path], engine_format: EngineJson, listing: CandidateList, context: Context
) -> Iterator[LineupEntry]:
    """The configuration that the engine takes for this N and K and the nearest M, on the kernel of its form."""
    if not files:
        return
    try:
        yield LineupEntry(name=name, candidate=_engine_config(files, engine_format, listing, context))
    except (UnusableRow, UserError) as error:
        yield LineupEntry(name=name, reason=str(error))


def _engine_config(
    files: Sequence[Path], engine_format: EngineJson, listing: CandidateList, context: Context
) -> Candidate:
    """Raises UnusableRow, or UserError for a file that cannot be read."""
    spec = listing.spec
    kernel = next((i for i in context.family.implementations if i.label == _PLAIN), None)
    if kernel is None:
        raise UnusableRow("kernel: the family has none of the engine's form")
    candidate_filter = CandidateFilter(implementation=kernel, spec=spec, device=context.device)
    if missing := kernel.unavailable(context.device):
        raise UnusableRow(missing)
    wanted = engine_format.file_name(spec, re.sub(r"[\s/]+", "_", context.device.name))
    alike = [p for p in files if p.name.startswith(wanted.partition("device_name=")[0])]
    path = next((p for p in alike if p.name == wanted), alike[0] if len(alike) == 1 else None)
    if path is None:
        raise UnusableRow(f"file: {len(alike)} for other devices, no {wanted}" if alike else f"file: no {wanted}")
    configurations = engine_format.read(path)
    entry = configurations[str(nearest_key(map(int, configurations), spec.m))]
    knobs = {"NUM_KSPLIT": entry.get("SPLIT_K", 1), "cache_modifier": "", **entry}
    knobs.pop("SPLIT_K", None)
    candidate, failure = candidate_filter.candidate(knobs)
    result = failure or candidate_filter.check(candidate, keep_dominated=True)
    if result.status is not None:
        raise UnusableRow(result.reason)
    return candidate


def autotune_backend(context: Context) -> Autotuned | None:
    """The backend that lets `triton.autotune` choose, if it is configured."""
    return next((i for i in context.implementations if isinstance(i, Autotuned)), None)


def autotune_configs(other: Autotuned, listing: CandidateList, context: Context) -> tuple[Candidate, ...]:
    """The configurations for `triton.autotune` on this problem. Raises UnusableRow where it cannot run."""
    if reason := other.unavailable(context.device) or other.unsupported_reason(listing.spec, {}, context.device):
        raise UnusableRow(reason)
    found = tuple(c for c in listing.candidates if other.kernel is not None and c.backend == other.kernel.label)
    if not found:
        raise UnusableRow("space: no configuration of the kernel fits")
    return found


def autotune_entry(trial: Trial) -> LineupEntry:
    """The choice of `triton.autotune`, or its failure."""
    if trial.tuning is None:
        return LineupEntry(name=AUTOTUNE, reason=f"{trial.status}: {trial.error}")
    return LineupEntry(name=AUTOTUNE, candidate=trial.candidate, tuning=trial.tuning)
