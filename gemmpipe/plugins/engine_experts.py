"""Dispatch of an engine's mixtures of experts per number of tokens: a tuned row, or the engine's own kernels.

An engine calls its experts with the memory of the output, outside of compiled graphs: this is a plain function.
"""

import threading
from dataclasses import dataclass, field

import torch

from gemmpipe.core.data import Device, Problem
from gemmpipe.core.errors import UserError
from gemmpipe.family import GemmSpec
from gemmpipe.plugins.engine_dispatch import MAX_KEYS, EngineAnswers, may_look_up, tuned_call
from gemmpipe.runtime.cache import BindRequest, CallKey
from gemmpipe.runtime.dispatch import Dispatch, dispatch_of
from gemmpipe.runtime.moe import MixtureCall, RoutedOperands, run_mixture
from gemmpipe.runtime.operands import ALIGNMENT
from gemmpipe.runtime.select import RunnableCandidate
from gemmpipe.runtime.selection_log import LOG

FAMILY = "fmoe"
ENGINES_OWN = EngineAnswers(libtypes=frozenset({"vllm_function", "sglang_function"}))
"""Rows of the engines' own functions leave the experts to the engine."""


class NotAnswered(Exception):
    """No row answers for these experts and tokens: the engine's own kernels are used."""


class _Output(threading.local):
    """The output of this thread's current call."""

    tensor: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor


_OUTPUT = _Output()


@dataclass(frozen=True, kw_only=True)
class ExpertsDispatch(Dispatch):
    """The experts of an engine; the keys without a row are kept, so that they cost one look-up in a set."""

    declined: set[CallKey] = field(default_factory=set)

    def run(self, given: RoutedOperands, out: torch.Tensor) -> bool:
        """The mixture into `out` [tokens, N], contiguous; False if no row answers: `out` is unchanged then."""
        key = given.key
        if key in self.declined or not out.is_contiguous() or out.data_ptr() & ALIGNMENT:
            return False
        _OUTPUT.tensor = out
        try:
            computed = run_mixture(self, key, given)
        except NotAnswered:
            return False
        except UserError as error:  # no mixture of the family
            LOG.log_step(f"{self.family.name}: engine: {error}")
            self._decline(key)
            return False
        finally:
            _OUTPUT.tensor = None
        if computed.data_ptr() != out.data_ptr():  # a library's own memory
            out.copy_(computed.view(out.shape))
        return True

    def first_call(self, key: CallKey, request: BindRequest) -> torch.Tensor:
        """Run the first call of a key by a row, and keep it. Raises NotAnswered."""
        if not may_look_up(request.device):
            raise NotAnswered
        with self.lock:
            call: MixtureCall | None = self.calls.get(key)
            if call is None:
                tuned = tuned_call(self, request, ENGINES_OWN)
                if tuned is None:
                    self._decline(key)
                    raise NotAnswered
                if len(self.calls) >= MAX_KEYS:
                    self.calls.clear()
                self.calls[key] = tuned[0]
                return tuned[1]
        return request.run(call)

    def select_for_graph(
        self, problem: Problem, device: Device, alternative: str
    ) -> tuple[GemmSpec, RunnableCandidate]:
        """Raises NotAnswered: the candidate would prepare weights inside a graph capture."""
        raise NotAnswered

    def _decline(self, key: CallKey) -> None:
        if len(self.declined) >= MAX_KEYS:
            self.declined.clear()
        self.declined.add(key)


_EXPERTS: list[ExpertsDispatch] = []
_LOCK = threading.Lock()


def engine_experts() -> ExpertsDispatch:
    """The process's experts, made at the first use; they share the tables of the run time's dispatch."""
    if not _EXPERTS:
        plain = dispatch_of(FAMILY)
        plain.tables()
        with _LOCK:
            if not _EXPERTS:
                _EXPERTS.append(
                    ExpertsDispatch(family=plain.family, graph_pool=False, make_out=_OUTPUT.take, _tables=plain._tables)
                )
    return _EXPERTS[0]


def clear_experts() -> None:
    """Look up every key again at its next call: after tables have changed."""
    with _LOCK:
        _EXPERTS.clear()
