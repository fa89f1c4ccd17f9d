"""Ranks are read on Dask's workers; what is lost there costs its own rank, and what fails is one line."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis import engine
from dlprof.analysis.diagnosis import diagnosed, wanted
from dlprof.analysis.engine import Done, cluster, open_store
from dlprof.analysis.engine.cluster import Dask
from dlprof.analysis.rules import RULES
from dlprof.errors import DlprofError
from dlprof.read.kineto.split import free_bytes
from dlprof.read.run import TRACE, Rank, Run, open_run
from dlprof.result.stored import to_json
from tests.fixtures.measures import RANKS, deadly, greedy, rows
from tests.fixtures.places import ROOT


def result(run: Run, **how: Any) -> Any:
    """Return what the report of a run knows."""
    return to_json(diagnosed(engine.measure(run, wanted(RULES), **how), RULES))


def dask(where: str, tell: Callable[[str], None] = lambda _: None) -> Dask:
    """Return the backend; skip where Dask is not installed."""
    pytest.importorskip("distributed", reason="needs the extra dask")
    return Dask(where, tell)


@pytest.mark.parametrize("where", ["", "loco", "local:", "local:0", "local:-1", "local:a", "slurm:0", "localhost:8786"])
def test_a_place_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(DlprofError, match=f"--dask {where}: "):
        Dask(where, pytest.fail)


@pytest.mark.parametrize("where", ["local", "local:4", "slurm", "slurm:16", "tcp://host:8786", "tls://host:8786"])
def test_a_place_is_taken(where: str) -> None:
    assert Dask(where, pytest.fail).where == where


def test_without_dask_the_extra_is_named(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(DlprofError, match=r"Dask is not installed: pip install 'dlprof\[dask\]'"):
        engine.measure(job, [rows], backend=Dask("local", pytest.fail))


def test_without_slurm_that_is_told(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = dask("slurm:2")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DlprofError, match="--dask slurm: there is no sbatch on this machine"):
        engine.measure(job, [rows], backend=backend)


@pytest.mark.long
def test_local_workers_that_fit_into_memory_give_what_this_process_gives(
    job: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(job, tmp_path)
    store.make()
    seen: list[Done] = []
    lines: list[str] = []
    one = result(job, jobs=1)
    free = free_bytes()
    assert free is not None
    monkeypatch.setattr(Rank, "unpacked_bytes", int(free * 0.3))
    assert result(job, store=store, backend=dask("local:4", lines.append), progress=seen.append) == one
    assert lines == ["the largest rank needs so much memory that 2 workers of 4 can work at once"]
    assert [done.ranks for done in seen] == [0, 1, 2, 3, 4]
    # It was kept by whoever read it: no cluster is asked where all is known.
    assert result(job, store=store, backend=Dask("tcp://127.0.0.1:1", pytest.fail)) == one


@pytest.mark.long
def test_a_rank_that_kills_its_workers_costs_itself(job: Run, tmp_path: Path) -> None:
    store = open_store(job, tmp_path)
    store.make()
    run = engine.measure(job, [rows, deadly], store=store, backend=dask("local:2"))
    assert run.frame(rows)["rank"].to_list() == [0, 2, 3]
    (why,) = run.warnings[1]
    assert "rank1.json.gz killed its process" in why
    assert run.failures() == {}
    assert sorted(store.read(job.ranks, engine.run.travelling([rows, deadly])).answers) == [0, 2, 3]


@pytest.mark.slow
def test_a_worker_that_takes_too_much_is_ended(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "free_bytes", lambda: 2 * (900 << 20))
    run = engine.measure(job, [greedy], backend=dask("local:2"))
    assert run.frame(greedy)["rank"].to_list() == [0, 2, 3]
    assert "rank1.json.gz killed its process (out of memory?)" in run.warnings[1][0]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def started(*words: str, path: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program of Dask; end it afterwards."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    command = [sys.executable, "-P", "-m", f"distributed.cli.{words[0]}", *words[1:], "--no-dashboard"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def scheduler() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a scheduler; return its address and the process."""
    pytest.importorskip("distributed", reason="needs the extra dask")
    port = free_port()
    with started("dask_scheduler", "--host", "127.0.0.1", "--port", str(port)) as process:
        while process.poll() is None:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"tcp://127.0.0.1:{port}", process


def worker(address: str, path: Path = ROOT) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Start a worker of one thread that nobody starts again."""
    return started("dask_worker", address, "--no-nanny", "--nthreads", "1", "--host", "127.0.0.1", path=path)


def test_a_scheduler_that_is_not_there_is_one_line(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWERS_S", 0.5)
    for address in (f"tcp://127.0.0.1:{free_port()}", "tcp://127.0.0.1", "tcp://:0", "nonsense://127.0.0.1:1"):
        assert impossible(job, address) == f"{address}: no Dask scheduler answers there"


def impossible(run: Run, address: str, tell: Callable[[str], None] = lambda _: None) -> str:
    """Return the one line that says why a run is not measured there."""
    with pytest.raises(DlprofError) as e:
        engine.measure(run, [rows], backend=dask(address, tell))
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.long
def test_a_running_scheduler_is_used_and_left_running_and_what_it_lacks_is_one_line(
    job: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, empty, here = (tmp_path / name for name in ("other", "empty", "here"))
    shutil.copytree(ROOT / "dlprof", other / "dlprof", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "dlprof" / "schema.py").open("a") as file:
        file.write("# another line\n")
    (empty / "dlprof").mkdir(parents=True)
    (empty / "dlprof" / "__init__.py").touch()
    with scheduler() as (address, process):
        with monkeypatch.context() as patched:
            patched.setattr(cluster, "WORKERS_S", 1)
            patched.setattr(cluster, "_LOOKS_S", 1)
            lines: list[str] = []
            assert "no worker came within 1 s" in impossible(job, address, lines.append)
            assert lines == [f"{address}: waiting for the first worker"]
        with worker(address, other):
            line = impossible(job, address)
            assert line.startswith(f"{address}: the worker at tcp://127.0.0.1:")
            assert line.endswith(" has another version of dlprof or pandas")
        with worker(address, empty):
            line = impossible(job, address)
            assert line.startswith(f"{address}: a worker cannot run this dlprof: ModuleNotFoundError: ")
        with worker(address), worker(address):
            with (tmp_path / "file").open("w") as file:
                fd = Path(f"/proc/self/fd/{os.dup2(file.fileno(), 200)}")  # each process has its own
                try:
                    line = impossible(replace(job, ranks=(Rank(0, {TRACE: fd}),)), address)
                finally:
                    os.close(200)
            assert line == f"the worker on {socket.gethostname()} does not see /proc/self/fd/200"
            # The workers stand in another folder.
            here.symlink_to(job.path)
            monkeypatch.chdir(tmp_path)
            run = open_run("here")
            store = open_store(run, Path("cache"))
            store.make()
            assert result(run, store=store, backend=dask(address)) == result(run, jobs=1)
            assert len(list(Path("cache").rglob("*.npz"))) == RANKS
        assert process.poll() is None


@pytest.mark.long
@pytest.mark.parametrize("victim", [pytest.param("scheduler", marks=pytest.mark.slow), "worker"])
def test_a_cluster_that_is_gone_is_one_line_and_what_was_read_is_kept(
    victim: str, job: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(job, tmp_path)
    store.make()
    with ExitStack() as stack:
        address, of_scheduler = stack.enter_context(scheduler())
        of_worker = stack.enter_context(worker(address))

        def kill(done: Done) -> None:
            if done.ranks == 1:
                monkeypatch.setattr(cluster, "WORKERS_S", 1)
                monkeypatch.setattr(cluster, "_LOOKS_S", 1)
                (of_scheduler if victim == "scheduler" else of_worker).send_signal(signal.SIGKILL)

        with pytest.raises(DlprofError) as e:
            engine.measure(job, [rows], store=store, backend=dask(address), progress=kill)
    what = "the scheduler is gone" if victim == "scheduler" else "the last worker is gone"
    assert str(e.value) == f"{address}: {what}; the same command goes on from here"
    assert 1 <= len(store.read(job.ranks, [rows]).answers) < RANKS
