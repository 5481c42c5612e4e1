"""The native table, from selections to the file and back."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.core.data import Device
from gemmpipe.core.events import Event, Events
from gemmpipe.core.schema import SELECTIONS
from gemmpipe.family import Family
from gemmpipe.formats import Target
from gemmpipe.formats.native import NativeCsv
from gemmpipe.tables import store

KEY = ["M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle"]


def _selections(*rows: Mapping[str, object]) -> pd.DataFrame:
    base = {
        "format": "",
        "bucket": "",
        "gfx": "sm_90",
        "cu_num": 132,
        "libtype": "triton",
        "solidx": 0,
        "splitK": 1,
        "us": 4.5,
        "config": '{"BLOCK_SIZE_M":16}',
        "near_ties": 2,
        "policy": "p",
        "run_id": "r1",
        "N": 16,
        "K": 32,
        "bias": False,
        "dtype": "bfloat16",
        "outdtype": "float32",
        "scaleAB": False,
        "bpreshuffle": False,
    }
    return pd.DataFrame([{**base, **row} for row in rows], columns=[*SELECTIONS, *KEY])


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def target(tmp_path: Path, h200: Device, emitted: list[Event]) -> Target:
    events = Events(listeners=[emitted.append])
    return Target(folder=tmp_path, device=h200, run_id="r1", provenance={"torch": "2.13"}, events=events)


def test_written_as_aiter_writes_and_read_back(target: Target, sixteen: Family) -> None:
    bucket = {"format": "triton_json", "bucket": "small_M", "M": None}
    frame = _selections({"M": 1}, bucket, {"M": 64, "us": 5.0, "bias": True})
    (path,) = NativeCsv(file=None, sort=False).write(sixteen, frame, target)
    assert path == target.folder / "small16_tuned_gemm.csv"
    header, first, second = path.read_text().splitlines()
    assert header.startswith(
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName"
    )
    assert first.startswith("sm_90,132,1,16,32,False,torch.bfloat16,torch.float32,False,False,triton,0,1,4.5,")
    assert second.startswith("sm_90,132,64,16,32,True,")
    rows = store.read(path, sixteen)
    assert [(row["M"], row["us"], row["near_ties"], row["baseline_us"]) for row in rows] == [
        (1, 4.5, 2, None),
        (64, 5.0, 2, None),
    ]


def test_a_kept_old_row_is_reported(target: Target, sixteen: Family, emitted: list[Event]) -> None:
    table = NativeCsv(file="dsv3_gemm.csv", sort=True)
    table.write(sixteen, _selections({"M": 2}, {"M": 1}), target)
    slower = _selections({"M": 1, "us": 6.0, "libtype": "torch", "config": "{}"})
    (path,) = table.write(sixteen, slower, target)
    assert [(row["M"], row["libtype"]) for row in store.read(path, sixteen)] == [(1, "triton"), (2, "triton")]
    assert [(e.kind, e.text.split(": ", 1)[1]) for e in emitted] == [
        (
            "line",
            "sm_90/132 M=1 N=16 K=32 bias=False dtype=bfloat16 outdtype=float32 scaleAB=False bpreshuffle=False: "
            "kept the old row: 4.50 us before, 6.00 us now, 0 % required",
        )
    ]


def test_a_winner_over_the_incumbent_replaces_it(target: Target, sixteen: Family, emitted: list[Event]) -> None:
    table = NativeCsv(file=None, sort=False)
    table.write(sixteen, _selections({"M": 1}), target)
    raced = _selections({"M": 1, "us": 6.0, "libtype": "torch", "config": "{}", "incumbent_us": 6.5})
    (path,) = table.write(sixteen, raced, target)
    assert [row["libtype"] for row in store.read(path, sixteen)] == ["torch"]
    assert [e.kind for e in emitted] == ["detail"]


def test_nothing_selected_writes_nothing(target: Target, sixteen: Family) -> None:
    assert NativeCsv(file=None, sort=False).write(sixteen, _selections(), target) == []
    assert list(target.folder.iterdir()) == []
