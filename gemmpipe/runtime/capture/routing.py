"""Counting the rows of each expert while products are captured, on the device and without waiting for it."""

import atexit
import logging
import os
from dataclasses import dataclass, field
from multiprocessing import util as mp_util
from pathlib import Path

import torch

from gemmpipe.core.errors import UserError, one_line, printable
from gemmpipe.launch.workspace import stream_is_capturing
from gemmpipe.sources.routing_counts import LayerSizes, add_counts, routing_file

_LOG = logging.getLogger("gemmpipe.runtime")


@dataclass(kw_only=True)
class RoutingCounter:
    """Counts of each layer's experts, added to a file when the process ends: reading them waits for the GPU.

    A call in a CUDA graph counts at every replay if its layer was called before the capture.
    """

    path: Path
    counts: dict[LayerSizes, torch.Tensor] = field(default_factory=dict)

    def add(self, topk_ids: torch.Tensor, sizes: tuple[int, int, int, int], layer: str) -> None:
        """Count the rows of one call; ids that are no expert here are left out. sizes: see routing_counts.SIZES."""
        key, experts = LayerSizes(sizes=sizes, layer=printable(layer)), sizes[2]
        held = self.counts.get(key)
        if held is None or held.device != topk_ids.device:
            if topk_ids.is_cuda and stream_is_capturing():
                return
            held = self.counts[key] = torch.zeros(experts + 1, dtype=torch.int64, device=topk_ids.device)
        ids = topk_ids.reshape(-1).long()
        places = torch.where((ids >= 0) & (ids < experts), ids, experts)
        held.scatter_add_(0, places, torch.ones_like(places))

    def flush(self) -> None:
        """Add the counts to the file; an error is a warning: it must not end the captured program."""
        taken, self.counts = self.counts, {}
        try:
            found = {key: held.tolist()[:-1] for key, held in taken.items()}
            if any(map(any, found.values())):
                add_counts(self.path, found)
        except (OSError, RuntimeError, UserError) as error:
            _LOG.warning("gemmpipe: %s: captured routings are not written: %s", self.path, one_line(error))

    def reset(self) -> None:
        """In a forked process: drop the parent's counts, which the parent writes."""
        self.counts = {}


_COUNTERS: dict[Path, RoutingCounter] = {}


def routing_counter(captured: Path) -> RoutingCounter:
    """The process's counter for a file of captured products; it writes when the process ends, in forked ones too."""
    path = routing_file(captured)
    if path not in _COUNTERS:
        counter = _COUNTERS[path] = RoutingCounter(path=path)
        atexit.register(counter.flush)
        os.register_at_fork(after_in_child=counter.reset)
        # Processes of multiprocessing end without atexit's functions.
        mp_util.register_after_fork(counter, lambda copy: mp_util.Finalize(None, copy.flush, exitpriority=0))
    return _COUNTERS[path]
