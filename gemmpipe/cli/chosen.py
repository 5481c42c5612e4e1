"""Words that choose options, looked at before Hydra composes: it fails inside on a value that can name none."""

from collections.abc import Iterable, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException

from gemmpipe.errors import UserError, nearest, shortened

_HYDRA = "hydra/"
_SHOWN = 60
_LONGEST = 200
"""Characters of a name; from 256 on looking for its file fails."""


def check_choices(words: Iterable[str], options: Mapping[str, Sequence[str]]) -> None:
    """Refuse a list that holds anything but names, in overrides of a group of `options` or of Hydra's own.

    Raises UserError: the key, the value, what was expected. What names no option is refused when it is looked for.
    """
    for word in words:
        key, _, value = word.partition("=")
        group = key.lstrip("+~").split("@")[0]
        if group in options and not set("[{") & set(value) and max(map(len, value.split(","))) > _LONGEST:
            raise UserError(f"{group}: no option '{shortened(value)}'{nearest('', options[group])}")
        if not value.startswith(("[", "choice")) and "[" not in value:  # parsing takes milliseconds
            continue
        if group not in options and not group.startswith(_HYDRA):
            continue
        parsed = _parsed(word)
        if parsed is None:
            continue  # told where it is made readable
        for chosen in _alternatives(parsed):
            if isinstance(chosen, list) and (parsed.is_delete() or not all(map(_is_name, chosen))):
                shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
                known = nearest("", options.get(group, ()))
                raise UserError(f"{group}: {shown} given, expected the name of an option, or a list of names{known}")


def _alternatives(parsed: Override) -> Sequence[object]:
    """The values of a sweep, or the one value."""
    value: object = parsed.value()
    return value.list if isinstance(value, ChoiceSweep) else [value]


def _is_name(value: object) -> bool:
    return isinstance(value, str | QuotedString)


def _parsed(word: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None
