"""The last sections of a report: what was not done and what changes it, and where everything comes from."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup

from gemmpipe.backends import NOT_THIS_PRODUCT
from gemmpipe.charts.markup import html_table, join, tag, text_line
from gemmpipe.charts.page import Section
from gemmpipe.core.data import TIMED
from gemmpipe.core.events import counted
from gemmpipe.core.shell import shell_join
from gemmpipe.core.units import bytes_text, time_text
from gemmpipe.report.attention import product_name, records
from gemmpipe.report.data import TABLE, RunData
from gemmpipe.report.results import CONVERTED, NO_LIBRARY
from gemmpipe.report.run_folder import RUNNING
from gemmpipe.report.speedup import conversion_reasons

_MAX_LISTED = 20
_MAX_CONFIG = 60_000
_MEMORY_KEY = "stages.select.max_extra_weight_pct="
_CPU_ONLY = "no CPU run"
"""How reasons of backends begin that need a CPU."""
_CHANGES = {"no GPU": "tune on a GPU", NOT_THIS_PRODUCT: ""}
"""What changes a reason of a backend that begins like this; other reasons are the doctor's."""
_DOCTOR_KEYS = ("kernel", "backend")
_NO_LIBRARY_TIMED = ("no library was timed", "backend=[..., torch]")

Missing = tuple[str, str, str]
"""(what, why or which, what changes it)."""


def not_done_section(data: RunData) -> Section:
    """Parts that the run left out, each with the option or command that changes it."""
    rows = list(missing(data))
    table = html_table(
        ("what", "which", "what changes it"),
        [(a, b, tag("code", c) if c else "") for a, b, c in rows],
        text_columns=(0, 1, 2),
    )
    body = table if rows else tag("p", "Nothing: every product has a checked choice.")
    return Section(id="missing", title="What was not done", body=body)


def missing(data: RunData) -> Iterator[Missing]:
    """A part that the run or the table lacks, and the command that adds it."""
    if data.state == TABLE:
        yield (
            "search, candidates, wall time, device conditions",
            "a table holds the choices alone",
            "gemmpipe report DIR",
        )
    elif not data.finished:
        yield "the selection", f"the run is {data.state_word}", _go_on(data)
    for name in data.unsolved[:_MAX_LISTED]:
        yield "a product without a valid candidate", name, "backend=[...] or a wider space"
    for name in data.undecided[:_MAX_LISTED]:
        yield "a product left undecided by the budget", name, "search.budget_s= or search.budget_trials="
    yield from _rejected(data)
    yield from _unavailable(data)
    products = data.products
    converted = records(products[products["library"] == CONVERTED])
    limits = [round(each.limit_pct) for each in data.gated if each.limit_pct is not None]
    for which, change in conversion_reasons(converted, data.family, max(limits, default=None)):
        yield "a speed-up over a library", which, change
    if absent := int((products["library"] == NO_LIBRARY).sum()):
        why = ("the recording has no library", "tune on a GPU") if data.recorded else _NO_LIBRARY_TIMED
        yield "a comparison with a library", f"{counted(absent, 'product')}: {why[0]}", why[1]
    if len(products) and not products["share"].notna().any():
        yield "the floor", "no rates of this device", "roofline=FILE"
    yield from _untimed(data)


def _rejected(data: RunData) -> Iterator[Missing]:
    names = {row["problem"]: product_name(row) for row in records(data.products)}
    for each in data.gated[:_MAX_LISTED]:
        times = f"{time_text(each.time_us)} instead of {time_text(each.chosen_us)}"
        which = (
            f"{names.get(each.problem, each.problem)}: {each.backend} {each.config} takes {times} with "
            f"{bytes_text(each.extra_weight_bytes)} more weight memory"
        )
        limit = "LIMIT" if each.limit_pct is None else f"{each.limit_pct:.0f}"
        yield "a faster candidate with more memory", text_line(which, 400), f"{_MEMORY_KEY}{limit}"
    if more := len(data.gated[_MAX_LISTED:]):
        yield "faster candidates with more memory", f"{more:,} more", f"{_MEMORY_KEY}LIMIT"


def _unavailable(data: RunData) -> Iterator[Missing]:
    """Backends of which nothing was tried, but for those of a CPU in a run on a GPU."""
    tried = {each.trial.candidate.backend for each in data.trials}
    reasons: dict[str, str] = {}
    for each in data.excluded:
        if each.backend not in tried and not each.example.startswith(_CPU_ONLY):
            reasons.setdefault(each.backend, each.example)
    for backend, reason in list(reasons.items())[:_MAX_LISTED]:
        change = next((text for start, text in _CHANGES.items() if reason.startswith(start)), _doctor_command(data))
        yield f"candidates of {text_line(backend, 40)}", text_line(reason, 200), change


def _doctor_command(data: RunData) -> str:
    """The command about the backends of this run, as its own command chose them."""
    try:
        typed = shlex.split(data.command)
    except ValueError:  # a command of someone else's file
        typed = []
    chosen = [each for each in typed if re.split(r"[=.]", each.lstrip("+~"), maxsplit=1)[0] in _DOCTOR_KEYS]
    kernel = [] if any(each.startswith("kernel=") for each in chosen) else [f"kernel={data.family.name}"]
    return shell_join(["gemmpipe", "doctor", *kernel, *chosen])


def _untimed(data: RunData) -> Iterator[Missing]:
    """Products of which no candidate has a time, in a run that has not ended or that its budget ended."""
    if data.finished:
        count = data.problems - len(data.products) - len(data.unsolved) - len(data.undecided)
        if data.state != TABLE and count > 0:
            yield "timing", f"{counted(count, 'product')} left by the run's budget", _resume(data)
        return
    timed = {each.trial.problem for each in data.trials if each.trial.status in TIMED}
    if (count := data.problems - len(timed)) > 0:
        yield "timing", counted(count, "product"), _go_on(data)


def _go_on(data: RunData) -> str:
    """The command that continues a run; none for one that is running."""
    return "" if data.state == RUNNING else _resume(data)


def _resume(data: RunData) -> str:
    return shell_join(["gemmpipe", f"resume={data.origin}"])


def provenance_section(data: RunData) -> Section:
    """The command, versions, device and files; the configuration is folded."""
    facts: list[tuple[Any, ...]] = [("state", data.state_word), ("from", data.origin)]
    if data.command:
        facts.append(("command", tag("code", text_line(data.command, 2000))))
    if data.started:
        facts.append(("last run (UTC)" if data.state == TABLE else "started (UTC)", text_line(data.started, 40)))
    if data.exit_code is not None:
        facts.append(("exit code", str(data.exit_code)))
    if data.sessions > 1:
        facts.append(("sessions", str(data.sessions)))
    policies = sorted({str(p) for p in data.products["policy"] if p})
    if policies:
        facts.append(("how times were taken", text_line("; ".join(policies), 300)))
    shown = list(data.provenance.items())[-_MAX_LISTED:]
    parts = [html_table(("", ""), facts, text_columns=(0, 1)), *(_run_facts(name, each) for name, each in shown)]
    if data.files:
        items = [tag("li", tag("code", text_line(file, 300))) for file in data.files[:200]]
        parts.append(tag("details", tag("summary", f"Files: {len(data.files)}"), tag("ul", join(items))))
    if data.config is not None:
        parts.append(tag("details", tag("summary", "Configuration"), tag("pre", _config_text(data.config))))
    return Section(id="provenance", title="Provenance", body=join(parts))


def _run_facts(name: str, facts: Mapping[str, Any]) -> Markup:
    """The provenance of one run: nested values as `key value` pairs."""
    rows = [(text_line(key, 60), text_line(_flat(value), 1000)) for key, value in list(facts.items())[:40]]
    return tag("details", tag("summary", f"Run {text_line(name, 80)}"), html_table(("", ""), rows, text_columns=(0, 1)))


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    return str(value)


def _config_text(config: Mapping[str, Any]) -> str:
    text = json.dumps(config, indent=1, default=str)
    return text if len(text) <= _MAX_CONFIG else f"{text[:_MAX_CONFIG]}\n... (the rest is in manifest.json)"
