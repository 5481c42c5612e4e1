"""Choices of a run that has not selected yet: the rules of `select` over its finals, the search's times elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from gemmpipe.backends.same_size import computes_another_product
from gemmpipe.core.data import Status, Trial
from gemmpipe.core.paths import shipped
from gemmpipe.journal import Record
from gemmpipe.stages import FINALS
from gemmpipe.stages.rows import config_text, quantile
from gemmpipe.stages.selection_rules import Finalist, SelectionRules, select_finalist
from gemmpipe.stages.selections import comparison

if TYPE_CHECKING:
    from gemmpipe.family import Family

_SCREEN = "screen"


def provisional_rows(record: Record, family: "Family") -> Iterator[Mapping[str, Any]]:
    """A row like a selection for each problem with a valid candidate, in the order of the problems.

    Candidates with extra weight memory are left out, as by the default of `stages.select.max_extra_weight_pct`; so are
    those of a comparison that compute another product.
    """
    device = record.sessions[-1].get("device") if record.sessions else None
    facts: Mapping[str, Any] = device if isinstance(device, dict) else {}
    place = {"gfx": facts.get("gfx"), "cu_num": facts.get("cu_num"), "device": facts.get("name")}
    for row in {str(row["id"]): row for row in record.problems}.values():
        name = str(row["id"])
        for stage, chosen_by in ((FINALS, "finals"), (_SCREEN, "search")):
            finalists = _finalists(record.of(stage, name), record)
            if finalists:
                key: Mapping[str, Any] = row["key"]  # type: ignore[assignment]
                cells = {**key, **place, "weight": row["weight"], "layer": row["layer"], "chosen_by": chosen_by}
                yield {**cells, **_choice(finalists, family)}
                break


def _finalists(trials: Sequence[Trial], record: Record) -> list[Finalist]:
    return [
        Finalist(
            candidate=trial.candidate,
            samples_us=trial.samples_us,
            extra_weight_bytes=0,
            err_ratio=trial.err_ratio or 0.0,
            kernel_name=record.kernel_names.get(trial.candidate.id, trial.candidate.backend),
            complete=trial.status is Status.OK,
            shared=trial.shared,
        )
        for trial in trials
        if trial.status in (Status.OK, Status.PRUNED) and trial.samples_us and not trial.extra_weight_bytes
        if not computes_another_product(trial.candidate)
    ]


def _choice(finalists: Sequence[Finalist], family: "Family") -> dict[str, Any]:
    selection = select_finalist(finalists, family.baseline, (), _rules())
    chosen = selection.chosen
    ordered = sorted(chosen.samples_us)
    return {
        "libtype": chosen.candidate.backend,
        "kernelName": chosen.kernel_name,
        "config": config_text(chosen.candidate),
        "us": chosen.time_us,
        "p20_us": quantile(ordered, 0.2),
        "p80_us": quantile(ordered, 0.8),
        "err_ratio": chosen.err_ratio,
        **comparison(selection),
    }


@cache
def _rules() -> SelectionRules:
    """The default options of the stage `select`."""
    import yaml

    options = yaml.safe_load((shipped("conf") / "stage" / "select.yaml").read_text(encoding="utf-8"))
    return SelectionRules(
        prefer=options["prefer"], min_improvement_pct=options["min_improvement_pct"], tie_pct=options["tie_pct"]
    )
