"""The process's dispatches, one a family: plain ones, and while products are captured ones that count."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gemmpipe.family import load_family
from gemmpipe.runtime.captured import Recorder, asked_for
from gemmpipe.runtime.dispatch import Dispatch
from gemmpipe.runtime.operands import Given, Optional, orders_of, problem_of, with_order
from gemmpipe.runtime.watching import layer, quiet


@dataclass(frozen=True, kw_only=True)
class Recorded(Dispatch):
    """A dispatch that also counts every product it is asked for."""

    recorder: Recorder

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        x_scale: Optional,
        w_scale: Optional,
        bias: Optional,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """As the plain one."""
        given = Given(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
        return self._counted(given, lambda: super(Recorded, self).__call__(x, w, x_scale, w_scale, bias, out_dtype))

    def torchs_own(self, given: Given, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As the plain one."""
        return self._counted(given, compute)

    def _counted(self, given: Given, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        with quiet():
            out = compute()
        if out.numel() and given.x.shape[-1]:
            with self.recorder.keeping_errors():
                orders = orders_of(given.x_scale)  # one row or column lies in both, and says nothing
                problem = with_order(problem_of(self.family, given, self.flag), orders if len(orders) == 1 else ())
                self.recorder.add(self.family.name, {**dict(problem.key), "op": self.family.entry_point}, layer())
        return out


EAGER: dict[str, Dispatch] = {}
"""The process's dispatches by family, for calls outside compiled graphs; read without a function call."""
_BORROWED: dict[str, Dispatch] = {}
OTHERS: dict[tuple[object, ...], Dispatch] = {}
"""Those of calls that say more than their operands: a configuration, an output to write into."""
_LOCK = threading.Lock()


def dispatch_of(family: str, *, borrowed: bool = False) -> Dispatch:
    """The process's dispatch of a family, made when first asked for; `family+column`: with that key column true."""
    held = _BORROWED if borrowed else EAGER
    found = held.get(family)
    if found is None:
        with _LOCK:
            recorder = asked_for()
            kind = Dispatch if recorder is None else partial(Recorded, recorder=recorder)
            name, _, flag = family.partition("+")
            found = held.setdefault(family, kind(family=load_family(name), flag=flag, borrowed=borrowed))
    return found


def reload() -> None:
    """Read the tables again at the next call, and find every call anew: after tuning, or a changed environment."""
    with _LOCK:
        EAGER.clear()
        _BORROWED.clear()
        OTHERS.clear()
