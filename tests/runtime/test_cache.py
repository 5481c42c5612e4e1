"""The first call of a key: one look-up and one miss, for any number of threads and any failure."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gemmpipe.runtime import cache, fused_moe, gemm_a16w16
from gemmpipe.runtime.binding import NotCapturable
from gemmpipe.runtime.dispatch import EAGER, dispatch_of
from gemmpipe.runtime.selection_log import LOG

Product = Callable[[], torch.Tensor]
MM, PACKED = {"method": "mm"}, {"method": "float32_packed"}


def plain() -> torch.Tensor:
    return gemm_a16w16(torch.ones(3, 64).bfloat16(), torch.ones(32, 64).bfloat16())


def experts() -> torch.Tensor:
    x, w1, w2 = torch.ones(3, 32), torch.ones(4, 32, 32), torch.ones(4, 32, 16)
    ids = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32)
    return fused_moe(x.bfloat16(), w1.bfloat16(), w2.bfloat16(), torch.full((3, 2), 0.5), ids)


@pytest.mark.parametrize(("family", "product"), [("a16w16", plain), ("fmoe", experts)])
def test_of_several_threads_is_found_once(family: str, product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    missed: list[object] = []
    selections = cache.lookup_results

    def slowly(*arguments: object) -> Iterator[object]:
        looked.append(arguments)
        time.sleep(0.2)  # the other thread calls meanwhile
        return selections(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "lookup_results", slowly)
    monkeypatch.setattr(cache.online, "missed", lambda *arguments: missed.append(arguments))
    start = threading.Barrier(2)

    def work(_: int) -> torch.Tensor:
        start.wait(timeout=600)
        return product()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(work, range(2))
    assert torch.equal(one, other)
    assert (len(looked), len(missed), len(dispatch_of(family).calls)) == (1, 1, 1)
    assert [untuned.calls for untuned in LOG.untuned.values()] == [2]
    product()
    assert [untuned.calls for untuned in LOG.untuned.values()] == [3]


def test_a_rule_that_fails_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate that runs is counted, not those that failed."""
    rules = cache.lookup_results

    def twice(*arguments: object) -> Iterator[object]:
        (last,) = rules(*arguments)  # type: ignore[arg-type]
        yield from (last, last)

    failures = iter([RuntimeError("no such instruction")])
    bind = dispatch_of("a16w16")._bind

    def failing(self: object, *arguments: object) -> object:
        for failure in failures:
            raise failure
        return bind(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "lookup_results", twice)
    monkeypatch.setattr("gemmpipe.runtime.dispatch.Dispatch._bind", failing)
    plain()
    assert [untuned.calls for untuned in LOG.untuned.values()] == [1]


@pytest.mark.parametrize(("family", "product"), [("a16w16", plain), ("fmoe", experts)])
def test_a_graph_after_new_tables_has_the_earlier_call(
    family: str, product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled or loaded in a capture; if the call must prepare weights, the fallback runs."""
    expected = product()
    dispatch = EAGER[family]
    ((key, before),) = dispatch.calls.items()
    assert dispatch.reload_tables() == 1
    monkeypatch.setattr(cache, "lookup_results", None)
    monkeypatch.setattr(cache, "is_capturing", lambda device: True)
    assert torch.equal(product(), expected)
    assert not dispatch.calls

    def unprepared(*operands: object) -> torch.Tensor:
        raise NotCapturable

    dispatch._outdated[key] = unprepared
    assert torch.equal(product(), expected)
    monkeypatch.undo()
    assert torch.equal(product(), expected)
    assert dispatch.calls[key] is not before


def test_a_workload_of_ever_new_shapes_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_CALLS", 4)
    w = torch.ones(8, 64).bfloat16()
    for rows in range(1, 20):
        gemm_a16w16(torch.ones(rows, 64).bfloat16(), w)
        if rows == 3:
            EAGER["a16w16"].reload_tables()
    dispatch = EAGER["a16w16"]
    assert max(len(held) for held in (dispatch.calls, dispatch._missed, dispatch._outdated)) <= 4
