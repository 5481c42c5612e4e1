"""The select stage: chooses one candidate per problem and one per bucket, from the trials of the finals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.backends import library_backends
from gemmpipe.core import schema
from gemmpipe.core.data import FINALS, NOISY, Bucket, Candidate, Device, Problem
from gemmpipe.core.errors import UserError, check_at_least, suggest_or_list
from gemmpipe.core.events import counted, verb
from gemmpipe.family import GemmSpec
from gemmpipe.family.problem import shape_groups
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.engine.files import engine_rows
from gemmpipe.stages.memory_options import memory_options
from gemmpipe.stages.rows import report_unsolved
from gemmpipe.stages.selection_rules import Finalist, Selection, SelectionRules, select_finalist
from gemmpipe.stages.selections import base_row, comparison, finalists_of, policy
from gemmpipe.tables.merge import shared_policy

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Select(Stage):
    """Chooses; needs no device, so `reuse=` can apply other rules to an old run."""

    prefer: Mapping[str, float]
    min_improvement_pct: float
    max_extra_weight_pct: float
    tie_pct: float

    needs: ClassVar[tuple[str, ...]] = ("problems", "trials")
    gives: ClassVar[tuple[str, ...]] = ("selections", "memory_options")

    def __post_init__(self) -> None:
        check_at_least(0, max_extra_weight_pct=self.max_extra_weight_pct, tie_pct=self.tie_pct)
        check_at_least(
            0, min_improvement_pct=self.min_improvement_pct, **{f"prefer.{k}": v for k, v in self.prefer.items()}
        )

    def check(self, context: Context) -> None:
        """Raises UserError for a preferred backend that does not exist."""
        labels = {i.label for i in (*context.implementations, *context.family.implementations)}
        known = labels | set(library_backends())
        for label in self.prefer:
            if label not in known:
                raise UserError(f"stages.select.prefer.{label}: no such backend{suggest_or_list(label, known)}")

    def usual_s(self, device: Device) -> float:
        """With the stages after it and the tables of the run: 0.2 to 1.2 s for 6 to 100 problems (H100, 2026-11-25)."""
        return 0.01

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the selections of the problems and of the formats' buckets, and what more memory would gain."""
        import pandas as pd

        problems = context.problems
        finalists = finalists_of(tables["trials"], FINALS)
        rows: list[dict[str, object]] = []
        options: list[dict[str, object]] = []
        for problem in problems if context.per_problem else ():
            passed = finalists.get(problem.id, [])
            selection = self._choose(problem, passed, context)
            if selection is None:
                report_unsolved(problem, tables["trials"], len(passed), self.max_extra_weight_pct, context)
            else:
                spec = context.family.spec(problem)
                rows.append({**base_row(problem, spec, selection.chosen, context), **comparison(selection)})
                options += memory_options(problem, weight_bytes(spec), passed, selection.chosen)
        for group in shape_groups(problems):
            rows += self._bucket_rows(sorted(group, key=lambda p: p.rows), finalists, context)
        rows += engine_rows(problems, tables["trials"], context)
        keys = [c.name for c in context.family.key_columns]
        frame = pd.DataFrame(rows, columns=[*schema.SELECTIONS, *keys]).astype({context.family.rows_column: "Int64"})
        solved = int((frame["format"] == "").sum())
        above = int((frame.loc[frame["format"] == "", "ratio"] > 1).sum())
        if context.per_problem:
            kind = "detail" if solved == len(problems) else "line"  # the last screen has it too
            text = f"select: {solved} of {counted(len(problems), 'problem')} solved, {above} slower than the library"
            context.events.emit(kind, text)
        self._report_noise(frame, context)
        noisy = sum(_is_noisy(p20, p80) for p20, p80 in zip(frame["p20_us"], frame["p80_us"], strict=True))
        if noisy:
            text = f"{counted(noisy, 'choice')} with times that vary by more than half between rounds; busy machine?"
            context.events.emit("detail", text)
        return {"selections": frame, "memory_options": pd.DataFrame(options, columns=list(schema.MEMORY_OPTIONS))}

    def _report_noise(self, frame: "pd.DataFrame", context: Context) -> None:
        """Reports how reliable the selections are: times on a shared device, and timing noise."""
        own = frame[frame["format"] == ""]
        word = shared_policy(context.device.kind)
        shared = int(own["policy"].str.contains(word, regex=False).sum())
        if shared and word not in context.policy:
            of_all = f"{shared} of {counted(len(own), 'choice')} {verb(shared, 'was', 'were')} timed"
            on_cpu = context.device.kind == "cpu"
            user = "other processes used the CPU" if on_cpu else "another process used the GPU"
            again = "retune=true on an idle machine" if on_cpu else "a later run with the GPU to itself"
            context.events.emit("warning", f"{of_all} while {user} ({word}); {again} repeats them")
        noise = own["noise_pct"].dropna()
        if len(noise):
            text = f"timing noise: {noise.median():.2f} % between choice and runner-up (median over problems)"
            context.events.emit("detail", f"{text}, {noise.quantile(0.99):.2f} % (p99)")

    def _choose(self, problem: Problem, passed: list[Finalist], context: Context) -> Selection | None:
        """The choice among the finalists within the limit of memory; None if there are none."""
        spec = context.family.spec(problem)
        finalists = [f for f in passed if self._affordable(f, spec)]
        if not finalists:
            return None
        rules = SelectionRules(prefer=self.prefer, min_improvement_pct=self.min_improvement_pct, tie_pct=self.tie_pct)
        incumbents = context.incumbents.get(problem.id, ())
        return select_finalist(finalists, context.family.baseline, incumbents, rules)

    def _affordable(self, finalist: Finalist, spec: GemmSpec) -> bool:
        return finalist.extra_weight_bytes * 100 <= self.max_extra_weight_pct * weight_bytes(spec)

    def _bucket_rows(
        self, group: list[Problem], finalists: Mapping[str, list[Finalist]], context: Context
    ) -> list[dict[str, object]]:
        ms = sorted(p.rows for p in group)
        rows = []
        engines = {target.name for target in context.engine_targets}
        for name, each in context.formats:
            if name in engines:
                continue
            for bucket in each.buckets(context.family, ms):
                inside = [p for p in group if bucket.contains(p.rows)]
                row = self._bucket_row(name, bucket, inside, finalists, context) if inside else None
                if row is not None:
                    rows.append(row)
        return rows

    def _bucket_row(
        self,
        name: str,
        bucket: Bucket,
        inside: list[Problem],
        finalists: Mapping[str, list[Finalist]],
        context: Context,
    ) -> dict[str, object] | None:
        """The row of the candidate with the least call-weighted time over the bucket's Ms and valid at each."""
        by_problem = [
            {
                f.candidate: f
                for f in finalists.get(p.id, ())
                if bucket.accepts(f.candidate) and self._affordable(f, context.family.spec(p))
            }
            for p in inside
        ]
        common: set[Candidate] = set.intersection(*(set(found) for found in by_problem))
        if not common:
            context.events.emit("detail", f"{name} {bucket.name}: no candidate is valid at every M of {inside[0].id}")
            return None
        sums = {
            c: sum(p.weight * found[c].time_us for p, found in zip(inside, by_problem, strict=True)) for c in common
        }
        best = min(common, key=lambda c: (sums[c], c.id))
        row = base_row(inside[0], context.family.spec(inside[0]), by_problem[0][best], context)
        return row | {
            "format": name,
            "bucket": bucket.name,
            "bucket_low": bucket.low,
            "bucket_high": bucket.high,
            "policy": policy(inside, by_problem[0][best], context),
            context.family.rows_column: None,
            "us": sums[best],
            "err_ratio": max(found[best].err_ratio for found in by_problem),
            "tflops": None,
            "bw": None,
            "weight": sum(p.weight for p in inside),
        }


def weight_bytes(spec: GemmSpec) -> float:
    """The bytes of the stored weight without scales."""
    from gemmpipe.family.operands import storage_bytes

    return float(storage_bytes(spec.w_dtype, spec.weight_elements))


def _is_noisy(p20_us: float | None, p80_us: float | None) -> bool:
    return p20_us is not None and p80_us is not None and p80_us > NOISY * p20_us
