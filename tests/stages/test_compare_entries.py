"""The entries of a comparison: engines' files by device and M, rows of tables that cannot run here."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemmpipe import journal
from gemmpipe.backends.aten import Torch
from gemmpipe.backends.autotune import Autotune
from gemmpipe.backends.own import Own
from gemmpipe.core.data import Candidate, Device, Status, Trial
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.formats.engine_json import Sglang, Vllm
from gemmpipe.stages.compare import entries
from gemmpipe.stages.screen.candidates import CandidateList, list_candidates
from gemmpipe.tables.recorded import UnusableRow

BODY = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16, "num_warps": 4,
        "num_stages": 3}  # fmt: skip
AXES = {"BLOCK_SIZE_M": (16, 64), "BLOCK_SIZE_N": (64,), "BLOCK_SIZE_K": (128,), "num_warps": (4,), "num_stages": (3,)}
FAMILY = load_family("a8w8_blockscale")


@pytest.fixture
def context(h200: Device, tmp_path: Path) -> Any:
    """The parts of a Context that entries need."""
    own = {i.label: i for i in FAMILY.implementations}
    chosen = [*Own(label="triton").implementations(FAMILY), *Autotune(limit_s=1.0).implementations(FAMILY)]
    run_dir = tmp_path / "outputs/runs/compare/now"
    return SimpleNamespace(
        family=FAMILY, device=h200, implementations=tuple(chosen), implementation=own.get, run_dir=run_dir
    )


def _listing(context: Any, m: int) -> CandidateList:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problem = make_problem(FAMILY, {"M": m, "N": 1280, "K": 1024}, defaults, context.device.gfx, "case")
    space = Space(axes=AXES, when=(), pinned=())
    return list_candidates(problem, FAMILY, context.implementations, context.device, space, ())


def _file(folder: Path, device: str, **by_m: dict[str, object]) -> Path:
    path = folder / f"N=1280,K=1024,device_name={device},dtype=fp8_w8a8,block_shape=[128,128].json"
    path.write_text(json.dumps({m.removeprefix("m"): {**BODY, **body} for m, body in by_m.items()}))
    return path


def test_an_engine_takes_the_file_of_this_device_at_the_nearest_m(context: Any, tmp_path: Path) -> None:
    _file(tmp_path, "NVIDIA_A100", m8={"BLOCK_SIZE_M": 16})
    _file(tmp_path, "NVIDIA_H200", m1={"BLOCK_SIZE_M": 16}, m64={"BLOCK_SIZE_M": 32}, m256={})
    files = sorted(tmp_path.glob("*.json"))
    for m, rows in ((1, 16), (40, 32), (4096, 64)):
        [found] = entries.engine_entries("vllm", files, Vllm(device_name=None), _listing(context, m), context)
        assert found.candidate is not None, found.reason
        assert (found.candidate.backend, found.candidate.knobs["BLOCK_SIZE_M"]) == ("triton", rows)
    assert [*entries.engine_entries("vllm", [], Vllm(device_name=None), _listing(context, 1), context)] == []


def test_an_engines_split_k_is_a_knob_of_the_own_kernel(context: Any, tmp_path: Path) -> None:
    path = _file(tmp_path, "elsewhere", m8={"SPLIT_K": 2})
    [found] = entries.engine_entries("sglang", [path], Sglang(device_name=None), _listing(context, 8), context)
    assert found.candidate is not None, "the only file of this N and K, of another device"
    assert found.candidate.knobs["NUM_KSPLIT"] == 2


def test_files_that_cannot_be_used_give_a_reason(context: Any, tmp_path: Path) -> None:
    others = [_file(tmp_path, device, m8={}) for device in ("A", "B")]
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    cases = {
        "2 for other devices, no N=1280,K=1024,device_name=NVIDIA_H200": others,
        "file: no N=1280,K=1024": [tmp_path / "N=1,K=1.json"],
        "BLOCK_SIZE_K 256 does not fit into a group": [_file(wrong, "A", m8={"BLOCK_SIZE_K": 256})],
    }
    for reason, files in cases.items():
        [found] = entries.engine_entries("vllm", files, Vllm(device_name=None), _listing(context, 8), context)
        assert found.candidate is None
        assert reason in found.reason


def test_the_first_row_that_runs_is_taken(context: Any) -> None:
    listing = _listing(context, 64)
    good = next(c for c in listing.candidates if c.backend == "triton")
    stale = {"libtype": "triton", "config": json.dumps(good.knobs), "kernelName": "blockscale@00000000", "run_id": "x"}
    right = {**stale, "kernelName": None}
    empty = journal.Record()
    first, own = entries.tuned_entries(listing, [stale, right], (), lambda run: empty, context)
    assert (first.name, first.candidate, own.name, own.candidate) == ("tuned", good, "own kernels", good)
    [alone] = entries.tuned_entries(listing, [stale], (), lambda run: empty, context)
    assert "its source or library is" in alone.reason
    _, named = entries.tuned_entries(listing, [right], [{**right, "config": "{}"}], lambda run: empty, context)
    assert named.candidate is None, "the named table takes precedence"


def test_a_library_is_never_an_own_kernel(context: Any) -> None:
    """Also if `own` names a table that was tuned with libraries."""
    listing = _listing(context, 64)
    good = next(c for c in listing.candidates if c.backend == "triton")
    ours = {"libtype": "triton", "config": json.dumps(good.knobs), "kernelName": None, "run_id": "x"}
    library = {"libtype": "torch", "config": '{"method":"bfloat16_convert"}', "kernelName": None, "run_id": "x"}
    context.implementation = {"triton": context.implementation("triton"), "torch": Torch()}.get
    winner, *_ = entries.tuned_entries(listing, [library], (), lambda run: journal.Record(), context)
    assert winner.candidate is not None, winner.reason
    for named, candidate in (([library], None), ([library, ours], good)):
        _, own = entries.tuned_entries(listing, [ours], named, lambda run: journal.Record(), context)
        assert own.candidate == candidate
    _, own = entries.tuned_entries(listing, [ours], [library], lambda run: journal.Record(), context)
    reason = "stages.lineup.own: the table's row is a library's; expected one tuned with 'backend=[gluon,"
    assert own.reason.startswith(reason)


@pytest.mark.parametrize(("raced", "reason"), [(True, "no own kernel was in"), (False, "the journal of that run")])
def test_missing_own_kernels_have_a_reason(context: Any, raced: bool, reason: str) -> None:
    listing = _listing(context, 64)
    good = next(c for c in listing.candidates if c.backend == "triton")
    library = Candidate.of("torch", {"method": "bfloat16_convert"})
    row = {"libtype": "triton", "config": json.dumps(good.knobs), "kernelName": None, "run_id": "x"}
    trial = Trial(stage="bench", problem=listing.problem.id, candidate=library, status=Status.OK, samples_us=(1.0,))
    record = SimpleNamespace(of=lambda stage, problem: [trial] if raced else [])
    context.family = replace(FAMILY, implementations=())  # so that its winner is no own kernel
    _, own = entries.tuned_entries(listing, [row], (), lambda run: record, context)  # type: ignore[arg-type,return-value]
    assert own.candidate is None
    assert reason in own.reason


def test_triton_chooses_among_what_fits(context: Any) -> None:
    listing = _listing(context, 64)
    other = entries.autotune_backend(context)
    assert other is not None
    found = entries.autotune_configs(other, listing, context)
    assert set(found) == {c for c in listing.candidates if c.backend == "triton"}
    with pytest.raises(UnusableRow, match="no configuration of the kernel fits"):
        entries.autotune_configs(other, SimpleNamespace(spec=listing.spec, candidates=()), context)  # type: ignore[arg-type]
