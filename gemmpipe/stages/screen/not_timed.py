"""Lines about the backends that the user named and of which nothing can be timed.

A backend of `default` that cannot run here is usual; one that was named is expected in the comparison.
"""

from collections.abc import Sequence

from gemmpipe.stages import Context, NamedBackend
from gemmpipe.stages.screen.candidates import SpaceReport
from gemmpipe.templates.params import NO_GPU

_MOST_OF_GROUP = 2
"""Lines about the backends of a group; more are one line and the command that has the reasons."""


def not_timed_lines(context: Context, report: SpaceReport) -> list[str]:
    """A line per reason, with the backends that it holds for; of the backends of a group two lines at most."""
    by_option: dict[str, dict[str, list[str]]] = {}
    for each in context.named_backends:
        if reason := _reason(each, context, report):
            by_option.setdefault(each.option, {}).setdefault(reason, []).append(each.name)
    lines: dict[str, None] = {}
    for reasons in by_option.values():
        lines |= dict.fromkeys(_lines(reasons, context))
    return list(lines)


def _lines(reasons: dict[str, list[str]], context: Context) -> Sequence[str]:
    if len(reasons) <= _MOST_OF_GROUP:
        return [f"{', '.join(names)}: not timed: {reason}" for reason, names in reasons.items()]
    names = ", ".join(name for names in reasons.values() for name in names)
    return [f"{names}: not timed", f"  why, and how to install what is missing: {context.doctor_command}"]


def _reason(backend: NamedBackend, context: Context, report: SpaceReport) -> str | None:
    """Why nothing of a backend can be timed; None where something can, or where only the sizes are against it."""
    if not backend.labels:
        return f"{context.family.name} has no kernel of this kind"
    if report.fitting.intersection(backend.labels):
        return None
    missing = next((report.missing[label] for label in backend.labels if label in report.missing), None)
    own = {each.label for each in context.family.implementations} if context.device.kind == "cpu" else set()
    return missing or (NO_GPU if own.intersection(backend.labels) else None)
