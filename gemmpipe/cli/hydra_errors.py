"""Hydra's and OmegaConf's errors as one line: key, what is wrong, what was expected, the nearest name."""

import re
from collections.abc import Mapping, Sequence

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from gemmpipe.cli.errors import terminal_line
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.overrides import is_text_or_list, override_key
from gemmpipe.core.errors import UserError, suggest_or_list

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, RecursionError, yaml.YAMLError, ValueError)
"""Raised by composing a configuration from wrong overrides or YAML files."""
_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
"""The packages of launchers that Hydra has only if they are installed."""


def as_user_error(
    error: BaseException, options: Mapping[str, Sequence[str]], overrides: Sequence[str], recipe: str
) -> UserError:
    """One of CONFIG_ERRORS as a UserError; `options`: names by group, `recipe`: the file of the overrides, or ""."""
    index = re.match(r"invalid literal for int\(\) with base 10: '(.*)'", str(error))
    if index:  # a name as a list's index; Hydra does not name the override
        key = next((override.split("=")[0] for override in overrides if f".{index[1]}" in override.split("=")[0]), "")
        text = f"{key}: no such key; '{index[1]}' given where a list has only indices 0, 1, ..."
    elif (gone := re.match(r"Could not delete '(.*)'\. No match in the defaults", str(error))) and gone[1] in options:
        text = f"~{gone[1]}: cannot be left out; expected {gone[1]}=NAME, or {gone[1]}=[] where several may be chosen"
    elif "group override must be a string" in str(error):  # nor the option
        text = _non_name_override(overrides, options) or _hydra_message(error)
    elif "Multiple values for" in str(error) and (listed := _list_override(overrides, options)):
        text = listed
    else:
        text = _describe(error, options, overrides)
    return UserError(f"{recipe}: {text}" if recipe else text)


def _non_name_override(overrides: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The error of the first override that sets a group to a value that is not a name; "" if none does."""
    for override in overrides:
        key, group = override_key(override), override_key(override).split("@")[0]
        if group in options and not is_text_or_list(override):
            value = override.partition("=")[2]
            return f"{key}: {_no_option(group, value, options)}"
    return ""


def _no_option(group: str, name: str, options: Mapping[str, Sequence[str]]) -> str:
    if group == "device" and name.lower() in _GPUS:
        return f"no option '{name}'; expected device=cuda (NVIDIA), device=hip (AMD), or auto, the default"
    if group == "backend" and (option := ConfigFolders(config_dir=None).option_of_part(group, name)):
        return f"no option '{name}'; it is a part of {group}={option}"
    return f"no option '{name}'{suggest_or_list(name, options[group], f'gemmpipe --help {group}')}"


def _list_override(overrides: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The error of the first override that gives a list to a group that takes one option; "" if none does."""
    for override in overrides:
        group, _, value = override.partition("=")
        names = [name.strip("\"' ") for name in value.strip("[]").split(",")]
        if group in options and value.startswith("[") and len(names) > 1:
            return f"{group}: [{', '.join(names)}] given, expected one option; a sweep is -m {group}={','.join(names)}"
    return ""


def _unknown_option_override(overrides: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The error of the first override that names an unknown option; "" if none does.

    Hydra checks groups in its own order. With a forgotten --config-dir the backends of an unknown kernel are unknown
    as well: the first one typed is reported.
    """
    for override in overrides:
        group, _, value = override.partition("=")
        for name in value.strip("[]").split(","):
            name = name.strip("\"' ")
            if group in options and re.fullmatch(r"[A-Za-z][\w.-]*", name) and name not in options[group]:
                return f"{group}: {_no_option(group, name, options)}" if is_text_or_list(override) else ""
    return ""


def _describe(error: BaseException, options: Mapping[str, Sequence[str]], overrides: Sequence[str]) -> str:
    if isinstance(error, MissingConfigException):
        return _missing_option(error, options, overrides)
    if isinstance(error, RecursionError):
        return "the defaults lists of the configuration files include each other in a cycle"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as key=value"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return terminal_line(f"{mark.name}: line {mark.line + 1}: {error.problem}")
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _wrong_key(cause, options)
    return _hydra_message(error)


def _missing_option(
    error: MissingConfigException, options: Mapping[str, Sequence[str]], overrides: Sequence[str]
) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if group not in options:
        if name in _PLUGINS:
            return f"{group}: '{name}' is not installed; pip install {_PLUGINS[name]}"
        known = [str(each) for each in error.options or ()]
        return (
            f"{group}: no option '{name}'{suggest_or_list(name, known)}"
            if known
            else terminal_line(str(error).split("\n")[0])
        )
    named = re.match(r"In '([^']+)'", str(error))
    where = f"{named[1]}.yaml: " if named and named[1] != "_base" else ""
    first = "" if where else _unknown_option_override(overrides, options)
    return first or f"{where}{group}: {_no_option(group, name, options)}"


def _wrong_key(cause: OmegaConfBaseException, options: Mapping[str, Sequence[str]]) -> str:
    parent = cause.parent_node
    key = str(cause.full_key)
    if "Cannot merge DictConfig with ListConfig" in str(cause):
        return f"{key}: keys and values given, expected a list"
    if "not in struct" not in str(cause) or parent is None:
        return terminal_line(f"{key}: {str(cause).splitlines()[0]}")
    try:
        known = [str(name) for name in parent if name != "_target_"]  # set in files only
    except TypeError:
        return f"{key}: no such key; its parent is a single value"
    last = key.rsplit(".", 1)[-1]
    place = key.rsplit(".", 1)[0] if "." in key else ""
    if place in options and last in options[place] and "_target_" not in parent:  # a group that takes several options
        return f"{key}: '{last}' is not chosen; {place}=[{','.join([*known, last])}] adds it"
    if key.lower() in _SIZES:
        return (
            f"{key}: no such key; values of M are shapes.nsets=[1,64], other sizes shapes=list shapes.items=[[M,N,K]]"
        )
    if key == "shapes.items":
        return f"{key}: no such key of this option of shapes; expected shapes=list '{key}=[[M,N,K]]'"
    return f"{key}: no such key{suggest_or_list(last, known)}"


_GPUS = ("gpu", "nvidia", "amd", "rocm")
"""Words that people type for a GPU."""
_SIZES = ("m", "n", "k", "tokens", "rows", "batch_size", "batch_sizes")
"""Names that people type for the sizes of problems."""


def _hydra_message(error: BaseException) -> str:
    """The fallback: Hydra's first line, which names the override, and its suggestion if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("To append", "Set the environment"))]
    return terminal_line(" ".join(kept[:2])) or type(error).__name__
