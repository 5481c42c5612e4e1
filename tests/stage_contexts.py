"""The context of a stage for tests: no problems, formats or implementations but those that are given."""

from pathlib import Path
from typing import Any

from search_setup import EXHAUSTIVE

from gemmpipe.core.data import Device
from gemmpipe.core.events import Events
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.space import Space
from gemmpipe.journal import Journal, Record
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages import Context


def stage_context(folder: Path, family: Family, defaults: KernelDefaults, device: Device, **given: Any) -> Context:
    """A context with its run and its output in a folder; `given`: fields with other values."""
    fields: dict[str, Any] = {
        "source": InlineShapes(items=[]),
        "formats": (),
        "output": folder / "tuned",
        "retune": False,
        "events": Events(),
        "run_id": "r",
        "run_dir": folder / "run",
        "provenance": {},
        "space": Space(axes={}, when=(), pinned=()),
        "search": EXHAUSTIVE,
        "implementations": (),
        "incumbents": {},
        "policy": "p",
        "record": Record(),
        "pool_or_none": None,
        "check": lambda: None,
        **given,
    }
    journal = given.get("journal") or Journal(fields["run_dir"])
    return Context(family=family, defaults=defaults, device=device, **{**fields, "journal": journal})
