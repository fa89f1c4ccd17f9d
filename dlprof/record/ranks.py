"""Which rank a process is, which folder it has, and where a loader's worker finds what its rank records.

Processes may train without a process group, as Hogwild's do, and none of them knows a number: then each takes the next
one that none of those has which train at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlprof import run_folder
from dlprof.files import boot
from dlprof.record.launch.process import started
from dlprof.record.log import Log

# The variables in which launchers pass the rank. SLURM's comes last: what another launcher starts within a job has that
# of the batch script too, which is task 0.
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

# Those in which they pass the number of ranks. Not SLURM_NTASKS: a single process in a batch script has that of its
# whole allocation.
SIZES = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

# Those in which they pass a rank's number on its host.
_LOCAL_RANKS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

# How the process group of a pipeline is named, in lower case: by PyTorch's DeviceMesh after its dimension, and by
# Megatron-LM.
_PIPELINES = ("mesh_pp", "mesh_pipe", "mesh_pipeline", "pipeline_model_parallel_group")

# So many processes of one job may train without a process group; any further one has a folder by its process id.
_MOST_ALONE = 256


def find_rank() -> int:
    """Return this process's rank: the process group's if there is one, else by the launcher's variables, else 0."""
    distributed = process_group()
    if distributed is not None:
        return int(distributed.get_rank())
    return _number_of(*RANKS) or 0


def find_size() -> int | None:
    """Return the number of ranks by the launcher's variables; None: they do not say."""
    return _number_of(*SIZES)


def local_rank() -> int | None:
    """Return this process's number on its host by the launcher's variables; None: they do not say."""
    return _number_of(*_LOCAL_RANKS)


def is_among(asked: str, run: Path, rank: int, pipeline: Sequence[int] | None) -> bool:
    """Return whether a rank is one of those that --ranks names, as `launch.options.ranks` checks it.

    `pipeline`: the ranks of the pipeline that it is a stage of; None: not known yet. Needs nothing from other ranks.
    """
    return any(_is_named(part, run, rank, pipeline) for part in asked.split(","))


def _is_named(part: str, run: Path, rank: int, pipeline: Sequence[int] | None) -> bool:
    if part == "all":
        return True
    if part == "last":
        distributed = process_group()
        return rank + 1 == (distributed.get_world_size() if distributed is not None else find_size() or 1)
    if part == "per-host":
        local = local_rank()
        # Without a launcher, the first of those that train on this host: each wrote its file when it began to.
        return local == 0 if local is not None else rank == min(w.rank for w in words_here(run) if w.runs)
    if part == "per-stage":
        ranks = pipeline or _pipeline_group()
        return 0 in ranks if ranks else rank == 0
    first, _, last = part.partition("-")
    return int(first) <= rank <= int(last or first)


def _pipeline_group() -> Sequence[int]:
    """Return the ranks of this one's pipeline by the names of its process groups; none: no group is named so."""
    distributed, c10d = process_group(), sys.modules.get("torch.distributed.distributed_c10d")
    groups = getattr(getattr(c10d, "_world", None), "pg_map", ()) if distributed is not None else ()
    named = [group for group in list(groups) if str(getattr(group, "group_desc", "")).lower() in _PIPELINES]
    return distributed.get_process_group_ranks(named[0]) if named else ()


def is_alone() -> bool:
    """Return whether nothing makes this process one of several ranks: neither a process group nor a launcher."""
    return process_group() is None and find_rank() == 0 and find_size() in (None, 1)


def make_folder(run: Path, rank: int, restart: int, *, alone: bool) -> tuple[Path, int, Path | None]:
    """Make the folder of a rank's recording; return it, the rank's number, and the folder that it would else have had.

    Where another process has that one, a process that is alone takes the next number while the other one trains; any
    other has a folder of another name, which is not read. Raises OSError.
    """
    ranks, life = run / "ranks", f".r{restart}" if restart else ""
    for number in range(rank, rank + (_MOST_ALONE if alone else 1)):
        folder = ranks / run_folder.rank_name(number, life)
        try:
            _make(folder)
        except FileExistsError:
            if alone and _trains(run, folder):
                continue
            break
        _leave_word(run, folder)
        return folder, number, None
    other = folder.with_name(f"{folder.name}.{os.getpid()}")
    other.mkdir()
    _leave_word(run, other)
    return other, number, folder


def _make(folder: Path) -> None:
    """Make a rank's folder, in a folder that most often is there already. Raises FileExistsError, OSError."""
    try:
        folder.mkdir()
    except FileNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()


def _number_of(*names: str) -> int | None:
    """Return the first of these variables that is a whole number."""
    return next((int(v) for v in (os.environ.get(n, "") for n in names) if v.isdigit()), None)


def process_group() -> Any:
    """Return torch.distributed where this process is in a process group; None: in none."""
    distributed = sys.modules.get("torch.distributed")
    there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if there else None


def is_child() -> bool:
    """Return whether another process has made this one to work for it, by multiprocessing."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


class Word(NamedTuple):
    """What a process has said of itself when it began to train: its folder, its rank, and who waits for its command."""

    host: str
    pid: int
    folder: str  # below ranks/
    rank: int
    supervisor: str
    since: str  # what `started` says of it
    at_ns: int = 0  # when it began

    @property
    def runs(self) -> bool:
        """Return whether it still runs, on this host."""
        return self.since == str(started(self.pid))


def words_here(run: Path) -> Iterator[Word]:
    """Return what the processes of this host have said, in its folder."""
    return words_in([_host(run)])


def words_in(hosts: Iterable[Path]) -> Iterator[Word]:
    """Return what processes have said in the folders of hosts, the last word of each."""
    for host in hosts:
        known = {}
        for path in host.glob(run_folder.notes_name("*")):
            known.update({(word.pid, word.since): word for word in _words_of(path)})
        yield from known.values()


def hellos(host: Path) -> list[dict[str, Any]]:
    """Return what the interpreters of a job have said when they started, and later, in a host's folder."""
    found: list[dict[str, Any]] = []
    for path in host.glob(run_folder.notes_name("*")):
        for said in _said(path, "hello"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found.append(said | {"pid": int(said["pid"])})
    return found


def _words_of(notes: Path) -> Iterator[Word]:
    """Return what a host's file of notes holds of its ranks, in order."""
    for said in _said(notes, "rank"):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            rank = int(said["folder"].rpartition("/")[2].partition(".")[0])
            of = (int(said["pid"]), str(said["folder"]), rank, str(said["supervisor"]), str(said["since"]))
            yield Word(notes.parent.name, *of, int(said["at_ns"]))


def _said(notes: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Return the notes of a kind in a file, in order; a line that is being written is left out."""
    start = run_folder.begins(kind).encode()
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        lines = notes.read_bytes().splitlines()
    for line in lines:
        if line.startswith(start):
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)


def _host(run: Path) -> Path:
    return run_folder.host_folder(run, os.uname().nodename)


def leave_note(host: Path, kind: str, **said: Any) -> None:
    """Append a line to the notes in a host's folder, which several processes under one kernel write. Raises OSError."""
    with contextlib.closing(Log(host / run_folder.notes_name(boot()))) as log:
        log.write(f"{run_folder.begins(kind)}{json.dumps(said)[1:]}\n")


def _leave_word(run: Path, folder: Path) -> None:
    """Write down which folder this process has.

    To its loaders' workers, which were started before, and to the supervisor, which looks at what the job has left: a
    process's environment may be written over later.
    """
    host = _host(run)
    host.mkdir(parents=True, exist_ok=True)
    leave_note(
        host,
        "rank",
        pid=os.getpid(),
        folder=folder.relative_to(run / "ranks").as_posix(),
        supervisor=str(os.environ.get("DLPROF_SUPERVISOR")),
        since=str(started(os.getpid())),
        at_ns=time.time_ns(),
    )


def _trains(run: Path, folder: Path) -> bool:
    """Return whether the process that has a folder still runs: another one than this.

    One without a file on this host is assumed to run: it has just made the folder, or is on another host.
    """
    word = next((word for word in words_here(run) if run / "ranks" / word.folder == folder), None)
    return word is None or (word.pid != os.getpid() and word.runs)


def folder_of_rank(run: Path) -> Path | None:
    """Return the folder of the rank that this process is a loader's worker of; None: it does not train yet, or is none.

    Workers are started before their rank knows that it trains, and may start in an interpreter of their own.
    """
    word = _word_of_rank(run)
    return run / "ranks" / word.folder if word is not None else None


def age_of_rank(run: Path) -> int:
    """Return for how long that rank has trained, in ns; 0: it does not train yet, or is none."""
    word = _word_of_rank(run)
    return max(time.time_ns() - word.at_ns, 0) if word is not None else 0


def _word_of_rank(run: Path) -> Word | None:
    from multiprocessing.process import parent_process

    rank = parent_process()
    words = [word for word in words_here(run) if rank is not None and word.pid == rank.pid]
    return words[-1] if words else None
