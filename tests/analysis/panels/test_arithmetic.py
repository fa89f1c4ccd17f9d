"""The table of the heaviest operators, on hand-made runs."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.operators import MOST_OPERATORS
from dlprof.analysis.panels.compute import ARITHMETIC_PICTURE, draw_arithmetic
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, asked


def table(folder: Path, facts: dict[str, Any], *names: str) -> Any:
    """Draw what is known of a step with so many operators, each of a kernel shorter than the one before."""
    events: list[Any] = [traces.step(0, 0, 10 * MS)]
    for n, name in enumerate(names):
        events += [traces.op(name, n * 20_000, 15_000)]
        events += traces.launched("kernel", n * 20_000 + 1_000, MS + n * 300_000, 300_000 - n * 10_000, n + 1)
    path = runs.recorded(folder / "run", (traces.trace(*events, world_size=1), [], facts))
    (panel,) = asked(runs.measured(path, ARITHMETIC_PICTURE.draw), draw_arithmetic)
    return panel


def test_the_heaviest_come_first_and_no_more_than_a_table_holds(tmp_path: Path) -> None:
    panel = table(tmp_path, {"device": {"type": "cuda"}}, *(f"aten::op{n}" for n in range(MOST_OPERATORS + 2)))
    assert panel.shape == "table"
    assert [row[0] for row in panel.rows] == [f"op{n}" for n in range(MOST_OPERATORS)]
    assert {row[4] for row in panel.rows} == {None}


def test_shapes_among_which_time_was_only_shared_out_are_one_row(tmp_path: Path) -> None:
    each = {"operator": "aten::mm", "dtype": "bfloat16", "calls": 1}
    shapes = [
        {**each, "shape": "8x8 8x8", "flops": 3_000_000, "bytes": 300},
        {**each, "shape": "8x8 8x16", "flops": 6_000_000, "bytes": 500},
    ]
    facts = {
        "device": {"type": "cuda", "name": "NVIDIA A100-SXM4-40GB"},
        "flops": {"state": "waiting", "shapes": shapes},
    }
    panel = table(tmp_path, facts, "aten::mm", "aten::add")
    assert panel.columns[:5] == ("operator, shapes", "type", "calls", "time a step_ns", "GFLOP")
    assert panel.rows[0][:5] == ("mm of 2 shapes", "bfloat16", 2, 300_000, pytest.approx(0.009))
    assert panel.rows[1][0] == "add"
    assert "312 TFLOP/s in bfloat16" in panel.note


def test_of_several_ranks_the_mean_is_shown_and_the_one_with_most(tmp_path: Path) -> None:
    def job(rank: int, dur: int, shapes: list[dict[str, Any]]) -> tuple[Any, list[Any], dict[str, Any]]:
        mm = [traces.op("aten::mm", 0, 15_000), *traces.launched("kernel", 1_000, MS, dur, 1)]
        add = [traces.op("aten::add", 20_000, 15_000), *traces.launched("kernel", 21_000, 5 * MS, dur // 2, 2)]
        made = traces.trace(traces.step(0, 0, 10 * MS), *mm, *(add if rank else []), rank=rank, world_size=2)
        return made, [], {"device": {"type": "cuda"}, "flops": {"state": "done", "shapes": shapes}}

    each = {"operator": "aten::mm", "dtype": "bfloat16", "calls": 1}
    shapes = [{**each, "shape": s, "flops": 3_000_000, "bytes": 300} for s in ("8x8 8x8", "8x8 8x16")]
    path = runs.recorded(tmp_path / "run", job(0, 200_000, shapes), job(1, 400_000, shapes))
    (panel,) = asked(runs.measured(path, ARITHMETIC_PICTURE.draw), draw_arithmetic)
    assert panel.title == "The heaviest operators of a step, mean of 2 ranks"
    assert panel.columns[4:6] + panel.columns[-2:] == ("GFLOP", "TFLOP/s", "most on rank", "there_ns")
    assert [(*row[:6], *row[-2:]) for row in panel.rows] == [
        ("mm of 2 shapes", "bfloat16", 2, 300_000, pytest.approx(0.006), pytest.approx(0.02), 1, 400_000),
        ("add", None, 0.5, 100_000, None, None, 1, 200_000),
    ]
