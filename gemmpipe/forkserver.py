"""Where the processes of a run are forked from: what all of them import is imported there once (2 to 3 s)."""

import multiprocessing
from multiprocessing import forkserver as server
from multiprocessing.context import ForkServerContext


def forkserver() -> ForkServerContext:
    """The context to start processes in; whoever starts the first waits for the imports."""
    # In joblib's processes the default is a method of its own, which processes started by any other cannot look up.
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("forkserver", force=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gemmpipe.preloaded"])
    return context


def begin() -> None:
    """Start to import there, beside what the caller imports meanwhile."""
    forkserver()
    server.ensure_running()
