"""`gemmpipe doctor`: versions, devices, backends with why one is unavailable, the tables that are read, a verdict."""

import datetime
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe import __version__
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.machine import machine_lines, warnings_of
from gemmpipe.core.artifact import read_runs, sidecar_path
from gemmpipe.core.data import Device, Problem
from gemmpipe.core.errors import EnvironmentProblem, GemmpipeError, UserError
from gemmpipe.core.events import Events, counted
from gemmpipe.core.paths import shipped_tables, user_tables
from gemmpipe.core.shell import shell_join
from gemmpipe.family import Family, load_family
from gemmpipe.family.environment import ONLY_GIVEN, only_given_tables, table_variable, unused_variables
from gemmpipe.family.guard import PluginError
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.report.results import is_multiplied_as_stored
from gemmpipe.stages.screen.candidates import CandidateFilter

if TYPE_CHECKING:
    from gemmpipe.pipeline.plan import Plan
    from gemmpipe.tables.merge import Row

_MAX_REASONS = 3
"""Reasons why rows cannot run: the most frequent ones are shown."""
_PACKAGES = ("torch", "triton", "hydra-core", "omegaconf", "pandas", "nvidia-ml-py")
_OF_TABLES = ("table=", "inputs=", "target=")
"""Overrides that a tuning run does not read."""


def report_environment(plan: "Plan", events: Events) -> int:
    """Emit the report line by line. Returns exit code 0. Raises EnvironmentProblem if torch cannot be imported."""
    for line in _version_lines():
        events.emit("line", line)
    try:
        devices = plan.devices.find()
    except (ImportError, OSError) as error:
        raise EnvironmentProblem(f"torch cannot be imported: {error}") from None
    events.emit("line", "devices")
    for device in devices:
        events.emit("line", f"  {_device_line(device)}")
    if all(device.kind == "cpu" for device in devices):
        events.emit("line", f"  no GPU: {_no_gpu_reason()}")
    output = Path(plan.output)
    try:
        problems = plan.source.problems(plan.family, plan.defaults, devices[0].gfx)
        failures = _backend_failures(plan, devices[0], problems[0])
        backends = list(_backend_lines(failures, plan.family, devices[0]))
        can_tune = any(None in reasons for reasons in failures.values())
        other = _other_kernel(plan, devices[0], problems[0]) if can_tune else ""
        note = [f"note: {_other_kernel_note(plan.family, other)}"] if other else []
        verdict = [*note, _readiness(failures), f"next: {_next_command(plan, devices[0], failures, other)}"]
    except UserError as error:
        backends = [f"backends for {plan.family.name}: not checked{_needed(plan, error)}"]
        verdict = [f"next: {_command_with_problems(plan)}"]
    for line in (
        *machine_lines(devices, output),
        *backends,
        *_table_lines(plan.family, devices[0]),
        *(f"note: {warning}" for warning in warnings_of(devices, output)),
        *verdict,
    ):
        events.emit("line", line)
    return 0


def _version_lines() -> Iterator[str]:
    yield "versions"
    yield f"  gemmpipe {__version__}, python {platform.python_version()}, {platform.platform(terse=True)}"
    yield "  " + ", ".join(f"{package} {_version(package)}" for package in _PACKAGES)


def _version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "not installed"


def _device_line(device: Device) -> str:
    units = {"cuda": "SMs", "hip": "CUs"}.get(device.kind, "cores")
    shared = f", {device.shared_bytes // 1024} KiB shared memory per block" if device.shared_bytes else ""
    return (
        f"{device.torch_name}: {device.name}, {device.gfx}, {device.cu_num} {units}, "
        f"{device.cache_bytes / 2**20:.0f} MiB last-level cache{shared}"
    )


def _no_gpu_reason() -> str:
    import torch

    runtime = torch.version.cuda or torch.version.hip
    if runtime is None:
        return f"torch {torch.__version__} is built for CPU only"
    return f"torch {torch.__version__} is built for GPUs, but the driver reports none"


def _backend_failures(plan: "Plan", device: Device, problem: Problem) -> dict[str, list[str | None]]:
    """By backend: per implementation the reason why no configuration fits the problem, None if one does."""
    spec = plan.family.spec(problem)
    found: dict[str, list[str | None]] = {}
    for name, backend in plan.backends.items():
        own = [
            CandidateFilter(implementation=i, spec=spec, device=device) for i in backend.implementations(plan.family)
        ]
        found[name] = [_common_failure(candidates, plan.space) for candidates in own]
    return found


def _backend_lines(failures: Mapping[str, list[str | None]], family: Family, device: Device) -> Iterator[str]:
    """One line per implementation of each backend."""
    yield f"backends for {family.name} on {device.gfx}"
    width = max(map(len, failures), default=0)
    for name, reasons in failures.items():
        if not reasons:
            yield f"  {name:<{width}} none: the family has no implementation of this kind"
        for reason in reasons:
            yield f"  {name:<{width}} {'available' if reason is None else f'unavailable: {reason}'}"


def _common_failure(candidates: CandidateFilter, space: Space) -> str | None:
    """The most frequent reason if no configuration fits, else None."""
    try:
        listed = candidates.list_configs(space)
    except PluginError as raised:
        return str(raised)
    reasons: Counter[str] = Counter()
    for candidate, failure in map(candidates.candidate, listed.configs):
        result = failure or candidates.check(candidate, listed.missing, keep_dominated=True)
        if result.status is None:
            return None
        reasons[result.reason] += 1
    return listed.missing or (reasons.most_common(1)[0][0] if reasons else _no_configs_reason(candidates))


def _no_configs_reason(candidates: CandidateFilter) -> str:
    """Why an implementation has no configuration: its kernels need a GPU, or the space has none for this device."""
    from gemmpipe.launch.launch import KernelImplementation

    if candidates.device.kind == "cpu" and isinstance(candidates.implementation, KernelImplementation):
        return "no GPU: Triton compiles for GPUs"
    return f"the space has no configuration of it for {candidates.device.gfx}"


def _readiness(failures: Mapping[str, list[str | None]]) -> str:
    """The verdict: how many of the family's backends can be timed here, and the reasons of the others, grouped."""
    failures = {name: reasons for name, reasons in failures.items() if reasons}
    ready = [name for name, reasons in failures.items() if None in reasons]
    others: dict[str, list[str]] = {}
    for name, reasons in failures.items():
        if name not in ready:
            reason = next(text for text in reasons if text)
            others.setdefault(reason.partition(":")[0], []).append(name)
    why = "".join(f"; {', '.join(names)}: {reason}" for reason, names in others.items())
    named = f" ({', '.join(ready)})" if ready else ""
    return f"ready: {len(ready)} of {counted(len(failures), 'backend')}{named}{why}"


_SMALL_PRODUCTS = ("shapes=list", "shapes.items=[{M: [1, 64], N: 512, K: 1024}]")
"""What is tuned first on a CPU, as README has it."""


def _other_kernel(plan: "Plan", device: Device, problem: Problem) -> str:
    """On a CPU a kernel whose operands libraries multiply as stored, where those of the default one are converted.

    Empty elsewhere, and where anything was typed that belongs to a kernel.
    """
    typed = {override.lstrip("~+").partition("=")[0].partition(".")[0] for override in plan.overrides}
    if device.kind != "cpu" or typed & {"kernel", "shapes", "space"}:
        return ""
    if is_multiplied_as_stored(plan.family.spec(problem), device.gfx):
        return ""
    sizes = dict.fromkeys(("M", "N", "K"), 64)
    for name, module in ConfigFolders(config_dir=None).kernels.items():
        family = load_family(module)
        with suppress(UserError):  # a product with other sizes, such as experts
            like = make_problem(family, sizes, plan.defaults, device.gfx, name)
            if is_multiplied_as_stored(family.spec(like), device.gfx):
                return name
    return ""


def _other_kernel_note(family: Family, other: str) -> str:
    return (
        f"libraries of a CPU convert the operands of {family.name} before they multiply them; those of {other} they "
        f"multiply as stored"
    )


def _next_command(
    plan: "Plan", device: Device, failures: Mapping[str, list[str | None]], other_kernel: str = ""
) -> str:
    """The command that fits this machine: what was typed for doctor, on a CPU with two small products."""
    if not any(None in reasons for reasons in failures.values()):
        return "gemmpipe --help backend # no backend can be timed: choose others, or install what is missing"
    typed = [each for each in plan.overrides if not each.startswith(("~", *_OF_TABLES))]
    keys = {override.partition("=")[0] for override in typed}
    if "kernel" not in keys:
        typed.append(f"kernel={other_kernel or plan.family.name}")
    if "shapes" not in keys:
        typed += ["shapes=llama8b"] if device.kind != "cpu" else _SMALL_PRODUCTS
    if "output" not in keys and device.kind == "cpu":
        typed.append("output=tuned")  # not into the shipped tables of a checkout
    return shell_join(["gemmpipe", *typed])


def _command_with_problems(plan: "Plan") -> str:
    """`doctor` again, with a source of problems that is named after the family, if there is one."""
    named = _own_shapes(plan.family)
    typed = [each for each in plan.overrides if each.partition("=")[0] != "shapes" and not each.startswith("~")]
    return shell_join(["gemmpipe", "doctor", *typed, *(f"shapes={name}" for name in named[:1])])


def _own_shapes(family: Family) -> list[str]:
    """The sources of problems that are named after a family."""
    return [name for name in ConfigFolders(config_dir=None).options["shapes"] if name.startswith(family.name)]


def _needed(plan: "Plan", error: UserError) -> str:
    """What to give where the source has no problem: the default one may be a model without products of this kernel."""
    if any(override.startswith("shapes") for override in plan.overrides):
        return f" without a problem: {error}"
    example = "".join(f", such as shapes={name}" for name in _own_shapes(plan.family)[:1])
    reason = str(error).rpartition(": ")[2].partition(",")[0]
    return f": the default shapes have no problem of this kernel ({reason}); expected shapes= with some{example}"


def _table_lines(family: Family, device: Device) -> Iterator[str]:
    yield f"tuned tables of {family.name}, in look-up order"
    from gemmpipe.runtime.tables import table_layers

    named, *folders = table_layers(family)
    yield f"  {table_variable(family)}{'' if named else ' is not set'}"
    yield from (f"    {line}" for line in _table_summary(named, family, device))
    if only_given_tables():
        yield f"  {ONLY_GIVEN} is set: neither the user's nor the shipped tables are read"
    for folder, paths in zip((user_tables(), shipped_tables()), folders, strict=False):
        yield from (f"  {line}" for line in _table_summary(paths or [folder / family.csv_name], family, device))
    yield from (f"  {line}" for line in unused_variables().values())


def _table_summary(paths: Iterable[Path], family: Family, device: Device) -> Iterator[str]:
    from gemmpipe.runtime.select import count_usable_rows
    from gemmpipe.tables import store

    for path in paths:
        if not path.is_file():
            yield f"{path}: not found"
            continue
        try:
            table = store.load(path, family)
        except (GemmpipeError, OSError) as error:
            yield f"{path}: cannot be used: {error}"
            continue
        count, reasons = count_usable_rows(family, table.rows, device)
        reasons["not timed"] += len(table.refused)
        why = [f"{reason} ({rows:,})" for reason, rows in reasons.most_common() if rows]
        more = [f"and {len(why) - _MAX_REASONS} more reasons"] if len(why) > _MAX_REASONS else []
        detail = f": {'; '.join([*why[:_MAX_REASONS], *more])}" if why else ""
        others = _other_models(table.rows, device)
        rows_text = counted(count + reasons.total(), "row")
        yield f"{path}: {rows_text}, {count:,} can run here{detail}{others}{_tuned_text(path)}"


def _other_models(rows: "Iterable[Row]", device: Device) -> str:
    """The other models of device on which rows of this one's gfx and cu_num were timed; they answer here too."""
    own = [row for row in rows if (row["gfx"], row["cu_num"]) == (device.gfx, device.cu_num)]
    found = Counter(str(row["device"]) for row in own if row.get("device") not in (None, "", device.name))
    return "".join(f"; {count:,} timed on {name}, not {device.name}" for name, count in found.most_common())


def _tuned_text(path: Path) -> str:
    """When the last run wrote into a table, as its sidecar has it."""
    try:
        times = [str(facts["time"]) for facts in read_runs(sidecar_path(path)).values() if "time" in facts]
        day = datetime.datetime.fromisoformat(max(times)).astimezone(datetime.UTC).date()
        days = (datetime.datetime.now(datetime.UTC).date() - day).days
    except (GemmpipeError, OSError, ValueError, TypeError, OverflowError):
        return ""
    age = "today" if days < 1 else f"{counted(days, 'day')} ago"
    return f"; tuned {day.isoformat()} ({age})"
