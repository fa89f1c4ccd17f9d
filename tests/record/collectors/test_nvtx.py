"""The NVTX ranges of real jobs, as a tool gets them: a library of our own listens where nsys would."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import COMPILES_NOTHING, environment, facts, launch, rows, wrapped

pytest.importorskip("torch", reason="recording needs torch")

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
    told = {name.removeprefix("dlprof::"): closed.count(name) for name in closed}
    assert told == {"fetch": 8, "forward": 5, "mine": 5, "backward": 6, "all_reduce": 6, "optimizer": 6}
    assert closed[:4] == ["dlprof::backward", "dlprof::all_reduce", "dlprof::optimizer", "dlprof::fetch"]
    numbered = [name for what, name in seen if what == "start"]
    assert numbered == [f"dlprof::step {row['step']}" for row in rows(rank)] + [f"dlprof::step {len(rows(rank))}"]
    ends = [what for what, _ in seen if what in ("start", "end")]
    assert all(pair in (("start", "end"), ("end", "start")) for pair in itertools.pairwise(ends))


def test_without_nvtx_one_line_says_so_and_the_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if hasattr(torch._C, "_nvtx"):
        pytest.skip("this PyTorch has NVTX")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    run_recorded(tmp_path, JOB, nvtx=True, warnings=1)
    assert "no NVTX ranges" in facts(tmp_path / "run/ranks/00000")["warnings"][0]
    assert len(rows(tmp_path / "run/ranks/00000")) == 7
