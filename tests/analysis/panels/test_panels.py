"""The tables and pictures of the page: their rows against known runs, and none where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.compute.operators import MOST_KERNELS, MOST_OPERATORS
from dlprof.analysis.panel import MOST_RANKS, Picture, drawn, points, table
from dlprof.analysis.panels import communication, compute, host, machine, step
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from tests.fixtures import allocator, dialects, dumps, pipelines, runs, traces
from tests.fixtures.claims import edit, rewrite
from tests.fixtures.dumps import MB, write
from tests.fixtures.exchanges import HANDED_ON, exchanging
from tests.fixtures.exchanges import pipeline as handing_on
from tests.fixtures.hosts import SEEN, US, ahead, call, item, piece, waiting, with_lines, with_stacks
from tests.fixtures.logged import GOLDEN, smi
from tests.fixtures.routed import routed
from tests.fixtures.runs import A100, CPU, MS, light
from tests.fixtures.sampled_stacks import LOADER, MAIN, stacked
from tests.fixtures.scalers import scaled

Make = Callable[[Path], Path]
S = 1_000 * MS


def draw(picture: Picture, path: Path) -> list[Panel]:
    return runs.called(path, picture.draw)


def met(*ranks: dict[str, Any]) -> Make:
    return lambda folder: runs.foreign(folder / "job", *ranks)


def recorded(trace: dict[str, Any] | None, *steps: Any, ranks: int = 1, **facts: Any) -> Make:
    return lambda folder: runs.recorded(folder / "run", *[(trace, steps, {**CPU, **facts})] * ranks)


def picked(rows: Sequence[Sequence[Any]], *columns: int) -> list[tuple[Any, ...]]:
    return [tuple(row[n] for n in columns) for row in rows]


PLAIN = recorded(None, *(light(n, MS) for n in range(9)))
TRAINS = met(traces.training(world_size=1))
UNLINKED = waiting()
for _event in UNLINKED["traceEvents"]:
    _event["args"].pop("correlation", None)


@pytest.mark.parametrize(
    ("picture", "make"),
    [
        (machine.FILES_PICTURE, lambda folder: traces.write(folder / "rank0.json", traces.training(world_size=1))),
        (machine.FILES_PICTURE, recorded(traces.training(world_size=1))),
        (machine.GPU_LOGS_PICTURE, TRAINS),
        (compute.KERNELS_PICTURE, PLAIN),
        (host.LINES_PICTURE, PLAIN),
        (host.PROFILES_PICTURE, lambda folder: with_stacks(folder, SEEN)),
        (host.QUEUE_PICTURE, met(UNLINKED)),
        (host.STACKS_PICTURE, PLAIN),
        # A step that waits for no device, a line that was hardly seen, a trace without steps.
        (host.SYNCS_PICTURE, met(traces.trace(traces.step(1, 0, 10 * MS), traces.launched("gemm", 0, 9, 5 * MS, 1)))),
        (host.LINE_SHARES_PICTURE, lambda folder: stacked(folder, f"{MAIN};main (/w/train.py:68) 2\n")),
        (step.TIMELINE_PICTURE, met(traces.trace(traces.kernel("gemm", 0, MS), world_size=1))),
        (step.WHOLE_JOB_PICTURE, recorded(None, light(0, S))),
        (host.WORKERS_PICTURE, lambda folder: worked(folder, 0)),
    ],
)  # fmt: skip
def test_where_there_is_nothing_to_draw_there_is_no_panel(tmp_path: Path, picture: Picture, make: Make) -> None:
    assert drawn(runs.measured(make(tmp_path), picture.draw), [picture]) == ()


FRAME = pd.DataFrame({"rank": np.arange(3), "ns": [1.5, np.nan, 2.0], "name": ["a", "b", None]})


def test_a_table_holds_the_chosen_columns_of_the_first_rows_as_plain_values() -> None:
    made = table("Title", FRAME, {"name": "kernel", "ns": "time_ns"}, most=2, note="A note.")
    assert made == Panel("table", "Title", (("a", 1.5), ("b", None)), ("kernel", "time_ns"), note="A note.")
    whole = table("Title", FRAME, {"rank": "rank"})
    assert (whole.rows, {type(value) for row in whole.rows for value in row}) == (((0,), (1,), (2,)), {int})
    assert points(FRAME.set_index("rank")[["ns"]]) == ((0, 1.5), (1, None), (2, 2.0))


def test_a_picture_that_cannot_be_drawn_costs_no_other_and_a_wrong_name_fails_at_once(tmp_path: Path) -> None:
    def nothing() -> list[Panel]:
        raise NotMeasured("nothing to draw")

    def fine() -> list[Panel]:
        return [table("Title", FRAME, {"rank": "rank"})]

    def typo(step_meens: pd.DataFrame) -> list[Panel]:
        raise AssertionError(step_meens)

    run = runs.measured(TRAINS(tmp_path))
    assert [panel.title for panel in drawn(run, [Picture(nothing), Picture(fine)])] == ["Title"]
    with pytest.raises(TypeError, match="step_meens"):
        Picture(typo)


def heaviest(*ranks: tuple[dict[str, int], list[dict[str, Any]]], device: str = "NVIDIA A100-SXM4-40GB") -> Make:
    """Return what makes ranks of a step with operators whose kernels take so many µs, and shapes that were counted."""

    def job(rank: int, took: dict[str, int], shapes: list[dict[str, Any]]) -> tuple[Any, list[Any], dict[str, Any]]:
        events: list[Any] = [traces.step(0, 0, 10 * MS)]
        for n, (name, us) in enumerate(took.items()):
            events.append(traces.op(name, n * 20_000, 15_000))
            events += traces.launched("kernel", n * 20_000 + 1_000, MS + n * 300_000, us * US, n + 1)
        told = {"flops": {"state": "done", "shapes": shapes}} if shapes else {}
        made = traces.trace(*events, rank=rank, world_size=len(ranks))
        return made, [], {"device": {"type": "cuda", "name": device}, **told}

    return lambda folder: runs.recorded(folder / "run", *(job(r, *of) for r, of in enumerate(ranks)))


MM = {"operator": "aten::mm", "dtype": "bfloat16", "calls": 1}
SHAPES = [{**MM, "shape": "8x8 8x8", "flops": 3_000_000, "bytes": 300},
          {**MM, "shape": "8x8 8x16", "flops": 6_000_000, "bytes": 500}]  # fmt: skip


def test_the_heaviest_operators(tmp_path: Path) -> None:
    many = {f"aten::op{n}": 300 - 10 * n for n in range(MOST_OPERATORS + 2)}
    (panel,) = draw(compute.ARITHMETIC_PICTURE, heaviest((many, []))(tmp_path / "many"))
    assert picked(panel.rows, 0, 4) == [(f"op{n}", None) for n in range(MOST_OPERATORS)]
    # Shapes among which time was only shared out are one row.
    (panel,) = draw(compute.ARITHMETIC_PICTURE, heaviest(({"aten::mm": 300, "aten::add": 290}, SHAPES))(tmp_path / "b"))
    assert panel.columns[:5] == ("operator, shapes", "type", "calls", "time a step_ns", "GFLOP")
    assert panel.rows[0][:5] == ("mm of 2 shapes", "bfloat16", 2, 300_000, pytest.approx(0.009))
    assert panel.rows[1][0] == "add"
    assert "312 TFLOP/s in bfloat16" in panel.note
    # Of several ranks the mean is shown, and the one with most.
    two = heaviest(({"aten::mm": 200}, SHAPES), ({"aten::mm": 400, "aten::add": 200}, SHAPES))
    (panel,) = draw(compute.ARITHMETIC_PICTURE, two(tmp_path / "c"))
    assert panel.columns[4:6] + panel.columns[-2:] == ("GFLOP", "TFLOP/s", "most on rank", "there_ns")
    assert [(*row[:6], *row[-2:]) for row in panel.rows] == [
        (
            "mm of 2 shapes",
            "bfloat16",
            2,
            300_000,
            pytest.approx(0.009),
            pytest.approx(0.03),
            1,
            pytest.approx(400_000),
        ),
        ("add", None, 0.5, 100_000, None, None, 1, 200_000),
    ]


def test_kernels_and_copies(tmp_path: Path) -> None:
    kernels, copies = draw(compute.KERNELS_PICTURE, TRAINS(tmp_path / "one"))
    assert kernels.columns[2:] == ("calls", "time a step_ns", "a call_ns", "share")
    assert [row[0] for row in kernels.rows] == ["sm90_gemm", "sm90_gemm_backward", "multi_tensor_apply"]
    assert kernels.rows[0][2:] == (1, 300_000, 300_000, pytest.approx(6 / 11))
    assert copies.rows[0][0] == "HtoD"
    # Kernels that take no time were called all the same.
    made = traces.training(world_size=1)
    for event in made["traceEvents"]:
        event["dur"] *= not (event.get("cat") == "kernel" and "gemm" in event["name"])
    kernels, _ = draw(compute.KERNELS_PICTURE, met(made)(tmp_path / "none"))
    assert [row[0] for row in kernels.rows] == ["multi_tensor_apply", "sm90_gemm", "sm90_gemm_backward"]
    assert kernels.rows[1][2:] == (1, 0, 0, 0)
    # Of many kernels the longest are shown and the rest are counted.
    many = [traces.kernel(f"kernel_{n}", n * 10_000, 1_000 + n) for n in range(MOST_KERNELS + 10)]
    (panel,) = draw(compute.KERNELS_PICTURE, met(traces.trace(traces.step(1, 0, MS), *many))(tmp_path / "many"))
    assert [row[0] for row in panel.rows] == [f"kernel_{n}" for n in range(MOST_KERNELS + 9, 9, -1)]
    assert f"The longest {MOST_KERNELS} of {MOST_KERNELS + 10} kernels" in panel.note
    # Of several ranks the mean is shown, and the one with most.
    events = [[traces.step(0, 0, MS), traces.kernel("gemm", 10_000, us * US)] for us in (100, 200)]
    events[1].append(traces.kernel("only", 500_000, 100_000))
    two = [traces.trace(*mine, rank=rank, world_size=2) for rank, mine in enumerate(events)]
    (panel,) = draw(compute.KERNELS_PICTURE, met(*two)(tmp_path / "two"))
    assert panel.columns[-2:] == ("most on rank", "there_ns")
    assert [(row[0], *row[2:]) for row in panel.rows] == [
        ("gemm", 1, 150_000, 150_000, 0.75, 1, 200_000),
        ("only", 0.5, 50_000, 100_000, 0.25, 1, 100_000),
    ]


def test_collectives(tmp_path: Path) -> None:
    collectives = partial(draw, communication.COLLECTIVES_PICTURE)
    # Groups of as many ranks share a row.
    (panel,) = collectives(met(*exchanging((0, 1), (2, 3)))(tmp_path / "a"))
    assert [row[:4] for row in panel.rows] == [("all_reduce in 2 groups", 2, "below 256 MiB", 1)]
    assert panel.rows[0][5:10] == pytest.approx((250_000, 1_000_000, 40e9, 40e9, 40 / 450))
    assert panel.columns[10:] == ("last rank", "came last in", "of")
    assert panel.rows[0][10:] == (1, 1, 1)
    # What missing ranks hide is said.
    (panel,) = collectives(met(*exchanging((0, 1, 2))[:2])(tmp_path / "b"))
    assert (panel.columns[5], panel.rows[0][5], panel.rows[0][10:]) == ("waiting_ns", None, (None, None, None))
    assert "at most this long" in panel.note
    # A send and its receive are one, whose transfer begins when both have come: transfers of 500, 300, 200 and 200 µs,
    # and 1, 2.8, 1.6 and 5.4 ms of waiting of one of two ranks each.
    (panel,) = collectives(met(*handing_on(*HANDED_ON))(tmp_path / "c"))
    assert panel.rows[0][:2] == ("send and receive in 4 directions", 2)
    assert panel.rows[0][5:7] == pytest.approx((1_350_000, 300_000))
    made = exchanging((0, 1), (2, 3))
    for trace in made:
        trace["traceEvents"].append(traces.sent("send", 0, 0, 1_000, group="", ranks=(0, 1, 2, 3), told=False))
    (panel,) = collectives(met(*made)(tmp_path / "d"))
    assert "between which ranks" in panel.note


def test_the_flight_recorders_tell_where_each_rank_is(tmp_path: Path) -> None:
    where, kinds = draw(communication.FLIGHT_RECORDER_PICTURE, dumps.hung(tmp_path / "d"))
    issued = ["last issued" if rank in (3, 5) else "waits in" for rank in range(8)]
    assert [row[1] for row in where.rows] == issued
    assert kinds.rows == (("the default group", "all_reduce", 30, 8, "1000"),)


def test_files_of_one_kind_share_a_row_and_those_that_are_read_come_first(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "job", *(traces.training(rank=n, world_size=3) for n in range(3)))
    (path / "et.json").write_text(dialects.execution_trace())
    for n in range(5):
        (path / f"{n}.png").write_bytes(b"\x89PNG\r\n")
    (panel,) = draw(machine.FILES_PICTURE, path)
    assert panel.rows[0][1:3] == ("torch.profiler trace", "ranks 0 to 2")
    assert set(picked(panel.rows[1:], 1, 2)) == {
        ("not known", "left"),
        ("execution trace (PyTorch ET or Chakra)", "left"),
    }
    assert any(row[0].startswith("5 files: ") for row in panel.rows)


def test_a_log_of_gpus_has_a_row_a_gpu_with_the_columns_that_were_logged(tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text(smi(datetime(2026, 3, 4), 9, 1980, 1300))
    (panel,) = draw(machine.GPU_LOGS_PICTURE, tmp_path / "gpus.csv")
    assert [dict(zip(panel.columns, row, strict=True))["clock, MHz"] for row in panel.rows] == [1980, 1300]
    assert "power limit, W" not in panel.columns
    assert "enforced.power.limit" not in panel.note  # the power itself was logged


def test_the_loss_scale_is_drawn_of_one_rank_in_powers_of_two(tmp_path: Path) -> None:
    (panel,) = draw(compute.LOSS_SCALE_PICTURE, scaled(tmp_path / "a", skipped=(0, 1, 50), grown=(40,), ranks=2))
    assert (panel.columns, panel.rows) == (("step", "scale"), ((0, 15.0), (1, 14.0), (40, 15.0), (50, 14.0)))
    assert "skipped 3 steps, 2 of them before" in panel.note
    assert "16,384" in panel.note
    (panel,) = draw(compute.LOSS_SCALE_PICTURE, scaled(tmp_path / "b", unknown=True))
    assert "only the beginning is known" in panel.note


def test_the_allocators_memory_is_of_many_ranks_the_most(tmp_path: Path) -> None:
    gb, ranks = allocator.GB, range(MOST_RANKS + 1)
    path = allocator.recorded(tmp_path, *([allocator.reading(n, rank * gb) for n in range(3)] for rank in ranks))
    (panel,) = draw(compute.MEMORY_PICTURE, path)
    assert draw(step.STEPS_PICTURE, path)[0].columns[1:] == ("mean of ranks", "slowest rank")
    assert panel.rows[0] == (0, (MOST_RANKS + 1) * gb, MOST_RANKS * gb)


def test_a_snapshot_is_drawn_by_line_with_its_peak(tmp_path: Path) -> None:
    def snapshot(name: str, held: Any) -> list[Panel]:
        return draw(compute.MEMORY_SNAPSHOT_PICTURE, write(tmp_path / f"{name}.pickle", held))

    areas, table = snapshot("plain", dumps.training().snapshot())
    lines = ("forward (model.py:10)", "backward of MulBackward0", "step (optimizer.py:7)")
    assert areas.columns == ("since the first event_ns", *lines)
    assert max(sum(row[1:]) for row in areas.rows) == 24 * MB
    # The second step's last allocation is the 12th of the events, 0.1 ms each, from the first on.
    assert [mark[:2] for mark in areas.marks] == [(11 * 100_000, "peak")]
    assert (areas.rows[0][0], table.rows[0][2]) == (0, 18 * MB)
    assert [mark[1] for mark in snapshot("out", dumps.ran_out(pieces=False).snapshot())[0].marks] == [
        "out of memory",
        "peak",
    ]
    # Without times events are counted, and without events there is the table alone.
    areas, _ = snapshot("untimed", dumps.training(timed=False).snapshot())
    assert (areas.columns[0], areas.marks) == ("events of the allocator", ())
    (table,) = snapshot("no events", {**dumps.training().snapshot(), "device_traces": []})
    assert table.shape == "table"
    # A snapshot beside a trace joins its rank.
    folder = runs.foreign(tmp_path / "traces", *(traces.training(rank=rank) for rank in range(2)))
    write(folder / "rank1_snapshot", dumps.training().snapshot())
    panels = draw(compute.MEMORY_SNAPSHOT_PICTURE, folder)
    assert [panel.title.endswith("rank 1, GPU 0") for panel in panels] == [True, True]


def test_a_pipelines_bubbles_stages_and_step(tmp_path: Path) -> None:
    path = pipelines.recorded(tmp_path / "a", "Schedule1F1B", 2, 4, pipelines.alike(10, 20), hand_over=5)
    timeline, ranks, stages, schedules = draw(communication.PIPELINE_PICTURE, path)
    assert schedules.rows[0] == ("GPipe", pytest.approx(0.2), 1.0, 1.0, "replayed")
    assert schedules.title == "What schedules leave idle and hold, 2 ranks and 4 micro-batches"
    # Five slots of 30 ms and two hand-overs a round of two micro-batches.
    assert ranks.rows[0] == pytest.approx((0, 50 * MS, 30 * MS, 0, 20 * MS, 0, 5 / 17, 0.2, 0.2, 0.2))
    assert "1F1B, 4 micro-batches, 1 stage a rank, a step of 170.0 ms" in ranks.note
    assert stages.rows == ((0, 0, 10 * MS, 20 * MS, 1), (1, 1, 10 * MS, 20 * MS, 1))
    end = max(row[1] + row[2] for row in timeline.rows)
    for lane in ("stage 0 · rank 0", "stage 1 · rank 1"):
        mine = sorted(row[1:3] for row in timeline.rows if row[0] == lane)
        # Bubbles and chunks follow each other without a hole, from the beginning to the end.
        assert [start for start, _ in mine] == [0, *(start + dur for start, dur in mine)][:-1]
        assert sum(mine[-1]) == end
        assert any(row[0] == lane and row[4] == "pipeline_bubble" for row in timeline.rows)
    # What was not replayed is not told.
    path = pipelines.recorded(tmp_path / "b", "Schedule1F1B", 2, 4, pipelines.alike(10, 20), here=[0])
    _, ranks, _ = draw(communication.PIPELINE_PICTURE, path)
    assert ranks.rows[0] == (0, pytest.approx(30 * MS), *(None,) * 4, pytest.approx(0.2), None, None, 0.2)
    timeline = draw(communication.PIPELINE_PICTURE, pipelines.two_stages(tmp_path / "c"))[0]
    assert timeline.rows[0] == ("stage 0 · rank 0", 0, 10_000_000, "0", "forward")
    assert len([row for row in timeline.rows if row[4] != "pipeline_bubble"]) == 8


def test_of_pipelines_side_by_side_the_first_ones_stages_are_shown(tmp_path: Path) -> None:
    # The second pipeline's chunks last four fifths as long.
    shorter = [[(*chunk[:3], chunk[3] * 4 // 5, chunk[4] * 4 // 5) for chunk in of]
               for of in (pipelines.FIRST, pipelines.SECOND)]  # fmt: skip
    calls = [(pipelines.FIRST, 0, 90), (pipelines.SECOND, 5, 71), (shorter[0], 0, 90), (shorter[1], 4, 71)]
    path = pipelines.by_hand(
        tmp_path, *([one] for one in calls), facts_of=lambda r: pipelines.facts(r % 2, (0, 1) if r < 2 else (2, 3))
    )
    timeline, ranks, stages, *_ = draw(communication.PIPELINE_PICTURE, path)
    assert stages.rows == ((0, 0, 10 * MS, 20 * MS, 1), (1, 1, 10 * MS, 20 * MS, 1))
    assert [row[0] for row in ranks.rows] == [0, 1, 2, 3]
    assert "One of 2 pipelines" in timeline.note


def test_profiles_of_samples_and_of_calls(tmp_path: Path) -> None:
    flame, table = draw(host.PROFILES_PICTURE, GOLDEN / "pyspy.speedscope.json.gz")
    assert (flame.shape, flame.unit) == ("flame", "ns")
    assert {row[3]: row[2] for row in flame.rows if row[0] == 0}["waiting for the loader"] == 2_420_000_000
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["function"].partition(":")[0], first["whose"]) == ("decode (train.py", "yours")
    flame, table = draw(host.PROFILES_PICTURE, GOLDEN / "calc.prof")
    assert "estimated" in flame.note
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["function"], first["calls"]) == ("decode (calc.py:5)", 300)


def test_stacks_of_all_ranks_are_put_together(tmp_path: Path) -> None:
    flame, table = draw(host.STACKS_PICTURE, with_stacks(tmp_path, SEEN, SEEN))
    assert table.columns[3:] == ("in it_share", "with what it calls_share")
    assert table.rows == (
        ("between the phases", "log (log.py:9)", "yours", 1, 1),
        ("between the phases", "dumps (json/__init__.py:2)", "library", pytest.approx(1 / 6), pytest.approx(1 / 6)),
        ("waiting for the loader", "run (train.py:3)", "yours", 1, 1),
        ("waiting for the loader", "wait (threading.py:9)", "library", 1, 1),
        ("loader worker", "decode (data.py:4)", "yours", 0.8, 0.8),
        ("loader worker", "read (data.py:2)", "yours", 0.2, 1),
    )
    assert "py-spy saw 352 stacks: " in table.note  # 2 · (36 + 40 + 100)
    assert flame.rows[:3] == (
        (0, 0, 72, "between the phases", "host"),
        (0, 72, 80, "waiting for the loader", "input_wait"),
        (0, 152, 200, "loader worker", "worker"),
    )
    assert {(1, 0, 72, "run (train.py)", "own"), (3, 0, 12, "dumps (json/__init__.py)", "library"),
            (3, 152, 160, "decode (data.py)", "own")} <= set(flame.rows)  # fmt: skip


def test_lines_are_a_panel_a_function_the_longest_first(tmp_path: Path) -> None:
    code = {"source": "def f():\n    a()\n"}
    first = [piece("data:f", [(2, 4, 3 * MS)], **code), piece("data:g", [(2, 1, 90 * MS)], role="worker")]
    (g, f) = draw(host.LINES_PICTURE, with_lines(tmp_path, first, [piece("data:f", [(2, 6, 7 * MS)], **code)]))
    assert (g.title, f.title) == ("Line by line: data:g, in the loader's workers", "Line by line: data:f, in the rank")
    assert f.rows == ((1, "", "", "", "", "def f():"), (2, 10, 10 * MS, MS, 1, "\u00a0" * 4 + "a()"))
    assert "over 2 ranks" in f.note


def test_lines_of_the_user_stand_by_phase(tmp_path: Path) -> None:
    seen = [(";main (/w/train.py:68)", 60), (";main (/w/train.py:69)", 30), (";main (/w/train.py:70)", 2),
            (f";main (/w/train.py:61);{LOADER};decode (/w/data.py:7)", 108),
            (";run (/lib/python3.11/site-packages/fancy/cli.py:3)", 10)]  # fmt: skip
    (panel,) = draw(host.LINE_SHARES_PICTURE, stacked(tmp_path, *(f"{MAIN}{frames} {n}\n" for frames, n in seen)))
    assert picked(panel.rows, 0, 1, 4, 5) == [
        ("waiting for the loader", "/w/data.py:7", 1.0, 108 / 210),
        ("between the phases", "/w/train.py:68", 60 / 102, 60 / 210),
        ("between the phases", "/w/train.py:69", 30 / 102, 30 / 210),
    ]


def test_the_queue_is_drawn_with_what_waits_longest_in_it(tmp_path: Path) -> None:
    waits, length = draw(host.QUEUE_PICTURE, met(waiting(call("cudaStreamWaitEvent")))(tmp_path / "a"))
    ((ended, _, launched, times, idle, before, what),) = waits.rows
    # 752 µs from its launch until it runs.
    assert (ended, launched, times, idle, before) == ("second", "cudaLaunchKernel", 1, 500_000, 752_000)
    assert "event" in what
    assert (length.shape, length.columns) == ("lines", ("into the trace_ns", "rank 0"))
    # Ranks are drawn on one time, and short waits leave no table.
    one, other = ahead(), waiting(wait=1_000)
    one["distributedInfo"] |= {"world_size": 2}
    other["distributedInfo"] |= {"rank": 1, "world_size": 2}
    (length,) = draw(host.QUEUE_PICTURE, met(one, other)(tmp_path / "b"))
    assert length.columns == ("into the trace_ns", "rank 0", "rank 1")
    assert "behind its host" in length.note
    assert max(float(str(row[1])) for row in length.rows if row[1] not in (None, "")) <= 8


def test_waits_are_those_of_the_rank_that_waits_longest_and_on_a_cpu_counted(tmp_path: Path) -> None:
    def job(rank: int, until: int) -> dict[str, Any]:
        """Trace a step in which `.item()` waits from 1 ms on, and the device then idles until 7 ms."""
        first = traces.launched("gemm", 0, 10 * US, until - 12 * US, 1)
        then = traces.launched("gemm", 7 * MS, 7 * MS + 10 * US, 2 * MS, 5)
        return traces.trace(traces.step(1, 0, 10 * MS), first, *item(MS, until, 2), then, rank=rank)

    (panel,) = draw(host.SYNCS_PICTURE, met(job(0, 3 * MS), job(1, 5 * MS))(tmp_path / "a"))
    assert panel.title.endswith("rank 1")
    assert panel.columns[3:] == ("waiting a step_ns", "device then idle_ns")
    assert panel.rows[0][:3] == ("aten::item", "cudaMemcpyAsync", 1)
    assert panel.rows[0][3:] == (pytest.approx(4.01 * MS, rel=1e-3), pytest.approx(2 * MS, abs=5 * US))
    events = [traces.step(1, 0, 10 * MS), *(traces.op("aten::item", n * MS, 10 * US) for n in (1, 2, 4))]
    made = traces.trace(*events, traces.op("aten::mm", 3 * MS, MS), device="", backend="", world_size=1)
    (panel,) = draw(host.SYNCS_PICTURE, met(made)(tmp_path / "b"))
    assert (panel.rows, panel.columns) == ((("aten::item", 3),), ("by", "times a step"))


def stepping(folder: Path, *ranks: list[dict[str, Any]], stalls: Any = None, **info: Any) -> dict[str, Panel]:
    made_by = ((None, steps, {"device": A100}) for steps in ranks)
    path = runs.recorded(folder, *made_by, stalls=[stalls] if stalls else None, **info)
    return {panel.title: panel for panel in draw(step.STEPS_PICTURE, path)}


def test_steps_stand_where_they_were_and_what_held_them_up_is_marked(tmp_path: Path) -> None:
    steps = [light(n, 10 * MS, kind="validation" if n in (20, 21) else "train", first=int(n == 10)) for n in range(30)]
    stalls = [runs.stall("checkpoint", 15, 8 * MS), runs.stall("garbage_collection", 16, MS // 10)]
    resumed = [traces.BASE_NS + n * S + 400 * MS for n in (-3, 25, 50)]
    panel = stepping(tmp_path / "a", steps, stalls=stalls, resumed_ns=resumed)["Steps over the run"]
    assert (panel.columns, panel.rows[3]) == (("time_ns", "rank 0"), (3 * S, 10 * MS))
    assert panel.steps == tuple(n for n in range(30) if n not in (20, 21, 25))
    assert panel.marks == (
        (10 * S, "step 10: an epoch begins or ends", "epoch"),
        (15 * S, "step 15: checkpoint, 8.00 ms", "checkpoint"),
        (20 * S, "step 20: validation, 2 steps, 20.0 ms", "validation"),
        (25 * S + 400 * MS, "the job went on after it was stopped", "suspended"),
    )
    # The counted step is told from the window, and a trace alone has steps by number.
    counted = [light(n, 10 * MS, profiled=int(n in (9, 20, 21, 22))) for n in range(30)]
    assert stepping(tmp_path / "b", counted)["Steps over the run"].note.startswith("Steps 9 and 20 to 22: ")
    (panel,) = draw(step.STEPS_PICTURE, TRAINS(tmp_path / "c"))
    assert panel.columns == ("step", "rank 0")


def test_the_parts_of_the_steps_add_up_to_them_on_the_mean_rank(tmp_path: Path) -> None:
    parts = {"forward_ns": 2 * MS, "backward_ns": 3 * MS, "optimizer_ns": MS}
    each = [[light(n, 10 * MS, fetch_ns=ms * MS, **parts) for n in range(step.MOST_POINTS * 2)] for ms in (1, 3)]
    panel = stepping(tmp_path, *each)["What the training thread did in its steps"]
    assert panel.columns == ("time_ns", "input_wait", "forward", "backward", "optimizer_host", "other")
    assert (panel.shape, len(panel.rows)) == ("areas", step.MOST_POINTS)
    assert panel.rows[1] == (2 * S, 2 * MS, 2 * MS, 3 * MS, MS, 2 * MS)
    assert "of 2 steps a point" in panel.note


def test_the_whole_job_is_the_mean_of_the_ranks(tmp_path: Path) -> None:
    ranks = [[light(n, S, kind="validation" if 20 <= n < 20 + k else "train") for n in range(40)] for k in (8, 4)]
    stalls = [[runs.stall("checkpoint", 5, 800 * MS)], []]
    path = runs.recorded(tmp_path, *((None, steps, CPU) for steps in ranks), stalls=stalls)
    (panel,) = draw(step.WHOLE_JOB_PICTURE, path)
    assert picked(panel.rows, 0, 1, 3) == [
        ("training, warming up", 3, pytest.approx(3 / 40)),
        ("training, steady", 31, pytest.approx(31 / 40)),
        ("validation", 6, pytest.approx(6 / 40)),
        ("of it saving checkpoints", 0.5, pytest.approx(0.01)),
    ]
    assert panel.rows[3][2] == 400 * MS
    assert panel.note.startswith("Means over 2 ranks.")


FULL = ((100, 100, 100, 500), (100, 100, 200, 400))


def holding(*experts: int, backward: bool = False) -> Make:
    """Return what makes a job of two layers whose ranks hold so many experts of each, and one that all tokens pass."""
    more = {"parameters": 8, "parameter_bytes": 32, "bucket": -1, "forward_flops": -1, "recompute_flops": -1}
    more |= {"backward_flops": -1, "sharded": 0}

    def make(folder: Path) -> Path:
        run = runs.recorded(folder, *((one, [], runs.GPU) for one in routed(*FULL, backward=backward)))
        for rank, number in enumerate(experts):
            kinds = {"": "Model", "0.shared_experts": "MLP", "1.shared_experts": "MLP"}
            for layer in (0, 1):
                kinds[f"{layer}.experts"] = "ModuleList"
                for n in range(number):
                    kinds |= {f"{layer}.experts.{n}": "MLP", f"{layer}.experts.{n}.up": "Linear"}
            rewrite(run, "modules.jsonl", [{"path": path, "kind": kind} | more for path, kind in kinds.items()], rank)
        return run

    return make


@pytest.mark.parametrize(
    ("make", "title", "columns", "rows", "note"),
    [
        (met(*routed(*FULL)), "Tokens per rank", ("rank", "tokens a dispatch", "of the mean_times"),
         [(3, 450, 2.25)], "2.25 × the mean rank's tokens"),
        # The tokens of one dispatch, not those of the forward and the backward pass together.
        (holding(1, 1, 1, 1, backward=True), "Tokens per expert", ("expert", "rank", "tokens a dispatch"),
         [(3, 3, 450), (2, 2, 150), (0, 0, 100), (1, 1, 100)], "one expert of each of 2 layers"),
        # Of missing ranks it is known what the others send them.
        (met(*routed(*FULL)[:2]), "Tokens sent to each rank", ("rank",), [(3,)], ""),
        *((holding(*held), "Tokens per rank", ("rank",), [(3,)], why) for held, why in (
            ((2, 2, 2, 2), "not in the trace: each rank holds 2 experts of a layer"),
            ((1, 1, 1, 2), "not in the trace: ranks hold up to 2 experts of a layer"),
            ((1, 1, 1, 0), "not every rank holds an expert"),
            ((1, 1, 1), "how many experts each rank holds is not known"),
            ((), "how many experts each rank holds is not known"))),
    ],
)  # fmt: skip
def test_tokens_of_experts(
    tmp_path: Path, make: Make, title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]], note: str
) -> None:
    (panel,) = draw(communication.EXPERTS_PICTURE, make(tmp_path))
    assert (panel.title, panel.columns[: len(columns)], len(panel.rows)) == (title, columns, 4)
    assert [row[: len(columns)] for row in panel.rows[: len(rows)]] == [pytest.approx(row) for row in rows]
    assert note in panel.note


def worked(folder: Path, workers: int, slow: int = 0, **without: Any) -> Path:
    """Record a loader whose workers take 30 ms for a batch, the first `slow` ms more."""
    facts = {**CPU, "loaders": [{"role": "train", "num_workers": workers, "prefetch_factor": 2}]}
    steps = [light(n, 20 * MS, fetch_ns=10 * MS) for n in range(10 * max(workers, 4))]
    path = runs.recorded(folder / "run", (None, steps, facts))
    told = {"step": 20 * MS, "wait": 10 * MS, "fetch": 30 * MS, "cpu": 7 * MS, "n": len(steps), "slow": slow * MS}
    runs.loading(path, 0, workers=workers, **told)
    edit(path, "fetches.jsonl", lambda _, row: row | without)
    return path


def test_the_loaders_workers(tmp_path: Path) -> None:
    (panel,) = draw(host.WORKERS_PICTURE, worked(tmp_path / "a", workers=2, slow=12))
    assert panel.columns[:4] == ("rank", "worker", "batches", "fetch_ns")
    assert picked(panel.rows, 0, 1, 3, 4, 5) == [(0, 0, 42 * MS, 3 * MS, 7 * MS), (0, 1, 30 * MS, 3 * MS, 7 * MS)]
    # What a kernel does not tell is a dash and no zero, and of very many workers the first are shown.
    (panel,) = draw(
        host.WORKERS_PICTURE, worked(tmp_path / "b", workers=host.MOST_WORKERS + 2, cpu_ns=-1, stored_bytes=-1)
    )
    assert panel.rows[0][5] is panel.rows[0][7] is None
    assert len(panel.rows) == host.MOST_WORKERS
    assert panel.note.endswith(f"The first {host.MOST_WORKERS} of {host.MOST_WORKERS + 2} workers.")


def timeline(folder: Path, *made: dict[str, Any]) -> Panel:
    (panel,) = draw(step.TIMELINE_PICTURE, met(*made)(folder))
    return panel


def at(panel: Panel, lane: str, name: str) -> tuple[float, float]:
    """Return when a piece begins and how long it is, µs."""
    ((start, dur),) = [(row[1] / US, row[2] / US) for row in panel.rows if row[0] == lane and row[3] == name]
    return start, dur


def far(rank: int) -> dict[str, Any]:
    """Return a step of a rank on a host of its own, whose clock is 50 ms ahead of the one before."""
    events = (traces.step(0, 0, MS), traces.fetch(5 * US, 100 * US), traces.kernel("gemm", 0, 500 * US))
    ahead = traces.BASE_NS + rank * 50 * MS
    return traces.trace(*events, rank=rank, world_size=2, base_ns=ahead, host=f"node-{rank}")


@pytest.mark.parametrize(
    ("made", "second", "note"),
    [
        ([traces.training(rank=r, base_ns=traces.BASE_NS + 300 * US * r) for r in (0, 1)], 305, ""),
        ([far(0), far(1)], 5, "their clocks differ"),
        # Clocks that collectives bring together are one.
        ([traces.training(rank=r, base_ns=traces.BASE_NS + 50 * MS * r, host=f"node-{r}") for r in (0, 1)], 5, ""),
    ],
    ids=["one clock", "two clocks", "brought together"],
)
def test_ranks_are_drawn_on_one_clock_or_each_from_its_beginning(
    tmp_path: Path, made: list[dict[str, Any]], second: int, note: str
) -> None:
    panel = timeline(tmp_path, *made)
    assert [at(panel, f"rank {rank} · thread", "fetch")[0] for rank in (0, 1)] == [5, second]
    assert note in panel.note
    assert bool(note) == bool(panel.note)


def test_arrows_lead_from_the_last_to_come_to_those_that_waited(tmp_path: Path) -> None:
    def job(rank: int, late: int) -> dict[str, Any]:
        collective = traces.collective(300 * US + late, 400 * US - late, 1_000, ranks=(0, 1, 2), correlation=2)
        launched = traces.launched("gemm", 20 * US, 50 * US, 150 * US, 1)
        events = (traces.step(0, 0, MS), traces.op("aten::mm", 10 * US, 100 * US), *launched, collective)
        return traces.trace(*events, rank=rank, world_size=3, host="node-1")

    panel = timeline(tmp_path, job(0, 0), job(1, 250 * US), job(2, 240 * US))
    # Rank 2 waits 10 µs, a hundredth of the step: not worth an arrow.
    ((when, origin, goal, label),) = panel.arrows
    assert (when, label) == (550 * US, "rank 0 had waited 250.0 µs for rank 1")
    assert origin.startswith("rank 1 · communication")
    assert goal.startswith("rank 0 · communication")
    assert "Arrows lead" in panel.note
    assert [(row[0][:6], *row[1:4]) for row in panel.rows if row[4] == "waiting"] == [
        ("rank 0", 300 * US, 250 * US, "waits for rank 1"),
        ("rank 2", 540 * US, 10 * US, "waits for rank 1"),
    ]


def test_of_many_ranks_the_first_are_drawn_and_those_that_others_wait_for(tmp_path: Path) -> None:
    world, late = MOST_RANKS + 3, MOST_RANKS + 1
    made = [traces.training(rank=r, world_size=world) for r in range(world)]
    for event in made[late]["traceEvents"]:
        event["dur"] /= 10 if "nccl" in event["name"] else 1
    panel = timeline(tmp_path, *made)
    lanes = {row[0].split(" · ")[0] for row in panel.rows}
    assert len(lanes) == MOST_RANKS
    assert {"rank 0", "rank 1", "rank 2", f"rank {late}"} <= lanes
    assert panel.note.startswith(f"{MOST_RANKS} of {world} ranks: ")


@pytest.mark.parametrize(
    ("ranks", "titles", "drawn_ranks"),
    [
        # The slowest step is the one that most ranks say, and drawn with those.
        ([{3: 1_500}, {3: 1_500}, {1: 1_500}], ["One traced step (step 2)", "The slowest traced step (step 3)"],
         [3, 2]),
        ([{3: 1_050}, {3: 1_040}], ["One traced step (step 2)"], [2]),  # it is like the others
        ([{3: 1_500}, {3: 1_040}], ["One traced step (step 2)", "The slowest traced step (step 3)"],
         [2, 2]),
    ],
)  # fmt: skip
def test_the_slowest_step(
    tmp_path: Path, ranks: list[dict[int, int]], titles: list[str], drawn_ranks: list[int]
) -> None:
    def job(rank: int, longer: dict[int, int]) -> dict[str, Any]:
        events = [traces.step(n, n * 2 * MS, longer.get(n, 1_000) * US) for n in range(4)]
        return traces.trace(*events, *(traces.kernel("gemm", n * 2 * MS + US, 500 * US) for n in range(4)), rank=rank)

    panels = draw(step.TIMELINE_PICTURE, met(*(job(*each) for each in enumerate(ranks)))(tmp_path))
    assert [p.title for p in panels] == titles
    assert [len({row[0] for row in p.rows if "computation" in row[0]}) for p in panels] == drawn_ranks
