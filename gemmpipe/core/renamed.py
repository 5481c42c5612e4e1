"""Names of version 0.1.0 that stay valid for one version: modules, symbols, methods, fields, keys.

`renamed.json` maps old module paths and public names to the new ones; it is read on the first use of an old one. Each
name is reported once per process: as a DeprecationWarning if Python code uses it, and as a notice that a run prints.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import TypeVar

_PREFIX = "gemmpipe."

# Renamed keys of the configuration, one table per node.
SEARCH_KEYS = {
    "best": "good_fraction",
    "boldness": "exploration",
    "least": "min_trials",
    "looks": "rungs",
    "of": "algorithm",
    "patience": "stop_margin",
    "polish": "neighbor_steps",
    "rows": "transfer_rows",
    "share": "trial_fraction",
    "slots": "compile_slots",
    "warm": "transfer",
    "winners": "transfer_winners",
}
RUNG_KEYS = {"keep_ratio": "keep_fraction", "most_launches": "max_launches"}
STAGES = {"called": "verify_calls", "report": "verify_report", "slower": "lint_timings"}
STAGE_KEYS: Mapping[str, Mapping[str, str]] = {
    "capture": {"keep_pct": "cover_pct", "tuned_too": "include_tuned"},
    "compare": {"against": "baseline"},
    "engine": {"further_pct": "extra_key_pct"},
    "load": {"of": "read", "rivals": "baselines"},
    "verify_report": {
        "behind_pct": "max_behind_pct",
        "called_within_pct": "max_call_overhead_pct",
        "within_pct": "max_drift_pct",
    },
}
MOVED_KEYS = {"stages.compare.rates.sm_90": "roofline.h200", "stages.compare.rates": "roofline"}
"""Keys with another parent now; full paths, with the current names above them. The first one that matches counts."""
OPTIONS: Mapping[str, Mapping[str, str]] = {"search": {"_looks": "_rungs", "learned": "forest"}, "stage": STAGES}

_reported: set[str] = set()
_notices: list[str] = []
T = TypeVar("T")


def note(old: str, new: str) -> bool:
    """Records the notice of a renamed name for `take_notices`; False if this process has recorded it before."""
    if old in _reported:
        return False
    _reported.add(old)
    _notices.append(f"{old}: renamed; use {new}")
    return True


def take_notices() -> list[str]:
    """The notices since the last call, one line each."""
    taken = list(_notices)
    _notices.clear()
    return taken


def warn(old: str, new: str, stacklevel: int) -> None:
    """One DeprecationWarning and one notice per name and process; `stacklevel` 1 is the caller."""
    if note(old, new):
        import warnings

        warnings.warn(f"{old}: renamed; use {new}", DeprecationWarning, stacklevel=stacklevel + 1)


@functools.cache
def _table() -> tuple[Mapping[str, str], Mapping[str, Mapping[str, str]]]:
    """Old module -> new module, and old module -> its renamed or moved public names -> new path."""
    import json  # not at the top, as every program that imports gemmpipe loads this module

    with open(f"{__file__.rpartition('.')[0]}.json", encoding="utf-8") as stream:
        content = json.load(stream)
    return content["modules"], content["names"]


def renamed_modules() -> Mapping[str, str]:
    """Old module paths, and the modules that have most of their content now."""
    return _table()[0]


def renamed_names() -> Mapping[str, Mapping[str, str]]:
    """By old module: its public names that were renamed or moved to another module, and their current paths."""
    return _table()[1]


def current_key(key: str, fields: Collection[str]) -> str:
    """The name of a key in a class with these fields: the new one for an old one, or the old one for a new one.

    A user's class may have a field with an old name, and build on a shipped option with the new one.
    """
    pairs = [pair for table in (SEARCH_KEYS, RUNG_KEYS, *STAGE_KEYS.values()) for pair in table.items()]
    names = [new if old == key else old for old, new in pairs if key in (old, new)]
    return next((name for name in names if name in fields), key)


def is_old_key(key: str) -> bool:
    """True for a key that was renamed."""
    return any(key in table for table in (SEARCH_KEYS, RUNG_KEYS, *STAGE_KEYS.values()))


def current_path(path: str) -> str:
    """The current dotted path of a class or a function; unchanged if it was not renamed."""
    module, _, name = path.rpartition(".")
    if not module.startswith(_PREFIX):
        return path
    modules, names = _table()
    return names.get(module, {}).get(name) or f"{modules.get(module, module)}.{name}"


class _CurrentLoader(SourceFileLoader):
    """Loads a module as usual, and adds a `__getattr__` that resolves its old names."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        vars(module).setdefault("__getattr__", functools.partial(_old_name, module))


class _OldModuleLoader:
    """Makes an empty module in place of a renamed one, with a `__getattr__` that resolves its names."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__getattr__"] = functools.partial(_old_name, module)


class _Finder:
    """Finds renamed modules, and makes existing ones resolve their old names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(_PREFIX):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            if type(spec.loader) is SourceFileLoader:
                spec.loader = _CurrentLoader(spec.loader.name, spec.loader.path)
            return spec
        if name not in renamed_modules():
            return None
        return ModuleSpec(name, _OldModuleLoader(), is_package=True)  # type: ignore[arg-type]  # importlib's loader protocol


def serve_old_names() -> None:
    """Makes old module paths importable in this process; a second call has no effect."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        files = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(files, _Finder())  # finders of other programs keep their place before it


def _old_name(module: types.ModuleType, name: str) -> object:
    """The object that an old public name of a module refers to. Raises AttributeError."""
    old = module.__name__
    if not name.startswith("_"):
        path = renamed_names().get(old, {}).get(name)
        if path is None and isinstance(vars(module)["__loader__"], _OldModuleLoader):
            path = f"{renamed_modules()[old]}.{name}"
        if path is not None and (found := _resolved(path)) is not _MISSING:
            warn(f"{old}.{name}", path, stacklevel=2)
            vars(module)[name] = found  # the next access does not come here
            return found
    raise AttributeError(f"module {old!r} has no attribute {name!r}", name=name, obj=module)


_MISSING = object()


def _resolved(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name, _MISSING)


def renamed_members(**names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator, `old="new"`: old members return new ones, and the constructor accepts old keywords."""

    def decorate(cls: type[T]) -> type[T]:
        for old, new in names.items():
            setattr(cls, old, _old_member(cls, old, new))
        fields = {old: new for old, new in names.items() if new in getattr(cls, "__dataclass_fields__", {})}
        if fields:
            _accept_old_keywords(cls, fields)
        return cls

    return decorate


def _old_member(cls: type, old: str, new: str) -> property:
    def read(self: object) -> object:
        warn(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}", stacklevel=2)
        return getattr(self, new)

    return property(read)


def _accept_old_keywords(cls: type, fields: Mapping[str, str]) -> None:
    construct = cls.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def accepting(self: object, *args: object, **values: object) -> None:
        for old in fields.keys() & values.keys():
            new = fields[old]
            warn(f"{cls.__name__}({old}=)", f"{cls.__name__}({new}=)", stacklevel=2)
            values.setdefault(new, values.pop(old))
        construct(self, *args, **values)

    cls.__init__ = accepting  # type: ignore[misc]


def accept_old_methods(cls: type, names: Mapping[str, str]) -> None:
    """For `__init_subclass__`: members that a user's class defines under an old name get the new name too.

    Members with a new name are also available under the old one, so that `super().misfit(...)` of such a class works.
    """
    own = vars(cls)
    for old, new in names.items():
        if old in own and new not in own and not cls.__module__.startswith(_PREFIX):
            warn(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}", stacklevel=4)  # after __init_subclass__ and ABCMeta
            setattr(cls, new, own[old])
            hints = own.get("__annotations__", {})
            if old in hints:  # the default of a field
                hints[new] = hints.pop(old)
        elif new in own and old not in own:
            setattr(cls, old, own[new])
