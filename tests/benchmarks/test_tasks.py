"""What a task asks of a shared disk does not grow with the number of tasks: counted by strace."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.tasks import measure


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="it takes strace, and root for hosts")
def test_a_task_makes_as_many_calls_among_many_as_among_few() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DLPROF_", "SLURM_", "OMPI_"))}
    few, many = (measure(size, env) for size in (16, 64))
    for when in ("start", "end"):
        for kind in ("stat", "open", "make", "list"):
            # A hundredth of all tasks reads what all have left.
            assert many[when][kind] / 64 < 1.3 * few[when][kind] / 16 + 2, (when, kind)
    assert few["end"]["list"] > 0
