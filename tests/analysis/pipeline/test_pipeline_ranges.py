"""Pipelines in traces that others recorded: chunks from their ranges, and abstention where those do not tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.pipeline.pipes import bubbles, stage_lengths
from dlprof.analysis.pipeline.rules.pipeline_bubble import RULE
from dlprof.analysis.pipeline.schedules import Action, Grid, grid, replay
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.jobs import as_ranks, launch
from tests.fixtures.pipelines import alike, laid_out
from tests.fixtures.runs import MS, asked
from tests.fixtures.stages import STAGES

WORDS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
STEPS = 3


def named(schedule: str, action: Action) -> str:
    stage, what, which = action
    if schedule == "ScheduleGPipe":
        return f"{what.capitalize()} {which}"
    return f"PP:{stage}{WORDS[what]}{which}"


def passed(action: Action, at: int, length: int) -> list[Any]:
    """Return a pass's operators; a backward's lie within what autograd evaluates."""
    if action[1] != "forward":
        return [
            traces.op("autograd::engine::evaluate_function: MmBackward0", at, length),
            traces.op("aten::mm", at + 500, length - 1_000),
        ]
    half = length // 2
    # Autocast casts the weights for the first micro-batch, and keeps them for the others.
    cast = [traces.op("aten::_to_copy", at + half - 1_000, 500)] * (action[2] == 0)
    return [traces.op("aten::linear", at, half - 2_000), *cast, traces.op("aten::relu", at + half, length - half)]


def foreign(
    folder: Path, schedule: str, ranks: int, microbatches: int, chunks: int, gpu: bool, told: str = "", beside: int = 1
) -> Path:
    """Write the traces of a pipeline as torch.profiler leaves them: a range begins with waiting for the neighbour.

    The ranges are those of the schedule `told` (its own by default); 1F1B has none, only what is sent and received. So
    many pipelines train `beside` each other; only on a GPU the groups are told in which they send.
    """
    plan = grid(schedule, ranks, microbatches, chunks)
    rows = laid_out(plan.rows, alike(10, 20))
    step = max(start + dur for row in rows for _, start, dur in row) + 10
    mark = unnamed if (told or schedule) == "Schedule1F1B" else ranged
    made = []
    for rank, row in enumerate(rows * beside):
        events: list[Any] = []
        group = rank // ranks
        members = tuple(range(group * ranks, (group + 1) * ranks))
        where: dict[str, Any] = {"group": f"pipeline{group}" if beside > 1 else "0", "ranks": members}
        for n in range(STEPS):
            zero = n * step * MS + 3 * MS
            events += [traces.step(n, zero - 3 * MS, step * MS), traces.op("aten::linear", zero - 2 * MS, MS)]
            events.append(traces.op("aten::_fused_adamw_", zero + (row[-1][1] + row[-1][2] + 1) * MS, MS))
            end, ranges = 0, []
            for k, (action, start, dur) in enumerate(row):
                begin, launch = zero + end * MS, 1 + n * 1_000 + k
                end = start + dur
                if gpu:
                    # The host runs ahead: it has launched all of a chunk soon after the one before.
                    ranges.append((action, zero + k * 100_000, zero + k * 100_000 + 90_000))
                    made_by = passed(action, ranges[-1][1] + 10_000, 70_000)
                    made_by.append(traces.call("cudaLaunchKernel", ranges[-1][1] + 30_000, 5_000, launch))
                    if action[1] != "forward":
                        made_by = [event | {"tid": traces.AUTOGRAD} for event in made_by]
                    events += [*made_by, traces.kernel("gemm", zero + start * MS, dur * MS, launch)]
                    received = traces.collective(
                        begin, zero + start * MS - begin, 8, "recv", kernel_name="ncclDevKernel_SendRecv", **where
                    )
                    events += [received] * (zero + start * MS > begin)
                else:
                    ranges.append((action, begin, zero + end * MS))
                    events += passed(action, zero + start * MS + 1_000, dur * MS - 2_000)
                    waits = traces.annotation("gloo:recv", begin, zero + start * MS - begin)
                    events += [waits] * (zero + start * MS > begin)
            events += mark(schedule, ranges, plan)
        backend = {} if gpu else {"device": "", "backend": "gloo"}
        made.append(traces.trace(*events, rank=rank, world_size=ranks * beside, **backend))  # type: ignore[arg-type]
    return runs.foreign(folder / "traces", *made)


def ranged(schedule: str, passes: list[tuple[Action, int, int]], plan: Grid) -> list[Any]:
    """Name each pass's range; a forward that is held has one together with the backward after it."""
    events, at = unnamed(schedule, passes, plan) if schedule == "ScheduleGPipe" else [], 0
    while at < len(passes):
        action, begin, end = passes[at]
        name = named(schedule, action)
        if action in plan.held:
            at += 1
            end = passes[at][2]
            name = f"PP:({name[3:]};{named(schedule, passes[at][0])[3:]})OVERLAP_F_B"
        events.append(traces.annotation(name, begin, end - begin))
        at += 1
    return events


def unnamed(_schedule: str, passes: list[tuple[Action, int, int]], plan: Grid) -> list[Any]:
    """Return the calls that send and receive around each pass."""
    events = []
    for (stage, what, _), begin, end in passes:
        first, last = stage == 0, stage == max(s for row in plan.rows for s, _, _ in row)
        receives, sends = (not first, not last) if what == "forward" else (not last, not first)
        events += [traces.op("c10d::recv_", begin + 200, 300)] * receives
        events += [traces.op("c10d::send", end - 500, 300)] * sends
    return events


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble", "gpu"),
    [
        ("ScheduleGPipe", 1, 2 / 8, False),
        ("Schedule1F1B", 1, 2 / 8, False),
        ("ScheduleInterleaved1F1B", 2, 2 / 14, False),
        ("ScheduleInterleavedZeroBubble", 2, 2 / 38, False),
        ("ScheduleDualPipeV", 2, None, False),
        ("ScheduleGPipe", 1, 2 / 8, True),
        ("Schedule1F1B", 1, 2 / 8, True),
        ("ScheduleLoopedBFS", 2, 2 / 14, True),
        ("ScheduleZBVZeroBubble", 2, 0.0, True),
    ],
)
def test_chunks_are_what_was_computed_within_the_ranges(
    tmp_path: Path, schedule: str, chunks: int, bubble: float | None, gpu: bool
) -> None:
    path = foreign(tmp_path, schedule, 3, 6, chunks, gpu)
    run = runs.measured(path, breakdown, bubbles, stage_lengths)
    frame = run.frame(bubbles)
    assert set(frame["schedule"]) == {schedule}
    assert frame["microbatches"].to_list() == [6, 6, 6]
    if bubble is None:  # no formula is known
        plan = grid(schedule, 3, 6, chunks)
        length = replay(plan.rows, {a: float(alike(10, 20)(a)) for row in plan.rows for a in row}, plan.held)
        bubble = 1 - 6 * chunks * 30 / length
    assert frame["simulated"].to_list() == pytest.approx([bubble] * 3, abs=0.01)
    assert frame["busy_ns"].to_list() == pytest.approx([6 * chunks * 30 * MS] * 3, rel=0.01)
    assert run.frame(stage_lengths)["stage_ns"].to_list() == pytest.approx([30 * MS] * 3 * chunks, rel=0.01)
    idle = asked(run, part, "pipeline_bubble")
    if not gpu:
        assert idle == pytest.approx(dict(zip(frame["rank"], frame["dur_ns"] - frame["busy_ns"], strict=True)), abs=MS)
    assert max(asked(run, part, "communication").values()) < MS  # but for the calls themselves
    assert ask(RULE, path).state in ("clear", "found")


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("ScheduleGPipe", 1), ("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2)]
)
def test_pipelines_beside_each_other_are_told_by_the_groups_that_send(
    tmp_path: Path, schedule: str, chunks: int
) -> None:
    frame = runs.measured(foreign(tmp_path, schedule, 2, 4, chunks, gpu=True, beside=2), bubbles).frame(bubbles)
    assert frame["ranks"].to_list() == ["0, 1", "0, 1", "2, 3", "2, 3"]
    assert frame["simulated"].to_list() == pytest.approx([1 / (4 * chunks + 1)] * 4, abs=0.01)


@pytest.mark.parametrize(
    ("schedule", "shape", "how", "why"),
    [
        # Where no groups are told, pipelines beside each other are not taken for one.
        ("ScheduleGPipe", (2, 4), {"beside": 2}, "which ranks are one pipeline"),
        ("Schedule1F1B", (2, 4), {"beside": 2}, "not in 1F1B's order"),
        ("ScheduleGPipe", (3, 3), {"told": "Schedule1F1B"}, "not in 1F1B's order"),
    ],
)
def test_passes_in_an_order_that_nobody_knows_are_not_told(
    schedule: str, shape: tuple[int, int], how: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(NotMeasured, match=why):
        runs.measured(foreign(tmp_path, schedule, *shape, 1, gpu=False, **how), bubbles).frame(bubbles)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 7)])
def test_1f1b_is_told_whatever_its_size(tmp_path: Path, ranks: int, microbatches: int) -> None:
    frame = runs.measured(foreign(tmp_path, "Schedule1F1B", ranks, microbatches, 1, gpu=False), bubbles).frame(bubbles)
    bubble = (ranks - 1) / (microbatches + ranks - 1)
    assert frame["closed"].to_list() == pytest.approx([bubble] * ranks)
    assert frame["simulated"].to_list() == pytest.approx([bubble] * ranks, abs=0.01)
    assert frame["bubble"].to_list() == pytest.approx([bubble] * ranks, abs=0.01)


MARKS = [traces.step(n, n * MS, MS) for n in range(3)]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (MARKS, "no pipeline"),
        ([*MARKS, traces.annotation("Forward 0", 10, 20)], "no pipeline"),
        ([*MARKS, traces.annotation("gloo:recv", 10, 20)], "names no stage or micro-batch"),
        (
            [*MARKS, traces.annotation("PP:0F0", 10, 20), traces.annotation("PP:(0F1;3B0)OVERLAP_F_B", 40, 20)],
            "no backward pass in PP:",
        ),
        ([traces.annotation("PP:0F0", 10, 20)], "nothing in it marks the steps"),
    ],
)
def test_what_ranges_do_not_tell_is_not_measured(tmp_path: Path, events: list[Any], why: str) -> None:
    path = runs.foreign(tmp_path / "traces", traces.trace(*events, traces.op("aten::mm", 0, 500), device=""))
    with pytest.raises(NotMeasured, match=why):
        runs.measured(path, bubbles).frame(bubbles)


@pytest.mark.slow
def test_what_torch_profiler_writes_of_real_pipelines_is_read(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        STAGES
        + """
from torch.profiler import profile, schedule as window
dist.init_process_group("gloo")
for name in ("GPipe", "Interleaved1F1B", "1F1B", "DualPipeV"):
    class Work(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
        def forward(self, x):
            return Nap.apply(self.linear(x), 0.02, 0.04)
    _, step = build(name, 4, Work)
    os.makedirs(name, exist_ok=True)
    write = lambda p: p.export_chrome_trace(f"{name}/rank{dist.get_rank()}.json")
    with profile(schedule=window(wait=1, warmup=1, active=3), on_trace_ready=write) as p:
        for _ in range(6):
            step()
            p.step()
dist.destroy_process_group()
"""
    )
    done = launch(as_ranks(script), tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    for name, bubble in (("GPipe", 1 / 5), ("1F1B", 1 / 5), ("Interleaved1F1B", 1 / 9), ("DualPipeV", None)):
        frame = runs.measured(tmp_path / name, bubbles).frame(bubbles)
        assert set(frame["schedule"]) == {f"Schedule{name}"}
        assert (frame["busy_ns"] >= 4 * 60e6 * (1 if name in ("GPipe", "1F1B") else 2)).all()
        if bubble is not None:
            assert frame["simulated"].to_list() == pytest.approx([bubble] * 2, abs=0.08)
        assert (frame["bubble"] > 0.8 * (bubble or frame["simulated"])).all()
