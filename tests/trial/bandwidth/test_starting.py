"""Ranks that were started here: all end, whatever becomes of one of them, and the first failure is one line."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="exchanging needs torch")

from dlprof.errors import DlprofError  # noqa: E402 - after the check that there is torch
from dlprof.trial.bandwidth import starting  # noqa: E402
from dlprof.trial.bandwidth.plan import COLLECTIVES, Plan, sizes  # noqa: E402
from dlprof.trial.bandwidth.starting import StoppedError, environment, run_here  # noqa: E402

PLAN = Plan(sizes("64K"), ("all_reduce",), iterations=3, warmup=1, backend="gloo")
LONG = Plan(sizes("1K..64M*2"), iterations=1000, backend="gloo", seconds=600)


def env() -> dict[str, str]:
    return environment(os.environ, 2, on_gpus=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return the ranks that are started, as they are."""
    real, ranks = starting._start, list[subprocess.Popen[bytes]]()

    def start(*args: Any) -> subprocess.Popen[bytes]:
        ranks.append(real(*args))
        return ranks[-1]

    monkeypatch.setattr(starting, "_start", start)
    return ranks


def have_met(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Return whether rank 0 waits for the others, or is past that."""
    assert isinstance(ranks[0].args, list)
    return len(ranks) == 2 and (Path(str(ranks[0].args[-1])) / "port").exists()


def test_two_ranks_measure(started: list[subprocess.Popen[bytes]]) -> None:
    raw = run_here(PLAN, 2, env(), True, lambda: False)
    (row,) = raw.rows
    assert (row.collective, row.bytes, row.correct) == ("all_reduce", 1 << 16, True)
    assert [len(of) for of in row.samples] == [3, 3]
    assert (raw.backend, raw.hosts, raw.device) == ("gloo", (os.uname().nodename,) * 2, "")
    assert [rank.returncode for rank in started] == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_on_gpus_measure_over_nccl(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    collectives = COLLECTIVES if ranks > 1 else COLLECTIVES[:-1]  # nobody sends to himself
    plan = Plan(sizes("64K,16M"), collectives, iterations=5, backend="nccl")
    raw = run_here(plan, ranks, environment(os.environ, ranks, on_gpus=True), True, lambda: False)
    assert (raw.backend, raw.device) == ("nccl", torch.cuda.get_device_name(0))
    assert [(row.collective, row.correct) for row in raw.rows] == [(c, True) for c in collectives] * 2
    assert all(took > 0 for row in raw.rows for of in row.samples for took in of)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named_and_nobody_is_left(started: list[subprocess.Popen[bytes]], victim: int) -> None:
    def kill() -> bool:
        if started and have_met(started):
            started[victim].kill()
        return False

    with pytest.raises(DlprofError, match=f"^rank {victim} was ended by a signal .Killed.: out of memory"):
        run_here(LONG, 2, env(), True, kill)
    assert None not in [rank.returncode for rank in started]


def test_whoever_asks_for_the_end_leaves_nobody(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(StoppedError):
        run_here(LONG, 2, env(), True, lambda: bool(started) and have_met(started))
    assert [rank.returncode for rank in started] == [-signal.SIGTERM] * 2
    assert isinstance(started[0].args, list)
    assert not Path(str(started[0].args[-1])).exists()


def test_a_backend_that_does_not_start_is_one_line() -> None:
    with pytest.raises(DlprofError) as failed:
        run_here(PLAN, 2, {**env(), "GLOO_SOCKET_IFNAME": "no-such-card"}, True, lambda: False)
    assert str(failed.value).startswith("gloo does not start on rank ")
    assert "\n" not in str(failed.value)


def test_ranks_on_the_cpu_see_no_gpu_and_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert environment({}, 2, on_gpus=False) == {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(max(1, cores // 2)),
    }
    assert environment({"OMP_NUM_THREADS": "7"}, 2, on_gpus=False)["OMP_NUM_THREADS"] == "7"
    assert environment({"A": "b"}, 2, on_gpus=True) == {"A": "b"}
