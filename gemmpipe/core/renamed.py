"""Names of version 0.1.0 that stay readable for one version: modules, symbols, methods, fields.

`renamed.json` maps old module paths and public names to the new ones; it is read when an old one is first used. Each
name is reported once per process: as a DeprecationWarning where Python code uses it, and as a notice that a run prints.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import TypeVar

_PREFIX = "gemmpipe."
_reported: set[str] = set()
_notices: list[str] = []
T = TypeVar("T")


def note(old: str, new: str) -> bool:
    """Keep the notice about a renamed name for `take_notices`; False where it was given before in this process."""
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
    """Old module -> new module, and old module -> its names that changed or went elsewhere -> new path."""
    import json  # not above, as every program that imports gemmpipe loads this module

    with open(f"{__file__.rpartition('.')[0]}.json", encoding="utf-8") as stream:
        content = json.load(stream)
    return content["modules"], content["names"]


def renamed_modules() -> Mapping[str, str]:
    """Old module paths and the modules that have most of their content now."""
    return _table()[0]


def renamed_names() -> Mapping[str, Mapping[str, str]]:
    """By old module: its public names that changed, or that went to another module, and their paths now."""
    return _table()[1]


def current_path(path: str) -> str:
    """A dotted path to a class or a function as it is now; unchanged where it was not renamed."""
    module, _, name = path.rpartition(".")
    if not module.startswith(_PREFIX):
        return path
    modules, names = _table()
    return names.get(module, {}).get(name) or f"{modules.get(module, module)}.{name}"


class _CurrentLoader(SourceFileLoader):
    """Loads a module as Python does; its old names are served on request."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        vars(module).setdefault("__getattr__", functools.partial(_old_name, module))


class _OldModuleLoader:
    """Makes an empty module in place of one that was renamed: its names are served on request."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__getattr__"] = functools.partial(_old_name, module)


class _Finder:
    """Finds renamed modules, and lets the present ones serve their old names."""

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
        return ModuleSpec(name, _OldModuleLoader(), is_package=True)


def serve_old_names() -> None:
    """From here on old module paths can be imported, once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _old_name(module: types.ModuleType, name: str) -> object:
    """The object that an old public name of a module means now. Raises AttributeError."""
    old = module.__name__
    if not name.startswith("_"):
        path = renamed_names().get(old, {}).get(name)
        if path is None and type(module.__loader__) is _OldModuleLoader:
            path = f"{renamed_modules()[old]}.{name}"
        if path is not None and (found := _resolved(path)) is not _MISSING:
            warn(f"{old}.{name}", path, stacklevel=2)
            vars(module)[name] = found  # the next access is an ordinary one
            return found
    raise AttributeError(f"module {old!r} has no attribute {name!r}", name=name, obj=module)


_MISSING = object()


def _resolved(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name, _MISSING)


def renamed_members(**names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator, `old="new"`: old members read as new ones, and the constructor accepts the old keywords."""

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
    """For `__init_subclass__`: members that a class of the user's own defines under an old name get the new one.

    Members with a new name can be called by the old one too, so that `super().misfit(...)` of such a class works.
    """
    own = vars(cls)
    for old, new in names.items():
        if old in own and new not in own and not cls.__module__.startswith(_PREFIX):
            warn(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}", stacklevel=4)  # behind __init_subclass__ and ABCMeta
            setattr(cls, new, own[old])
            hints = own.get("__annotations__", {})
            if old in hints:  # the default of a field
                hints[new] = hints.pop(old)
        elif new in own and old not in own:
            setattr(cls, old, own[new])
