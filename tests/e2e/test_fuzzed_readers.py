"""A sample of the fuzzer's inputs to every reader of files; `tests/soak/fuzz.py` is the long run."""

import random
from pathlib import Path

import pytest
from fuzz import outcome_of, place_of
from fuzz_readers import READERS, Reader

SEED, INPUTS = 1, 40


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_mutated_file_is_accepted_or_refused_in_a_line(reader: Reader, tmp_path: Path) -> None:
    path = place_of(reader, tmp_path)
    for number in range(INPUTS):
        path.write_bytes(reader.input(random.Random(f"{SEED} {reader.name} {number}")))
        assert outcome_of(reader, path) in ("accepted", "refused"), f"input {number}"


@pytest.mark.e2e
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_what_inputs_are_made_from_is_accepted(reader: Reader, tmp_path: Path) -> None:
    """Else the fuzzer would try nothing but the first lines of a reader."""
    path = place_of(reader, tmp_path)
    for raw in reader.seeds:
        path.write_bytes(reader.pack(raw))
        assert outcome_of(reader, path) == "accepted"


def test_inputs_depend_on_their_seed_alone() -> None:
    made = [READERS[0].input(random.Random("1 x 7")) for _ in range(2)]
    assert made[0] == made[1] != READERS[0].input(random.Random("1 x 8"))
