"""The kernel that an engine chooses for a kind of layer: ordered rules, each with its conditions, as in the engine."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

BLOCKS, ROWS, SIXTEEN, EXPERTS_BLOCKS, EXPERTS_SIXTEEN = (
    "linear fp8 by blocks",
    "linear fp8 by row",
    "linear bf16",
    "experts fp8 by blocks",
    "experts bf16",
)
KINDS = (BLOCKS, ROWS, SIXTEEN, EXPERTS_BLOCKS, EXPERTS_SIXTEEN)
"""The kinds of layers."""
EXPERT_ARGUMENTS = ("ep_size", "expert_parallel_size", "enable_expert_parallel", "moe_a2a_backend")
"""Arguments of servers, by name, that choices of kernels for experts depend on in addition to the backends' flags."""
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts that an engine's choice depends on."""

    gfx: str
    flags: Mapping[str, str] = field(default_factory=dict)
    """The server's arguments by name without dashes: `linear_backend`, `enable_expert_parallel`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    packages: Mapping[str, bool] = field(default_factory=dict)
    """True by name if a package can be imported; for an absent name, the packages of this Python decide."""
    sizes: Sequence[tuple[int, int]] = ()
    """(N, K) of the products of the kind of layers in question, if known."""

    def enabled(self, variable: str, default: bool) -> bool:
        """An environment variable that is true or false."""
        value = self.variables.get(variable)
        return default if value is None else value.strip().lower() not in _FALSE

    def installed(self, package: str) -> bool:
        """True if a package can be imported; imports at most its parents."""
        if package in self.packages:
            return self.packages[package]
        try:
            return importlib.util.find_spec(package) is not None
        except (ImportError, ValueError):
            return False

    def flag(self, name: str, default: str = "auto") -> str:
        """A server's argument."""
        return self.flags.get(name, default).lower().replace("-", "_")

    @property
    def expert_parallel(self) -> bool:
        """True if experts are distributed over devices."""
        ep = self.flags.get("ep_size", self.flags.get("expert_parallel_size", "1"))
        enabled = self.flags.get("enable_expert_parallel", "false").lower() not in _FALSE
        return enabled or ep not in ("1", "")


Condition = Callable[[Situation], str]
"""The reason why a kernel is passed over; empty if it is not."""


@dataclass(frozen=True, kw_only=True)
class KernelRule:
    """A kernel of an engine for one kind of layers."""

    name: str
    """As the engine's log names it."""
    title: str
    backend: str
    """The value of the backend flag that selects it; empty for a kernel without one."""
    source: str
    """The file in the engine's package that has the conditions."""
    conditions: tuple[Condition, ...] = ()
    sizes: Condition | None = None
    """The reason why some sizes run on the layer's `fallback`, within this kernel's function."""
    reads_files: bool = False
    """True: it reads tuned files."""
    labels: tuple[str, ...] = ()
    """Our backends that time the same kernel, by their `libtype`."""
    libraries: tuple[str, ...] = ()
    """Our backends that time the libraries it calls; a product of some sizes may be one, of others another."""
    scales: str = ""
    """The memory order in which the engine quantises x in blocks before it: row or column; empty if it reads none."""

    def passed_over(self, situation: Situation) -> str:
        """The first reason why the engine does not use it; empty if it can."""
        return next((reason for condition in self.conditions if (reason := condition(situation))), "")


@dataclass(frozen=True, kw_only=True)
class LayerRules:
    """The kernels of a kind of layers in an engine's order, and the flag that filters them."""

    kind: str
    flag: str
    """The argument of the server, as typed: `--linear-backend`."""
    kernels: tuple[KernelRule, ...]
    order: Callable[[Situation, Sequence[KernelRule]], Sequence[KernelRule]] = lambda situation, rules: rules
    """The order for a situation, where it depends on it."""
    fallback: str = ""
    """The backend that computes sizes which a chosen kernel's function does not."""
    strict: bool = False
    """True: a requested backend without a kernel of this kind is an error, else it is ignored."""

    def chosen(self, situation: Situation) -> "LayerChoice":
        """The kernel that the engine uses, and those before it with the reasons why they are passed over."""
        wanted = situation.flag(self.flag.lstrip("-").replace("-", "_")) if self.flag else "auto"
        listed = list(self.order(situation, self.kernels))
        filtered = [rule for rule in listed if rule.backend == wanted]
        note = ""
        if wanted != "auto":
            if not filtered and self.strict:
                text = f"{self.flag} {wanted}: no kernel of this kind: the server does not start"
                return LayerChoice(kind=self.kind, rule=None, passed_over=(), note=text)
            note = f"{self.flag} {wanted}" + ("" if filtered else ": no kernel of this kind, ignored")
            listed = filtered or listed
        passed: list[tuple[KernelRule, str]] = []
        for rule in listed:
            reason = rule.passed_over(situation)
            if not reason and rule.sizes is not None and (reason := rule.sizes(situation)):
                other = next(each for each in self.kernels if each.backend == self.fallback)
                return LayerChoice(kind=self.kind, rule=other, passed_over=(*passed, (rule, reason)), note=note)
            if not reason:
                return LayerChoice(kind=self.kind, rule=rule, passed_over=tuple(passed), note=note)
            passed.append((rule, reason))
        return LayerChoice(kind=self.kind, rule=None, passed_over=tuple(passed), note=note or "no kernel fits")

    def chosen_by_size(self, situation: Situation) -> "tuple[SizedChoice, ...]":
        """The choices for the known sizes, that of the most sizes first; engines choose for each layer by itself.

        Without known sizes, the choice for sizes that all kernels take.
        """
        by_rule: dict[str, list[tuple[int, int]]] = {rule.name: [] for rule in self.kernels}
        for size in situation.sizes:
            rule = self.chosen(replace(situation, sizes=(size,))).rule
            by_rule.setdefault(rule.name if rule is not None else "", []).append(size)
        groups = sorted(filter(None, by_rule.values()), key=len, reverse=True) or [[]]
        return tuple(
            SizedChoice(choice=self.chosen(replace(situation, sizes=sizes)), sizes=tuple(sizes)) for sizes in groups
        )

    def computes_all(self, rule: KernelRule, situation: Situation) -> bool:
        """True if the server computes all sizes with this kernel once its flag selects it."""
        if not (flags := self.flags_for(rule)):
            return all(each.rule is rule for each in self.chosen_by_size(situation))
        asked = replace(situation, flags={**situation.flags, flags[0].lstrip("-").replace("-", "_"): flags[1]})
        return all(each.rule is rule for each in self.chosen_by_size(asked))

    def flags_for(self, rule: KernelRule) -> tuple[str, ...]:
        """The arguments that ask for a kernel; empty if no argument does."""
        return (self.flag, rule.backend) if self.flag and rule.backend else ()


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The kernel for one kind of layers."""

    kind: str
    rule: KernelRule | None
    """None: the server does not start, or nothing fits."""
    passed_over: tuple[tuple[KernelRule, str], ...]
    note: str = ""

    @property
    def reads_files(self) -> bool:
        """True if the kernel reads tuned files."""
        return self.rule is not None and self.rule.reads_files


@dataclass(frozen=True, kw_only=True)
class SizedChoice:
    """The kernel for the layers of some sizes."""

    choice: LayerChoice
    sizes: tuple[tuple[int, int], ...]
    """(N, K); none if no sizes are known."""

    @property
    def rule(self) -> KernelRule | None:
        """As `LayerChoice.rule`."""
        return self.choice.rule


@dataclass(frozen=True, kw_only=True)
class EngineRules:
    """The rules of one version of an engine."""

    engine: str
    version: str
    """The version with the sources that the rules are from."""
    layers: tuple[LayerRules, ...]

    def layer(self, kind: str) -> LayerRules | None:
        """The rules of a kind of layers."""
        return next((each for each in self.layers if each.kind == kind), None)

    def choices(self, situation: Situation) -> Iterator[LayerChoice]:
        """The choice for each kind of layers."""
        for each in self.layers:
            yield each.chosen(situation)


def on(*architectures: str) -> Condition:
    """Only on these architectures: whole names, or their beginnings with `*`."""

    def reason(situation: Situation) -> str:
        fits = any(
            situation.gfx.startswith(each[:-1]) if each.endswith("*") else situation.gfx == each
            for each in architectures
        )
        return "" if fits else f"not on {situation.gfx}"

    return reason


def needs(*packages: str) -> Condition:
    """One of these packages is installed."""

    def reason(situation: Situation) -> str:
        return "" if any(map(situation.installed, packages)) else f"{packages[0]} is not installed"

    return reason


def variable(name: str, *, default: bool, wanted: bool = True) -> Condition:
    """A variable has this truth."""

    def reason(situation: Situation) -> str:
        is_set = situation.enabled(name, default)
        return "" if is_set == wanted else f"{name}={situation.variables.get(name, str(int(default)))}"

    return reason


def multiples(n: int, k: int) -> Condition:
    """N and K of all known products are multiples of these."""

    def reason(situation: Situation) -> str:
        odd = [f"N={a} K={b}" for a, b in situation.sizes if a % n or b % k]
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        return f"N % {n} or K % {k}: {odd[0]}{more}" if odd else ""

    return reason


def not_disabled(variable_name: str, kernel: str) -> Condition:
    """The kernel is not in a variable's list of disabled ones."""

    def reason(situation: Situation) -> str:
        names = situation.variables.get(variable_name, "").split(",")
        return f"{variable_name} has it" if kernel in [name.strip() for name in names] else ""

    return reason


def never(reason: str) -> Condition:
    """Chosen only by its flag."""
    return lambda situation: reason
