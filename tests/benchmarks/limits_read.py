"""A Triton kernel that only reads a weight, and the ways in which limits.py launches it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gemmpipe.core.data import Device
from gemmpipe.family import Weights

VECTOR = 4  # elements of 4 bytes: 16 bytes
LINE = 8  # vectors in 128 bytes: a program's part begins at a line


@triton.jit
def read_part(src, sums, vectors, part, VECTORS: tl.constexpr, STAGES: tl.constexpr):
    """A program sums a part of 16-byte vectors of 32-bit integers, VECTORS in each step."""
    begin = tl.program_id(0) * part
    end = tl.minimum(begin + part, vectors)
    lanes, elements = tl.arange(0, VECTORS)[:, None], tl.arange(0, 4)[None, :]
    total = tl.zeros([VECTORS], tl.int32)
    for at in tl.range(begin, end, VECTORS, num_stages=STAGES):
        total += tl.sum(tl.load(src + (at + lanes) * 4 + elements, mask=at + lanes < end, other=0), axis=1)
    tl.store(sums + tl.program_id(0), tl.sum(total))


@dataclass(frozen=True, kw_only=True)
class ReadWay:
    """A launch of `read_part`: programs per multiprocessor, warps, 16-byte loads per thread and step, stages."""

    each: int
    warps: int
    loads: int
    stages: int = 1

    @property
    def name(self) -> str:
        """Its values."""
        return f"read programs={self.each}/unit warps={self.warps} loads={self.loads} stages={self.stages}"

    @property
    def step(self) -> int:
        """Vectors per program and step."""
        return 32 * self.warps * self.loads

    def launch(self, source: torch.Tensor, sums: torch.Tensor) -> Callable[[], object]:
        """A launch that reads int32 `source`, whose elements are a multiple of a vector, with a program per sum."""
        vectors, programs = source.numel() // VECTOR, sums.numel()
        part = -(-vectors // (programs * LINE)) * LINE
        options = {"VECTORS": self.step, "STAGES": self.stages, "num_warps": self.warps}
        return lambda: read_part[(programs,)](source, sums, vectors, part, **options)

    def launches(self, weights: Sequence[Weights], device: Device) -> list[Callable[[], object]]:
        """A launch for each weight. Raises ValueError if the first one's sum is wrong."""
        sources = [each.w.reshape(-1).view(torch.int32) for each in weights]
        sums = torch.zeros(self.each * device.cu_num, dtype=torch.int32, device=device.torch_name)
        found = [self.launch(source, sums) for source in sources]
        found[0]()
        if (int(sums.sum(dtype=torch.int64)) - int(sources[0].sum(dtype=torch.int64))) % 2**32:
            raise ValueError("the sum is wrong")
        return found


WAYS = (
    *(ReadWay(each=1, warps=16, loads=loads) for loads in (2, 4, 8)),
    *(ReadWay(each=2, warps=8, loads=loads) for loads in (2, 4, 8)),
    *(ReadWay(each=4, warps=8, loads=loads) for loads in (1, 2)),
    ReadWay(each=4, warps=4, loads=8),
    *(ReadWay(each=8, warps=4, loads=loads) for loads in (2, 4)),
    *(ReadWay(each=each, warps=8, loads=4, stages=4) for each in (1, 2, 4)),
)
