"""Tuning a kernel of one's own in Python: the names that kernel authors' scripts know, with gemmpipe's timing.

Nothing here is isolated: the kernels run in the caller's process, and one that hangs hangs it. A family of one's own in
a folder for `--config-dir` is tuned by the pipeline instead, in workers that may die.
"""

from gemmpipe.tune.configs import get_search_space, save_configs_to_json, tune_and_save_configs
from gemmpipe.tune.kernel import benchmark_config, tune_kernel

__all__ = ["benchmark_config", "get_search_space", "save_configs_to_json", "tune_and_save_configs", "tune_kernel"]
