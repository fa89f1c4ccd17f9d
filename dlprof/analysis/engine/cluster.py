"""Reads ranks on the workers of a Dask cluster: one that is started here, one that runs already, or SLURM jobs.

Each rank is one task. The largest are sent first, and no more at once than there are threads: a worker that dies has
one rank, and the scheduler holds few answers. Dask starts a lost rank again on another worker; what kills its worker
each time costs its own row of the report.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pkgutil
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlprof.analysis.engine.needs import Measure
from dlprof.analysis.engine.ranks import RankAnswer
from dlprof.analysis.engine.run import PROCESS_BYTES, USED, Also, at_once, lost, measure_rank
from dlprof.analysis.engine.store import Store, code
from dlprof.errors import DlprofError
from dlprof.read.kineto.split import free_bytes
from dlprof.read.run import Rank
from dlprof.units import count

NEEDED = "Dask is not installed: pip install 'dlprof[dask]'"

# How long a scheduler may take to answer, and a running cluster may be without a worker.
ANSWERS_S, WORKERS_S = 10, 30
_LOOKS_S = 5

# A rank that has cost so many workers is given up. (The scheduler of a running cluster has its own number.)
DEATHS = 2

SLURM_JOBS = 4
# Memory of a SLURM job, as a multiple of the estimate for its largest rank: SLURM ends a job that takes more.
_SLURM_SPARE = 2

_UNLIKE = "has another version of dlprof or pandas"


@dataclass(frozen=True)
class Dask:
    """A backend of the engine. `where`: local, local:N, slurm, slurm:N, or the address of a scheduler."""

    where: str
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        _parsed(self.where)

    def __call__(
        self,
        ranks: Sequence[Rank],
        todo: Sequence[Measure[Any]],
        workers: int,  # noqa: ARG002 - a cluster has its own
        also: Also | None = None,
        store: Store | None = None,
    ) -> Iterator[tuple[int, RankAnswer]]:
        """Measure the ranks on the cluster's workers; raise DlprofError where there is none or it is lost."""
        if store:  # whoever writes there may stand in another folder
            store = replace(store, root=store.root.absolute(), folder=store.folder.absolute())
        with _cluster(self, ranks, store) as cluster:
            yield from cluster.measure(ranks, partial(_measure, todo=todo, also=also, store=store, by=code()), todo)


class _Cluster:
    """A scheduler that answers, and its workers."""

    def __init__(self, client: Any, where: str, alive: Callable[[], bool]) -> None:
        self._client, self._where, self._alive = client, where, alive
        self._counted, self._threads = -math.inf, 0

    def measure(
        self, ranks: Sequence[Rank], work: Callable[[Rank], RankAnswer], todo: Sequence[Measure[Any]]
    ) -> Iterator[tuple[int, RankAnswer]]:
        """Send the ranks in their order, each when a thread is free for it, and yield the answers as they come."""
        waiting, sent = deque(ranks), dict[Any, Rank]()
        named = f"dlprof-{os.urandom(8).hex()}"
        while waiting or sent:
            while waiting and len(sent) < max(1, self._free()):
                rank = waiting.popleft()
                there = replace(rank, files={name: path.absolute() for name, path in rank.files.items()})
                sent[self._client.submit(work, there, key=f"{named}-{rank.index}", pure=False)] = rank
            for future in self._done(list(sent)):
                rank = sent.pop(future)
                yield rank.index, self._answer(future, rank, todo)
                future.release()

    def _free(self) -> int:
        """Return the number of threads of all workers: workers come and go."""
        now = time.monotonic()
        if now - self._counted >= 1:
            with self._connected():
                self._threads = sum(self._client.nthreads().values())
            self._counted = now
        return self._threads

    def _done(self, futures: Sequence[Any]) -> Sequence[Any]:
        """Wait until one of these or more are done; raise DlprofError where nothing more is to be expected."""
        from distributed import wait

        gone = None
        while True:
            with self._connected():
                try:
                    return list(wait(futures, timeout=_LOOKS_S, return_when="FIRST_COMPLETED").done)
                except asyncio.TimeoutError:
                    pass
            now = time.monotonic()
            gone = None if self._free() else gone or now
            if gone is not None and now - gone >= WORKERS_S and not self._alive():
                raise DlprofError(f"{self._where}: the last worker is gone; the same command goes on from here")

    def _answer(self, future: Any, rank: Rank, todo: Sequence[Measure[Any]]) -> RankAnswer:
        from distributed import KilledWorker

        with self._connected():
            error = future.exception()
            if error is None:
                answer: RankAnswer = future.result()
                return answer
        if isinstance(error, KilledWorker):
            return lost(rank, todo)
        if isinstance(error, DlprofError):
            raise error
        # A rank's own trouble is in its answer: this is of the worker, most likely a Python or a dlprof unlike ours.
        raise DlprofError(f"{self._where}: a worker cannot run this dlprof: {type(error).__name__}: {error}")

    @contextmanager
    def _connected(self) -> Iterator[None]:
        from distributed import CancelledError

        try:
            yield
        except asyncio.TimeoutError:
            raise
        except (OSError, CancelledError, asyncio.CancelledError) as e:
            raise DlprofError(f"{self._where}: the scheduler is gone; the same command goes on from here") from e


def _measure(rank: Rank, todo: Sequence[Measure[Any]], also: Also | None, store: Store | None, by: str) -> RankAnswer:
    """Measure a rank on a worker; raise DlprofError where its dlprof is another one, or it does not see the files."""
    host = socket.gethostname()
    if code() != by:
        raise DlprofError(f"the worker on {host} {_UNLIKE}")
    for path in rank.paths:
        if not path.exists():
            raise DlprofError(f"the worker on {host} does not see {path}")
    return measure_rank(rank, todo, also, store)


@contextmanager
def _cluster(dask: Dask, ranks: Sequence[Rank], store: Store | None) -> Iterator[_Cluster]:
    """Start a cluster or find it; end it where it was started here."""
    kind, number = _parsed(dask.where)
    try:
        from dask import config
        from distributed import Client
    except ImportError:
        raise DlprofError(NEEDED) from None
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter(
            "ignore"
        )  # other versions of libraries, ports in use: serious problems raise an error that is reported
        stack.enter_context(_silent())
        environ = "distributed.nanny.pre-spawn-environ"
        stack.enter_context(config.set({**_SETTINGS, environ: config.get(environ) | _MALLOC}))
        address: Any = kind
        alive: Callable[[], bool] = bool  # False: nothing was started here
        if kind == "local":
            address = stack.enter_context(_local(ranks, number, dask.tell))
        elif kind == "slurm":
            address, alive = stack.enter_context(_slurm(ranks, number or SLURM_JOBS, store))
        try:
            client = stack.enter_context(Client(address, timeout=ANSWERS_S, set_as_default=False))
        except (OSError, ValueError, ImportError, asyncio.TimeoutError, AssertionError):
            # The last one: the client's own thread has not started within ten seconds.
            raise DlprofError(f"{dask.where}: no Dask scheduler answers there") from None
        stack.enter_context(client.as_current())
        _await_worker(client, dask, alive)
        _check_workers(client, dask.where)
        yield _Cluster(client, dask.where, alive)


_SETTINGS = {
    "distributed.scheduler.allowed-failures": DEATHS - 1,
    # A worker has one rank at a time. Dask cannot spill its tables: they are not results. With too much memory it ends.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.admin.log-length": 0,
}

# A worker's malloc keeps freed memory. With Dask's default it goes back to the kernel, and the next rank takes it again
# page by page.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": 256 << 20, "MALLOC_MMAP_THRESHOLD_": 32 << 20}


def _await_worker(client: Any, dask: Dask, alive: Callable[[], bool]) -> None:
    """Wait for the first worker; raise DlprofError where none comes."""
    until = time.monotonic() + WORKERS_S
    warned = False
    while True:
        try:
            client.wait_for_workers(1, timeout=_LOOKS_S)
            return
        except asyncio.TimeoutError:
            pass
        if not warned:
            dask.tell(f"{dask.where}: waiting for the first worker")
            warned = True
        if time.monotonic() > until and not alive():
            raise DlprofError(f"{dask.where}: no worker came within {WORKERS_S} s")


def _check_workers(client: Any, where: str) -> None:
    """Raise DlprofError where a worker has no dlprof, or another one: it would die of what it is sent."""
    for found in client.run(pkgutil.resolve_name, f"{code.__module__}:{code.__name__}", on_error="return").values():
        if isinstance(found, Exception):
            raise DlprofError(f"{where}: a worker cannot run this dlprof: {type(found).__name__}: {found}")
    for address, found in client.run(code, on_error="return").items():
        if found != code():
            raise DlprofError(f"{where}: the worker at {address} {_UNLIKE}")


@contextmanager
def _local(ranks: Sequence[Rank], number: int, tell: Callable[[str], None]) -> Iterator[Any]:
    """Start workers on this machine, with an equal part of its free memory each."""
    from distributed import LocalCluster

    workers = at_once(ranks, number or None)
    if number and workers < min(number, len(ranks)):
        tell(f"the largest rank needs so much memory that {count(workers, 'worker')} of {number} can work at once")
    free = free_bytes()
    with (
        tempfile.TemporaryDirectory(prefix="dlprof-") as scratch,
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=0 if free is None else max(int(free * USED) // workers, _bytes_of(ranks)),
            dashboard_address=None,
            local_directory=scratch,
            silence_logs=_SILENT,
        ) as cluster,
    ):
        yield cluster


@contextmanager
def _slurm(ranks: Sequence[Rank], jobs: int, store: Store | None) -> Iterator[tuple[Any, Callable[[], bool]]]:
    """Start workers as SLURM jobs of one core each; return them, and whether any of the jobs is there still."""
    try:
        from dask import config
        from dask_jobqueue import SLURMCluster
    except ImportError:
        raise DlprofError(NEEDED) from None
    if shutil.which("sbatch") is None:
        raise DlprofError("--dask slurm: there is no sbatch on this machine")
    logs = Path(tempfile.mkdtemp(prefix="dlprof-")) if store is None else store.folder.parent / "slurm"
    cluster = SLURMCluster(
        cores=1,
        processes=1,
        memory=f"{_SLURM_SPARE * _bytes_of(ranks) >> 20} MiB",
        job_name="dlprof",
        python=sys.executable,
        log_directory=str(logs),
        job_script_prologue=[*config.get("jobqueue.slurm.job-script-prologue", []), *_exports()],
        silence_logs=_SILENT,
        scheduler_options={"dashboard_address": None},
    )
    try:
        # Jobs are sent in the background, where a refusal by SLURM would not show.
        command = ["sbatch", "--test-only"]
        tried = subprocess.run(command, input=cluster.job_script(), capture_output=True, text=True, check=False)
        if tried.returncode:
            raise DlprofError(f"--dask slurm: {(tried.stderr.strip() or 'sbatch failed').splitlines()[-1]}")
        cluster.scale(jobs=min(jobs, len(ranks)))

        def alive() -> bool:
            numbers = [str(job.job_id) for job in cluster.workers.values() if job.job_id]
            command = ["squeue", "--noheader", "--jobs", ",".join(numbers)]
            return bool(numbers) and bool(subprocess.run(command, capture_output=True, check=False).stdout.strip())

        yield cluster, alive
    finally:
        with suppress(AssertionError):  # of a job that was refused after all
            cluster.close()


def _exports() -> list[str]:
    """Return the lines of a shell script that make our settings those of a worker."""
    dask = {f"DASK_{n.upper().replace('.', '__').replace('-', '_')}": value for n, value in _SETTINGS.items()}
    return [f"export {name}={value}" for name, value in {**dask, **_MALLOC}.items()]


def _bytes_of(ranks: Sequence[Rank]) -> int:
    return max(rank.unpacked_bytes for rank in ranks) + PROCESS_BYTES


_SILENT = logging.CRITICAL + 1
_LOGGERS = ("distributed", "distributed.client", "distributed.scheduler", "distributed.nanny", "tornado", "asyncio")


@contextmanager
def _silent() -> Iterator[None]:
    """Silence Dask's log: dlprof prints what a user needs."""
    import distributed  # noqa: F401 - it sets the levels when it is imported

    before = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in before:
        logging.getLogger(name).setLevel(_SILENT)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _parsed(where: str) -> tuple[str, int]:
    """Return the kind of a cluster (local, slurm, or an address) and how many workers; 0: as many as are sensible."""
    kind, sign, number = where.partition(":")
    if kind in ("local", "slurm"):
        if sign and not (number.isdecimal() and 0 < int(number) <= 10_000):
            raise DlprofError(f"--dask {where}: the number of workers after {kind}: is 1 or more")
        return kind, int(number or 0)
    if "://" not in where:
        raise DlprofError(f"--dask {where}: name local, local:N, slurm, slurm:N, or tcp://HOST:PORT of a scheduler")
    return where, 0
