"""Pipelines in traces that others recorded: chunks from their ranges, and abstention where those do not tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import NotMeasured
from dlprof.measures.pipeline import bubbles, stage_lengths
from dlprof.measures.schedules import Action, grid
from dlprof.rules.pipeline_bubble import RULE
from tests import runs, traces
from tests.collectors.test_pipeline import STAGES
from tests.jobs import environment
from tests.pipelines import alike, laid_out
from tests.rules.asking import ask
from tests.runs import MS

WORDS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
STEPS = 4


def named(schedule: str, action: Action) -> str:
    stage, what, which = action
    if schedule == "ScheduleGPipe":
        return f"{what.capitalize()} {which}"
    return f"PP:{stage}{WORDS[what]}{which}"


def foreign(folder: Path, schedule: str, ranks: int, microbatches: int, chunks: int, gpu: bool) -> Path:
    """Write the traces of a pipeline as torch.profiler leaves them: a range begins with waiting for the neighbour."""
    rows = laid_out(grid(schedule, ranks, microbatches, chunks).rows, alike(10, 20))
    step = max(start + dur for row in rows for _, start, dur in row) + 5
    made = []
    for rank, row in enumerate(rows):
        events: list[Any] = []
        for n in range(STEPS):
            zero = n * step * MS
            events.append(traces.step(n, zero, step * MS))
            end = 0
            for k, (action, start, dur) in enumerate(row):
                begin, launch = zero + end * MS, 1 + n * 1_000 + k
                if gpu:
                    # The host runs ahead: it has launched all of a chunk soon after the one before.
                    events.append(traces.annotation(named(schedule, action), zero + k * 100_000, 90_000))
                    at = zero + k * 100_000 + 10_000
                    events.append(traces.launched("gemm", at, zero + start * MS, dur * MS, launch))
                    received = traces.collective(
                        begin, (start - end) * MS, 8, name="recv", kernel_name="ncclDevKernel_SendRecv"
                    )
                    events += [received] * (start > end)
                else:
                    events.append(traces.annotation(named(schedule, action), begin, zero + (start + dur) * MS - begin))
                    events.append(traces.op("aten::mm", zero + start * MS + 1_000, dur * MS - 2_000))
                    events += [traces.annotation("gloo:recv", begin, (start - end) * MS)] * (start > end)
                end = start + dur
        backend = {} if gpu else {"device": "", "backend": "gloo"}
        made.append(traces.trace(*events, rank=rank, world_size=ranks, **backend))  # type: ignore[arg-type]
    return runs.foreign(folder / "traces", *made)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [
        ("ScheduleGPipe", 1, 2 / 8),
        ("ScheduleInterleaved1F1B", 2, 2 / 14),
        ("ScheduleLoopedBFS", 2, 2 / 14),
        ("ScheduleInterleavedZeroBubble", 2, 2 / 38),
        ("ScheduleZBVZeroBubble", 2, 0.0),
    ],
)
def test_chunks_are_what_was_computed_within_the_ranges(
    tmp_path: Path, schedule: str, chunks: int, bubble: float, gpu: bool
) -> None:
    path = foreign(tmp_path, schedule, 3, 6, chunks, gpu)
    run = runs.measured(path, bubbles, stage_lengths)
    frame = run.frame(bubbles)
    assert set(frame["schedule"]) == {schedule}
    assert frame["microbatches"].to_list() == [6, 6, 6]
    assert frame["simulated"].to_list() == pytest.approx([bubble] * 3, abs=0.01)
    assert frame["busy_ns"].to_list() == pytest.approx([6 * chunks * 30 * MS] * 3, rel=0.01)
    assert run.frame(stage_lengths)["stage_ns"].to_list() == pytest.approx([30 * MS] * 3 * chunks, rel=0.01)
    assert ask(RULE, path).state in ("clear", "found")


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], "no pipeline stages were recorded"),
        ([traces.annotation("Forward 0", 10, 20)], "no pipeline stages were recorded"),
        ([traces.annotation("gloo:recv", 10, 20)], "names no stage or micro-batch"),
        (
            [traces.annotation("PP:0F0", 10, 20), traces.annotation("PP:(0F1;3B0)OVERLAP_F_B", 40, 20)],
            "DualPipeV overlaps",
        ),
    ],
)
def test_what_ranges_do_not_tell_is_not_measured(tmp_path: Path, events: list[Any], why: str) -> None:
    marks = [traces.step(n, n * MS, MS) for n in range(3)]
    path = runs.foreign(tmp_path / "traces", traces.trace(*marks, traces.op("aten::mm", 0, 500), *events, device=""))
    with pytest.raises(NotMeasured, match=why):
        runs.measured(path, bubbles).frame(bubbles)


def test_without_marks_of_steps_it_abstains(tmp_path: Path) -> None:
    made = traces.trace(traces.annotation("PP:0F0", 10, 20), traces.op("aten::mm", 12, 5), device="")
    with pytest.raises(NotMeasured, match="nothing in it marks the steps"):
        runs.measured(runs.foreign(tmp_path / "traces", made), bubbles).frame(bubbles)


@pytest.mark.slow
def test_what_torch_profiler_writes_of_real_pipelines_is_read(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        STAGES
        + """
from torch.profiler import profile, schedule as window
dist.init_process_group("gloo")
for name in ("GPipe", "Interleaved1F1B", "1F1B"):
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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launcher, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for name, bubble in (("GPipe", 1 / 5), ("Interleaved1F1B", 1 / 9)):
        frame = runs.measured(tmp_path / name, bubbles).frame(bubbles)
        assert set(frame["schedule"]) == {f"Schedule{name}"}
        assert (frame["busy_ns"] >= 4 * 60e6 * (1 if name == "GPipe" else 2)).all()
        assert frame["simulated"].to_list() == pytest.approx([bubble] * 2, abs=0.08)
        assert (frame["bubble"] > 0.8 * bubble).all()
    with pytest.raises(NotMeasured, match="record the job with dlprof"):
        runs.measured(tmp_path / "1F1B", bubbles).frame(bubbles)
