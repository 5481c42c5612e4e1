"""Fixed colours: a name has the same colour in every chart of every page.

A name is a backend (`torch`), or a backend and its method (`torch mm`): methods share the backend's colour and differ
in the pattern of the line. The colours are CSS variables with a value for each theme.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from markupsafe import Markup

from gemmpipe.charts.markup import join, tag, text_line

TUNED, LIBRARY, FLOOR, IDLE = "tuned", "best library", "floor", "idle"

_FIXED: dict[str, tuple[str, str]] = {  # light, dark; contrast with the background is at least 3
    TUNED: ("#1d4ed8", "#6ea8fe"),
    LIBRARY: ("#d9480f", "#ff9e5e"),
    "triton": ("#7048e8", "#b197fc"),
    "gluon": ("#0b7285", "#3bc9db"),
    "sliced": ("#c2255c", "#faa2c1"),
    "streamed": ("#5f3dc4", "#c0b3ff"),
    "skinny": ("#a66b00", "#ffd43b"),
    "torch": ("#5c6873", "#adb5bd"),
    "scaled_mm": ("#2b8a3e", "#69db7c"),
    "onednn": ("#66800b", "#c0eb75"),
    "cublaslt": ("#c92a2a", "#ff8787"),
    "hipblaslt": ("#b5500a", "#ffa94d"),
    "aiter": ("#862e9c", "#e599f7"),
    "deepgemm": ("#364fc7", "#91a7ff"),
    "vllm": ("#8a6d00", "#ffe066"),
    "sglang": ("#a61e4d", "#f783ac"),
    "quack": ("#087f5b", "#63e6be"),
    "autotune": ("#9c36b5", "#da77f2"),
    "same_size": ("#8a5a2b", "#e0b084"),
}
_FREE = (
    ("#1971c2", "#74c0fc"),
    ("#2f9e44", "#8ce99a"),
    ("#e8590c", "#ffc078"),
    ("#6741d9", "#d0bfff"),
    ("#0c8599", "#99e9f2"),
    ("#d6336c", "#fcc2d7"),
    ("#7a5c00", "#ffec99"),
    ("#37b24d", "#c3fae8"),
    ("#f03e3e", "#ffa8a8"),
    ("#15aabf", "#66d9e8"),
    ("#be4bdb", "#eebefa"),
    ("#868e96", "#868e96"),
    ("#4263eb", "#bac8ff"),
    ("#f76707", "#ffd8a8"),
    ("#0ca678", "#96f2d7"),
)
_PATTERNS = 5
"""Patterns of lines: `.d0` to `.d4` of the style sheet."""
_VALUES = (*_FIXED.values(), *_FREE)


@dataclass(kw_only=True)
class Colours:
    """The colour of each name of a page, as CSS classes: `c3` sets the colour, `d1` the pattern of a line."""

    _slots: dict[str, int] = field(default_factory=dict)
    _variants: dict[str, list[str]] = field(default_factory=dict)

    def css_class(self, name: str) -> str:
        """The classes of a name. A new name gets its backend's colour, or the next free one."""
        if name == FLOOR:
            return "cf"
        if name == IDLE:
            return "ci"
        base = name if name in _FIXED else name.split(" ")[0]
        if base not in self._slots:
            fixed = list(_FIXED)
            free = len(_FIXED) + sum(1 for known in self._slots if known not in _FIXED) % len(_FREE)
            self._slots[base] = fixed.index(base) if base in _FIXED else free
        variants = self._variants.setdefault(base, [])
        if name not in variants:
            variants.append(name)
        return f"c{self._slots[base]} d{variants.index(name) % _PATTERNS}"


def legend(
    names: Iterable[str], colours: Colours, *, lines: bool = True, labels: dict[str, str] | None = None
) -> Markup:
    """The legend of a group of charts: one entry per name, as a line or as a square."""
    entries = [
        tag("span", swatch(name, colours, lines=lines), text_line((labels or {}).get(name, name), 60), class_="entry")
        for name in dict.fromkeys(names)
    ]
    return tag("div", join(entries), class_="legend")


def swatch(name: str, colours: Colours, *, lines: bool = False) -> Markup:
    """The mark of a name next to its text."""
    mark = (
        tag("line", x1=0, y1=6, x2=24, y2=6, class_="line")
        if lines
        else tag("rect", x=4, y=0, width=12, height=12, rx=2, class_="area")
    )
    return tag(
        "svg",
        mark,
        class_=f"swatch {colours.css_class(name)}",
        width=24,
        height=12,
        data_name=text_line(name),
        aria_hidden="true",
    )


def colour_rules() -> tuple[str, str]:
    """The variables of the light and of the dark theme: `--p0:#1d4ed8;...`."""
    return tuple("".join(f"--p{i}:{pair[theme]};" for i, pair in enumerate(_VALUES)) for theme in (0, 1))  # type: ignore[return-value]


def colour_classes() -> str:
    """The rule of each colour class."""
    return "".join(f".c{i}{{--s:var(--p{i})}}" for i in range(len(_VALUES)))
