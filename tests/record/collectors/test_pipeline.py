"""Chunks of real pipelines: every schedule that torch has, what is written of them, and what must not be touched."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.analysis.pipeline.pipes import bubbles, stage_lengths
from dlprof.analysis.pipeline.schedules import grid
from dlprof.record.collectors.pipeline import Pipeline
from dlprof.record.recorder import Recorder
from tests.fixtures import worlds
from tests.fixtures.devices import Devices, Place
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import COMPILES_NOTHING, as_ranks, facts, launch, record, rows, wrapped
from tests.fixtures.runs import measured
from tests.fixtures.stages import STAGES

torch = pytest.importorskip("torch", reason="recording needs torch")
if not torch.distributed.is_available():
    pytest.skip("pipelines need torch.distributed", allow_module_level=True)


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
WORK = ("forward", "backward", "input", "weight")


def lines(rank: Path) -> list[dict[str, Any]]:
    return rows(rank, "chunks")


def on_ranks(folder: Path, body: str, ranks: int = 2) -> Path:
    """Record a script on some ranks, and give the run folder."""
    script = folder / "script.py"
    script.write_text(COMPILES_NOTHING + STAGES + dedent(body))
    done = launch(wrapped(folder / "run", as_ranks(script, many=ranks), "--no-trace"), folder, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def alone(folder: Path, body: str, *, warnings: int = 0) -> Path:
    """Record a script whose only rank, this process, holds the whole pipeline, and give the rank's folder."""
    with worlds.of_one():
        run_recorded(folder, STAGES + dedent(body), warnings=warnings)
    return folder / "run/ranks/00000"


@pytest.mark.long
def test_every_schedule_leaves_each_chunk_once_within_its_step(tmp_path: Path) -> None:
    steps = 3
    run = on_ranks(
        tmp_path,
        f"""
        dist.init_process_group("gloo")
        for name in {SCHEDULES!r}:
            schedule, step = build(name, 4, lambda: nn.Linear(8, 8))
            for _ in range({steps}):
                step()
        dist.destroy_process_group()
        """,
    )
    for r in range(2):
        rank = run / f"ranks/{r:05d}"
        assert facts(rank)["warnings"] == []
        assert facts(rank)["pipeline"] == {
            "schedule": "ScheduleDualPipeV",
            "microbatches": 4,
            "stages": [r, 3 - r],
            "num_stages": 4,
            "ranks": [0, 1],
        }
        written = lines(rank)
        calls = {c["step"]: c for c in written if c["action"] == "schedule"}
        # The first call of all also sets up the pipeline and the recording, and is not measured.
        assert sorted(calls) == list(range(1, steps * len(SCHEDULES)))
        for number, call in calls.items():
            name = SCHEDULES[number // steps]
            chunks = [c for c in written if c["step"] == number and c["action"] != "schedule"]
            begin = [c["start_ns"] for c in chunks]
            end = [c["start_ns"] + c["dur_ns"] for c in chunks]
            assert call["start_ns"] <= begin[0]
            assert end[-1] <= call["start_ns"] + call["dur_ns"]
            assert all(e <= b for e, b in zip(end, begin[1:], strict=False))
            assert sum(c["dur_ns"] for c in chunks) == call["busy_ns"] <= call["dur_ns"]
            stages = [r] if name in ("GPipe", "1F1B") else [r, 3 - r] if name in SCHEDULES[-2:] else [r, r + 2]
            last = 1 if name in ("GPipe", "1F1B") else 3
            counted = Counter((c["stage"], c["microbatch"], c["action"]) for c in chunks)
            assert set(counted.values()) == {1}, name
            for stage in stages:
                for m in range(4):
                    done = {a for s, i, a in counted if (s, i) == (stage, m)}
                    whole, split = {"forward", "backward"}, {"forward", "input", "weight"}
                    assert done - {"loss"} in (whole, split), name
                    assert ("loss" in done) == (stage == last)
            assert {s for s, _, _ in counted} == set(stages)
            # In the order that the grid has: a rank's own chunks are done one after the other.
            order = [(c["stage"], c["action"], c["microbatch"]) for c in chunks if c["action"] in WORK]
            assert order == list(grid(f"Schedule{name}", 2, 4, len(stages)).rows[r]), name


# Of p ranks and m micro-batches: what formulas say that the schedule leaves idle, and what the grid says.
BUBBLES = [("1F1B", 2, 2, 1 / 3, 1 / 3), ("GPipe", 4, 8, 3 / 11, 3 / 11), ("1F1B", 4, 8, 3 / 11, 3 / 11)]
BUBBLES += [(name, 4, 8, 3 / 19, 3 / 19) for name in ("Interleaved1F1B", "LoopedBFS")]
BUBBLES += [("InterleavedZeroBubble", 4, 8, math.nan, 1.5 / 25.5), ("ZBVZeroBubble", 4, 8, math.nan, 0.0)]
BUBBLES += [("DualPipeV", 4, 8, math.nan, 1 / 9)]


# What a grid costs, and what is measured of it beside: tests/analysis/pipeline.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "microbatches", "closed", "scheduled"), BUBBLES)
def test_bubbles_of_known_size(
    tmp_path: Path, name: str, ranks: int, microbatches: int, closed: float, scheduled: float
) -> None:
    # 80 ms forward and 160 ms backward a rank and micro-batch, in one or two chunks; each half of a backward 80 ms.
    chunks = 1 if name in ("GPipe", "1F1B") else 2
    body = f"""
    dist.init_process_group("gloo")
    schedule, step = build({name!r}, {microbatches}, lambda: Sleeper(0.08 / {chunks}))
    for _ in range(7):
        step()
    dist.destroy_process_group()
    """
    found = measured(on_ranks(tmp_path, body, ranks), bubbles, stage_lengths).frame(bubbles)
    assert found["closed"].to_list() == pytest.approx([closed] * ranks, nan_ok=True)
    # Stages that sleep are alike: what the grid leaves idle with the passes of this run is what the schedule costs.
    assert found["scheduled"].to_list() == pytest.approx([scheduled] * ranks, abs=0.02)
    assert found["simulated"].to_list() == pytest.approx([scheduled] * ranks, abs=0.05)
    parts = found[["schedule_ns", "imbalance_ns", "launch_ns", "communication_ns"]].sum(axis=1)
    assert parts.to_list() == pytest.approx((found["step_ns"] - found["busy_ns"]).to_list())
    assert (found["busy_ns"] >= microbatches * 240e6).all()
    # No pipeline is faster than its schedule: where the bubble came out much smaller, waiting was taken for work.
    # A machine that is busy with other things makes naps longer, in the chunks and between them.
    assert found["bubble"].between(0.8 * scheduled, scheduled + 0.25).all(), found


@pytest.mark.long
def test_evaluation_failures_and_forks_are_left_alone(tmp_path: Path) -> None:
    rank = alone(
        tmp_path,
        """
        failing = False
        def loss(output, target):
            if failing:
                raise ValueError("broken")
            return F.mse_loss(output, target)
        schedule, step = build("GPipe", 2, lambda: nn.Linear(8, 8), loss=loss)
        for number in range(8):
            step()
            if number == 3:
                schedule.eval(torch.randn(2, 8), target=torch.randn(2, 8))
            if number == 4:
                failing = True
                try:
                    step()
                except ValueError as e:
                    assert str(e) == "broken"
                else:
                    raise AssertionError
                failing = False
            if number == 5:
                child = os.fork()
                if not child:
                    step()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        """,
    )
    written = lines(rank)
    assert [c["step"] for c in written if c["action"] == "schedule"] == list(range(1, 8))
    assert {c["step"] for c in written if c["action"] == "forward"} == set(range(1, 8))
    assert len(written) == 7 * (1 + 2 * 3 + 1)


def test_a_chunk_that_cannot_be_told_costs_the_recording_and_not_the_job(tmp_path: Path) -> None:
    rank = alone(
        tmp_path,
        """
        class Nameless(PipelineStage):
            # Breaks whoever but torch's own code asks which stage this is.
            @property
            def stage_index(self):
                if "dlprof" in sys._getframe(1).f_code.co_filename and number > 2:
                    raise AttributeError("no index")
                return 0
            @stage_index.setter
            def stage_index(self, index):
                pass
        losses, number = [], 0
        stage = Nameless(nn.Linear(8, 8), 0, 1, torch.device("cpu"))
        schedule = schedules.ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
        for number in range(8):
            schedule.step(torch.ones(2, 8), target=torch.zeros(2, 8), losses=losses)
            optimizer.step()
            optimizer.zero_grad()
        assert len(losses) == 2, losses
        """,
        warnings=1,
    )
    (warning,) = facts(rank)["warnings"]
    assert warning.startswith("pipeline is off: AttributeError: no index")
    assert len(rows(rank)) == 8


@pytest.mark.long
def test_a_long_job_keeps_every_step_and_the_chunks_of_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, first = 45, 1_000
    monkeypatch.setattr("dlprof.record.collectors.pipeline._ROWS_AT_FIRST", first)  # instead of 20,000
    rank = alone(
        tmp_path,
        f"""
        schedule, step = build("GPipe", 16, lambda: nn.Linear(8, 8))
        for _ in range({steps}):
            step()
        """,
    )
    written = lines(rank)
    calls = [c for c in written if c["action"] == "schedule"]
    assert len(calls) == steps - 1
    a_step = 3 * 16 + 1
    seconds = (calls[-1]["start_ns"] - calls[0]["start_ns"]) / 1e9
    chunks = len(written) - len(calls)
    assert chunks % a_step == 0  # whole steps
    assert first <= chunks <= first + 50 * seconds + a_step


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="device times need a GPU")
def test_on_a_gpu_the_times_are_the_devices(tmp_path: Path) -> None:
    body = """
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
        def forward(self, x):
            torch.cuda._sleep(20_000_000)  # cycles: some 10 ms, of which the host sees nothing
            return self.linear(x)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    schedule, step = build("GPipe", 2, lambda: Long().cuda(), device="cuda")
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    """
    (tmp_path / "script.py").write_text(STAGES + dedent(body))
    record(tmp_path / "script.py", folder=tmp_path / "run", options=["--no-trace"])
    forward = [c for c in lines(tmp_path / "run/ranks/00000") if c["action"] == "forward"]
    assert len(forward) == 18
    assert all(c["dur_ns"] > 2_000_000 for c in forward)


class Stage:
    """A pipeline's stage on the second GPU of a process whose current one is the first."""

    def __init__(self, devices: Devices) -> None:
        self.stage_index, self.num_stages, self.is_last, self.group = 0, 2, False, None
        self.device = Place("cuda", 1)
        self._devices = devices

    def forward_one_chunk(self, index: int) -> None:
        self._devices.launch((10 + index) * 1_000_000, device=1)


class Schedule:
    """A schedule of three micro-batches, forward only, between whose chunks the stage waits for its neighbour."""

    _has_backward, _n_microbatches = True, 3

    def __init__(self, stage: Stage, devices: Devices) -> None:
        self._stage = stage
        self._devices = devices

    def step(self, captured: bool = False) -> None:
        for index in range(3):
            self._devices.launch(2_000_000, device=1)
            self._devices.capturing = captured and index == 1
            self._stage.forward_one_chunk(index)
            self._devices.capturing = False


def test_chunks_on_a_gpu_are_timed_there_and_none_while_a_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(monkeypatch)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])
    recorder = Recorder(tmp_path, [Pipeline])
    recorder.begin()
    (pipeline,) = recorder._collectors
    assert isinstance(pipeline, Pipeline)
    forward = pipeline._around_chunk(Stage.forward_one_chunk, lambda stage, n: (stage.stage_index, n, "forward"))
    monkeypatch.setattr(Stage, "forward_one_chunk", forward)
    monkeypatch.setattr(Schedule, "step", pipeline._around_step(Schedule.step))
    schedule = Schedule(Stage(devices), devices)
    schedule.step()
    schedule.step(captured=True)
    devices.capturing = True
    schedule.step()  # the whole of it goes into a graph
    devices.capturing = False
    schedule.step()
    assert devices.awake == {1}
    devices.now_ns = devices.queued_ns[1]
    recorder.stop("exit")
    assert recorder.warnings == []
    lines = rows(recorder.folder, "chunks")
    calls = [line for line in lines if line["action"] == "schedule"]
    assert [(call["dur_ns"], call["busy_ns"]) for call in calls] == [(39_000_000, 33_000_000)] * 2
    for call in calls:
        chunks = lines[lines.index(call) + 1 :][:3]
        assert [chunk["dur_ns"] for chunk in chunks] == [10_000_000, 11_000_000, 12_000_000]
        assert [chunk["start_ns"] - call["start_ns"] for chunk in chunks] == [2_000_000, 14_000_000, 27_000_000]
