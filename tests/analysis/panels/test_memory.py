"""What the CUDA allocator took, of many ranks the most."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.panel import MOST_RANKS
from dlprof.read.run import open_run
from tests.fixtures.allocator import GB, reading, recorded


def test_many_ranks_are_drawn_as_the_most_of_them(tmp_path: Path) -> None:
    path = recorded(tmp_path, *([reading(n, rank * GB) for n in range(3)] for rank in range(MOST_RANKS + 1)))
    (panel,) = [p for p in diagnose(open_run(path), (), jobs=1).panels if p.title == "GPU memory of PyTorch"]
    assert panel.rows[0] == (0, (MOST_RANKS + 1) * GB, MOST_RANKS * GB)
