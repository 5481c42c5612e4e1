"""The tables between stages: their columns, declared once."""

PROBLEMS = ("problem", "weight", "layer")
"""Plus the family's key columns."""

SHORTLIST = ("problem", "candidate", "libtype", "config", "role", "status", "us", "reason")
"""`role`: `library`, `incumbent`, `compared` (timed to the end), `unlike` (that, and it computes something else) or
empty; `us` the screening time or missing."""

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
    "err_ratio",
    "extra_weight_bytes",
    "shared",
    "error",
)
"""Every candidate's last trial at its furthest stage; `samples_us` is a tuple, sample i belongs to round i in bench."""

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
    "ratio_low",
    "ratio_high",
    "near_ties",
    "policy",
    "run_id",
    "device",
)
"""The result columns of a native tuned table, after `gfx, cu_num` and the family's key.

`device` is the product's name, since `gfx` and `cu_num` are the same on an H100 and an H200."""

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
    "ratio",
    "incumbent_us",
    "runner_up",
    "runner_up_us",
    "noise_pct",
    "extra_weight_bytes",
    "weight",
    "layer",
    "reason",
)
"""Plus the family's key columns. `format` and `bucket` are empty for a problem's own selection; for a bucket's,
M is missing and `us` is the call-weighted sum over the bucket's Ms. `ratio` is selected over baseline, paired;
`noise_pct` how far the run cannot tell the selected from the runner-up."""

RECORDED = ("place", "extra")
"""What selections that were read from tables have beside their columns: `file:line`, and foreign columns as a dict."""

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
"""What was compiled ahead; `rows` of the table need it, `cached` was found compiled."""

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
"""What became of a table's rows; `verdict` is `holds` or `stale`, `drift` is now over recorded, `ratio` winner over
baseline, paired; `called_*` are of the layout of x's scales (`row`, `column`) in which a call costs most."""

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
"""A row's call through the run time beside its own launch, in one layout of x's scales; `called_ratio` is call over
launch, paired. `called_error` says why there is no time."""
