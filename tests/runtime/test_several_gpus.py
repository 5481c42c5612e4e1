"""Several devices in one process: each call runs on its operands' device, with that device's rows."""

import json
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import cpu_device, gpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.family import load_family
from gemmpipe.family.reference import error_ratio
from gemmpipe.runtime import gemm_a8w8_blockscale, gemm_a16w16, prepare_weight, release_prepared, reload
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.runtime.weight_cache import WEIGHT_CACHE
from gemmpipe.tables.store import render

N, K = 256, 512
TILES = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
    "cache_modifier": "",
}
COPY = {"method": "bfloat16_copy"}
WriteRows = Callable[..., None]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def two(test: Callable[..., None]) -> Callable[..., None]:
    """A test of two GPUs."""
    return pytest.mark.gpu(pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")(test))


def row(device: Device, libtype: str, knobs: dict[str, Scalar], **others: Scalar) -> dict[str, Scalar]:
    key: dict[str, Scalar] = {"gfx": device.gfx, "cu_num": device.cu_num, "M": 16, "N": N, "K": K, "bias": False}
    key |= {"dtype": "bfloat16", "outdtype": "bfloat16", "scaleAB": False, "bpreshuffle": False, **others}
    return {**key, "libtype": libtype, "config": json.dumps(knobs), "us": 1.0}


@pytest.fixture
def write(tmp_path, monkeypatch) -> Iterator[WriteRows]:
    """One table with these rows; two GPUs of one model share a row."""

    def made(*rows: dict[str, Scalar], family: str = "a16w16") -> None:
        unique = {(each["gfx"], each["cu_num"]): each for each in rows}
        path = tmp_path / "several.csv"
        path.write_text(render(list(unique.values()), load_family(family), ()))
        monkeypatch.setenv(f"GEMMPIPE_CONFIG_{family.upper()}", str(path))
        reload()

    yield made
    reload()


def operands(place: str, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(16, K, generator=generator), torch.randn(N, K, generator=generator) * K**-0.5
    return x.bfloat16().to(place), w.bfloat16().to(place)


def quantised(index: int) -> tuple[torch.Tensor, ...]:
    """fp8 operands on a GPU with block scales of 1: (x, w, x_scale, w_scale)."""
    x, w = (each.to(torch.float8_e4m3fn) for each in operands(f"cuda:{index}", seed=index))
    return x, w, torch.ones(16, K // 128, device=x.device), torch.ones(N // 128, K // 128, device=x.device)


def right(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    assert out.device == x.device
    assert error_ratio(out, x.float() @ w.float().T, 0.02, 0.02) < 0.01


@pytest.mark.parametrize("place", [pytest.param("cpu"), pytest.param("cuda:0", marks=gpu)])
def test_each_device_has_rows_of_its_own(write, place: str) -> None:
    """With one table in one process the CPU's row is used on the CPU, a GPU's on that GPU."""
    rows = [row(cpu_device(), "torch", {"method": "mm"})]
    write(*rows, *([row(gpu_device(0), "triton", {**TILES, "NUM_KSPLIT": 4})] if place != "cpu" else []))
    for each in dict.fromkeys(("cpu", place)):
        x, w = operands(each)
        for _ in range(3):
            right(gemm_a16w16(x, w), x, w)
    assert set(LOG.steps.values()) == {"exact"}
    assert len(dispatch_of("a16w16").calls) == len({"cpu", place})


@two
@pytest.mark.parametrize(
    ("libtype", "knobs"),
    [("triton", {**TILES, "NUM_KSPLIT": 1}), ("triton", {**TILES, "NUM_KSPLIT": 4}), ("torch", {"method": "mm"})],
)
def test_calls_on_two_gpus_in_turn_and_the_current_one_stays(write, libtype: str, knobs: dict[str, Scalar]) -> None:
    write(*(row(gpu_device(index), libtype, knobs) for index in (0, 1)))
    given = [operands(f"cuda:{index}", seed=index) for index in (0, 1)]
    for current in (0, 1):
        with torch.cuda.device(current):
            for turn in range(6):
                x, w = given[turn % 2]
                right(gemm_a16w16(x, w), x, w)
                assert torch.cuda.current_device() == current
            outs = [gemm_a16w16(*given[turn % 2]) for turn in range(40)]  # without waiting in between
            for turn, out in enumerate(outs):
                right(out, *given[turn % 2])
    assert set(LOG.steps.values()) == {"exact"}
    assert torch.cuda.current_device() == 0


@two
def test_a_weight_is_prepared_on_its_device(write) -> None:
    eight: dict[str, Scalar] = {"dtype": "float8_e4m3fn"}
    write(*(row(gpu_device(index), "torch", COPY, **eight) for index in (0, 1)), family="a8w8_blockscale")
    given = [quantised(index) for index in (0, 1)]
    assert [prepare_weight(w, w_scale) for _, w, _, w_scale in given] == [1, 1]
    assert torch.cuda.current_device() == 0
    assert {entry.extra.device for entry in WEIGHT_CACHE.entries.values()} == {w.device for _, w, *_ in given}
    for each in given * 2:
        right(gemm_a8w8_blockscale(*each), *each[:2])
    assert len(WEIGHT_CACHE.entries) == 2
    assert release_prepared(given[0][1]) == 1
    assert len(WEIGHT_CACHE.entries) == 1
    for each in given:
        right(gemm_a8w8_blockscale(*each), *each[:2])
    assert set(LOG.steps.values()) == {"exact"}


@two
def test_operands_of_two_gpus_are_refused(write) -> None:
    write()
    x, w = operands("cuda:0")[0], operands("cuda:1")[1]
    with pytest.raises(UserError, match=r"w is on cuda:1, expected cuda:0 as x"):
        gemm_a16w16(x, w)


@two
@pytest.mark.parametrize("splits", [1, 4])
def test_a_thread_a_gpu(write, splits: int) -> None:
    write(*(row(gpu_device(index), "triton", {**TILES, "NUM_KSPLIT": splits}) for index in (0, 1)))
    failed: list[BaseException] = []
    start = threading.Barrier(4)

    def work(index: int) -> None:
        try:
            x, w = operands(f"cuda:{index % 2}", seed=index)
            start.wait(timeout=600)
            for _ in range(50):
                out = gemm_a16w16(x, w)
            right(out, x, w)
            assert torch.cuda.current_device() == 0
        except BaseException as error:  # noqa: BLE001 - shown in the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@two
@pytest.mark.parametrize("splits", [1, 4])
def test_a_graph_on_the_second_gpu_during_calls_on_the_first(write, splits: int) -> None:
    write(*(row(gpu_device(index), "triton", {**TILES, "NUM_KSPLIT": splits}) for index in (0, 1)))
    given = [operands(f"cuda:{index}", seed=index) for index in (0, 1)]
    for x, w in given:
        right(gemm_a16w16(x, w), x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):  # torch keeps one stream, of whichever GPU was first
            captured = gemm_a16w16(*given[1])
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        right(gemm_a16w16(*given[0]), *given[0])
        torch.cuda.synchronize(1)
        right(captured, *given[1])
    assert torch.cuda.current_device() == 0
