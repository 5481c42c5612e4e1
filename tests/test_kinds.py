"""The tables of tests' kinds name files and fixtures that exist: a test would count as a unit test otherwise."""

import re
from pathlib import Path

import kinds
import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", kinds.KIND_OF_FIXTURE)
def test_a_fixture_exists(name: str) -> None:
    made = re.compile(rf"@pytest\.fixture.*\ndef {name}\(")
    assert any(made.search(path.read_text()) for path in TESTS.rglob("*.py"))


def test_the_files_and_folders_exist() -> None:
    assert {*kinds.KIND_OF_FILE} <= {path.stem for path in TESTS.rglob("test_*.py")}
    assert {*kinds.KIND_OF_FOLDER} <= {path.name for path in TESTS.iterdir()}
    assert {*kinds.KIND_OF_FILE.values(), *kinds.KIND_OF_FOLDER.values(), *kinds.KIND_OF_FIXTURE.values()} <= {
        *kinds.KINDS
    }
