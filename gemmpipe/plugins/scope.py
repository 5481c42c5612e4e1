"""The scope of a plug-in, and its line when an engine starts: what it takes over, and why it leaves the rest.

The scope is an environment variable with the kinds of layers that the plug-in may take over.

`GEMMPIPE_VLLM=linear,moe` (the default) names the kinds, `off` none; `quantise` and `replays` must be named. An unknown
name takes nothing over: a misspelt name must not enable more than the user asked for.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import gemmpipe
from gemmpipe.core.errors import suggest_or_list

LINEAR, MOE, QUANTISE, REPLAYS, OFF = "linear", "moe", "quantise", "replays", "off"
KINDS = (LINEAR, MOE)
"""The kinds of layers of every engine: linear layers, and mixtures of experts."""
GRAPHS = "replays of CUDA graphs"
"""What the start line calls `REPLAYS` (launch/replays.py)."""
BF16, FP8_BLOCKS, FP8_ROWS, EXPERTS = "linear bf16", "linear fp8 by blocks", "linear fp8 by row", "experts"
"""Products of layers, as the start line names them."""
FAMILIES = ("a16w16", "a8w8", "a8w8_blockscale", "fmoe")
"""The families of engines' layers: bf16 and fp16, fp8 by row, fp8 by blocks, experts."""
_OFF_WORDS = frozenset({OFF, "0", "false", "no", "none"})


def unserved_reason(family: str, gfx: str) -> str:
    """Why no plug-in computes a layer with rows of this family and architecture; empty if one may."""
    if family not in FAMILIES:
        return f"no layer of an engine is a product of {family}"
    return "" if gfx.startswith("sm_") else f"of {gfx}: the plug-ins need an NVIDIA GPU"


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The kinds of layers that a plug-in may take over, and the variable that states them."""

    variable: str
    kinds: tuple[str, ...]
    errors: tuple[str, ...] = ()
    """One text per unknown kind: `GEMMPIPE_VLLM: 'linaer': unknown, expected ...`."""

    @property
    def off(self) -> bool:
        """True if no kind may be taken over."""
        return not self.kinds

    def reason(self, kind: str) -> str:
        """Why this kind is left to the engine; empty if it may be taken over."""
        if kind in self.kinds:
            return ""
        value = os.environ.get(self.variable, "")
        return f"{self.variable}={value}" if value.strip() else f"only if {self.variable} names '{kind}'"


def read_scope(variable: str, more_kinds: Sequence[str] = ()) -> Scope:
    """The scope in an environment variable: `KINDS` if it is not set or empty; `more_kinds` must be named."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return Scope(variable=variable, kinds=KINDS)
    kinds = (*KINDS, *more_kinds)
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if any(word in _OFF_WORDS for word in words):
        return Scope(variable=variable, kinds=())
    known = [*kinds, OFF]
    errors = tuple(
        f"{variable}: '{word}': unknown{suggest_or_list(word, known)}" for word in words if word not in kinds
    )
    return Scope(variable=variable, kinds=tuple(kind for kind in kinds if kind in words), errors=errors)


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """One kind of product of an engine, or its quantisers: taken over, or left to the engine for a reason."""

    name: str
    """The kind in words: `linear bf16`, `linear fp8 by blocks`, `experts`, `quantisers`, `replays of CUDA graphs`."""
    detail: str = ""
    """Rows of the tables for it, `90 rows for 5 sizes`; fused operations of a quantiser, `RMS norm and SiLU`."""
    reason: str = ""
    """Why it is left to the engine; empty if it is taken over."""

    @property
    def taken(self) -> bool:
        """True if layers of this kind may use tuned rows."""
        return not self.reason

    def __str__(self) -> str:
        more = self.reason or self.detail
        return f"{self.name} ({more})" if more else self.name


def start_line(engine: str, device: str, takeovers: Sequence[Takeover], errors: Sequence[str] = ()) -> str:
    """`gemmpipe 0.2.0 in vLLM 0.25.1 on NVIDIA H200: takes over ...; leaves ... to the engine`.

    `engine` has the engine's version. Kinds that are left for the same reason are named together.
    """
    taken = [str(each) for each in takeovers if each.taken]
    by_reason: dict[str, list[str]] = {}
    for each in takeovers:
        if not each.taken:
            by_reason.setdefault(each.reason, []).append(each.name)
    left = [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    parts = [f"takes over {', '.join(taken)}" if taken else "takes over nothing"]
    if left:
        parts.append(f"leaves to the engine: {', '.join(left)}")
    place = f" on {device}" if device else ""
    return f"gemmpipe {gemmpipe.__version__} in {engine}{place}: {'; '.join((*parts, *errors))}"


def replays_line(engine: str, reasons: Mapping[str, str], errors: Sequence[str] = ()) -> str:
    """The start line if replays of graphs are all that a plug-in takes over; `reasons` for what it leaves."""
    left = [Takeover(name=name, reason=reason) for name, reason in reasons.items()]
    return start_line(engine, "", [Takeover(name=GRAPHS, detail="on GPUs from sm_90 on"), *left], errors)


def inactive_line(engine: str, reason: str, errors: Sequence[str] = ()) -> str:
    """The line of a plug-in that changes nothing: `gemmpipe 0.2.0 in vLLM 0.25.1: does nothing (off)`."""
    return f"gemmpipe {gemmpipe.__version__} in {engine}: {'; '.join((f'does nothing ({reason})', *errors))}"
