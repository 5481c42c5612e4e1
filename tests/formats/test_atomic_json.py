"""a16w16_atomic's JSON files through the command line: a recorded gfx942 run of aiter's shapes, selected again here."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.data import Candidate, Problem, Status, Trial
from gemmpipe.core.device import arch_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.journal import Journal

FAMILY = load_family("a16w16_atomic")
SIZES = (16, 32, 64, 128, 256, 512, 2048, 4096)
PRODUCTS = ((1024, 1024), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
BUCKETS = {"small": 16, "medium_M32": 32, "medium_M64": 64, "medium_M128": 128, "large": 256, "xlarge": 512}
Time = Callable[[int, int, int, int, int], float]


def _problem(m: int, n: int, k: int) -> Problem:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return make_problem(FAMILY, {"M": m, "N": n, "K": k}, defaults, "gfx942", "test")


def _candidate(block_m: int, splits: int) -> Candidate:
    knobs = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "NUM_KSPLIT": splits}
    amd = {"waves_per_eu": 3, "matrix_instr_nonkdim": 16, "kpack": 1}
    return Candidate.of("triton", {**knobs, "num_warps": 4, "num_stages": 2, "cache_modifier": "", **amd})


def _record(folder: Path, time_us: Time) -> None:
    """A journal of finals with every block size and split at every size."""
    journal = Journal(folder)
    journal.write("session", device=asdict(arch_device("gfx942")))
    for n, k in PRODUCTS:
        for m in SIZES:
            problem = _problem(m, n, k)
            journal.write("problem", id=problem.id, key=dict(problem.key), weight=1.0, layer="")
            for block_m in (16, 32, 64, 128):
                for splits in (1, 4):
                    samples = (time_us(m, n, k, block_m, splits),) * 5
                    facts = {"status": Status.OK, "launches": 5, "samples_us": samples, "err_ratio": 0.0}
                    candidate = _candidate(block_m, splits)
                    journal.trial(Trial(stage="bench", problem=problem.id, candidate=candidate, **facts))  # type: ignore[arg-type]
            journal.write("done", stage="bench", problem=problem.id)
    journal.close()


@pytest.fixture
def tuned(folder: Path) -> Callable[[Time], Path]:
    """Select from a recorded run; returns the folder of the artifacts."""

    def decide(time_us: Time) -> Path:
        assert main(["capture", "kernel=a16w16_atomic", "shapes=a16w16_atomic_aiter"]) == 0
        (run,) = (folder / "outputs" / "runs" / "capture").iterdir()
        _record(run, time_us)
        assert main(["tune", f"reuse={run}", "chain=[select,merge]", "output=tuned"]) == 0
        return folder / "tuned"

    return decide


def _read(path: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(path.read_text())
    return found


def test_names_buckets_and_forced_blocks(tuned: Callable[[Time], Path]) -> None:
    # The widest block is always the fastest, but each medium bucket is for its own.
    output = tuned(lambda m, n, k, block_m, splits: 10 + m + (128 / block_m) + splits)
    names = {f"gfx942-GEMM-A16W16-ATOMIC-N={n}-K={k}.json" for n, k in PRODUCTS}
    assert {path.name for path in output.glob("gfx942-GEMM-*[0-9C].json")} == {*names, "gfx942-GEMM-A16W16-ATOMIC.json"}
    blocks = {"small": 128, "medium_M32": 32, "medium_M64": 64, "medium_M128": 128, "large": 128, "xlarge": 128}
    for name in (*names, "gfx942-GEMM-A16W16-ATOMIC.json"):
        found = _read(output / name)
        assert list(found) == list(BUCKETS)
        assert {bucket: knobs["BLOCK_SIZE_M"] for bucket, knobs in found.items()} == blocks
        assert found["small"] == _candidate(128, 1).knobs


def test_the_default_file_holds_the_commonest_winner_of_each_bucket(tuned: Callable[[Time], Path]) -> None:
    # Four splits win at two products in every bucket, at large M everywhere but one.
    def time_us(m: int, n: int, k: int, block_m: int, splits: int) -> float:
        many = k > 1024 or (m > 256 and n > 1024)
        return 10 + m + (128 / block_m) + (splits if not many else -splits)

    output = tuned(time_us)
    default = _read(output / "gfx942-GEMM-A16W16-ATOMIC.json")
    splits = {bucket: knobs["NUM_KSPLIT"] for bucket, knobs in default.items()}
    assert splits == dict.fromkeys(BUCKETS, 1) | {"xlarge": 4}
    one = _read(output / "gfx942-GEMM-A16W16-ATOMIC-N=1024-K=3072.json")
    assert {knobs["NUM_KSPLIT"] for knobs in one.values()} == {4}


def test_xlarge_is_for_all_its_sizes(tuned: Callable[[Time], Path]) -> None:
    # At 512 four splits win by little, at 2048 and 4096 they lose by much: the bucket's sum decides.
    output = tuned(lambda m, n, k, block_m, splits: m + block_m + (-splits if m == 512 else 10 * splits))
    found = _read(output / "gfx942-GEMM-A16W16-ATOMIC-N=6144-K=1024.json")
    assert (found["xlarge"]["NUM_KSPLIT"], found["large"]["NUM_KSPLIT"]) == (1, 1)
