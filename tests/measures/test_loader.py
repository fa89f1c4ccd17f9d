"""Calls of the loader, and whether it has workers."""

from pathlib import Path

import pytest

from dlprof.measures.loader import loader_calls
from tests import runs, traces
from tests.runs import MS


@pytest.mark.parametrize(
    ("loader", "single"), [("_SingleProcessDataLoaderIter", True), ("_MultiProcessingDataLoaderIter", False)]
)
def test_a_trace_tells_calls_and_kind(tmp_path: Path, loader: str, single: bool) -> None:
    made = traces.trace(*(traces.fetch(n * MS, 10, loader) for n in range(3)))
    row = runs.rank_of(tmp_path, made).once(loader_calls.function).iloc[0]
    assert (row["calls"], row["in_process"]) == (3, single)


def test_the_light_layer_counts_all_steps(tmp_path: Path) -> None:
    folder = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS, fetches=2) for n in range(10)], runs.CPU))
    assert runs.measured(folder, loader_calls).frame(loader_calls)["calls"][0] == 20
