"""The time left that runs state, on recorded runs of an H100: products, experts, files of engines, a comparison."""

from pathlib import Path

import pytest
from recorded_run import RecordedRun

FOLDER = Path(__file__).parents[1] / "data" / "time_left"
OTHERS = ("compare_56", "h200_flashinfer_20")
TUNED = sorted(path for path in FOLDER.glob("*.xz") if path.name.partition(".")[0] not in OTHERS)


@pytest.fixture(autouse=True)
def eight_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded runs timed experts over eight draws of their routing, whatever the number of tokens."""
    monkeypatch.setattr("gemmpipe.stages.finals_cost.routing_draws", lambda family, spec: 8)


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.name.partition(".")[0])
def test_from_a_quarter_of_a_run_on_the_time_left_is_known(path: Path) -> None:
    """Right at three moments of four in every run, at all of them in most: within 30 %, or between the ends stated."""
    run, errors, right = RecordedRun(path), [], 0
    for now, left_s in run.estimates():
        true_s = run.end - now
        if now < run.end / 4 or true_s < 5:
            continue
        assert left_s is not None, now
        assert now + left_s == pytest.approx(run.end, rel=0.27), now
        between = run.progress.range_s(now)
        errors.append(abs(left_s - true_s) / true_s)
        right += between[0] <= true_s <= between[1] if between is not None else errors[-1] <= 0.3
    assert len(errors) > 20
    assert right >= 0.75 * len(errors)
    assert max(errors) < 0.5


def test_kernels_that_a_library_compiles_in_first_launches_count_by_their_number() -> None:
    """13 of 20 products wait 2.3 s each for FlashInfer on the GPU's worker: up to six times the time was stated."""
    run, errors, right = RecordedRun(FOLDER / "h200_flashinfer_20.jsonl.xz"), [], 0
    for now, left_s in run.estimates():
        if run.end / 4 < now < run.end - 5:
            assert left_s is not None, now
            errors.append(abs(left_s - (run.end - now)) / (run.end - now))
            least, most = run.progress.range_s(now) or (left_s, left_s)
            right += least <= run.end - now <= most
    assert right >= 0.85 * len(errors)
    assert sum(error <= 0.35 for error in errors) > 0.7 * len(errors)
    assert max(errors) < 0.75


@pytest.mark.parametrize("name", ["vllm_experts_fp8_35", "vllm_experts_bf16_35"])
def test_finals_of_keys_that_are_added_count_from_the_first_times_on(name: str) -> None:
    """70 and 133 problems are in the finals, 35 in the screening: 5 s were stated of 44, and 6 of 150."""
    run = RecordedRun(FOLDER / f"{name}.jsonl.xz")
    for now, left_s in run.estimates():
        if run.end / 4 < now < 0.8 * run.end:
            assert left_s == pytest.approx(run.end - now, rel=0.35), now


def test_a_comparison_is_known_once_its_first_products_are_timed() -> None:
    """The first product takes nine seconds, until the kernels of libraries are compiled."""
    run = RecordedRun(FOLDER / "compare_56.jsonl.xz")
    for now, left_s in run.estimates():
        if 0.35 * run.end < now < 0.8 * run.end:
            assert left_s == pytest.approx(run.end - now, rel=0.4), now
