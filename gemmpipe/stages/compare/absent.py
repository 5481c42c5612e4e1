"""Why a backend has no candidate for a problem: its rules for the product, or what this machine lacks.

On a machine without a GPU most backends name that alone, also those that have no kernel for the product on any GPU.
"""

from collections.abc import Iterator
from functools import cache

from gemmpipe.backends import NO_SPACE, NOT_THIS_PRODUCT
from gemmpipe.backends.autotune import Autotuned
from gemmpipe.backends.engine_pair import EnginePair
from gemmpipe.core.data import Candidate, Device, Knobs
from gemmpipe.core.device import arch_device
from gemmpipe.family import GemmSpec, Implementation
from gemmpipe.family.guard import PluginError, call_plugin
from gemmpipe.stages import Context
from gemmpipe.stages.rows import candidate_of
from gemmpipe.stages.screen.candidates import CandidateList

NO_GPU = ("no GPU", "no NVIDIA GPU")
"""How the reasons begin that a GPU would change."""
_ARCHITECTURES = ("sm_90", "sm_100", "gfx942", "gfx950")
_NOT_INSTALLED = "not installed"


def absent_candidates(listing: CandidateList, context: Context) -> Iterator[tuple[Candidate, str]]:
    """(candidate, reason) of each library candidate that is excluded, and of each library without any candidate."""
    own = {each.label for each in context.family.implementations}
    libraries = {each.label: each for each in context.implementations if each.label not in own}
    excluded = listing.summary.excluded
    listed = {candidate.backend for candidate in listing.candidates}
    for label, config, error in zip(excluded["libtype"], excluded["config"], excluded["error"], strict=True):
        listed.add(label)
        if label not in own:
            candidate = candidate_of(label, config)
            yield candidate, _reason(libraries.get(label), listing.spec, candidate.knobs, error)
    for label, library in libraries.items():
        if label not in listed and not isinstance(library, Autotuned):  # which has an entry of its own
            reason = _no_candidate(library, listing, context)
            yield Candidate.of(label, {}), _reason(library, listing.spec, {}, reason)


def pair_violation(library: Implementation | None, spec: GemmSpec, device: Device) -> str | None:
    """`rule: detail` for a product that an engine's quantiser and product do not compute together, or None.

    The functions that these pairs call take one matrix; experts have fp8 weights and 16-bit x too.
    """
    if not isinstance(library, EnginePair):
        return None
    listed = tuple(library.configs(spec, device, NO_SPACE))
    return library.form_violation(spec) or (None if listed else f"product: {library.label} has none for these operands")


def _no_candidate(library: Implementation, listing: CandidateList, context: Context) -> str:
    """Why a library lists no candidate."""
    missing = listing.summary.report.unavailable.get(library.label)
    rule = missing or _rule(library, listing.spec, {}, context.device)
    return rule or "no configuration for this product"


def _reason(library: Implementation | None, spec: GemmSpec, knobs: Knobs, reason: str) -> str:
    """The reason itself; for one that names the missing GPU, the rule that excludes the product on every GPU too."""
    if library is None or not reason.startswith(NO_GPU):
        return reason
    rules = [_rule(library, spec, knobs, _gpu(gfx)) for gfx in _ARCHITECTURES]
    return f"{NOT_THIS_PRODUCT}: {rules[0]}" if all(rules) else reason


def _rule(library: Implementation, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
    """The rule that excludes a candidate on this device; None where it has none, or where a package is missing.

    Without knobs: the rule for the first configuration, or for none where nothing is listed.
    """

    def violation() -> str | None:
        listed = tuple(library.configs(spec, device, NO_SPACE)) if not knobs else ()
        return library.unsupported_reason(spec, listed[0] if listed else knobs, device)

    try:
        rule = pair_violation(library, spec, device) or call_plugin(library, violation)
    except PluginError:
        return None
    return None if rule is None or _NOT_INSTALLED in rule else rule


@cache
def _gpu(gfx: str) -> Device:
    return arch_device(gfx)
