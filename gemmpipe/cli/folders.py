"""The folders of options and pipelines: the shipped ones, then the user's `--config-dir`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from gemmpipe.core.errors import UserError
from gemmpipe.core.files import read_regular
from gemmpipe.core.paths import shipped

_MAX_BYTES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class ConfigFolders:
    """The options by group and the pipelines that a command line can name, looked up once."""

    config_dir: Path | None

    @cached_property
    def options(self) -> dict[str, list[str]]:
        """The options of each group, without those that only others include (`_name`)."""
        found: dict[str, set[str]] = {}
        for folder in self._search_roots("conf"):
            for path in folder.glob("[a-z]*/[!_.]*.yaml"):
                if path.parent.name not in {"hydra", "pipelines"}:
                    found.setdefault(path.parent.name, set()).add(path.stem)
        return {group: sorted(names) for group, names in sorted(found.items())}

    @cached_property
    def pipelines(self) -> dict[str, Path]:
        """The pipelines by name."""
        return {
            path.stem: path for folder in self._search_roots("pipelines") for path in sorted(folder.glob("[!_.]*.yaml"))
        }

    def option_file(self, group: str, name: str) -> Path:
        """The file of an option."""
        return next(path for root in self._search_roots("conf") if (path := root / group / f"{name}.yaml").is_file())

    def option_of_part(self, group: str, part: str) -> str | None:
        """The option whose file has this key, such as `engine_pairs` for backend `vllm_pair`; None if none has it."""
        for option in self.options.get(group, ()):
            tree = yaml.safe_load(read_text(self.option_file(group, option)))
            if isinstance(tree, dict) and part in tree:
                return option
        return None

    def parts(self, group: str, option: str) -> tuple[str, ...]:
        """The keys of an option's file and of those that it includes, such as `vllm_pair` for backend `peers`."""
        if option not in self.options.get(group, ()):
            return ()
        tree = _read_yaml(self.option_file(group, option))
        if not isinstance(tree, Mapping):
            return ()
        defaults = tree.get("defaults")
        included = [each for each in defaults if isinstance(each, str)] if isinstance(defaults, list) else []
        inner = (part for each in included if each != option for part in self.parts(group, each))
        return tuple(dict.fromkeys([*inner, *(str(key) for key in tree if key != "defaults")]))

    def _search_roots(self, folder: str) -> tuple[Path, ...]:
        return (shipped(folder),) if self.config_dir is None else (shipped(folder), self.config_dir)

    def check(self) -> None:
        """Raises UserError for a user's file with a shipped name: Hydra would silently read the shipped one."""
        if self.config_dir is None:
            return
        for path in sorted([*self.config_dir.glob("*.yaml"), *self.config_dir.glob("*/*.yaml")]):
            name = path.relative_to(self.config_dir)
            twin = shipped("conf") / name if len(name.parts) > 1 else shipped("pipelines") / name
            if twin.is_file() and twin.resolve() != path.resolve():
                kind = (
                    f"an option '{name.parts[0]}={path.stem}'" if len(name.parts) > 1 else f"a pipeline '{path.stem}'"
                )
                raise UserError(f"{path}: gemmpipe ships {kind}, which would be read instead; expected another name")

    @cached_property
    def kernels(self) -> dict[str, str]:
        """The family in the file of each option of `kernel`; options that inherit it are left out."""
        trees = {name: _read_yaml(self.option_file("kernel", name)) for name in self.options["kernel"]}
        named = {name: tree.get("family") for name, tree in trees.items() if isinstance(tree, Mapping)}
        return {name: family for name, family in named.items() if isinstance(family, str)}

    @property
    def python_path(self) -> tuple[str, ...]:
        """The folders of the user's own families and backends, for sys.path."""
        return () if self.config_dir is None else (str(self.config_dir),)

    def make_importable(self) -> None:
        """Put the user's own modules on sys.path."""
        sys.path[:0] = [folder for folder in self.python_path if folder not in sys.path]

    def target_names(self) -> frozenset[str]:
        """Classes and families that the user's own files name: these may be imported although not part of gemmpipe."""
        if self.config_dir is None:
            return frozenset()
        files = [*self.config_dir.glob("*.yaml"), *self.config_dir.glob("*/*.yaml")]
        return frozenset(
            name for path in files for name in _referenced_code(_read_yaml(path), path.parent.name == "kernel")
        )


def _read_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(read_text(path))
    except (OSError, ValueError, UserError, RecursionError, yaml.YAMLError):
        return None  # an unused file may be anything; for a used one Hydra raises


def _referenced_code(node: object, kernel: bool) -> list[str]:
    """The `_target_`s in a tree, and the family of an option of `kernel`."""
    if isinstance(node, list):
        return [name for item in node for name in _referenced_code(item, kernel=False)]
    if not isinstance(node, Mapping):
        return []
    own = [node.get("_target_"), node.get("family") if kernel else None]
    return [name for name in own if isinstance(name, str)] + [
        n for v in node.values() for n in _referenced_code(v, kernel=False)
    ]


def read_text(path: Path) -> str:
    """The text of a file of options. Raises UserError if it is not a regular file; OSError, ValueError of reading."""
    return read_regular(path, "a file of options", _MAX_BYTES).decode()


def summary_line(path: Path) -> str:
    """The title of a YAML file: its first comment line."""
    first = read_text(path).partition("\n")[0].strip()
    return first.lstrip("# ") if first.startswith("#") else ""
