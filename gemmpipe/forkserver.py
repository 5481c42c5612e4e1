"""Where the processes of a run are forked from: what all of them import is imported there once (2 to 3 s)."""

import multiprocessing
from multiprocessing import forkserver as server
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext

from gemmpipe.interrupt import left_to_the_driver


def forkserver() -> ForkServerContext:
    """The context to start processes in: begins to import there, beside what the caller imports meanwhile."""
    # In joblib's processes the default is a method of its own, which processes started by any other cannot look up.
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("forkserver", force=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gemmpipe.preloaded"])
    for ensure_running in (resource_tracker.ensure_running, server.ensure_running):  # the first lifts the block
        with left_to_the_driver():
            ensure_running()
    return context
