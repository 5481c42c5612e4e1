"""Columns of the tables between stages, and of a native tuned table."""

DEVICE_COLUMNS = ("gfx", "cu_num")
"""Columns of the device in tables of all programs; the family's key columns follow."""

PROBLEMS = ("problem", "weight", "layer")
"""Plus the family's key columns."""

SHORTLIST = ("problem", "candidate", "libtype", "config", "role", "status", "us", "reason")
"""`role`: `library`, `incumbent`, `compared` (always timed in full), `unlike` (the same, but it computes something
else) or empty; `us` is the screening time in microseconds or missing."""

TRIALS = (
    "problem",
    "candidate",
    "libtype",
    "config",
    "kernelName",
    "stage",
    "status",
    "us",
    "p20_us",
    "p80_us",
    "launches",
    "samples_us",
    "full_clocks_us",
    "err_ratio",
    "extra_weight_bytes",
    "shared",
    "no_dependent_launch",
    "error",
)
"""The last trial of every candidate at its last stage; `samples_us` is a tuple, in bench sample i is of round i.

`full_clocks_us` is missing unless the product is timed at both clocks, of which `us` then is the geometric mean."""

RESULT = (
    "libtype",
    "solidx",
    "splitK",
    "us",
    "kernelName",
    "err_ratio",
    "tflops",
    "bw",
    "config",
    "baseline_us",
    "p20_us",
    "p80_us",
    "ratio",
    "ratio_low",
    "ratio_high",
    "near_ties",
    "backend_ratios",
    "policy",
    "run_id",
    "device",
)
"""The result columns of a native tuned table, after `gfx, cu_num` and the family's key.

`ratio` is the row's time over the baseline's, paired by round (older tables have its interval alone); `backend_ratios`
has by backend the time of its fastest other finalist over the row's, as JSON (older tables lack it); `device` is the
product name, since an H100 and an H200 have equal `gfx` and `cu_num`."""

SELECTIONS = (
    "problem",
    "format",
    "bucket",
    "bucket_low",
    "bucket_high",
    "gfx",
    "cu_num",
    *RESULT,
    "candidate",
    "baseline",
    "baseline_config",
    "incumbent_us",
    "runner_up",
    "runner_up_us",
    "noise_pct",
    "extra_weight_bytes",
    "weight",
    "layer",
    "reason",
)
"""Plus the family's key columns. `format` and `bucket` are empty for the selection of one problem; for that of a
bucket, M is missing and `us` is the call-weighted sum over the bucket's Ms. `noise_pct` is the difference between
selected and runner-up that the run cannot resolve."""

MEMORY_OPTIONS = (
    "problem",
    "M",
    "libtype",
    "config",
    "us",
    "chosen_us",
    "speedup",
    "extra_weight_bytes",
    "extra_weight_pct",
    "weight",
    "shared",
)
"""Candidates that are faster than the selection with more memory for the weight than allowed: the fastest for each
amount. `extra_weight_pct`: of the stored weight, the least `max_extra_weight_pct` that allows it."""

FROM_FILE = "file:"
"""The begin of a `run_id` that is no run's: the time was read from this file, which names no run."""

RECORDED = ("place", "extra")
"""Additional columns of selections read from tables: `file:line`, and a dict of the table's unknown columns."""

BUILDS = (
    "gfx",
    "build",
    "kernel",
    "rows",
    "compile_s",
    "cached",
    "shared_bytes",
    "registers",
    "spills",
    "error",
)
"""Builds compiled ahead of time; `rows`: number of table rows that need it, `cached`: from Triton's disk cache."""

VERIFIED = (
    "problem",
    "place",
    "libtype",
    "config",
    "kernelName",
    "verdict",
    "recorded_us",
    "us",
    "drift",
    "baseline",
    "ratio",
    "ratio_low",
    "ratio_high",
    "called_us",
    "called_ratio",
    "called_low",
    "called_high",
    "called_layout",
    "reason",
)
"""Results of verifying a table's rows. `verdict` is `holds`, `stale`, `not compared` (correct; the recorded time was
taken otherwise than here) or `cannot run here` (this machine lacks the row's library); `drift` is the new time over the
recorded one, `ratio` winner over baseline, paired; `called_*` are for the slowest layout of x's scales (`row`,
`column`)."""

CALLED = (
    "problem",
    "candidate",
    "layout",
    "called_us",
    "bound_us",
    "called_ratio",
    "called_low",
    "called_high",
    "called_error",
)
"""A row's call through the runtime compared with its bare launch, in one layout of x's scales; `called_ratio` is call
over launch, paired. `called_error` is the reason for a missing time."""
