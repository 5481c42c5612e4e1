"""The entry that own kernels are compared with: its names, and the check that a comparison has it."""

from collections.abc import Collection, Iterable, Iterator

from gemmpipe.core.errors import UserError, suggest, suggest_or_list
from gemmpipe.stages import Context
from gemmpipe.stages.compare.entries import NAMES, other_entries
from gemmpipe.stages.screen.candidates import list_candidates

LIBRARY, PEER = "fastest library", "fastest peer"
"""The fastest of a library's paths, and of everything by others; neither needs more weight memory."""
_KEY = "stages.compare.baseline"
_FASTEST = ", its fastest"
_ALWAYS = (*NAMES, LIBRARY, PEER)


def grouped_name(label: str) -> str:
    """The name of a backend's fastest candidates, where it has too many for an entry each."""
    return f"{label}{_FASTEST}"


def full_name(baseline: str, names: Collection[str]) -> str:
    """The name that a backend's label stands for: that of its fastest, or of its only path; else `baseline`."""
    if baseline in names:
        return baseline
    if grouped_name(baseline) in names:
        return grouped_name(baseline)
    paths = _paths(baseline, names)
    return paths[0] if len(paths) == 1 else baseline


def unknown_line(name: str, timed: Iterable[str], names: Collection[str]) -> str:
    """Why there is no time to compare with; `names`: those of all entries."""
    if several := _paths(name, timed):
        return f"{_KEY}: '{name}' has several paths; expected one of {', '.join(several)}"
    if name == LIBRARY:
        return f"no library was timed, so own kernels are compared with none; {_KEY}=NAME compares with another entry"
    if _is_known(name, names):
        return f"{_KEY}: '{name}' was not timed, so own kernels are compared with none"
    return f"{_KEY}: no entry named '{name}'{suggest_or_list(name, {*names, LIBRARY, PEER})}"


def check_label(baseline: str, labels: Collection[str]) -> None:
    """Raises UserError for a name that does not begin with a label of a backend, and is none of the other names."""
    known = {*_ALWAYS, *labels}
    first = _label(baseline)
    if not {baseline, first} & known:
        close = suggest(baseline, known) or suggest(first, labels) or suggest_or_list(baseline, known)
        raise UserError(f"{_KEY}: no entry named '{baseline}'{close}")


def check_entries(baseline: str, context: Context, names: Collection[str], problems: Collection[str]) -> None:
    """Raises UserError for a name that no entry of the comparison has, timed or not.

    `names`: those of these problems (their ids); the names of a library's candidates may differ on others.
    """
    if _is_known(baseline, names):
        return
    known = {*names, *_names_on(baseline, context, problems)}
    if not _is_known(baseline, known):
        close = suggest_or_list(baseline, {*known, LIBRARY, PEER})
        raise UserError(f"{_KEY}: no entry named '{baseline}'{close}")


def _names_on(baseline: str, context: Context, without: Collection[str]) -> Iterator[str]:
    """The names of the candidates of the baseline's backend on the other problems of the run."""
    own = {each.label for each in context.family.implementations}
    label = _label(baseline)
    libraries = [each for each in context.implementations if each.label == label and label not in own]
    for problem in context.problems if libraries else ():
        if problem.id not in without:
            listing = list_candidates(problem, context.family, libraries, context.device, context.space, ())
            yield from (entry.name for entry in other_entries(listing, context))


def _is_known(baseline: str, names: Collection[str]) -> bool:
    label = baseline.removesuffix(_FASTEST)
    return baseline in _ALWAYS or baseline in names or bool(_paths(label, names))


def _paths(label: str, names: Iterable[str]) -> list[str]:
    """The names of a backend's paths, each once."""
    return [name for name in dict.fromkeys(map(str, names)) if name.startswith(f"{label} ")]


def _label(baseline: str) -> str:
    return baseline.removesuffix(_FASTEST).partition(" ")[0]
