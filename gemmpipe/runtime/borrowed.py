"""Split-K's workspace for compiled code: never in the memory of a compiled graph, which is its compiler's own."""

import sys
from threading import get_ident

import torch

from gemmpipe.launching.streams import capturing, current_index, stream_getter
from gemmpipe.launching.workspace import WORKSPACES, Space, grown, made
from gemmpipe.runtime.outside import outside_pools


class BorrowedSpaces:
    """One workspace a thread and stream, made outside of all graphs' pools and kept for good.

    torch.compile's graphs of a device share one pool, so they run one after another, as launches of one thread on one
    stream do. Theirs are captured after a warm-up of the same calls, on the same stream; a graph of the user's own
    may run beside any other, and gets a workspace of its own.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], Space] = {}
        self._outgrown: list[Space] = []
        """A graph captured before still writes there."""

    def take(self, parts: int, counters: int, device: torch.device) -> Space:
        """For launches on the stream that is current."""
        index = current_index(device)
        stream = stream_getter()(index) if index >= 0 else 0
        place = (get_ident(), index, stream)
        held = self._held.get(place)
        fits = held is not None and held.parts >= parts and held.counters >= counters
        if index >= 0 and capturing():
            if not _in_compilers_graph(index, stream):
                return WORKSPACES.space(parts, counters, device)
            return held if held is not None and fits else made(parts, counters, device)
        if held is None or not fits:
            if held is not None:
                self._outgrown.append(held)
            before = held
            held = self._held[place] = outside_pools(lambda: grown(before, 2 * parts, counters, device), device)
        return held


def _in_compilers_graph(index: int, stream: int) -> bool:
    """Whether this is the stream on which torch.compile captures its graphs."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager = trees.get_manager(index, create_if_none_exists=False)
    return manager is not None and manager.stream.cuda_stream == stream


BORROWED = BorrowedSpaces()
