"""The data of the workloads, which are drawn once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the tests of a file have their workload draw its data into."""
    return tmp_path_factory.mktemp("data")
