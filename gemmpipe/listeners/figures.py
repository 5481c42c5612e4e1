"""The parameters and metrics that trackers of experiments log of a run."""

import re

from gemmpipe.listeners import RunOutcome, RunStart, product_names

_OPTIONS = ("kernel", "shapes", "search", "executor")
"""Groups with one option; groups of several (format, backend) are in the command, the device is known at the end."""


def parameters_of(run: RunStart) -> dict[str, str]:
    """The parameters of a run at its start; those of the device are known at its end."""
    options = {name: run.options[name] for name in _OPTIONS if run.options.get(name)}
    return {
        "pipeline": run.pipeline,
        **options,
        "kernel": run.kernel,
        "chain": " ".join(run.chain),
        "command": run.command,
    }


def metrics_of(outcome: RunOutcome) -> dict[str, float]:
    """The metrics of a run by name, which has letters, digits, `_`, `-`, `.` and `/` only.

    `wall_s`, `stage_s/NAME`, `products`, `unsolved`; by product `time_us/NAME` and `speedup/NAME`; by regime of M
    `geomean/NAME/speedup` and `geomean/NAME/floor_share`. A figure that was not measured is left out.
    """
    found: dict[str, float] = {"unsolved": float(len(outcome.unsolved)), "products": float(len(outcome.products))}
    if outcome.wall_s:
        found["wall_s"] = outcome.wall_s
    if outcome.exit_code is not None:
        found["exit_code"] = float(outcome.exit_code)
    found |= {f"stage_s/{_word(name)}": seconds for name, seconds in outcome.stage_s.items()}
    for name, product in product_names(outcome.products).items():
        found[f"time_us/{name}"] = product.time_us
        if product.speedup is not None:
            found[f"speedup/{name}"] = product.speedup
    for regime in outcome.regimes:
        label = _word(regime.label)
        if regime.speedup is not None:
            found[f"geomean/{label}/speedup"] = regime.speedup
        if regime.floor_share is not None:
            found[f"geomean/{label}/floor_share"] = regime.floor_share
    return found


def _word(text: str) -> str:
    """A label as part of a metric's name: `M <= 64` is `M_le_64`."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text.replace("<=", "le").replace(">=", "ge")).strip("_")
