"""The tree of modules keeps every sum, whatever folds into one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlprof.analysis.engine import Maybe
from dlprof.analysis.modules.tree import (
    GRAPHS,
    IDLE,
    MOST_OF_RANK,
    MOST_ROWS,
    PARTS,
    module_means,
    module_tree,
)
from dlprof.analysis.modules.work import GRAPH, OUTSIDE
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured

MS = 1e6
NAMES = "path kind part calls host_ns device_ns exposed_ns flops copied_bytes compiled fused"
COLUMNS = NAMES.split(" ")

Row = tuple[str, str, str, float]  # path, class, part, ms on the device


def work(*rows: Row, beside: float = 1.0) -> pd.DataFrame:
    """Return work as `module_work` has it: of each row so many ms of the step, `beside` times that on the device."""
    return pd.DataFrame(
        [(p, k, part, 1.0, 0.1 * MS, ms * MS * beside, ms * MS, ms * 1e12, 0.0, 0, 0) for p, k, part, ms in rows],
        columns=COLUMNS,
    )


def lacking() -> Maybe[pd.DataFrame]:
    def ask() -> pd.DataFrame:
        raise NotMeasured("no step was counted")

    return Maybe(ask)


def steps_of(ms: float) -> Timing:
    """Return the timing of two traced steps of such a length."""
    windows = np.array([[0, ms * MS], [ms * MS, 2 * ms * MS]], dtype=np.int64)
    even = np.full(2, ms * MS)
    return Timing(even, "trace", "step", None, windows, windows, np.arange(2), np.arange(2), {}, even, np.ones(2, bool))


def of_rank(
    work: pd.DataFrame,
    *,
    has_device: bool = True,
    step_ms: float | None = None,
    modules: pd.DataFrame | None = None,
    held: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Return the tree of one rank, whose step is by default as long as its work."""
    length = float(work["exposed_ns"].sum()) / MS if step_ms is None else step_ms
    known = lacking() if modules is None else Maybe(lambda: modules)
    counted = lacking() if held is None else Maybe(lambda: held)
    return module_tree.function(work, known, counted, has_device, steps_of(length))


def tree_of(*ranks: pd.DataFrame, peak: float | None = None, **how: Any) -> pd.DataFrame:
    """Return the tree of some ranks, by path."""
    frames = [of_rank(rank, **how).assign(rank=n) for n, rank in enumerate(ranks)]
    arithmetic = lacking() if peak is None else Maybe(lambda: pd.DataFrame({"peak": [peak]}))
    return module_means.function(pd.concat(frames, ignore_index=True), arithmetic).set_index("path")


def transformer(layers: int = 4, slow: dict[int, float] | None = None) -> pd.DataFrame:
    """Return a model of equal layers, but for those that are slow: attention 3 ms, mlp 2 ms, forward and twice back."""
    rows: list[Row] = [
        ("", "Model", "forward", 0.5),
        ("head", "Linear", "forward", 1),
        ("head", "Linear", "backward", 2),
    ]
    for n in range(layers):
        at = f"encoder.layer.{n}"
        times = (slow or {}).get(n, 1.0)
        for name, kind, ms in (("attention", "Attention", 3.0), ("mlp", "MLP", 2.0)):
            rows += [(f"{at}.{name}", kind, "forward", ms * times), (f"{at}.{name}", kind, "backward", 2 * ms * times)]
        rows.append((at, "Layer", "forward", 0.0))
    return work(*rows, (OUTSIDE, "", "optimizer", 4.0), (OUTSIDE, "", "backward", 1.0))


def test_layers_are_one_row_and_all_adds_up() -> None:
    tree = tree_of(transformer())
    within = [f"encoder.layer.*{of}" for of in ("", ".attention", ".mlp")]
    assert tree.index.tolist() == ["", *within, "head", OUTSIDE, OUTSIDE]
    assert tree["depth"].tolist() == [0, 1, 2, 2, 1, 0, 0]
    layers = tree.loc["encoder.layer.*"]
    assert (layers["kind"], layers["modules"], layers["own_ns"]) == ("Layer", 4, 0)
    assert [layers[f"{of}ns"] / MS for of in ("", "forward_", "backward_")] == pytest.approx([60, 20, 40])
    assert [tree[name][""] for name in ("ns", "own_ns")] == pytest.approx([63.5 * MS, 0.5 * MS])
    assert tree["total_ns"].unique() == pytest.approx(68.5 * MS)
    assert tree.loc["encoder.layer.*.attention", "share"] == pytest.approx(36 / 68.5)
    assert tree.loc[[OUTSIDE]].set_index("kind")["ns"].to_dict() == {"optimizer": 4e6, "backward": 1e6}
    assert tree.loc["encoder.layer.*.mlp", "calls"] == 4


def test_a_layer_that_is_clearly_slower_is_named() -> None:
    tree = tree_of(transformer(slow={2: 1.5}))
    assert tree.loc["encoder.layer.*", "slowest"] == "encoder.layer.2"
    assert tree.loc["encoder.layer.*", "slowest_ns"] == pytest.approx(22.5 * MS)
    assert tree.loc["encoder.layer.*", "typical_ns"] == pytest.approx(15 * MS)
    assert tree.loc["head", "slowest"] == ""
    assert set(tree_of(transformer(slow={2: 1.1}))["slowest"]) == {""}
    # What differs from rank to rank is no layer's.
    ranks = [transformer(slow={n: 1.5}) for n in range(3)]
    assert set(tree_of(*ranks)["slowest"]) == {""}
    assert tree_of(*ranks, ranks[1], ranks[1], ranks[1]).loc["encoder.layer.*", "slowest"] == "encoder.layer.1"


def test_what_a_device_idles_is_of_no_module() -> None:
    net = work(("", "Net", "forward", 4.0), (OUTSIDE, "", "optimizer", 2.0), (OUTSIDE, GRAPH, "other", 1.0))
    tree = tree_of(net, step_ms=10.0)
    assert tree["total_ns"].iloc[0] == pytest.approx(10 * MS)
    outside = tree.loc[[OUTSIDE]].set_index("kind")["ns"].to_dict()
    assert outside == pytest.approx({IDLE: 3 * MS, "optimizer": 2 * MS, GRAPHS: 1 * MS})
    assert IDLE not in set(tree_of(net, step_ms=10.0, has_device=False)["kind"])


def test_rates_are_of_the_time_in_which_a_module_computes() -> None:
    # What runs beside it makes a kernel take no less time.
    frame = work(("a", "Linear", "forward", 10.0), ("a", "Linear", "communication", 30.0), beside=2.0)
    frame.loc[1, "flops"] = 0.0
    found = tree_of(frame, peak=2e15).loc["a"]
    assert found["flops"] == 10e12
    assert found["flops_per_s"] == pytest.approx(10e12 / 20e-3)
    assert found["mfu"] == pytest.approx(0.25)
    assert tree_of(frame, has_device=False).loc["a", "flops_per_s"] == pytest.approx(10e12 / 10e-3)
    assert tree_of(frame)["mfu"].isna().all()


def test_what_is_not_known_of_one_module_is_not_known_of_those_around_it() -> None:
    frame = work(("a", "Net", "forward", 1.0), ("a.b", "Odd", "forward", 1.0), ("c", "Odd", "forward", 1.0))
    frame["flops"] = [7.0, np.nan, 5.0]
    tree = tree_of(frame)
    assert tree.loc["c", "flops"] == 5.0
    assert tree["flops"].isna().to_dict() == {"a": True, "a.b": True, "c": False}
    assert tree["flops_per_s"].isna().to_dict() == {"a": True, "a.b": True, "c": False}


def test_ranks_count_as_their_mean_and_the_worst_is_named() -> None:
    slow = work(("a", "Linear", "forward", 8.0))
    fast = work(("a", "Linear", "forward", 2.0), ("b", "Linear", "forward", 2.0))
    tree = tree_of(fast, slow, fast)
    assert [tree[name]["a"] for name in ("ns", "rank", "rank_ns")] == [4 * MS, 1, 8 * MS]
    assert tree.loc["b", "ns"] == pytest.approx(4 / 3 * MS)


def test_stages_of_a_pipeline_have_their_own_layers() -> None:
    def stage(first: int) -> pd.DataFrame:
        return work(*[(f"layers.{first + n}.mlp", "MLP", "forward", 1.0 + first) for n in range(8)])

    tree = tree_of(stage(0), stage(8))
    assert [tree[name]["layers.*.mlp"] for name in ("ns", "rank", "modules")] == pytest.approx(
        [(8 + 72) / 2 * MS, 1, 8]
    )


def test_of_very_many_modules_the_small_ones_count_to_those_around() -> None:
    # Named apart, so that none folds.
    rows: list[Row] = [("", "Model", "forward", 1.0)]
    rows += [(f"expert_{n}x.up", "Linear", "forward", 1.0 + n) for n in range(3 * MOST_OF_RANK)]
    assert len(of_rank(work(*rows))) == MOST_OF_RANK
    tree = tree_of(work(*rows))
    assert len(tree) == MOST_ROWS
    assert tree.loc["", "ns"] == pytest.approx(sum(row[3] for row in rows) * MS)
    assert tree["own_ns"].sum() == pytest.approx(tree.loc["", "ns"])


def test_parameters_are_of_the_modules_that_hold_them_and_of_those_around() -> None:
    frame = work(("", "Net", "forward", 1.0), *[(f"layer.{n}", "Layer", "forward", 1.0) for n in range(4)])
    rows = [("", 10), *[(f"layer.{n}.weight_norm", 100) for n in range(4)], *[(f"layer.{n}", 3) for n in range(4)]]
    modules = pd.DataFrame(rows, columns=["path", "parameter_bytes"]).assign(kind="Layer", moved_bytes=-1)
    tree = tree_of(frame, modules=modules)
    assert tree["parameter_bytes"].to_dict() == {"": 10 + 4 * 103, "layer.*": 4 * 103}
    assert tree["moved_bytes"].isna().all()
    moved = tree_of(frame, modules=modules.assign(moved_bytes=modules["parameter_bytes"] * 2))["moved_bytes"]
    assert moved.to_dict() == {"": 2 * (10 + 4 * 103), "layer.*": 2 * 4 * 103}
    assert tree_of(frame)["parameter_bytes"].isna().all()


def test_memory_is_held_by_the_modules_that_it_was_counted_of_and_by_those_around() -> None:
    frame = work(("", "Net", "forward", 1.0), *[(f"layer.{n}", "Layer", "forward", 1.0) for n in range(4)])
    rows = [("", "input", 7), ("…", "activation", 5)]
    rows += [(f"layer.{n}{of}", "activation", size) for n in range(4) for of, size in ((".norm", 100), ("", 3))]
    tree = tree_of(frame, held=pd.DataFrame(rows, columns=["module", "part", "bytes"]))
    assert tree["held_bytes"].to_dict() == {"": 12 + 4 * 103, "layer.*": 4 * 103}
    assert tree_of(frame)["held_bytes"].isna().all()
    assert tree_of(frame.assign(compiled=[0, 1, 1, 1, 1]))["compiled"].to_dict() == {"": False, "layer.*": True}


def test_a_job_without_modules_and_one_without_anything_else() -> None:
    assert tree_of(work((OUTSIDE, "", "forward", 3.0)))["share"].tolist() == [1.0]
    assert OUTSIDE not in tree_of(work(("a", "Linear", "forward", 3.0))).index


names = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "3", "4"]), max_size=4).map(".".join)
rows = st.tuples(names | st.just(OUTSIDE), st.sampled_from(["A", "B"]), st.sampled_from(PARTS), st.integers(0, 9))
jobs = st.lists(st.lists(rows, min_size=1, max_size=20), min_size=1, max_size=3)


@pytest.mark.long
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(jobs)
def test_roots_and_what_is_outside_are_all_and_rows_are_what_is_in_them(job: list[list[Row]]) -> None:
    ranks = [work(*rows) for rows in job]
    tree = tree_of(*ranks)
    whole = sum(float(rank["exposed_ns"].sum()) for rank in ranks) / len(ranks)
    assert tree.loc[tree["depth"] == 0, "ns"].sum() == pytest.approx(whole)
    assert tree["own_ns"].sum() == pytest.approx(whole)
    assert tree["total_ns"].iloc[0] == pytest.approx(whole)
    assert tree.loc[tree["depth"] == 0, "flops"].sum() == pytest.approx(whole / MS * 1e12)
    inside = tree[tree.index != OUTSIDE]
    parts = inside[[f"{part}_ns" for part in PARTS]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(inside["ns"].to_numpy())
