"""Builds the plan of a run from a composed configuration; the only module that instantiates classes named in it.

Every key and type is checked.
"""

import functools
import importlib
import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from gemmpipe.core.errors import UserError, suggest_or_list
from gemmpipe.core.renamed import current_key, current_path, is_old_key, note
from gemmpipe.family.space import parse_space
from gemmpipe.pipeline.config_types import Make, construct, convert

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gemmpipe.family import Family, Implementation, KeyColumn
    from gemmpipe.pipeline.plan import Plan

VERSION = 1
ROOT: Mapping[str, Any] = {
    "chain": tuple[str, ...],
    "output": str,
    "profile": str | None,
    "batch": int,
    "budget_s": float | None,
    "cpu_budget_s": float | None,
    "retune": bool,
    "report": bool,
    "open": bool | None,
    "verbose": bool,
    "events": Literal["terminal", "json"],
    "resume": str | None,
    "reuse": str | None,
    "table": str | None,
    "inputs": tuple[str, ...],
    "target": tuple[str, ...] | None,
}
"""Keys that are not groups, and their types."""
_NODES = (
    *("version", "kernel", "shapes", "space", "format", "backend"),
    *("search", "roofline", "device", "executor", "listener", "stages"),
)


@runtime_checkable
class _Provider(Protocol):
    """The type of a `backend` option: a library, or the kernels of a family with one label."""

    def implementations(self, family: "Family") -> "tuple[Implementation, ...]": ...


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """Facts of a run that are not in its configuration."""

    pipeline: str
    run_dir: Path
    overrides: tuple[str, ...]
    """As typed, one `key=value` each; these pin the axes of the space that they set."""
    python_path: tuple[str, ...]
    """The user's folders with Python modules, for this process and its workers."""
    allowed: frozenset[str]
    """Classes and families outside gemmpipe that the user's own files name."""
    named_backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By word of `backend=` as typed, but for `default`: the names of the backends that it stands for."""


def build(cfg: "DictConfig", origin: RunOrigin) -> "Plan":
    """The plan of a run. Raises UserError with the full key, the given value and the expected one."""
    from gemmpipe.pipeline.plan import Plan

    # An empty list of options composes to no node.
    tree = _with_roofline({"format": {}, "backend": {}, "listener": {}, **_plain(cfg)})
    _known_keys(tree, (*_NODES, *ROOT), "")
    if type(tree["version"]) is not int or tree["version"] != VERSION:
        raise UserError(f"version: {tree['version']!r} given, expected {VERSION}")
    _name_table(tree)
    make = functools.partial(_make, allowed=origin.allowed)
    root = {key: convert(tree[key], hint, key, make) for key, hint in ROOT.items()}
    if not root["output"].strip():
        raise UserError(f"output: {root['output']!r} given, expected a folder, or NAME.csv")
    if root["batch"] < 1:
        raise UserError(f"batch: {root['batch']} given, expected at least 1")
    for key in ("budget_s", "cpu_budget_s"):
        if root[key] is not None and root[key] <= 0:
            raise UserError(f"{key}: {root[key]} given, expected more than 0 seconds, or null")
    if root["open"] and not root["report"]:
        raise UserError("open: true given, and no report is written; expected report=true too")
    stages = _stages(tree["stages"], make)
    for name in root["chain"]:
        if name not in stages:
            raise UserError(f"chain: no stage '{name}'{suggest_or_list(name, stages)}")
    return Plan(
        version=VERSION,
        **_kernel(tree["kernel"], origin.allowed, make),
        **_choices(tree, make),
        space=parse_space(tree["space"], origin.overrides),
        stages=stages,
        **root,
        pipeline=origin.pipeline,
        run_dir=origin.run_dir,
        overrides=origin.overrides,
        named_backends=origin.named_backends,
        config=tree,
        python_path=origin.python_path,
        allow_targets=tuple(sorted(origin.allowed)),
    )


def build_option(node: Mapping[str, Any], expected: type, where: str) -> Any:
    """The object of a shipped option outside a composed configuration. Raises UserError as `build` does."""
    return convert(node, expected, where, functools.partial(_make, allowed=frozenset()))


def _plain(cfg: "DictConfig") -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return typing.cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _with_roofline(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with `stages.compare.rates`, as version 0.1.0 named it, in the group `roofline`."""
    from gemmpipe.family import roofline

    tree = {roofline.GROUP: {}, **tree}
    old, current = roofline.old_rates(tree), tree[roofline.GROUP]
    if not (old and isinstance(current, Mapping) and all(isinstance(given, Mapping) for given in old.values())):
        return tree
    compare = dict(tree["stages"]["compare"])
    if not current_path(str(compare.get("_target_"))).startswith("gemmpipe."):
        return tree  # a stage of the user's own, with a key of this name
    note("stages.compare.rates", roofline.GROUP)
    del compare["rates"]
    rates = {name: {**current.get(name, {}), **given} for name, given in old.items()}
    return {**tree, roofline.GROUP: {**current, **rates}, "stages": {**tree["stages"], "compare": compare}}


def _name_table(tree: dict[str, Any]) -> None:
    """Splits `output=DIR/NAME.csv` into the folder and the file of the csv format."""
    output, csv = tree["output"], tree["format"].get("csv")
    if not isinstance(output, str) or not output.lower().endswith(".csv"):
        return
    if not isinstance(csv, Mapping):
        raise UserError(f"output: {output} names a table, and format=[csv] is not chosen; expected a folder")
    if csv.get("file") is not None:
        raise UserError(f"output: {output} names a table, and so does format.csv.file={csv['file']}; expected one")
    tree["output"] = str(Path(output).parent)
    tree["format"] = {**tree["format"], "csv": {**csv, "file": Path(output).name}}


def _known_keys(node: object, known: Sequence[str], where: str) -> None:
    """Raises UserError for an unknown or a missing key."""
    if not isinstance(node, Mapping):
        raise UserError(f"{where}: {node!r} given, expected keys {', '.join(known)}")
    prefix = f"{where}." if where else ""
    for key in node:
        if key not in known:
            raise UserError(f"{prefix}{key}: no such key{suggest_or_list(str(key), known)}")
    for key in known:
        if key not in node:
            hint = "; a kernel option begins with 'defaults: [/space@_global_.space: NAME]'" if key == "space" else ""
            raise UserError(f"{prefix}{key}: missing{hint}")


def _kernel(node: object, allowed: frozenset[str], make: Make) -> dict[str, Any]:
    from gemmpipe.family import KernelDefaults, load_family, shipped_families
    from gemmpipe.family.problem import resolve_dtypes

    given = {"key": {}, **node} if isinstance(node, Mapping) else node
    _known_keys(given, ("family", "dtype", "out_dtype", "bias", "key"), "kernel")
    values = dict(typing.cast(Mapping[str, Any], given))
    name = convert(values.pop("family"), str, "kernel.family", make)
    shipped = shipped_families()
    if name not in shipped and name not in allowed:
        # Security: an override or a recipe must not import arbitrary modules on the path.
        raise UserError(f"kernel.family: no family '{name}'{suggest_or_list(str(name), shipped)}")
    family, defaults = load_family(str(name)), construct(KernelDefaults, values, "kernel", make)
    resolve_dtypes(defaults, "")  # unknown dtypes raise here, on any architecture
    columns = {column.name: column for column in family.key_columns}
    for column, value in defaults.key.items():
        if column not in columns:
            raise UserError(f"kernel.key.{column}: no key column of {family.name}{suggest_or_list(column, columns)}")
        if value is not None:
            _key_value(columns[column], value)
    return {"family": family, "defaults": defaults}


def _key_value(column: "KeyColumn", value: object) -> None:
    from gemmpipe.family.problem import parse_key_value

    try:
        parse_key_value(column, value, "")
    except UserError as error:
        raise UserError(f"kernel.key.{column.name}: {error}") from None


def _choices(tree: Mapping[str, Any], make: Make) -> dict[str, Any]:
    from gemmpipe.core.device import DeviceChoice
    from gemmpipe.executors import Executor
    from gemmpipe.family import roofline
    from gemmpipe.formats import Format
    from gemmpipe.listeners import Listener
    from gemmpipe.search import Search
    from gemmpipe.sources import Source

    return {
        "source": convert(tree["shapes"], Source, "shapes", make),
        "formats": convert(tree["format"], Mapping[str, Format], "format", make),
        "backends": convert(tree["backend"], Mapping[str, _Provider], "backend", make),
        "search": convert(tree["search"], Search, "search", make),
        "rooflines": convert(tree[roofline.GROUP], Mapping[str, roofline.Roofline], roofline.GROUP, make),
        "devices": convert(tree["device"], DeviceChoice, "device", make),
        "executor": convert(tree["executor"], Executor, "executor", make),
        "listeners": convert(tree["listener"], Mapping[str, Listener], "listener", make),
    }


def _stages(node: object, make: Make) -> dict[str, Any]:
    from gemmpipe.stages import Stage

    stages: dict[str, Any] = {}
    items = node.items() if isinstance(node, Mapping) else convert(node, Mapping[str, Stage], "stages", make)
    for key, options in items:  # one by one, as a stage may contain other stages
        stages[key] = stage = convert(options, Stage, f"stages.{key}", make)
        kind = type(stage).__name__
        if kind.lower() != key.replace("_", "").lower():
            raise UserError(f"stages.{key}: a {kind} stage given, expected one named {key.title().replace('_', '')}")
    return stages


def _make(node: Mapping[str, Any], expected: type, where: str, *, allowed: frozenset[str]) -> object:
    """The object that a node with `_target_` describes."""
    values = dict(node)
    target = values.pop("_target_")
    if not isinstance(target, str) or "." not in target:
        raise UserError(f"{where}._target_: {target!r} given, expected a class such as gemmpipe.search.simple.Halving")
    if not target.startswith("gemmpipe.") and target not in allowed:
        raise UserError(f"{where}._target_: {target}: a class outside gemmpipe must be named in a file of --config-dir")
    if (current := current_path(target)) != target:
        note(target, current)
    cls = _locate(current, where)
    if not isinstance(cls, type) or not issubclass(cls, expected):
        raise UserError(f"{where}._target_: {target} is no {expected.__name__}")
    values = _current_values(values, cls, where)
    return construct(cls, values, where, functools.partial(_make, allowed=allowed))


def _current_values(values: Mapping[str, Any], cls: type, where: str) -> dict[str, Any]:
    """The values of a node under the class's field names; an old key, from a user's file, takes precedence."""
    fields = inspect.signature(cls).parameters
    found = dict(values)
    for key in values:
        if key not in fields and (current := current_key(key, fields)) != key:
            if is_old_key(key):
                note(f"{where}.{key}", f"{where}.{current}")
            found[current] = found.pop(key)
    return found


def _locate(target: str, where: str) -> object:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise UserError(f"{where}: {target} needs the package '{error.name}', which is not installed") from None
        raise UserError(
            f"{where}._target_: no module '{module}' (Python files next to the folders of --config-dir are found)"
        ) from None
    except AttributeError:
        raise UserError(f"{where}._target_: {module} has no '{name}'") from None
