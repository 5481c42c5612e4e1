"""The backends that a user names with `backend=`, and those that rows of a table were chosen without.

`default` names none: its backends run where nothing is typed.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import yaml

from gemmpipe.core.artifact import read_runs, sidecar_path
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import read_regular
from gemmpipe.core.paths import shipped
from gemmpipe.stages import NamedBackend

if TYPE_CHECKING:
    from pathlib import Path

    from gemmpipe.pipeline.plan import Plan

DEFAULT = "default"
_MAX_OPTION_BYTES = 1 << 20
_CHOICE = re.compile(r"\+?backend=(.*)", re.DOTALL)


def typed_words(overrides: Iterable[str]) -> tuple[str, ...]:
    """The words of the last `backend=` of a command line; those of an empty one are `default`."""
    values = [found[1] for each in overrides if (found := _CHOICE.fullmatch(each))]
    return tuple(re.findall(r"[\w-]+", values[-1])) if values else (DEFAULT,)


def named_backends(plan: "Plan") -> list[NamedBackend]:
    """The backends that the user named, each once."""
    found = {
        name: NamedBackend(
            option=word,
            name=name,
            labels=tuple(each.label for each in plan.backends[name].implementations(plan.family)),
        )
        for word, names in plan.named_backends.items()
        for name in names
        if name in plan.backends
    }
    return list(found.values())


def chosen_without(plan: "Plan", table: "Path", run_ids: Sequence[str]) -> list[str]:
    """The words of `backend=` that a run lacked which chose rows of a table, as far as its sidecar has the command."""
    try:
        runs = read_runs(sidecar_path(table))
        commands = [shlex.split(str(runs[name].get("recipe", ""))) for name in run_ids if name in runs]
    except (UserError, OSError, ValueError):  # a damaged or foreign sidecar
        return []
    timed = [set(_with_members(typed_words(command))) for command in commands if command]
    named = plan.named_backends.items()
    return [word for word, names in named if any(word not in each and not each.issuperset(names) for each in timed)]


def _with_members(words: Iterable[str]) -> Iterator[str]:
    """Words of `backend=` with what shipped ones stand for: names of options and of the backends in their files."""
    for word in words:
        yield word
        path = shipped("conf") / "backend" / f"{word}.yaml"
        tree = yaml.safe_load(read_regular(path, "a shipped option", _MAX_OPTION_BYTES)) if path.is_file() else {}
        yield from (key for key in tree if key != "defaults")
        yield from _with_members(tree.get("defaults", ()))
