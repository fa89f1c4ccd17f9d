"""What changes make of a rank's memory and step, and which batches fit; and recordings of the changed script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.memory.changes import (
    batch_memory,
    batch_need,
    even,
    forward_of,
    gain_at,
    held_share,
    memory_changes,
    memory_what_if,
    most_times,
)
from dlprof.analysis.memory.footprint import checkpointed, footprint, units
from dlprof.analysis.memory.memory import memory_composition
from dlprof.analysis.modules.tree import module_means
from dlprof.analysis.modules.work import OUTSIDE
from dlprof.read.run import open_run
from tests.fixtures import allocator, holding, runs
from tests.fixtures.holding import row
from tests.fixtures.jobs import COMPILES_NOTHING

LAYERS = [
    row(part, f"layers.{n}.{name}", size, kind)
    for n in range(4)
    for part, name, kind, size in (
        ("parameter", "up", "Linear", 1_000),
        ("gradient", "up", "Linear", 1_000),
        ("optimizer", "up", "Linear", 2_000),
        ("activation", "norm", "LayerNorm", 500),
        ("activation", "up", "Linear", 4_500),
    )
]


def recorded(folder: Path, **told: Any) -> Path:
    """Record four layers that take 5,000 bytes of activations each, of which 500 are a layer's input."""
    path = holding.recorded(folder, LAYERS, **told)
    read = {"peak_allocated_bytes": 33_000, "reserved_bytes": 33_000, "peak_reserved_bytes": 33_000}
    allocator.write(path, [allocator.reading(5, 12_000, **read)])
    return path


def of(path: Path) -> pd.DataFrame:
    return runs.measured(path, memory_changes).frame(memory_changes).set_index(["change", "value"])


def test_each_change_of_a_rank_with_its_peak(tmp_path: Path) -> None:
    then = of(recorded(tmp_path))["then_bytes"].to_dict()
    assert then["", ""] == 33_000  # 12,000 stay, 20,000 are activations, 1,000 are temporary
    assert then["batch", "2"] == 54_000
    assert then["batch", "0.5"] == 22_500
    # The norms' 2,000 stay; of each weight a copy of half its size comes.
    # Half as much flows through products, too.
    assert then["autocast", ""] == 33_000 - 9_000 + 2_000 - 500
    assert then["16_bits", ""] == 16_500
    # As the first layer computes again: its own 5,000, all 4,000 of gradients, and what flows. That is no more than in
    # the last layer, for which the peak leaves 1,000.
    assert then["checkpoint", "layers.*"] == 12_000 + 5_000 + 1_000 + 4_000
    assert then["offload", ""] == 25_000
    assert then["8_bit", ""] == pytest.approx(33_000 - 8_000 * (1 - (1 + 1 / 64) / 4))
    assert ("shard", "1/2") not in then  # it is alone


def test_what_the_allocator_reserves_is_between_no_cache_and_each_part_by_itself(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    alone = of(path)
    assert (alone["least_bytes"] == alone["then_bytes"]).all()  # nothing is cached
    assert (alone["most_bytes"] > alone["then_bytes"]).to_list() == [False] * len(alone)
    read = {"peak_allocated_bytes": 33_000, "reserved_bytes": 39_600, "peak_reserved_bytes": 39_600}
    allocator.write(path, [allocator.reading(5, 12_000, **read)])
    frame = of(path)
    least, then, most = (frame[f"{name}_bytes"].to_dict() for name in ("least", "then", "most"))
    # Tensors hold 54,000, and a fifth more is cached. Each part at its own peak is less.
    assert least["batch", "2"] == 54_000
    assert then["batch", "2"] == most["batch", "2"] == pytest.approx(54_000 * 1.2)
    assert most["batch", "0.5"] == pytest.approx(max(22_500 * 1.2, 12_000 + 10_000 + 4_000 + 2 * 500))
    # A layer that is computed again was there in the forward pass, too.
    assert least["checkpoint", "layers.*"] == 22_000
    assert most["checkpoint", "layers.*"] == 12_000 + (3 * 500 + 5_000) + 4_000 + 2 * 1_000 + 4_500
    assert least["", ""] == most["", ""] == 39_600


def test_parts_without_a_float_are_as_large_in_16_bits(tmp_path: Path) -> None:
    path = holding.recorded(tmp_path, [*LAYERS, row("input", "", 640, "Net", dtype="int64")])
    then = of(path)["then_bytes"]
    assert then["", ""] - 640 == 2 * (then["16_bits", ""] - 640)


def test_checkpoints_are_around_modules_with_others_inside_and_named_where_they_save(tmp_path: Path) -> None:
    flat = [row("activation", f"main.{n}", 1_000, "Conv2d") for n in range(6)]
    assert not {"checkpoint", "checkpoint_only"} & {change for change, _ in of(holding.recorded(tmp_path, flat)).index}


def test_the_largest_batch_that_then_fits_is_of_the_whole_gpu(tmp_path: Path) -> None:
    frame = of(recorded(tmp_path))
    # 80,000 of the 92,000 below the line are left for what grows, which is 21,000 now.
    assert frame["times"]["", ""] == pytest.approx(80_000 / 21_000)
    assert frame["times"]["offload", ""] == pytest.approx(88_000 / 21_000)


def test_without_a_steady_step_memory_is_told_and_time_is_not(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    frame = runs.measured(path, memory_what_if).frame(memory_what_if).set_index("change")
    assert frame["then_bytes"]["checkpoint"] > 0
    assert pd.isna(frame["then_ns"]["checkpoint"])
    assert frame["why"]["checkpoint"] != ""


def test_checkpoints_take_the_forward_passes_of_the_modules_that_they_are_around() -> None:
    rows = [("", 100.0, True), ("encoder.*", 60.0, True), ("decoder.*", 20.0, True), (OUTSIDE, 0.0, True)]
    tree = pd.DataFrame(rows, columns=["path", "forward_ns", "on_device"]).assign(total_ns=400.0)
    assert forward_of(tree, ["encoder.*"]) == (0.15, 0.6, True)
    assert forward_of(tree, ["encoder.*", "decoder.*"]) == (0.2, 0.8, True)
    assert forward_of(tree, ["encoder.*", "other.*"]) is None
    assert forward_of(tree.assign(forward_ns=0.0), ["encoder.*"]) is None
    assert forward_of(None, ["encoder.*"]) is None


def test_each_list_of_modules_is_told_alone_too(tmp_path: Path) -> None:
    of_two = [
        {**one, "module": one["module"].replace("layers", name)} for name in ("encoder", "decoder") for one in LAYERS
    ]
    path = holding.recorded(tmp_path, of_two)
    frame = runs.measured(path, memory_changes).frame(memory_changes)
    sizes = frame.set_index(["change", "value"])["then_bytes"]
    alone = {sizes["checkpoint_only", "encoder.*"], sizes["checkpoint_only", "decoder.*"]}
    assert sizes["checkpoint", "encoder.*, decoder.*"] <= min(alone)
    assert max(alone) < sizes["", ""]


@pytest.mark.parametrize(
    ("schedule", "place", "share"),
    [("ScheduleGPipe", 0, 1.0), ("Schedule1F1B", 0, 0.5), ("Schedule1F1B", 3, 0.125), ("ScheduleMine", 0, None)],
)
def test_a_stage_holds_as_many_micro_batches_as_its_schedule_leaves(
    schedule: str, place: int, share: float | None
) -> None:
    # Eight micro-batches on four ranks: all under GPipe, p − place under 1F1B.
    assert held_share(schedule, 4, 8, 1, place) == share


# -- which batches fit


def room(path: Path) -> pd.DataFrame:
    return runs.measured(path, batch_memory).frame(batch_memory)


def test_what_was_counted_grows_by_part(tmp_path: Path) -> None:
    rows = [row("parameter", "a", 10_000), row("optimizer", "a", 20_000), row("gradient", "a", 10_000)]
    path = holding.recorded(tmp_path, [*rows, row("activation", "a", 25_000), row("input", "", 1_000, "")])
    # At the peak 4,000 more than was counted; a cache of 3,000, which a larger batch would use.
    read = {"peak_allocated_bytes": 60_000, "reserved_bytes": 63_000, "peak_reserved_bytes": 63_000}
    allocator.write(path, [allocator.reading(5, 40_000, **read)])
    (found,) = room(path).to_dict("records")
    assert (found["stays_bytes"], found["grows_bytes"]) == (30_000, 30_000)
    assert (found["floor_bytes"], found["total_bytes"], found["counted"]) == (41_000, 100_000, 1)
    # 62,000 are free below 92 %.
    assert most_times(room(path)) == pytest.approx(62_000 / 30_000)
    assert batch_need(room(path), 2) == pytest.approx(0.9)
    assert batch_need(room(path), 0.1) == pytest.approx(0.41)  # as the optimizer steps


def test_without_a_count_all_grows_that_a_step_does_not_leave(tmp_path: Path) -> None:
    path = allocator.recorded(tmp_path, [allocator.reading(n, 10 * allocator.GB) for n in range(9)])
    (found,) = room(path).to_dict("records")
    assert (found["stays_bytes"], found["grows_bytes"]) == (10 * allocator.GB, allocator.GB // 2)
    assert found["counted"] == 0


@pytest.mark.parametrize(
    ("times", "batch", "size"), [(2.9, 32, 88), (2.9, 5, 14), (1.1, 8, 8), (3.3, 4, 13), (1.2, 100, 120), (64, 2, 128)]
)
def test_a_size_is_a_whole_number_and_of_sixteen_on_a_multiple_of_eight(times: float, batch: int, size: int) -> None:
    assert even(times, batch) * batch == pytest.approx(size)
    assert even(2.9, None) == 2.75  # a batch that nobody knows is told in quarters


def test_a_gain_between_two_multiples_is_no_more_than_the_straight_line() -> None:
    known = pd.DataFrame({"times": [1.0, 2.0, 4.0], "gain_ns": [0.0, 40.0, 60.0], "again_ns": [-30.0, 20.0, 40.0]})
    # Between 2 and 4 times, half way between a half and a quarter.
    assert [gain_at(known, times) for times in (2, 8 / 3, 100)] == pytest.approx([40, 50, 60])
    assert gain_at(known, 1, "again_ns") == -30


# -- the same script with the change, recorded

SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from tests.fixtures.counted import Script
words = dict(word.split("=") for word in sys.argv[1:])
_, _, step = Script(**{name: eval(value) for name, value in words.items()}).made()
for _ in range(12):
    step()
"""


def recording(folder: Path, *options: str, **script: object) -> Path:
    """Record the script with a change, and return its run."""
    (folder / "train.py").write_text(COMPILES_NOTHING + SCRIPT)
    words = [f"{name}={value!r}" for name, value in script.items()]
    command = [
        sys.executable,
        "-P",
        "-m",
        "dlprof",
        "wrap",
        "--quiet",
        "--no-report",
        *options,
        "-o",
        str(folder / "run"),
        "--",
    ]
    subprocess.run([*command, sys.executable, str(folder / "train.py"), *words], check=True, capture_output=True)
    return folder / "run"


def counted(path: Path) -> float:
    """Return what was counted of the changed script's tensors, bytes."""
    frame = runs.measured(path, memory_composition).frame(memory_composition)
    return float(frame.loc[frame["known"] == "counted", "bytes"].sum())


@pytest.fixture(scope="module")
def as_it_is(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording of the script without any change."""
    return recording(tmp_path_factory.mktemp("as_it_is"), "--window", "4,1,3", batch=2)


@pytest.mark.slow
def test_a_recording_of_the_changed_script_counts_what_was_predicted(as_it_is: Path, tmp_path: Path) -> None:
    frame = of(as_it_is)
    less = frame["now_bytes"]["autocast", ""] - frame["then_bytes"]["autocast", ""]
    changed = recording(tmp_path, "--no-trace", batch=2, autocast=True)
    assert counted(as_it_is) - less == pytest.approx(counted(changed), rel=0.05)


@pytest.mark.long
def test_with_checkpoints_a_recording_counts_the_inputs_that_were_predicted(as_it_is: Path, tmp_path: Path) -> None:
    held = of_rank(as_it_is)
    now = footprint(
        held, {str(part): float(n) for part, n in held.groupby("part", observed=True)["bytes"].sum().items()}
    )
    then = checkpointed(now, units(held)).moments["forward"]["activation"]
    counts = of_rank(recording(tmp_path, "--no-trace", batch=2, checkpoints=True))
    assert then == pytest.approx(float(counts.loc[counts["part"] == "activation", "bytes"].sum()), rel=0.05)
    assert then < now.moments["forward"]["activation"] / 3


@pytest.mark.long
def test_a_recording_shows_the_time_that_checkpoints_add(as_it_is: Path) -> None:
    # How near that comes to the slowdown of the changed script: python -m benchmarks.memory --checkpoints.
    measured = runs.measured(as_it_is, memory_what_if, module_means)
    row = measured.frame(memory_what_if).set_index("change").loc["checkpoint"]
    assert (row["value"], row["bound"], row["why"]) == ("layers.*", "", "")
    tree = measured.frame(module_means).set_index("path")
    # Each of the six layers once more; the embedding and the head, whose product is about as large as a layer, not.
    again, whole = tree["forward_ns"]["layers.*"], tree["forward_ns"][""]
    assert row["then_ns"] / row["now_ns"] - 1 == pytest.approx(again / tree["total_ns"].iloc[0])
    assert tree["modules"]["layers.*"] == 6
    assert 0.5 * whole < again < 0.95 * whole


def of_rank(path: Path) -> pd.DataFrame:
    """Return the table `held` of the first rank."""
    return RankData(open_run(path).ranks[0]).table("held")
