"""Processes that multiprocessing starts anew (`spawn`, `forkserver`) count their products as forked ones do."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gemmpipe.runtime.captured import Recorder, recorder

Counting = Callable[[Recorder], AbstractContextManager[object]]
"""What counts into a recorder within its block; its module is imported in the new process."""


@contextmanager
def counted_when_spawned(path: Path, counting: Counting) -> Iterator[None]:
    """Within the block every process that is started anew runs under `counting` and adds to the file of `path`."""
    own = "__reduce_ex__" in vars(BaseProcess)
    before = BaseProcess.__reduce_ex__

    def reduced(process: BaseProcess, protocol: Any) -> tuple[object, ...]:
        # A process is pickled only to be started anew.
        make, arguments, state = (*before(process, protocol), None)[:3]
        return _revived, (path, counting, make, arguments, state)

    setattr(BaseProcess, "__reduce_ex__", reduced)  # noqa: B010  mypy knows it as a method
    try:
        yield
    finally:
        if own:
            setattr(BaseProcess, "__reduce_ex__", before)  # noqa: B010
        else:
            delattr(BaseProcess, "__reduce_ex__")


def _revived(
    path: Path, counting: Counting, make: Callable[..., BaseProcess], arguments: tuple[Any, ...], state: Any
) -> BaseProcess:
    """In the new process: the same, with what it runs counted."""
    process = make(*arguments)
    restore = getattr(process, "__setstate__", None) or vars(process).update
    restore(state or {})
    run = process.run

    def counted() -> None:
        kept = recorder(path)
        try:
            with counting(kept):
                run()
        finally:
            kept.flush()

    process.run = counted  # type: ignore[method-assign]
    return process
