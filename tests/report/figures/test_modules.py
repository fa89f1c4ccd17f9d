"""The modules as a tree table and as a flame graph with the same figures."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report.figures import modules
from dlprof.report.figures.drawing import ROWS
from dlprof.result import Result, RunInfo
from dlprof.result.figures import Modules
from tests.fixtures import results
from tests.fixtures.results import MS


def tree_of(found: Modules) -> modules.Tree:
    tree = modules.shown(Result(RunInfo("x"), None, modules=found))
    assert tree is not None
    return tree


def test_each_row_has_its_name_below_the_one_around_it() -> None:
    tree = tree_of(results.encoder())
    assert [(row.depth, row.name, row.times, row.parent) for row in tree.rows] == [
        (0, "Encoder", "", True),
        (1, "encoder.layer.*", "× 12", True),
        (2, "attention", "", False),
        (2, "mlp", "", False),
        (1, "head", "", False),
        (0, "communication of no single module", "", False),
        (0, "device idle", "", False),
    ]
    assert tree.rows[1].note == f"slowest encoder.layer.11: 20.0{NBSP}ms against 10.0{NBSP}ms"
    assert tree.rows[3].note == f"longest on rank 3: 69.0{NBSP}ms"
    assert [row.open for row in tree.rows[:3]] == [True, True, True]


def test_the_table_has_a_row_for_each_and_no_column_that_says_nothing() -> None:
    tree = tree_of(results.encoder())
    named = ("module", "share", "time", "forward", "backward", "own", "calls", "FLOP/s", "MFU", "params")
    assert tree.table.columns == named
    assert len(tree.table.rows) == len(tree.rows)
    assert tree.table.rows[1][1:5] == (f"61{NBSP}%", f"130.0{NBSP}ms", f"43.3{NBSP}ms", f"86.7{NBSP}ms")
    assert tree.table.rows[-1][1:4] == (f"16{NBSP}%", f"34.6{NBSP}ms", "")


def test_the_flame_graph_stands_what_is_inside_on_what_is_around_it() -> None:
    spec = tree_of(results.encoder()).flame.spec
    assert spec is not None
    [trace] = spec["data"]
    drawn = zip(trace["text"], trace["y"], trace["base"], trace["x"], strict=True)
    frames = {text: (y, base / MS, x / MS) for text, y, base, x in drawn}
    assert frames["step"] == (0, 0, 214.6)
    assert frames["Encoder"] == (1, 0, 150)
    assert frames["encoder.layer.* × 12 · Layer"] == (2, 0, 130)
    assert frames["mlp × 12 · MLP"] == (3, 80, 46)
    assert frames["head · Linear"] == (2, 130, 18)
    assert frames["device idle"] == pytest.approx((1, 180, 34.6))


def test_what_is_not_seen_and_what_seeing_took_is_said() -> None:
    assert f"takes 400.0{NBSP}µs of a traced step (0.2{NBSP}%)" in tree_of(results.encoder()).under
    rows = (results.module("", "Net", 0, 100.0, compiled=True),)
    assert "compiled" in tree_of(replace(results.encoder(), rows=rows)).rows[0].note


def test_without_modules_it_says_why_and_draws_nothing() -> None:
    tree = tree_of(Modules(why="the trace names no module"))
    assert tree.why == "the trace names no module"
    assert modules.specs(tree) == {}
    assert modules.shown(Result(RunInfo("x"), None)) is None


def test_no_more_rows_than_a_table_has() -> None:
    rows = tuple(results.module(f"m{n}", "Linear", 0, 1.0) for n in range(2 * ROWS))
    tree = tree_of(replace(results.encoder(), rows=rows))
    assert len(tree.rows) == len(tree.table.rows) == ROWS
