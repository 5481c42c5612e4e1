"""What aiter's tuned_fmoe.csv says of a choice beside its key and its time: both stages, apart."""

import json
from collections.abc import Mapping

from gemmpipe.data import Scalar
from gemmpipe.templates.two_stage import FUSED, knobs_of_stage

COLUMNS = ("block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2")
REST = ("us", "run_1stage", "xbf16", "flat", "tflops", "bw", "_tag")
"""What follows in aiter's newest header; older ones lack some of these."""


def cells(row: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    """The cells of a row of ours, from its knobs and its kernel's name; stages are not timed apart, so us1 is None."""
    config = json.loads(str(row.get("config") or "{}"))
    name, _, source = str(row.get("kernelName") or "").partition("@")
    if "BLOCK_SIZE_M" not in config:
        return {"kernelName1": name, "kernelName2": name}
    names = []
    for stage in (1, 2):
        own = knobs_of_stage(config, stage)
        tile = "x".join(str(own[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
        fused = "_fused" if stage == 1 and config.get(FUSED) else ""
        kernel, warps = ("routed", f"_w{own['num_warps']}") if "num_warps" in own else ("grouped", "")
        names.append(f"{kernel}{stage}{fused}_{tile}{warps}_s{own['num_stages']}@{source}")
    return {"block_m": config["BLOCK_SIZE_M"], "ksplit": 0, "kernelName1": names[0], "kernelName2": names[1]}
