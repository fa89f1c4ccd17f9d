"""How long the window of a trace stays open, and what is written of it; with a profiler that only notes its calls."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.read.kineto.torch_trace import read as read_trace
from dlprof.record.collectors.trace import Trace
from dlprof.record.further import ASK
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step
from tests.fixtures.devices import Devices, Model, Parameter
from tests.fixtures.in_process import in_c, run_recorded
from tests.fixtures.jobs import facts, launch, record, rows, tiny, wrapped

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

MS = 1_000_000


class Profiler:
    """Stands for torch.profiler._KinetoProfile: notes what is called, on which device."""

    calls: list[tuple[str, int]]

    def __init__(self, devices: Devices | None) -> None:
        self._devices = devices
        self.activities: Any = None
        self.profiler: Any = SimpleNamespace()  # torch.autograd's

    def __call__(self, activities: Any, **_: Any) -> Profiler:
        self.activities = activities
        self.calls = []
        return self

    def _note(self, name: str) -> None:
        self.calls.append((name, self._devices.current if self._devices is not None else -1))

    def prepare_trace(self) -> None:
        self._note("prepare")

    def start_trace(self) -> None:
        self._note("start")

    def stop_trace(self) -> None:
        self._note("stop")

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


class Job:
    """A loop whose steps take as long as the test says."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, devices: Devices | None, asked: str = "10,2,5"
    ) -> None:
        monkeypatch.setenv("DLPROF_WINDOW", asked)
        self.now = 0
        monkeypatch.setattr("dlprof.record.device.profiler._default_level", lambda: None)
        monkeypatch.setattr("dlprof.record.device.profiler._TEAR_DOWN_S", 0.0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices is not None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        self.profiler = Profiler(devices)
        monkeypatch.setattr(torch.profiler, "_KinetoProfile", self.profiler)
        self.recorder = Recorder(folder, [Trace])
        if devices is not None:
            self.model = Model(Parameter(4, "cuda", 1))
            assert self.recorder.clock.begin_forward(self.model)
            self.recorder.clock.end()
        self.recorder.begin()
        self.recorder.clock.trains = True
        (self.trace,) = self.recorder._collectors

    def steps(self, durations: Sequence[int]) -> None:
        """Run steps of so many ms."""
        for dur in durations:
            row = self.recorder.clock.row
            done = Step(row.number, self.now, dur * MS, -1, 0, 0, 0, 0, 0, 1, 1, 1, 0, row.profiled, None)
            self.now += dur * MS
            row.number += 1
            row.profiled = 0
            self.trace.step([done])


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices(monkeypatch)
    made.awake = {1}
    return made


def window(job: Job, durations: Sequence[int]) -> dict[str, Any]:
    job.steps(durations)
    assert job.recorder.warnings == []
    assert isinstance(job.trace, Trace)
    return job.trace.window


UNTRACED = [95, 96, 95, 300, 96, 95, 96, 95, 96, 95, 95, 95]  # two of them warm the profiler up
SLOW = [60_000, *[2_000] * 7]


@pytest.mark.parametrize(
    ("on_device", "asked", "durations", "steps", "extended"),
    [
        # On a device the window goes on until the host runs ahead as before, for three steps at most.
        (True, "10,2,5", [*UNTRACED, 97, 96, 95, 95, 96], (12, 16), 0),
        (True, "10,2,5", [*UNTRACED, 35, 72, 96, 96, 95], (12, 16), 0),  # settled by then, as on a V100
        (True, "10,2,5", [*UNTRACED, 35, 40, 45, 60, 72, 95, 96], (12, 18), 2),
        (True, "10,2,5", [*UNTRACED, 35, 40, 45, 50, 60, 70, 80, 90], (12, 19), 3),
        (True, "10,2,5", [*UNTRACED, 95, 95, 95, 95, 120, 121], (12, 17), 1),
        (True, "10,2,5", [*UNTRACED, 60, 66, 70, 72, 73, 80, 86], (12, 18), 2),  # hardly changing, and short
        (True, "10,2,5", [*UNTRACED, 150, 150, 150, 150, 150], (12, 16), 0),  # slower all along: tracing is
        (False, "10,2,5", [*UNTRACED, 35, 40, 45, 60, 72, 95, 96, 95], (12, 16), 0),
        # 3 s after the first step has ended step 3 warms up, and 4 s of traced steps and one more are enough.
        (False, "", SLOW, (4, 6), 0),
        (False, "", [60_000] * 6, (4, 4), 0),
        (False, "10,2,5", [2_000] * 9, (None, None), 0),  # one that was asked for waits for its steps
        (False, "", [100] * 20, (12, 16), 0),
    ],
)
def test_the_steps_of_the_window(
    on_device: bool,
    asked: str,
    durations: Sequence[int],
    steps: tuple[int | None, int | None],
    extended: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Devices(monkeypatch) if on_device else None
    job = Job(tmp_path, monkeypatch, devices, asked)
    told = window(job, [*durations, *[95] * 5] if on_device else durations)
    assert told["state"] == ("exported" if steps[0] else "waiting")
    assert (told["first_step"], told["last_step"], told["extended"]) == (*steps, extended)
    cuda = torch.profiler.ProfilerActivity.CUDA
    if devices is not None:
        # It synchronises the rank's device and wakes no other.
        assert job.profiler.calls == [("prepare", 1), ("start", 1), ("stop", 1)]
        assert (cuda in job.profiler.activities, told["cupti_torn_down"], devices.current) == (True, True, 0)
    elif steps[0]:
        assert (cuda in job.profiler.activities, told["cupti_torn_down"], told["errors"]) == (False, None, None)


@pytest.mark.parametrize(
    ("asked", "durations", "steps"),
    [
        ("10,2,5", [100] * 25, range(10, 19)),  # two warm up, and after the export in step 17 one step more feels it
        ("", [100] * 25, range(10, 19)),
        ("", [60_000, *[2_000] * 9], range(3, 9)),  # by time
    ],
)
def test_a_rank_that_is_asked_for_no_trace_marks_the_steps_in_which_others_trace(
    asked: str, durations: Sequence[int], steps: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks, state in (("all", "exported"), ("1,last,0", "exported"), ("1-7", "not_asked")):
        monkeypatch.setenv("DLPROF_RANKS", ranks)
        job = Job(tmp_path / ranks, monkeypatch, None, asked)
        marked = []
        for dur in durations:
            job.steps([dur])
            marked.append(job.recorder.clock.row.profiled)
        assert isinstance(job.trace, Trace)
        assert job.trace.window["state"] == state
        # Of a step that has just begun it is known whether it is traced.
        assert [n + 1 for n, profiled in enumerate(marked) if profiled] == [*steps], ranks
        assert bool(getattr(job.profiler, "calls", ())) == (state == "exported")
        assert (job.recorder.folder / "trace.json").exists() == (state == "exported")
        assert job.recorder.warnings == []


def test_a_rank_on_a_device_stands_by_for_as_long_as_others_windows_may_take(
    tmp_path: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLPROF_RANKS", "1")
    job = Job(tmp_path, monkeypatch, devices)
    marked = []
    for _ in range(30):
        job.steps([95])
        marked.append(job.recorder.clock.row.profiled)
    assert [n + 1 for n, profiled in enumerate(marked) if profiled] == [*range(10, 22)]
    assert not hasattr(job.profiler, "calls")


MESH = """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    for epoch in range(3):
        for batch in DataLoader(data, batch_size=8):
            train(batch)
    del model
    dist.destroy_process_group()
"""


@pytest.mark.long
def test_one_rank_of_each_stage_records_a_trace_and_none_waits_for_it(tmp_path: Path) -> None:
    """Ranks 0 and 2 are the pipeline of rank 0, by the names of the process groups alone."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(tiny(tmp_path, MESH))]
    options = ["--window", "5,1,3", "--ranks", "per-stage", "--no-sample"]
    done = launch(wrapped(tmp_path / "run", [sys.executable, *torchrun], *options), tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / f"run/ranks/{rank:05d}" for rank in range(4)]
    windows = [facts(folder)["window"]["state"] for folder in folders]
    assert windows == ["exported", "not_asked", "exported", "not_asked"]
    assert [(folder / "trace.json.gz").exists() for folder in folders] == [True, False, True, False]
    marked = [[row["step"] for row in rows(folder) if row["profiled"]] for folder in folders]
    assert marked == [marked[0]] * 4
    assert [sum(row["optimizer_steps"] for row in rows(folder)) for folder in folders] == [24] * 4


# Rank 0, and another rank whose clock or steps differ a little; the second is a step ahead, at times.
SLOWLY = [60_000, *[1_490] * 2, *[1_000] * 9]
PAIRS = {
    "by count": ("10,2,5", [100] * 25, [101] * 25),
    "one sees 3 s pass a step later": ("", [60_000, *[1_510] * 2, *[1_000] * 10], SLOWLY),
    "and one sooner": ("", SLOWLY, [60_000, *[1_510] * 2, *[1_000] * 10]),
    "the end by time": ("", [60_000, *[1_600] * 10], [60_000, *[1_700] * 2, *[1_200] * 9]),
    "one device settles later": ("10,2,5", [*UNTRACED, 35, 40, 45, 60, 72, *[95] * 6], [*UNTRACED, 35, 72, *[96] * 9]),
}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", PAIRS)
def test_the_windows_of_two_ranks_are_of_the_same_steps(
    name: str, ahead: int, tmp_path: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, *durations = PAIRS[name]
    store = torch.distributed.HashStore()
    jobs = [Job(tmp_path / str(rank), monkeypatch, devices, asked) for rank in range(2)]
    for rank, job in enumerate(jobs):
        assert isinstance(job.trace, Trace)
        job.trace._agreed.share(store, rank)
    leader, other = jobs
    other.steps(durations[1][:ahead])
    for n in range(len(durations[0])):
        leader.steps(durations[0][n : n + 1])
        other.steps(durations[1][n + ahead : n + ahead + 1])
    windows = [job.trace.window for job in jobs if isinstance(job.trace, Trace)]
    assert [w["state"] for w in windows] == ["exported"] * 2
    assert windows[0]["first_step"] == windows[1]["first_step"]
    assert windows[0]["last_step"] == windows[1]["last_step"]


@pytest.mark.parametrize(
    ("ahead", "durations", "state"),
    [
        (0, [300] * 60, "exported"),
        (1, [300] * 60, "exported"),
        (1, [20] * 600, "exported"),
        (1, [8_000] * 30, "exported"),
        (400, [20] * 1_000, "missed"),  # ranks that do not wait for each other
    ],
)
def test_a_later_window_is_of_the_same_steps_on_both_ranks(
    ahead: int, durations: list[int], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank is a step ahead, at times; rank 0 alone has the file in its run folder."""
    store = torch.distributed.HashStore()
    jobs = [Job(tmp_path / str(rank), monkeypatch, None, "off") for rank in range(2)]
    for rank, job in enumerate(jobs):
        assert isinstance(job.trace, Trace)
        job.trace._agreed.share(store, rank)
    leader, other = jobs
    leader.steps(durations[:10])
    other.steps(durations[: 10 + ahead])
    (tmp_path / "0" / ASK).write_text('{"steps": 3}')
    for n in range(10, len(durations) - ahead):
        leader.steps(durations[n : n + 1])
        other.steps(durations[n + ahead : n + ahead + 1])
    ((ours,), (theirs,)) = (job.recorder.windows for job in jobs)
    assert (ours["state"], theirs["state"], ours["number"], theirs["number"]) == ("exported", state, 2, 2)
    assert ours["last_step"] - ours["first_step"] == 2
    if state == "exported":
        assert (ours["first_step"], ours["last_step"]) == (theirs["first_step"], theirs["last_step"])
    assert [job.recorder.warnings for job in jobs] == [[], []]
    assert (jobs[1].recorder.folder / "trace-2.json").exists() == (state == "exported")


@pytest.mark.parametrize(("text", "opens"), [('{"steps": 3}', 4), ('{"steps": "3"}', 0), ("", 0), ('{"steps": 0}', 0)])
def test_each_file_is_answered_once_and_a_job_has_five_windows(
    text: str, opens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ASK).write_text('{"steps": 9}')  # of a job before a restart
    job = Job(tmp_path, monkeypatch, None, "off")
    job.steps([100] * 30)
    assert job.recorder.windows == []
    for n in range(6):
        (tmp_path / ASK).write_text(text)
        os.utime(tmp_path / ASK, (n, n))
        job.steps([100] * 40)
    assert [w["number"] for w in job.recorder.windows] == list(range(2, 2 + opens))
    assert job.recorder.warnings == []


def test_a_store_that_is_gone_ends_the_agreement_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def check(self, _keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

        set = get = check

    for rank in range(2):
        job = Job(tmp_path / str(rank), monkeypatch, None, "")
        assert isinstance(job.trace, Trace)
        job.trace._agreed.share(Gone(), rank)
        job.steps([*SLOWLY, *[1_000] * 9])
        assert (job.trace.window["state"], job.recorder.warnings) == ("exported", [])


def test_training_after_an_inference_has_a_window_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, monkeypatch, None, "")
    clock = job.recorder.clock
    clock.trains = False
    assert isinstance(job.trace, Trace)
    job.steps([500] * 30)
    assert job.trace.window["state"] == "exported"
    clock._train()
    job.steps([100] * 3)
    assert (job.trace.window["state"], (job.recorder.folder / "trace.json").exists()) == ("waiting", False)
    job.steps([100] * 20)
    assert (job.trace.window["state"], job.trace.window["first_step"]) == ("exported", 42)


def test_the_environment_is_as_it_was_a_step_after_the_window(
    tmp_path: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    job = Job(tmp_path, monkeypatch, devices)
    seen = []
    for _ in range(25):
        job.steps([95])
        seen.append(in_c("TEARDOWN_CUPTI"))
        assert "TEARDOWN_CUPTI" not in os.environ  # the script's own
    assert [(value, len(list(same))) for value, same in itertools.groupby(seen)] == [(None, 16), ("1", 1), (None, 8)]


@pytest.mark.parametrize(("free", "state"), [(1 << 30, "declined"), (2 << 30, "exported"), (None, "exported")])
def test_a_full_gpu_has_no_window(
    free: int | None, state: str, tmp_path: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(index: int) -> tuple[int, int]:
        if free is None:
            raise RuntimeError("a driver that does not say")
        return free, 80 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", of)
    job = Job(tmp_path, monkeypatch, devices)
    job.steps([95] * 25)
    assert isinstance(job.trace, Trace)
    assert job.trace.window["state"] == state
    told = [warning for warning in job.recorder.warnings if "MiB of the GPU are free" in warning]
    assert len(told) == (state == "declined")


def test_what_kineto_said_is_told_once_with_what_to_do(
    tmp_path: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, monkeypatch, devices)
    error = "function cuptiActivityEnable(kind) failed with error CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)"

    def close(self: Any) -> None:
        self.errors = [f"WARNING:2026-01-02 03:04:05 17:18 CuptiActivityApi.cpp:360] {error}"]

    monkeypatch.setattr("dlprof.record.device.profiler.Kineto.close", close)
    job.steps([*UNTRACED, *[95] * 9])
    assert isinstance(job.trace, Trace)
    assert job.trace.window["errors"] == [error]
    (warning,) = job.recorder.warnings
    assert error in warning
    assert "NVreg_RestrictProfilingToAdminUsers" in warning


def test_nothing_is_stopped_while_a_graph_is_captured(
    tmp_path: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, monkeypatch, devices)
    job.steps([*UNTRACED, 95])
    devices.capturing = True
    job.recorder.stop("exit")
    assert ("stop", 1) not in job.profiler.calls
    assert isinstance(job.trace, Trace)
    assert job.trace.window["state"] == "failed"


# Its own profiler comes long after our window, and must find all that it would have found without us.
REAL = """
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile

    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 512, device="cuda")

    def train():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for n in range(60):
        train()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        train()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    print(sum(e.device_type() == torch.autograd.DeviceType.CUDA for e in events) > 30)
    for n in range(20):
        train()
"""


def test_torchs_warning_of_lost_events_is_the_scripts_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, kineto = torch.autograd.profiler.profile, torch.profiler._KinetoProfile
    prepare, parse = kineto.prepare_trace, profile._ensure_function_events
    seen: list[str] = []
    monkeypatch.setattr(torch.autograd.profiler, "seen", seen, raising=False)  # for the script

    def prepare_trace(self: Any) -> None:  # as torch 2.10 to 2.12 do
        prepare(self)
        if self.profiler is not None and not self.acc_events:
            seen.append("clears events")

    def parses(self: Any) -> None:
        seen.append("parsed")
        parse(self)

    monkeypatch.setattr(kineto, "prepare_trace", prepare_trace)
    monkeypatch.setattr(profile, "_ensure_function_events", parses)
    body = """
    import torch
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train():
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    for _ in range(20):
        train()
    before = len(torch.autograd.profiler.seen)
    with torch.profiler.profile() as profiler:
        train()
    assert len(profiler.events()) > 20
    """
    script = run_recorded(tmp_path, dedent(body), window=(5, 1, 3))
    assert facts(tmp_path / "run/ranks/00000")["window"]["state"] == "exported"
    assert (script["before"], seen) == (0, ["clears events", "parsed"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_window_has_the_devices_work_and_leaves_the_scripts_profiler_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(dedent(REAL))
    done = record(path, folder=tmp_path / "run", options=["--flops", "off"])
    assert done.stdout == "True\n"
    assert "Completed Stage" not in done.stderr
    rank = tmp_path / "run/ranks/00000"
    told = facts(rank)
    window = told["window"]
    assert (window["state"], window["errors"], told["warnings"]) == ("exported", [], [])
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    assert window["cupti_torn_down"] == (cuda >= (12, 6))
    assert len(rows(rank)) == 81
    spans = read_trace(rank / "trace.json.gz").tables["spans"]
    assert (spans["kind"] == "kernel").sum() > 100
