"""vLLM's plug-in, found by the entry point `vllm.general_plugins`: tuned rows in its linear layers and experts.

`register` runs in every process of vLLM, before a model is built: in the front end, in the engine and in the workers.
It touches no device, since the front end forks. Rows are looked up where layers are built, in the workers; there the
start line appears too. vLLM's compile cache gets one factor more, so that a graph without the plug-in is not loaded
with it, nor the other way round.
"""

import logging
import multiprocessing
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gemmpipe.core.errors import one_line
from gemmpipe.plugins.scope import LINEAR, MOE, QUANTISE, REPLAYS, Scope, inactive_line, read_scope, replays_line

VARIABLE = "GEMMPIPE_VLLM"
"""The environment variable with the scope: `linear`, `moe`, `quantise`, `replays`, or `off`."""
OLDEST, NEWEST = (0, 25), (0, 33)
"""The supported versions of vLLM, major and minor."""
CACHE_FACTOR = "gemmpipe_plugin"
"""The plug-in's entry among the environment factors of vLLM's compile cache."""
_LOG = logging.getLogger("vllm.gemmpipe")  # a child of vLLM's logger, with its handlers and format
_DONE: list[bool] = []


def register() -> None:
    """The entry point: set the plug-in up once per process. It raises nothing: a failure is one warning."""
    if _DONE:
        return
    _DONE.append(True)
    try:
        reason = set_up()
    except Exception as error:  # noqa: BLE001 - the plug-in must not stop an engine
        _LOG.warning("%s", inactive_line("vLLM", f"set-up failed: {one_line(error)}"))
        return
    if reason and multiprocessing.parent_process() is None:  # once, not in every worker
        log_line(reason)


def log_line(line: str) -> None:
    """Log a line; vLLM since 0.33 sets its logging up after the plug-ins, so that the line goes to stderr as it is."""
    if _LOG.hasHandlers():
        _LOG.info("%s", line)
    else:
        logging.StreamHandler().handle(_LOG.makeRecord(_LOG.name, logging.INFO, __file__, 0, line, (), None))


def set_up() -> str:
    """Install what the scope allows; returns the line with the reason if nothing is installed."""
    scope = vllm_scope()
    version = str(import_module("vllm").__version__)
    engine = f"vLLM {version}"
    if reason := inactive_reason(scope, version):
        return inactive_line(engine, reason, scope.errors)
    from gemmpipe.plugins.engine_dispatch import look_up_unless
    from gemmpipe.plugins.operators import register_plugin_operators
    from gemmpipe.plugins.vllm_notice import NOTICE

    register_plugin_operators()
    look_up_unless(is_loading)
    NOTICE.start(engine, scope)
    installed = [
        NOTICE.attempt(LINEAR, "gemmpipe.plugins.vllm_linear"),
        NOTICE.attempt(MOE, "gemmpipe.plugins.vllm_experts"),
        NOTICE.attempt(QUANTISE, "gemmpipe.plugins.vllm_quantise"),
    ]
    replays = NOTICE.attempt(REPLAYS, "gemmpipe.launch.replays", "shorten_replays")
    if replays and not any(installed):
        return replays_line(engine, NOTICE.reasons, scope.errors)
    if not any(installed):
        return inactive_line(engine, "; ".join(dict.fromkeys(NOTICE.reasons.values())), scope.errors)
    add_cache_factor(scope)
    return ""


def is_loading() -> bool:
    """True while vLLM loads weights into the pool that a sleep of level 2 discards; MLA calls a layer then."""
    allocator = getattr(sys.modules.get("vllm.device_allocator.cumem"), "CuMemAllocator", None)
    return getattr(getattr(allocator, "instance", None), "current_tag", "") == "weights"


def vllm_scope() -> Scope:
    """The scope in the environment, of vLLM's kinds."""
    return read_scope(VARIABLE, (QUANTISE, REPLAYS))


def inactive_reason(scope: Scope, version: str) -> str:
    """Why the plug-in does nothing in this process; empty if it may be installed."""
    if scope.off:
        return scope.reason(LINEAR)
    if reason := unsupported_version(version):
        return reason
    platform = import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        return f"no CUDA platform, but {platform.device_type or 'none'}"
    if import_module("vllm.envs").VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and the kernel of a row depends on M"
    return ""


def unsupported_version(version: str) -> str:
    """The reason if this version of vLLM is not supported; empty if it is."""
    expected = f"expected {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"version '{version}' is unknown, {expected}"
    if not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return f"version {version} is not supported, {expected}"
    return ""


def cache_factor(scope: Scope) -> str:
    """The key of compiled graphs: the plug-in's presence, its version, its scope and the tables in use."""
    import gemmpipe
    from gemmpipe.plugins.tuned_products import tables_digest

    compiled = (kind for kind in scope.kinds if kind != REPLAYS)  # which change nothing in a graph
    return f"{gemmpipe.__version__} {','.join(compiled)} {tables_digest()}"


def add_cache_factor(scope: Scope) -> None:
    """Add the factor to those that vLLM hashes into the folder of its compile cache.

    vLLM calls each entry of `environment_variables` for the hash of both of its caches (of pieces, and of whole
    models compiled ahead of time).
    """
    variables: dict[str, Callable[[], Any]] = import_module("vllm.envs").environment_variables
    variables[CACHE_FACTOR] = lambda: cache_factor(scope)
