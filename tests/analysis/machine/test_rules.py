"""What the rules of the machine make of hosts whose cores, and GPUs whose clocks are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.estimate import Rule
from dlprof.analysis.machine.rules import idle_cores, shared_cores, thread_oversubscription, throttled_clock
from dlprof.read.run import open_run
from tests.fixtures import readings, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.processors import PRODUCTS, SPLIT, computing
from tests.fixtures.readings import NORMAL, clocked, crowded
from tests.fixtures.ruled import Case, check, clear, found, inapplicable, jobs, table, unmeasured
from tests.fixtures.runs import MS
from tests.fixtures.sampled_stacks import burst

Job = Callable[[Path], Path]


waits, cpu = jobs(crowded), jobs(computing)


def told(job: Job, **facts: Any) -> Job:
    """Return a job with other facts of its first rank."""

    def changed(folder: Path) -> Path:
        path = job(folder)
        file = path / "ranks/00000/facts.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | facts))
        return path

    return changed


def call(kind: str, line: int, source: str) -> dict[str, Any]:
    return {"kind": kind, "file": "train.py", "line": line, "function": "main", "source": source}


# Bound to one core of eight, since its start or by its own process.
ONE = {"affinity": 1, "allowed": "3", "at_start": "3"}
ITSELF = {**ONE, "at_start": "0-7"}
PINNED = call("affinity", 4, "os.sched_setaffinity(0, {3})")


def untraced(folder: Path) -> Path:
    return runs.recorded(folder / "run", (None, [runs.light(n, 10 * MS) for n in range(30)], runs.CPU))


def on_gpu(folder: Path) -> Path:
    return runs.recorded(folder / "gpu", (traces.training(), [], {"device": {"type": "cuda", "name": "A100"}}))


# ---- cores that nobody uses ----------------------------------------------------------------------------------------

IDLE = {
    "one thread on two cores": found(
        computing,
        PRODUCTS * (1 - 2**-0.9) + SPLIT * (1 - 2**-0.7) - 2 * 5_000,
        "at most 30",
        settings=[[("num_threads", 1, 2)]],
        rows=[("rank 0", 1, 2, pytest.approx(1.0), 2)],
        numerics=[False],
    ),
    "threads that a line sets": found(
        told(computing, calls=[call("threads", 3, "of_before(4)"), call("threads", 7, "torch.set_num_threads(1)")]),
        None,
        "`torch.set_num_threads(2)` (is 1, by `torch.set_num_threads(1)` at train.py:7)",
        never=["OMP_NUM_THREADS"],
        where=[("train.py", 7)],
    ),
    "threads that torchrun sets": found(
        told(computing, env={"OMP_NUM_THREADS": "1"}, launch={"TORCHELASTIC_RUN_ID": "none"}),
        None,
        "`torchrun` sets `OMP_NUM_THREADS=1` where it is not set",
    ),
    "threads of the environment": found(
        told(computing, env={"OMP_NUM_THREADS": "1"}), None, "(is 1, by `OMP_NUM_THREADS=1` in its", never=["torchrun"]
    ),
    "another number in the environment": found(
        told(computing, env={"OMP_NUM_THREADS": "4"}), None, "(is 1)", never=["OMP_NUM_THREADS=4"]
    ),
    "cores in use": clear(cpu(used=1.9), 0, *("1 thread and 2 cores", "of which 0.1")),
    "threads enough": clear(cpu(threads=2)),
    "no trace": unmeasured(cpu(traced=False), "torch.set_num_threads(2)"),
    "a GPU": inapplicable(on_gpu),
    "no samples": unmeasured(untraced),
}

# ---- ranks bound to the same cores ---------------------------------------------------------------------------------

SAME, OWN = ("0-1", "0-1"), ("0-1", "2-3")
SHARED = {
    # All wait for the rank that gains least.
    "two ranks on the same two of eight": found(
        waits(0.3, 0.4, threads=2, ours=2.0, bound=SAME),
        None,
        *("2 cores each, of which others may use 2 cores", "6 cores", "--cpus-per-task=5"),
        share=pytest.approx(0.3, abs=0.001),
        rows=[(rank, "node-1", 2, 2, 6, pytest.approx(ms * MS)) for rank, ms in ((0, 270), (1, 360))],
    ),
    "programs outside the job have the half of it": found(
        waits(0.3, 0.4, threads=2, others=4.0, bound=SAME), share=pytest.approx(0.15, abs=0.001)
    ),
    "cores of their own": clear(waits(0.3, 0.3, threads=2, bound=OWN)),
    "all that there are": clear(waits(0.3, 0.3, threads=2, bound=("0-3", "0-7"))),
    "no wait": clear(waits(0.0, 0.0, threads=1, ours=1.0, bound=SAME)),
    "not bound": inapplicable(waits(0.3, 0.3, bound=("0-7", "0-7"))),
    "not recorded": unmeasured(waits(0.3, 0.3)),
}


def test_a_gpu_on_another_node_is_told_without_a_figure(tmp_path: Path) -> None:
    rows = [runs.light(n, 100 * MS) for n in range(30)]
    ranks = []
    for cores, node in (("0-1", 1), ("2-3", 1), ("4-5", 0), ("6-7", 1)):  # of which only the last is right
        cpu = {"count": 8, "allowed": cores, "nodes": {"0": "0-3", "1": "4-7"}}
        ranks.append((None, rows, {"device": {**runs.A100, "index": 0, "node": node}, "host": "node-1", "cpu": cpu}))
    result = diagnose(open_run(runs.recorded(tmp_path / "run", *ranks)), (shared_cores.RULE,), jobs=1)
    (found,) = result.outcomes
    assert found.state == "not_measured"
    far = (
        "ranks 0 and 1 may only use cores of NUMA node 0, and their GPUs are at node 1;"
        " rank 2 may only use cores of NUMA node 1, and its GPU is at node 0: "
    )
    assert found.why.startswith(far)
    (warning,) = [text for text in result.run.warnings if "NUMA" in text]
    assert warning.startswith(far)
    assert "--cpu-bind" in warning


# ---- more threads than cores ---------------------------------------------------------------------------------------

ALL = (0.3, 0.3, 0.3, 0.3)
CUDA = {"type": "cuda"}
THREADS = {
    # One of the two cores is for the loader's worker. They use the two cores that each has: if all of that is work, no
    # number of threads does it sooner.
    "four ranks with eight threads each on eight cores": found(
        waits(0.2, 0.25, 0.2, 0.2, workers=1),
        None,
        *("Rank 1 computes with 8 threads and has 2 cores to itself: for 25 %", "each other, nothing is saved."),
        share=pytest.approx(0.2, abs=0.001),
        settings=[[("OMP_NUM_THREADS", 8, 1)]],
        at_most=True,  # one thread of two cores may be slower
        rows=[
            ("rank 0", 8, 2, pytest.approx(180 * MS)),
            ("rank 1", 8, 2, pytest.approx(225 * MS), pytest.approx(225 * MS), pytest.approx(2), 900, None),
        ],
        ranks=[0, 1, 2, 3],
        never=["outside the job"],
    ),
    "threads that a line sets": found(
        waits(0.2, 0.4, 0.2, 0.2, workers=1, more={"calls": [call("threads", 7, "torch.set_num_threads(8)")]}),
        None,
        "`torch.set_num_threads(1)` (is 8, by `torch.set_num_threads(8)` at train.py:7)",
        settings=[[("num_threads", 8, 1)]],
        never=["OMP_NUM_THREADS"],
        where=[("train.py", 7)],
    ),
    "a core that the script chose": found(
        waits(0.4, threads=1, workers=1, more={"calls": [PINNED]}, **ITSELF),
        None,
        *("Training waits for the few cores", "no `os.sched_setaffinity(0, {3})` at train.py:4: its affinity is 1 of"),
        settings=[[]],
        where=[("train.py", 4)],
    ),
    "a core that OpenMP bound it to": found(
        waits(0.4, threads=1, workers=1, env={"GOMP_CPU_AFFINITY": "3"}, **ITSELF),
        None,
        "`GOMP_CPU_AFFINITY=3` has OpenMP bind it",
    ),
    "a core that a library chose": found(
        waits(0.4, threads=1, workers=1, **ITSELF), None, "a library bound it", never=["taskset"]
    ),
    "a core that the launcher gave": found(
        waits(0.4, threads=1, workers=1, env={"SLURM_CPU_BIND": "quiet"}, **ONE),
        None,
        "when it started (`SLURM_CPU_BIND=quiet`, the job's `--cpus-per-task`)",
        never=["taskset"],
    ),
    "a core that taskset gave": found(waits(0.4, threads=1, workers=1, **ONE), None, "(`taskset`, `numactl`, "),
    "a quota that all threads share": found(
        waits(0.4, threads=16, stopped=0.8, quota=1.5),
        None,
        *("The container's quota stops the job", "quota of 1.50 cores was used up in 80 % of its periods", "--cpus"),
        settings=[[("OMP_NUM_THREADS", 16, 1)], []],
        share=pytest.approx(0.4, abs=0.001),
    ),
    "a quota, and no more threads than it grants": found(
        waits(0.4, threads=1, stopped=0.2, quota=1.5), None, "a larger CPU quota than 1.50 cores"
    ),
    "a quota that is not used up": unmeasured(waits(0.4, threads=1, stopped=0.01, quota=1.5)),
    "threads that the script sets": found(
        waits(*ALL, env={"OMP_NUM_THREADS": "2"}),
        None,
        "although `OMP_NUM_THREADS=2` is set",
        settings=[[("num_threads", 8, 2)]],
    ),
    "threads of the environment": found(
        waits(*ALL, env={"OMP_NUM_THREADS": "8"}), settings=[[("OMP_NUM_THREADS", 8, 2)]]
    ),
    # The two ranks use four cores, and somebody else the other four.
    "others cause half of it": found(
        waits(0.3, 0.3, others=4.0), None, "50 % of the used cores", share=pytest.approx(0.15)
    ),
    "workers that take all cores": found(
        waits(0.3, 0.3, workers=6),
        None,
        "6 of them and the rank share 4 cores",
        settings=[[("OMP_NUM_THREADS", 8, 1)], []],
    ),
    # A rank uses two of three cores: with all of them it would take two thirds of the time.
    "what is saved at least": found(
        waits(0.5, 0.5, count=6, affinity=6), None, "each other, 300.0 ms is saved.", share=pytest.approx(0.5)
    ),
    # Main thread and the other one each have a core for 45 % of the time; all of the step may be one operator.
    "an operator waits for all of its pool": found(
        waits(0.55, 0.55, threads=2, pool=0.55, count=2, affinity=2), share=pytest.approx(1 - 2 * 0.45**2)
    ),
    "a pool that waits less than its main thread": found(
        waits(0.55, 0.55, threads=2, pool=0.1, count=2, affinity=2), share=pytest.approx(0.55)
    ),
    "a little": clear(waits(0.01, 0.02), pytest.approx(0.01)),
    # With as many threads as cores somebody else has them: that is no all-clear, and no finding.
    "as many as cores": unmeasured(
        waits(*ALL, threads=2, others=4.0), *("30 %", "with 2 threads and 2 cores a rank"), share=0
    ),
    "as many as bound to": unmeasured(waits(*ALL, threads=2, affinity=2)),
    "as many, beside others": unmeasured(
        waits(0.3, 0.3, threads=4, others=4.0, ours=4.0), "outside the job used 4 cores"
    ),
    "as many, seldom": clear(waits(0.04, 0.03, threads=2), 0, "2 threads and 4 cores a rank; 4.0 % of the time"),
    "workers on the threads' cores": unmeasured(
        waits(0.3, 0.3, threads=4, workers=3, ours=4.0),
        *("with 4 threads, 3 loader workers and 4 cores a rank; what", "--set env.OMP_NUM_THREADS=1`"),
        share=0,
    ),
    "the same where the script sets threads": unmeasured(
        waits(0.3, 0.3, threads=4, workers=3, ours=4.0, env={"OMP_NUM_THREADS": "1"}), "--set torch.num_threads=1`"
    ),
    "workers beside one thread": unmeasured(
        waits(0.3, 0.3, threads=1, workers=3, ours=4.0), "--set loader.num_workers=2`"
    ),
    "workers beside others": unmeasured(
        waits(0.3, 0.3, threads=4, workers=3, others=4.0, ours=4.0), "used 4 cores; what"
    ),
    "workers, seldom": clear(waits(0.04, 0.03, threads=2, workers=3, ours=4.0)),
    "a kernel that does not count": unmeasured(waits(None), "does not count"),
    "nothing sampled": unmeasured(untraced, "nothing was sampled"),
    "cores that are not known": unmeasured(told(waits(0.3), cpu=None), "not recorded"),
    # With more threads than its 8 cores it needs to know when the GPU was idle.
    "a GPU": unmeasured(told(waits(0.3), device=CUDA), "with 8 threads and 8 cores a rank"),
    "a GPU whose idle time is not known": unmeasured(
        told(waits(0.3), device=CUDA, cpu={"count": 8, "affinity": 8, "torch_threads": 64}), never=["64 threads"]
    ),
}

# ---- clocks --------------------------------------------------------------------------------------------------------


def reads(*read: Mapping[str, float]) -> Job:
    return lambda folder: clocked(folder, *({**NORMAL, **one} for one in read))


def log(folder: Path) -> Path:
    """Write a trace, and beside it a log of nvidia-smi, which names no rank."""
    path = runs.foreign(folder / "traces", readings.computing())
    header = "timestamp, pci.bus_id, clocks.sm [MHz], clocks.max.sm [MHz], clocks_event_reasons.active"
    lines = [f"2025/01/01 00:00:{n:02d}.000, 00000000:3B:00.0, 990 MHz, 1980 MHz, 0x0000000000000040" for n in range(9)]
    (path / "smi.csv").write_text("\n".join([header, *lines]) + "\n")
    return path


def of_clock(share: float) -> Any:
    return pytest.approx(share, rel=0.05)


FREE = {"clock_reasons_bits": 0}
CLOCKS = {
    # 1,350 MHz in the mean, of 1,800.
    "heat, by what the same GPU has without": found(
        reads(FREE, {"sm_clock_mhz": 900, "clock_reasons_bits": 0x24}),
        None,
        "too hot",
        share=of_clock(0.25),
        rows=[("rank 0", pytest.approx(1_350, rel=0.02), 1_980, pytest.approx(0.5, abs=0.015))],
        ranks=[0],
    ),
    "heat all the time, by the maximum": found(
        reads({"sm_clock_mhz": 990, "clock_reasons_bits": 0x40}), share=of_clock(0.5)
    ),
    "a power brake": found(reads({"sm_clock_mhz": 990, "clock_reasons_bits": 0x80}), share=of_clock(0.5)),
    "a clock that was set": found(
        reads({"sm_clock_mhz": 1_485, "clock_reasons_bits": 0x2}), None, "nvidia-smi -rgc", share=of_clock(0.25)
    ),
    "a locked clock": found(
        reads({"sm_clock_mhz": 1_200, **FREE}),
        None,
        *("far below its maximum", "`nvidia-smi -rgc`"),
        share=of_clock(1 - 1_200 / 1_980),
    ),
    # Twice the power would give 2^(1/3) times the clock.
    "a lowered limit": found(
        reads({"sm_clock_mhz": 1_400, "power_limit_w": 350}),
        None,
        "`nvidia-smi -pl 700` (is 350 W)",
        share=of_clock(1 - 2 ** (-1 / 3)),
    ),
    "a log of nvidia-smi": found(log, None, "00000000:3B:00.0", share=of_clock(0.5), ranks=[]),
    "a GPU that names more than it reaches": clear(reads({"sm_clock_mhz": 1_750, **FREE})),
    "a clock that moves with the load": clear(reads({"sm_clock_mhz": 1_200, **FREE}, {"sm_clock_mhz": 1_400, **FREE})),
    "a clock that is low at its power limit": clear(
        reads({"sm_clock_mhz": 1_200, **FREE}, {"sm_clock_mhz": 1_200, "clock_reasons_bits": 0x4})
    ),
    "a normal limit, and an idle GPU": clear(
        reads({"sm_clock_mhz": 1_300}, {"sm_clock_mhz": 210, "clock_reasons_bits": 0x1}), 0, "normal power limit"
    ),
    # 1,775 MHz in the mean, of 1,800.
    "a little heat": clear(
        reads(FREE, {"sm_clock_mhz": 1_750, "clock_reasons_bits": 0x20}), of_clock(25 / 1_800), ranks=[0]
    ),
    "a CPU": inapplicable(lambda p: clocked(p, NORMAL, facts=dict(runs.CPU)), "on the CPU"),
    "a clock that was not read": unmeasured(lambda p: clocked(p, {"power_w": 300.0}), "clock was read"),
}


@table({idle_cores: IDLE, shared_cores: SHARED, thread_oversubscription: THREADS, throttled_clock: CLOCKS})
def test_what_a_rule_says(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)


@pytest.mark.parametrize(
    ("children", "text", "device", "fetch", "says"),
    [
        pytest.param(2.0, "with zipfile.ZipFile(path) as archive:", {}, 0, "open the archive once", id="known"),
        pytest.param(2.0, "row = self.prepared(index)", {}, 0, "", id="not known"),
        pytest.param(0.1, "with zipfile.ZipFile(path) as archive:", {}, 0, "", id="idle"),
        pytest.param(2.0, "with zipfile.ZipFile(path) as archive:", CUDA, 0, "", id="on a GPU"),
        pytest.param(2.0, "with zipfile.ZipFile(path) as archive:", {}, 300, "", id="training waits for data as well"),
    ],
)
def test_workers_that_compute_on_the_cores_of_the_training(
    tmp_path: Path, children: float, text: str, device: dict[str, Any], fetch: int, says: str
) -> None:
    more = {"pid": 10, "directory": "/w/"} | ({"device": device} if device else {})
    path = crowded(
        tmp_path / "run", 0.3, 0.3, threads=4, workers=3, ours=4.0, children=children, fetch=fetch, more=more
    )
    worker = 'process 10:"";process 11:"";thread (0x2): MainThread'
    worker += ";_worker_loop (/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py:350)"
    made = f"{worker};fetch (/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py:52)"
    burst(path, {f"{made};__getitem__ (/w/data.py:9)": 90}, lines=[["/w/data.py", 9, text]])
    outcome = ask(thread_oversubscription.RULE, path)
    assert outcome.state == ("found" if says else "not_measured")
    if says:
        assert (outcome.at_most, [(place.file, place.line) for place in outcome.where]) == (True, [("data.py", 9)])
        assert outcome.share == pytest.approx(0.3, abs=0.01)
        assert says in outcome.changes[0].text
