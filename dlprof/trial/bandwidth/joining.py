"""Which rank a process is, and where the ranks meet: as launchers say, or of ranks that were started here."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlprof.errors import DlprofError
from dlprof.files import boot, longer, write
from dlprof.record.ranks import find_rank, find_size, number_of
from dlprof.trial.bandwidth.watching import Watch

_LOCAL_RANKS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# Ports that a job may listen on, and that the kernel gives to nobody (/proc/sys/net/ipv4/ip_local_port_range).
_PORTS, _FIRST_PORT = 8_000, 20_000
_POLL_S = 0.05

_C10D: Any = dist  # what it has of stores is not in its stubs


class BrokenError(DlprofError):
    """An exchange that failed because of another rank: rank 0 tells of it for all."""


@dataclass(frozen=True)
class Ranks:
    """One rank among the others. They tell each other what to do through a store, apart from the backend."""

    rank: int
    ranks: int
    store: Any  # of torch.distributed
    watch: Watch

    def collect(self, key: str, value: Any) -> list[Any] | None:
        """Give rank 0 a value of JSON under a key that is used once; return the values of all there, elsewhere None."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank:
            return None
        values = []
        for r in range(self.ranks):
            values.append(self._get(f"{key}/{r}", f"rank {r} has not come as far: it is missing, or hangs"))
            self.store.delete_key(f"{key}/{r}")
        return values

    def announce(self, key: str, value: Any = None) -> Any:
        """Return rank 0's value on all ranks."""
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        return self._get(key, "rank 0 has not come as far: it is missing, or hangs")

    def _get(self, key: str, what: str) -> Any:
        self.watch.at(what)
        try:
            return json.loads(self.store.get(key))
        except RuntimeError as e:
            raise BrokenError(f"{what} ({first_line(e)})") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error of torch's, without the place in its C++."""
    line = next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)
    return re.sub(r"^\[\S*/[\w.]+:\d+\]\s*", "", line)[:200]


def place(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port where the ranks of a launcher's job meet; raise DlprofError where it does not say.

    torchrun sets MASTER_ADDR and MASTER_PORT. srun does not, and its first host is taken; mpirun neither, and where all
    ranks are on one host no address is needed.
    """
    port = environ.get("MASTER_PORT", "")
    chosen = int(port) if port.isdigit() else _port(environ)
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], chosen
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes and environ.get("SLURM_STEP_ID"):
        return _address(first_host(nodes)), chosen
    for size, local in (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("PMI_SIZE", "MPI_LOCALNRANKS")):
        if environ.get(size) and environ.get(size) == environ.get(local):
            return "127.0.0.1", chosen
    raise DlprofError("MASTER_ADDR is not set: name the host of rank 0 there, as for torch.distributed")


def _port(environ: Mapping[str, str]) -> int:
    """Return a port that all ranks of a job come to and those of other jobs seldom do."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    # MPICH names no job; the ranks of one host have one parent.
    job = "/".join(environ.get(name, "") for name in names).strip("/") or str(os.getppid())
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def first_host(nodes: str) -> str:
    """Return the first host of a list of SLURM's: node003 of "node[003-006,9],login1"."""
    if scontrol := shutil.which("scontrol"):
        done = subprocess.run([scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def _address(node: str) -> str:
    """Return where a node of SLURM's is reached: by its name, else, where that is no host's, at its NodeAddr."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        if scontrol := shutil.which("scontrol"):
            done = subprocess.run([scontrol, "show", "node", node], capture_output=True, text=True, check=False)
            if found := re.search(r"\bNodeAddr=(\S+)", done.stdout):
                return found[1]
    return node


def of_launcher(timeout_s: float) -> tuple[int, int, Any]:
    """Return rank, number of ranks and their store, as the launcher's environment says; raise DlprofError."""
    rank, ranks = find_rank(), find_size() or 1
    host, port = place(os.environ)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    try:
        store, *_ = next(_C10D.rendezvous("env://", rank, ranks, timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError, OSError) as e:
        raise BrokenError(
            f"the {ranks} ranks have not met at {host}:{port} within {timeout_s:g} s ({first_line(e)}): is one missing?"
        ) from None
    return rank, ranks, store


def of_started(rank: int, ranks: int, folder: Path, timeout_s: float) -> Any:
    """Return the store of ranks that were started here: rank 0 opens it and leaves its port in the folder."""
    file, timeout = folder / "port", timedelta(seconds=timeout_s)
    try:
        if rank == 0:
            store = _C10D.TCPStore("127.0.0.1", 0, ranks, is_master=True, timeout=timeout, wait_for_workers=False)
            write(file, str(store.port))
            return store
        until = time.monotonic() + timeout_s
        while not file.exists():
            if time.monotonic() > until:
                raise BrokenError(f"rank 0 has not started within {timeout_s:g} s")
            time.sleep(_POLL_S)
        port = int(file.read_text())
        return _C10D.TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as e:
        raise BrokenError(f"the ranks cannot meet on this host: {first_line(e)}") from None


@contextmanager
def joined(
    rank: int, ranks: int, store: Any, backend: str, timeout_s: float, watch: Watch
) -> Iterator[tuple[Ranks, torch.device, list[Mapping[str, str]], str]]:
    """Make the process group of all ranks; return them, this one's device, who all are (on rank 0) and the backend.

    A rank that cannot take part says so to all. Raises DlprofError.
    """
    here = Ranks(rank, ranks, _C10D.PrefixStore("dlprof", store), watch)
    why = ""
    try:
        device = _device(backend)
        _check(backend or _usual(device))
    except DlprofError as e:
        device, why = torch.device("cpu"), str(e)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    mine = {
        "host": os.uname().nodename,
        "boot": boot(),
        "device": name,
        "backend": backend or _usual(device),
        "why": why,
    }
    who = here.collect("joined", mine)
    chosen, fault = here.announce("backend", _agreed(who) if who else None)
    if fault:
        raise BrokenError(fault)
    if chosen == "gloo":
        device = torch.device("cpu")
    watch.at(f"{chosen} does not start on rank {rank}")
    try:
        dist.init_process_group(
            chosen,
            store=_C10D.PrefixStore("group", store),
            rank=rank,
            world_size=ranks,
            # This watch ends a rank that waits longer. NCCL's own would abort it, with pages of text.
            timeout=timedelta(seconds=2 * timeout_s + 60),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as e:
        raise BrokenError(f"{chosen} does not start on rank {rank} of {mine['host']}: {first_line(e)}") from None
    yield here, device, who or [], chosen
    # Not where something was raised: it may wait for others, who may be gone.
    dist.destroy_process_group()


def hosts_of(who: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the host of each rank; of machines that share a name all but the first with their kernel's start."""
    first = {one["host"]: one["boot"] for one in reversed(who)}
    return [one["host"] if one["boot"] == first[one["host"]] else longer(one["host"], one["boot"]) for one in who]


def _usual(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def _device(backend: str) -> torch.device:
    """Return this rank's device: its GPU by its number on the host, or the CPU; raise DlprofError."""
    if backend == "gloo" or not torch.cuda.is_available():
        if backend == "nccl":
            raise DlprofError("there is no GPU for nccl")
        return torch.device("cpu")
    local, there = number_of(*_LOCAL_RANKS) or 0, torch.cuda.device_count()
    if local >= there > 1:
        raise DlprofError(f"it is the host's rank {local}, and {there} GPUs are there")
    device = torch.device("cuda", local % there)  # a launcher may show each rank one GPU
    torch.cuda.set_device(device)
    return device


def _check(backend: str) -> None:
    if not dist.is_backend_available(backend):
        raise DlprofError(f"this torch ({torch.__version__}) is built without {backend}")


def _agreed(who: list[Mapping[str, str]]) -> tuple[str, str]:
    """Return the backend of all ranks, and why there is none."""
    for r, one in enumerate(who):
        if one["why"]:
            return "", f"rank {r} on {one['host']} cannot take part: {one['why']}"
    # A rank without a GPU among others that have one exchanges over gloo, and so must all.
    kinds = {one["backend"] for one in who}
    return ("gloo" if "gloo" in kinds else kinds.pop()), ""
