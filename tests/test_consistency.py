"""A result agrees with itself whatever the job did: jobs made at random, of one rank or several, traced or recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.result.stored import to_json
from tests.fixtures import runs, traces
from tests.fixtures.consistency import assert_consistent
from tests.fixtures.runs import MS

US = 1_000
STEPS = 4


class Job:
    """Writes what ranks do in a few steps that each begins when all are through, of lengths drawn by chance.

    How long things take differs much from job to job, and a little from step to step; each rank may have an ill of its
    own. On a CPU operators compute; else they launch, and the device computes when it has launched and is through.
    """

    def __init__(self, seed: int, ranks: int, gpu: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.ranks, self.gpu = ranks, gpu
        self.events: list[list[Any]] = [[] for _ in range(ranks)]
        self.light: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self.launch = 0
        self.ills = [[float(self.rng.choice([0.2, 1, 6])) for _ in range(6)] for _ in range(ranks)]
        self.sizes = self.rng.integers(1_000, 5_000_000, 3)
        self.exposed = bool(self.rng.random() < 0.5)
        self.kinds = str(self.rng.choice(["HtoD (Pageable -> Device)", "HtoD (Pinned -> Device)"]))
        self.reads = bool(self.rng.random() < 0.5)
        at = 10 * MS
        for n in range(STEPS):
            at = self._step(n, at)

    def _took(self, rank: int, ill: int, least: int, most: int) -> int:
        return int(self.rng.integers(least, most) * self.ills[rank][ill])

    def _step(self, n: int, zero: int) -> int:
        host, device = [zero] * self.ranks, [zero] * self.ranks
        phases: list[dict[str, int]] = [{} for _ in range(self.ranks)]
        for r in range(self.ranks):
            wait = self._took(r, 0, 50 * US, MS)
            self.events[r].append(traces.fetch(zero, wait))
            host[r] += wait
            phases[r]["fetch_ns"] = wait
            if self.gpu:
                self._copy(r, host, device)
            phases[r]["forward_ns"] = self._compute(r, 3, host, device, 1, traces.MAIN)
            phases[r]["backward_ns"] = -host[r]
        for size in self.sizes:
            for r in range(self.ranks):
                self._compute(r, 2, host, device, 2, traces.AUTOGRAD if self.gpu else traces.MAIN)
            if self.ranks > 1:
                self._exchange(int(size), host, device)
        for r in range(self.ranks):
            phases[r]["backward_ns"] += host[r]
            begun = host[r]
            self._compute(r, 3, host, device, 3, traces.MAIN)
            self.events[r].append(traces.annotation("Optimizer.step#AdamW.step", begun, host[r] - begun))
            phases[r]["optimizer_ns"] = host[r] - begun
            if self.reads and self.gpu and device[r] > host[r]:
                self.events[r].append(traces.op("aten::item", host[r], device[r] - host[r]))
                self.launch += 1
                self.events[r].append(traces.call("cudaStreamSynchronize", host[r], device[r] - host[r], self.launch))
                host[r] = device[r]
            host[r] += self._took(r, 4, 10 * US, 500 * US)
        end = max(*host, *device) + 10 * US
        for r in range(self.ranks):
            self.events[r].append(traces.step(n, zero, end - zero))
            start = traces.BASE_NS + zero
            self.light[r].append(runs.light(n, end - zero, start, profiled=1, **phases[r]))
        return end

    def _copy(self, r: int, host: list[int], device: list[int]) -> None:
        self.launch += 1
        took = self._took(r, 5, 20 * US, 600 * US)
        self.events[r].append(traces.op("aten::copy_", host[r], 40 * US))
        self.events[r].append(traces.call("cudaMemcpyAsync", host[r] + 5 * US, 20 * US, self.launch))
        device[r] = max(device[r], host[r] + 10 * US)
        self.events[r].append(traces.copy(device[r], took, took * 10, self.kinds, self.launch))
        device[r] += took
        host[r] += 50 * US

    def _compute(self, r: int, count: int, host: list[int], device: list[int], ill: int, thread: int) -> int:
        begun = host[r]
        for _ in range(count):
            took = self._took(r, ill, 20 * US, 400 * US)
            if self.gpu:
                self.launch += 1
                call = self._took(r, 4, 10 * US, 60 * US)
                self.events[r].append(traces.op("aten::mm", host[r], call, tid=thread))
                self.events[r].append(
                    traces.call("cudaLaunchKernel", host[r] + 2 * US, 5 * US, self.launch, tid=thread)
                )
                device[r] = max(device[r], host[r] + 8 * US)
                self.events[r].append(traces.kernel("ampere_sgemm_128x64_nn", device[r], took, self.launch))
                device[r] += took
                host[r] += call
            else:
                self.events[r].append(traces.op("aten::addmm", host[r], took, tid=thread))
                host[r] += took + self._took(r, 4, 1 * US, 50 * US)
        return host[r] - begun

    def _exchange(self, size: int, host: list[int], device: list[int]) -> None:
        """All ranks meet, on the device beside what it computes or before it goes on."""
        came = device if self.gpu else host
        through = max(came) + int(self.rng.integers(20 * US, 800 * US))
        members = tuple(range(self.ranks))
        for r in range(self.ranks):
            if self.gpu:
                self.events[r].append(traces.collective(came[r], through - came[r], size, ranks=members))
                device[r] = through if self.exposed else device[r]
            else:
                self.events[r].append(traces.annotation("gloo:all_reduce", host[r], through - host[r]))
                host[r] = through

    def traces(self) -> list[dict[str, Any]]:
        where: dict[str, Any] = {} if self.gpu else {"device": "", "backend": "gloo"}
        return [traces.trace(*e, rank=r, world_size=self.ranks, **where) for r, e in enumerate(self.events)]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_traces_of_any_job(tmp_path: Path, ranks: int, gpu: bool) -> None:
    for seed in range(2):
        path = runs.foreign(tmp_path / str(seed), *Job(seed, ranks, gpu).traces())
        assert_consistent(json.loads(json.dumps(to_json(diagnose(open_run(path), RULES, jobs=1)))))


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_recordings_of_any_job(tmp_path: Path, ranks: int, gpu: bool) -> None:
    for seed in range(10, 12):
        job = Job(seed, ranks, gpu)
        facts: dict[str, Any] = {"device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}} if gpu else dict(runs.CPU)
        facts["optimizers"] = [{"class": "AdamW", "fused": False, "foreach": None, "parameters": 60}]
        facts["loaders"] = [{"role": "train", "num_workers": 0, "batch_size": 8, "pin_memory": False}]
        recorded = []
        for made, steps in zip(job.traces(), job.light, strict=True):
            # Forty steps more that were not traced, each as one of the traced but for its length and its wait.
            more = []
            for n in range(STEPS, STEPS + 40):
                like, extra = steps[n % STEPS], int(job.rng.integers(0, 300 * US))
                waited = like["fetch_ns"] + extra
                start = steps[-1]["start_ns"] + (n - STEPS + 1) * 100 * MS
                more.append(like | {"step": n, "start_ns": start, "profiled": 0, "fetch_ns": waited})
                more[-1]["dur_ns"] = like["dur_ns"] + extra
            recorded.append((made, steps + more, facts))
        stalls = [
            [runs.stall("garbage_collection", n, int(job.rng.integers(MS, 4 * MS))) for n in range(5, 40, 3 + r)]
            for r in range(ranks)
        ]
        for of_rank, (_, steps, _) in zip(stalls, recorded, strict=True):
            for one in of_rank:
                one["start_ns"] = steps[one["step"]]["start_ns"] + 100 * US
        path = runs.recorded(tmp_path / str(seed), *recorded, stalls=stalls)
        assert_consistent(json.loads(json.dumps(to_json(diagnose(open_run(path), RULES, jobs=1)))))
