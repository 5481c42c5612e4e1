"""`gemmpipe doctor`: versions, devices, backends with why one is unavailable, and the tables that are read."""

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device
from gemmpipe.core.errors import EnvironmentProblem, GemmpipeError
from gemmpipe.core.events import Events, counted
from gemmpipe.core.paths import shipped_tables, user_tables
from gemmpipe.family import Family
from gemmpipe.family.environment import ONLY_GIVEN, only_given_tables, table_variable, unused_variables
from gemmpipe.family.guard import PluginError
from gemmpipe.family.space import Space
from gemmpipe.stages.screen.candidates import CandidateFilter

if TYPE_CHECKING:
    from gemmpipe.pipeline.plan import Plan

_MAX_REASONS = 3
"""Reasons why rows cannot run: the most frequent ones are shown."""
_PACKAGES = ("torch", "triton", "hydra-core", "omegaconf", "pandas", "nvidia-ml-py")


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
    for line in (*_backend_lines(plan, devices[0]), *_table_lines(plan.family, devices[0])):
        events.emit("line", line)
    return 0


def _version_lines() -> Iterator[str]:
    yield "versions"
    yield f"  gemmpipe {_version('gemmpipe')}, python {platform.python_version()}, {platform.platform(terse=True)}"
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


def _backend_lines(plan: "Plan", device: Device) -> Iterator[str]:
    """One line per implementation of each backend: available if a configuration fits the first problem."""
    yield f"backends for {plan.family.name} on {device.gfx}"
    problems = plan.source.problems(plan.family, plan.defaults, device.gfx)
    spec = plan.family.spec(problems[0])
    for name, backend in plan.backends.items():
        found = backend.implementations(plan.family)
        if not found:
            yield f"  {name:<12} none: the family has no implementation of this kind"
        for implementation in found:
            candidates = CandidateFilter(implementation=implementation, spec=spec, device=device)
            reason = _common_failure(candidates, plan.space)
            yield f"  {name:<12} {'available' if reason is None else f'unavailable: {reason}'}"


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
    return listed.missing or (reasons.most_common(1)[0][0] if reasons else "no configurations")


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
        yield f"{path}: {counted(count + reasons.total(), 'row')}, {count:,} can run here{detail}"
