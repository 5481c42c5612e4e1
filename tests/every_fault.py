"""A run of all faults of tests/faulty, which mostly waits for limits: tests share it, the last one reads its end."""

import os
from pathlib import Path

import pytest
from soak_runs import Site, Started

from gemmpipe.family import load_family

Begun = tuple[Site, Started]
LITTLE_PCT = 100 * 700e6 / (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
"""Little more than torch itself needs, as a share of this machine's memory."""
EXPECTED = {
    "right": {"ok", "pruned"},
    "hang_once": {"ok", "pruned"},
    "die_once": {"ok", "pruned"},
    "raise_bind": {"launch_error"},
    "raise_launch": {"launch_error"},
    "raise_odd": {"launch_error"},
    "segfault": {"died"},
    "kill": {"died"},
    "exit": {"died"},
    "sys_exit": {"died"},
    "eat": {"died"},
    "no_memory": {"launch_error"},
    "hang": {"timeout"},
    "compile_error": {"compile_error"},
    "compile_crash": {"compile_error"},
    "compile_hang": {"compile_error"},
    "spoil_nan": {"incorrect"},
    "untouched": {"incorrect"},
    "permute": {"incorrect"},
    "spoil_row": {"incorrect"},
    "unfit": {"unsupported"},
}
"""The statuses of a candidate, by its fault."""
KINDS = [*EXPECTED, "wrong_at_8"]


def begin(folder: Path, arguments: tuple[str, ...]) -> Begun:
    """Start it in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(arguments[0].removeprefix("--config-dir="))
        site = Site(folder=folder, arguments=arguments, family=load_family("faulty"))
    started = site.start(
        f"space.KIND=[{','.join(KINDS)}]",
        "space.PACE_MS=[0]",
        "stages.screen.margin_pct=1e6",  # who is slow at a first look is checked all the same
        "profile=all.csv",
        f"executor.memory_pct={LITTLE_PCT}",
        "executor.compile_timeout_s=4",
        "executor.timeout_s=6",  # eating takes a while on a busy machine
        "cpu_budget_s=null",  # which ends a run whose limits alone take a minute
    )
    return site, started
