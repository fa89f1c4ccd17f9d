"""NVTX ranges of real jobs, as a library that listens in nsys' place gets them; when nsys' window opens and closes."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.collectors.nsys import Capture
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import COMPILES_NOTHING, environment, facts, launch, rows, wrapped

torch = pytest.importorskip("torch", reason="recording needs torch")

# What NVTX hands to the tool that NVTX_INJECTION64_PATH names: tables of the functions that it may set. The numbers
# are those of the NVTX 3 headers (nvtxTypes.h, nvtxDetail/nvtxTypes.h).
LISTENER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { size_t size; int (*table)(int module, void ***functions, unsigned *count); } Callbacks;
typedef struct { uint16_t v, s; uint32_t c; int32_t ct; uint32_t co; int32_t pt, r; uint64_t p; int32_t mt;
                 const char *message; } Event;
static FILE *out;
static uint64_t ranges;
static void line(const char *what, const char *name) { fprintf(out, "%s %s\n", what, name); fflush(out); }
static void *string(void *domain, const char *name) { return strdup(name); }
static void *domain(const char *name) { return strdup(name); }
static int push(void *d, Event *e) { line("push", e->message); return 0; }
static int pop(void *d) { line("pop", ""); return 0; }
static uint64_t start(void *d, Event *e) { line("start", e->message); return ++ranges; }
static void end(void *d, uint64_t id) { line("end", ""); }
static int push_a(const char *name) { line("push", name); return 0; }
static int pop_a(void) { line("pop", ""); return 0; }
static uint64_t start_a(const char *name) { line("start", name); return ++ranges; }
static void end_a(uint64_t id) { line("end", ""); }
int InitializeInjectionNvtx2(const void *(*export)(uint32_t))
{
    const Callbacks *callbacks = export(1);
    void **core, **core2;
    unsigned n;
    out = fopen(getenv("NVTX_SEEN"), "a");
    if (!callbacks || !callbacks->table(1, (void ***)&core, &n) || !callbacks->table(5, (void ***)&core2, &n)) return 0;
    *(void **)core[5] = start_a; *(void **)core[7] = end_a; *(void **)core[9] = push_a; *(void **)core[11] = pop_a;
    *(void **)core2[2] = start; *(void **)core2[3] = end; *(void **)core2[4] = push; *(void **)core2[5] = pop;
    *(void **)core2[10] = string; *(void **)core2[12] = domain;
    return 1;
}
"""

JOB = """
import dlprof, torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=8):
        with dlprof.annotate("mine"):
            loss = model(x).sum()
        loss.backward()
        all_reduce(model.weight.grad)
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_steps_phases_collectives_and_annotations_reach_the_tool(tmp_path: Path) -> None:
    pytest.importorskip("nvtx", reason="this PyTorch has no NVTX of its own")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the library that listens")
    (tmp_path / "listener.c").write_text(LISTENER)
    (tmp_path / "job.py").write_text(COMPILES_NOTHING + JOB)
    library = tmp_path / "listener.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, tmp_path / "listener.c"], check=True)
    env = environment(NVTX_INJECTION64_PATH=str(library), NVTX_SEEN=str(tmp_path / "seen"))
    job = [sys.executable, str(tmp_path / "job.py")]
    done = launch(wrapped(tmp_path / "run", job, "--nvtx", "--window", "2,1,1"), tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["warnings"] == []
    assert facts(rank)["window"]["state"] == "exported"
    seen = [line.split(" ", 1) for line in (tmp_path / "seen").read_text().splitlines()]
    open_ranges: list[str] = []
    closed: list[str] = []
    for what, name in seen:
        if what == "push":
            open_ranges.append(name)
        elif what == "pop":
            closed.append(open_ranges.pop())
    assert open_ranges == []
    # Training is noticed in the first backward pass. Each epoch asks once more than it has batches, and for a start.
    counts = {name.removeprefix("dlprof::"): closed.count(name) for name in closed}
    assert counts == {"fetch": 8, "forward": 5, "mine": 5, "backward": 6, "all_reduce": 6, "optimizer": 6}
    assert closed[:4] == ["dlprof::backward", "dlprof::all_reduce", "dlprof::optimizer", "dlprof::fetch"]
    numbered = [name for what, name in seen if what == "start"]
    assert numbered == [f"dlprof::step {row['step']}" for row in rows(rank)] + [f"dlprof::step {len(rows(rank))}"]
    ends = [what for what, _ in seen if what in ("start", "end")]
    assert all(pair in (("start", "end"), ("end", "start")) for pair in itertools.pairwise(ends))


@pytest.mark.long
def test_without_nvtx_one_line_says_so_and_the_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(torch._C, "_nvtx"):
        pytest.skip("this PyTorch has NVTX")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    run_recorded(tmp_path, JOB, nvtx=True, warnings=1)
    assert "no NVTX ranges" in facts(tmp_path / "run/ranks/00000")["warnings"][0]
    assert len(rows(tmp_path / "run/ranks/00000")) == 7


class Job:
    """Steps of 10 ms, or of another length."""

    due: int | None = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, asked: str, step_ns: int = 10_000_000) -> None:
        monkeypatch.setenv("DLPROF_CAPTURE", asked)
        self.called: list[tuple[str, int]] = []
        self.cuda = True
        self.step_ns, self.now = step_ns, 0
        self.row = SimpleNamespace(number=0, profiled=0)
        self.clock: Any = SimpleNamespace(row=self.row, trains=True, capturing=False)
        device = SimpleNamespace(index=0, capturing=lambda: False)
        self.recorder: Any = SimpleNamespace(clock=self.clock, device=device, window={})
        for what in ("start", "stop"):
            note = partial(lambda what: self.called.append((what, self.row.number)), what)
            monkeypatch.setattr(torch.cuda.profiler, what, note)
        for what in ("is_available", "is_initialized"):
            monkeypatch.setattr(torch.cuda, what, lambda: self.cuda)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda index: self.called.append(("synchronize", index)))
        self.capture = Capture()
        recorder: Any = self.recorder
        self.capture.start(recorder)
        self.profiled: list[int] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            done: Any = SimpleNamespace(number=self.row.number, start_ns=self.now, dur_ns=self.step_ns)
            self.now += self.step_ns
            if self.row.profiled:
                self.profiled.append(self.row.number)
            self.row.number, self.row.profiled = self.row.number + 1, 0
            self.clock.position = self.row.number
            if self.due is not None and self.row.number >= self.due:
                self.due = self.capture.step([done])


@pytest.mark.parametrize(
    ("asked", "step_ns", "captures", "steps", "start", "stop"),
    [
        # Steps 8, 9 and 10 are recorded, and step 7, which is not marked, is heard.
        ("6,2,3", 10_000_000, 0, 30, 7, 11),
        ("on", 10_000_000, 0, 30, 11, 17),
        ("on", 2_000_000_000, 0, 30, 3, 6),  # slow steps: sooner and shorter
        ("2,1,2", 10_000_000, 6, 12, 7, 10),  # nothing is asked of the device while a graph is captured
        ("2,1,5", 10_000_000, 0, 5, 2, 5),  # the job ends inside of the window
    ],
)
def test_when_nsys_starts_and_stops(
    asked: str, step_ns: int, captures: int, steps: int, start: int, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(monkeypatch, asked, step_ns)
    job.clock.capturing = True
    job.steps(captures)
    assert not job.called
    job.clock.capturing = False
    job.steps(steps - captures)
    job.capture.stop()
    # Nothing is left in the queue where nsys starts and stops.
    assert job.called == [("synchronize", 0), ("start", start), ("synchronize", 0), ("stop", stop)]
    assert job.recorder.window == {"first_step": start + 1, "last_step": stop - 1}
    assert {*range(start, min(stop, steps - 1))} <= set(job.profiled)
    assert (job.due is None) == (steps > stop)


def test_without_a_gpu_or_without_being_asked_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, "1,1,1")
    job.cuda = False
    with pytest.raises(RuntimeError, match="uses no GPU"):  # which switches the collector off, and says so
        job.steps(5)
    job.capture.stop()
    assert not job.called
    job = Job(monkeypatch, "")
    job.steps(5)
    assert (job.due, job.called) == (None, [])
