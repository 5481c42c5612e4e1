"""Tuning of a user's own kernel in Python: the functions of kernel authors' scripts, with gemmpipe's timing.

The kernels run in the caller's process without isolation: one that hangs blocks it. The pipeline instead tunes a user's
own family, from a folder for `--config-dir`, in killable workers.
"""

from gemmpipe.tune.configs import get_search_space, save_configs_to_json, tune_and_save_configs
from gemmpipe.tune.kernel import benchmark_config, tune_kernel

__all__ = ["benchmark_config", "get_search_space", "save_configs_to_json", "tune_and_save_configs", "tune_kernel"]
