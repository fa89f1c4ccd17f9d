"""What tests of launchers share: a SLURM of this one machine."""

from collections.abc import Iterator

import pytest

from tests.fixtures.slurm import cluster, lacking


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a SLURM of two nodes; return the environment in which its commands find it."""
    if why := lacking():
        pytest.skip(why)
    with cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env
