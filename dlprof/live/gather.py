"""Gathers what is known of a job right now: its processes with their stacks, its step logs, its disks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dlprof import run_folder
from dlprof.errors import DlprofError, reason
from dlprof.live.follow import Follower, RankNow, of, stands_still
from dlprof.live.look import (
    WORDS,
    Frame,
    Process,
    Thread,
    below,
    disks,
    doing,
    jobs,
    mine,
    role_of,
    texts_of,
    with_stacks,
)
from dlprof.live.standstill import Rank, Seen
from dlprof.plain import plain
from dlprof.record.failures import ASK, FLIGHT, STILL
from dlprof.record.ranks import Word, words_here, words_in
from dlprof.units import ranks_named

_FULL_BYTES = 1_000_000
_TAIL_BYTES = 1 << 20  # of the step logs of this host, for what the last steps were
_ANSWER_S = 1.2  # that a rank takes to answer, which looks twice a second whether it is asked
_MOST_CALLS = 200
_ELSEWHERE_S = 10.0  # that an answer of another host may take: of a network disk, each sees the other's files late
_GOES_ON_S = 5.0
_MOST_ELSEWHERE = 512


def look(job: str, *, here: bool = False) -> Seen:
    """Look at a job, given as a run folder or a process's number; `here`: at none of its ranks on other hosts.

    Those of a recorded job answer by themselves, over the disk that they share. Raises DlprofError.
    """
    processes = mine()
    run, torch = _of_job(int(job), processes) if job.isdecimal() else (_folder(job), [])
    words: dict[int, Word] = {}
    elsewhere: dict[int, Word] = {}
    asked = 0
    if run is not None:
        words = {word.rank: word for word in sorted(words_here(run), key=lambda word: word.folder)}
        elsewhere = {} if here else {n: word for n, word in _elsewhere(run).items() if n not in words}
        asked = _ask(run, [*(word for word in words.values() if word.runs), *elsewhere.values()])
        known = {one.pid for one in torch}
        torch += with_stacks(one for one in _of_run(run, processes) if one.torch and one.pid not in known)
    ranks = ranks_of(torch, {word.pid: word.rank for word in words.values() if word.runs})
    if not ranks and not words and not elsewhere:
        raise DlprofError(f"{job}: no rank of a job that has loaded PyTorch is among its processes here")
    host = os.uname().nodename
    calls: dict[int, list[Call]] = {}
    folders: dict[int, Path] = {}
    if run is not None:
        folders = {n: run / "ranks" / word.folder for n, word in words.items() if word.runs}
        _wait_for(folders.values(), asked, _ANSWER_S)
        ranks = {n: _with_own_stacks(one, folders[n], asked) if n in folders else one for n, one in ranks.items()}
        theirs = {n: run / "ranks" / word.folder for n, word in elsewhere.items()}
        _wait_for(theirs.values(), asked, _ELSEWHERE_S)
        folders |= theirs
        calls = {n: calls_of(folder, asked) for n, folder in folders.items()}
    steps = steps_of(run, here=not elsewhere) if run is not None else {}
    found = []
    for number, process in ranks.items():
        workers = tuple(one for one in torch if one.parent == process.pid and role_of(one) == "worker")
        error = _handled(folders[number], asked) if number in folders else ""
        found.append(Rank(number, host, process, workers, *_step(steps.get(number)), error))
    for number, word in words.items():
        if run is not None and not word.runs and number not in ranks:
            error = _error(run / "ranks" / word.folder)
            found.append(Rank(number, host, None, (), *_step(steps.get(number)), error))
    found += [_far(word, folders[n], asked, steps.get(n)) for n, word in elsewhere.items() if n not in ranks]
    places = {Path("/dev/shm"), Path("/tmp"), *([run] if run else [])}
    for process in ranks.values():
        places.update(process.places)
    free = disks(sorted(places))
    return Seen(
        ranks=tuple(sorted(found, key=lambda rank: rank.number)),
        size=max((process.size or 0 for process in ranks.values()), default=0) or None,
        full=tuple(path for path, left in free if left is not None and left < _FULL_BYTES),
        silent=tuple(path for path, left in free if left is None),
        disagree=tuple(disagreements(calls)),
    )


def _elsewhere(run: Path) -> dict[int, Word]:
    """Return the ranks that have begun to train on other hosts, by number; some hundreds of them at most."""
    here = run_folder.host_folder(run, os.uname().nodename)
    found = words_in(host for host in run_folder.in_hosts(run) if host != here)
    words = sorted(itertools.islice(found, _MOST_ELSEWHERE), key=lambda word: word.folder)
    return {word.rank: word for word in words}


def _far(word: Word, folder: Path, asked: int, now: RankNow | None) -> Rank:
    """Return a rank of another host by what it has answered, or written when it ended."""
    error = _error(folder)
    if error or _has_ended(folder):
        return Rank(word.rank, word.host, None, (), *_step(now), error)
    goes_on = now is not None and now.still_s < _GOES_ON_S
    why = f"it is on {word.host}, and {'goes on' if goes_on else 'has not answered'}"
    process = Process(word.pid, 0, "S", 0.0, 0.0, 0, "", torch=True, rank=word.rank, unseen=why)
    answered = _with_own_stacks(process, folder, asked)
    return Rank(word.rank, word.host, answered, (), *_step(now), _handled(folder, asked))


def _step(now: RankNow | None) -> tuple[int | None, float | None]:
    return (None, None) if now is None else (now.step, now.still_s)


def _folder(job: str) -> Path:
    run = Path(job).absolute()
    if not run.is_dir():
        raise DlprofError(f"{job}: neither a run folder nor a process")
    return run


def _of_run(run: Path, processes: Mapping[int, Process]) -> list[Process]:
    """Return the processes of the ranks that record into a folder, and all that these have started."""
    pids = {word.pid for word in words_here(run) if word.runs}
    roots = [one for one in processes.values() if one.pid in pids or (one.run and Path(one.run) == run)]
    return list({one.pid: one for root in roots for one in below(root.pid, processes)}.values())


def _family_of(pid: int, processes: Mapping[int, Process]) -> list[Process]:
    """Return a process and what it has started. Raises DlprofError where it is none of the user's."""
    if pid not in processes:
        raise DlprofError(f"{pid}: no process of yours on this host")
    return below(pid, processes)


def ranks_below(pids: Sequence[int], processes: Mapping[int, Process]) -> tuple[Sequence[Process], dict[int, Process]]:
    """Return the processes with PyTorch, with stacks, among these and all that they have started, and their ranks.

    Raises DlprofError where there is no rank.
    """
    family = {one.pid: one for pid in pids for one in _family_of(pid, processes)}
    seen = with_stacks(one for one in family.values() if one.torch)
    if not (ranks := ranks_of(seen)):
        raise DlprofError(f"{pids[0]}: no rank of a job that has loaded PyTorch is among its processes")
    return seen, ranks


def _of_job(pid: int, processes: Mapping[int, Process]) -> tuple[Path | None, list[Process]]:
    """Return the run that the job of a process records into, if any, and the job's processes with their stacks.

    The process is any of the job's, or one that has started it.
    """
    near = {one.pid for one in _family_of(pid, processes)}
    seen = {one.pid: one for one in with_stacks(one for one in processes.values() if one.torch)}
    of_job = [job for job in jobs({**processes, **seen}.values()) if any(one.pid in near for one in job)]
    found = [one for job in of_job for one in job]
    run = next((Path(one.run) for one in found if one.run), None)
    return (run if run is not None and run.is_dir() else None), found


def _ask(run: Path, words: Iterable[Word]) -> int:
    """Ask ranks for what only they can say; return when."""
    now = time.time_ns()
    for word in words:
        with contextlib.suppress(OSError):
            (run / "ranks" / word.folder / ASK).touch()
    return now


def _wait_for(folders: Iterable[Path], since_ns: int, seconds: float) -> None:
    """Wait for the answers, as long as a rank that can answer takes; take back what none has."""
    until, open_ = time.monotonic() + seconds, list(folders)
    while open_ and time.monotonic() < until:
        time.sleep(0.1)
        open_ = [folder for folder in open_ if not _is_new(folder / STILL, since_ns)]
    for folder in open_:
        with contextlib.suppress(OSError):
            (folder / ASK).unlink()


def _is_new(path: Path, since_ns: int) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns >= since_ns - 1_000_000_000
    return False


def _with_own_stacks(process: Process, folder: Path, since_ns: int) -> Process:
    """Return a process that py-spy could not see with the stacks that it has written itself."""
    if process.threads or not _is_new(folder / STILL, since_ns):
        return process
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        answer = json.loads((folder / STILL).read_bytes())
        busy = bool(answer.get("busy"))
        threads = tuple(
            Thread(
                str(one["name"]),
                bool(one["main"]),
                busy and bool(one["main"]),
                False,
                tuple(Frame(*frame) for frame in one["frames"]),
            )
            for one in answer["threads"]
        )
        return replace(process, threads=threads, texts=texts_of(threads), unseen="")
    return process


def _error(folder: Path) -> str:
    """Return what a rank ended with, by its facts; "" where that is not known."""
    return _in_words(folder / "facts.json", "error")


def _has_ended(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return bool(json.loads((folder / "facts.json").read_bytes()).get("ended"))
    return False


def _handled(folder: Path, since_ns: int) -> str:
    """Return the error that a rank handles right now; "" for none, or where it has not said so."""
    return _in_words(folder / STILL, "handles") if _is_new(folder / STILL, since_ns) else ""


def _in_words(path: Path, key: str) -> str:
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        error = json.loads(path.read_bytes()).get(key) or {}
        words = ": ".join(plain(error[name], 200) for name in ("type", "text") if error.get(name))
        # The site is written as "function (file:line)".
        line = str(error.get("site") or "").rpartition("/")[2].removesuffix(")")
        return f"{words} ({plain(line, 80)})" if line else words
    return ""


class Call(NamedTuple):
    """A collective in PyTorch's flight recorder: `sequence` counts those of its group, alike on all its ranks."""

    group: str
    sequence: int
    op: str
    sizes: str
    dtype: str
    ended: bool


def calls_of(folder: Path, since_ns: int) -> list[Call]:
    """Return the last collectives of a rank as it has written them since then; none where it has not."""
    path, found = folder / FLIGHT, []
    if not _is_new(path, since_ns):
        return []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        for entry in json.loads(path.read_bytes())["entries"][-_MOST_CALLS:]:
            if entry.get("is_p2p"):
                continue
            name, about = entry["process_group"]
            found.append(
                Call(
                    str(about if about != "undefined" else name),
                    int(entry["collective_seq_id"]),
                    str(entry["profiling_name"]).partition(":")[2],
                    ", ".join("x".join(map(str, size)) or "scalar" for size in entry["input_sizes"]),
                    ", ".join(map(str, entry["input_dtypes"])),
                    bool(entry["retired"] or entry["state"] == "completed"),
                )
            )
    return found


def disagreements(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Say where ranks issued unlike collectives under one number of a group, the first of each group.

    And which ranks have not come to the one that the others wait in. What is given to some operations may differ.
    """
    issued: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, of_rank in calls.items():
        for call in of_rank:
            issued.setdefault((call.group, call.sequence), {})[rank] = call
    told = set()
    for (group, sequence), by_rank in sorted(issued.items(), key=lambda item: item[0][1]):
        if group in told or all(call.ended for call in by_rank.values()):
            continue
        named = "the default group" if group == "default_pg" else f"group {group}"
        kinds: dict[tuple[str, str, str], list[int]] = {}
        for rank, call in by_rank.items():
            alike = call.op in _ALIKE
            kinds.setdefault((call.op, call.sizes if alike else "", call.dtype if alike else ""), []).append(rank)
        if len(kinds) > 1:
            told.add(group)
            parts = [
                f"{ranks_named(ranks)} {'gives' if len(ranks) == 1 else 'give'} {op}"
                + (f" {sizes} {dtype}" if sizes else "")
                for (op, sizes, dtype), ranks in kinds.items()
            ]
            yield f"Collective {sequence} of {named} is not the same on all ranks: {'; '.join(parts)}."


# Collectives to which every rank must give as much as the others.
_ALIKE = frozenset(
    ("all_reduce", "allreduce_coalesced", "broadcast", "reduce", "all_gather", "_allgather_base", "reduce_scatter")
)


def ranks_of(processes: Iterable[Process], numbers: Mapping[int, int] | None = None) -> dict[int, Process]:
    """Return the ranks among processes with stacks, by number: `numbers`' by process, else their launcher's."""
    ranks = [one for one in processes if role_of(one) == "rank"]
    known = {one.pid for one in ranks}
    # A process that a rank has forked and that is no worker of its loader is none.
    ranks = [one for one in ranks if one.parent not in known or one.pid in (numbers or {})]
    found: dict[int, Process] = {}
    for at, one in enumerate(sorted(ranks, key=lambda one: one.pid)):
        number = (numbers or {}).get(one.pid, one.rank)
        found[at if number is None or number in found else number] = one
    return found


def steps_of(run: Path, *, here: bool) -> dict[int, RankNow]:
    """Return the last steps of the ranks, by number, as their step logs have them; `here`: of those on this host."""
    follower = Follower(run, here=here, most=_TAIL_BYTES)
    follower.read()
    return {rank.number: of(rank) for rank in follower.ranks}


@dataclass(frozen=True)
class JobHere:
    """A job of this user's on this host. `pid`: of what has started its ranks, else of its first rank.

    `step_ns`: the mean of the last steps of its slowest rank, if it is recorded. `now`: what it does, in a word or two.
    `cores`: that its processes used just now. `gpu_share`: how busy the GPUs that they compute on were, of the driver's
    last moment, the mean; None: none of its processes computes on one, or the driver does not tell. `slurm`: SLURM's
    numbers of the job and its step, "12.0"; "": it is none of SLURM's.
    """

    pid: int
    command: str
    ranks: int
    workers: int
    age_s: float
    cores: float
    rss_bytes: int
    now: str
    run: str = ""
    step_ns: float | None = None
    gpu_share: float | None = None
    host: str = ""
    slurm: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as it is printed with --format json."""
        return asdict(self)


_MOMENT_S = 0.5  # over which the use of cores is measured


def found_jobs() -> list[JobHere]:
    """Return the training jobs of this user on this host."""
    before, began_s = mine(), time.monotonic()
    time.sleep(_MOMENT_S)
    processes, passed_s = mine(), time.monotonic() - began_s
    seen = {one.pid: one for one in with_stacks(one for one in processes.values() if one.torch)}
    gpus = busy_gpus() if any(one.gpu for one in seen.values()) else {}
    found = []
    for members in jobs({**processes, **seen}.values()):
        ranks = ranks_of(members)
        first, run = members[0], next((one.run for one in members if one.run), "")
        used_s = sum(one.cpu_s - before[one.pid].cpu_s for one in members if one.pid in before)
        steps = steps_of(Path(run), here=True).values() if run else ()
        step_s = max((one.step_s for one in steps), default=None)
        still = step_s and stands_still(min(one.still_s for one in steps), step_s)
        now = word_of(ranks.values())
        found.append(
            JobHere(
                pid=first.pid,
                command=next(iter(ranks.values())).command,
                ranks=len(ranks),
                workers=sum(role_of(one) == "worker" for one in members),
                age_s=first.age_s,
                cores=used_s / passed_s,
                rss_bytes=sum(one.rss_bytes for one in members),
                now=f"stands still: dlprof hang {first.pid}" if still else now,
                run=run,
                step_ns=step_s and step_s * 1e9,
                gpu_share=of_job(gpus, [one.pid for one in members]),
                host=os.uname().nodename,
                slurm=next((one.job for one in members if one.job), ""),
            )
        )
    return found


_SRUN_S = 60.0  # that a step of SLURM's may take to begin and to look


def jobs_of_slurm(number: str) -> list[JobHere]:
    """Return the training jobs of a job of SLURM's, on all of its nodes, by a step beside its own (srun --overlap).

    Raises DlprofError where SLURM does not start such a step.
    """
    words = ["srun", f"--jobid={number}", "--overlap", "--ntasks-per-node=1", "--quiet"]
    words += [sys.executable, "-m", "dlprof.cli", "ps", "--format", "json"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SRUN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise DlprofError(f"srun: {reason(e) if isinstance(e, OSError) else f'no answer in {_SRUN_S:.0f} s'}") from None
    found: dict[tuple[str, int], JobHere] = {}
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # whatever else is printed on the nodes
            rows = [JobHere(**row) for row in json.loads(line)]
            # Several nodes may be one machine.
            found |= {(row.host, row.pid): row for row in rows if row.slurm.partition(".")[0] == number}
    if done.returncode and not found:
        said = done.stderr.strip().splitlines()
        raise DlprofError(f"srun --jobid={number}: {plain(said[-1], 300) if said else f'exit code {done.returncode}'}")
    return list(found.values())


# What one process computes on, by the device's number, and how busy that is.
Busy = Mapping[int, Mapping[int, float]]


def busy_gpus() -> Busy:
    """Return how busy the NVIDIA GPUs are that each process computes on; {} where the driver does not tell."""
    found: dict[int, dict[int, float]] = {}
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no driver, or one of another kind
        return found
    with contextlib.suppress(pynvml.NVMLError):
        for number in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # a GPU of somebody else's, or one that is lost
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                share = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found.setdefault(int(process.pid), {})[number] = share
    return found


def of_job(gpus: Busy, pids: Iterable[int]) -> float | None:
    """Return how busy the GPUs are that processes compute on, the mean, each GPU once; None: they compute on none."""
    shares = {number: share for pid in pids for number, share in gpus.get(pid, {}).items()}
    return sum(shares.values()) / len(shares) if shares else None


def word_of(ranks: Iterable[Process]) -> str:
    """Return what most of the ranks of a job do."""
    many = list(ranks)
    if any(one.state in ("T", "t") for one in many):
        return "stopped"
    return Counter(WORDS[doing(one).what].short for one in many).most_common(1)[0][0]
