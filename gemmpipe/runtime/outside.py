"""Memory that outlives a compiled graph: made where no graph's pool takes part."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def outside_pools(make: Callable[[], T], device: torch.device) -> T:
    """`make()` in a thread of its own, complete when it returns.

    While a compiled graph warms up, all memory of its thread comes from the graph's pool, and later replays write
    over it.
    """
    if device.type != "cuda":
        return make()
    results: list[T] = []
    errors: list[BaseException] = []
    before = torch.cuda.current_stream(device)

    def work() -> None:
        try:
            with torch.no_grad(), torch.cuda.device(device):
                stream = torch.cuda.current_stream(device)
                stream.wait_stream(before)
                results.append(make())
                stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
