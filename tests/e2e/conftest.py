"""What several files of whole runs share."""

from collections.abc import Iterator

import every_fault
import pytest


@pytest.fixture(scope="session", name="every_fault")
def _every_fault(
    tmp_path_factory: pytest.TempPathFactory, faulty_arguments: tuple[str, ...]
) -> Iterator[every_fault.Begun]:
    """A run of all faults: test_faults.py begins it, test_rows_of_faults.py, some tests later, reads its end."""
    site, started = every_fault.begin(tmp_path_factory.mktemp("faults"), faulty_arguments)
    yield site, started
    site.close()
