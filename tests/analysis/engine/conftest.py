"""The job that the tests of the engine ask."""

from __future__ import annotations

import pytest

from dlprof.read.run import Run
from tests.fixtures.measures import job_of_four


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the job of four ranks."""
    return job_of_four(tmp_path_factory.mktemp("job"))
