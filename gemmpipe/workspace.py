"""Split-K's workspace: one a stream, shared by all launches on it, since those follow one another."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]


class Workspaces:
    """fp32 parts and int32 arrival counters by stream; they grow, and counters are 0 between launches."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Pair] = {}

    def take(self, parts: int, counters: int, device: "torch.device") -> Pair:
        """At least `parts` fp32 and `counters` int32 elements for launches on the stream that is current now."""
        import torch

        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The zeroing becomes part of the graph, so nothing outside of it may count on these.
            return _make(parts, counters, device)
        held = self._held.get((str(device), stream))
        if held is None or held[0].numel() < parts or held[1].numel() < counters:
            before = held or _make(0, 0, device)
            held = _make(max(parts, before[0].numel()), max(counters, before[1].numel()), device)
            self._held[(str(device), stream)] = held
        return held


def _make(parts: int, counters: int, device: "torch.device") -> Pair:
    import torch

    return (
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


WORKSPACES = Workspaces()
