"""Why a job stands still: which ranks wait, for whom, and what those do that the others wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dlprof.live.look import WORDS, Doing, Process, doing, fetches
from dlprof.units import count, ranks_named

_STATES = {
    "T": "is stopped (SIGSTOP, or a debugger)",
    "t": "is held by a debugger",
    "D": "is inside the kernel and cannot be interrupted: a disk, a network file system or a driver does not answer",
}


@dataclass(frozen=True)
class Rank:
    """A rank as it was seen. `process` is None where it is gone.

    `error`: what it ended with, or handles right now, in words; "": that is not known, or there is none.
    """

    number: int
    host: str
    process: Process | None
    workers: tuple[Process, ...] = ()
    step: int | None = None  # the last one that it ended
    still_s: float | None = None  # since then
    error: str = ""


@dataclass(frozen=True)
class Seen:
    """All that was seen of a job at one moment.

    `size`: how many ranks it has; None: unknown. `full`: paths on full disks; `silent`: those whose disks do not
    answer. `disagree`: in words, how the ranks' collectives differ, by PyTorch's flight recorder.
    """

    ranks: tuple[Rank, ...]
    size: int | None = None
    full: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    disagree: tuple[str, ...] = ()


@dataclass(frozen=True)
class Standstill:
    """Why a job stands still, in sentences: `why`, the first, and what else was seen. `blamed`: the ranks it names.

    `at_work`: these do what may take long, such as saving or compiling: the job may well go on. `waiting`: the ranks
    that wait for others.
    """

    why: str
    more: tuple[str, ...] = ()
    blamed: tuple[int, ...] = ()
    where: Mapping[int, str] = field(default_factory=dict)  # what each rank does
    at_work: bool = False
    waiting: tuple[int, ...] = ()


_LONG = ("checkpoint", "compile", "window", "starting")


def standstill(seen: Seen) -> Standstill:
    """Return why the job stands still, as far as one look shows it."""
    found = _judged(seen)
    ranks = {rank.number: rank for rank in seen.ranks}
    states = {n: doing(rank.process) for n, rank in ranks.items() if rank.process is not None}
    alive = [n for n in states if not ranks[n].error]
    does = [states[n].what for n in found.blamed or alive if n in alive]
    waiting = tuple(n for n, one in states.items() if _waits(one, ranks[n], len(ranks)))
    return replace(found, at_work=bool(does) and all(what in _LONG for what in does), waiting=waiting)


def _judged(seen: Seen) -> Standstill:
    ranks = {rank.number: rank for rank in seen.ranks}
    does = {n: doing(rank.process) for n, rank in ranks.items() if rank.process is not None}
    where = {n: _does(rank, does.get(n)) for n, rank in ranks.items()}
    waiting = {n: one for n, one in does.items() if _waits(one, ranks[n], len(ranks))}
    missing = [n for n in range(seen.size or 0) if n not in ranks]
    held = [n for n, rank in ranks.items() if _held(rank)]
    others = [n for n in ranks if n not in waiting and n not in held]
    blamed = held or others
    more = [*_machine(seen), *seen.disagree]
    if blamed and (waiting or len(ranks) == 1 or held):
        waits = [n for n in waiting if n not in blamed]
        why = f"{_waiting(waits, waiting)}{_joined(blamed, ranks, does, which=bool(waits))}."
        return Standstill(why, tuple(more), tuple(blamed), where)
    groups = _groups(waiting)
    if len(groups) > 1:
        parts = [f"{_are(numbers)} in {_named(waiting[numbers[0]])}" for numbers in groups.values()]
        behind = _behind(ranks)
        why = f"The ranks disagree: {'; '.join(parts)}.{behind}"
        fewest = min(groups.values(), key=len)
        return Standstill(why, tuple(more), tuple(fewest), where)
    if waiting and missing:
        who = ranks_named(missing)
        why = f"{_waiting(list(waiting), waiting)}{who}, of which no process is on this host (elsewhere, or ended)."
        return Standstill(why, tuple(more), (), where)
    if waiting:
        one = waiting[min(waiting)]
        what = f"All {len(waiting)} ranks that were seen are in {_named(one)}"
        if seen.disagree:
            why = f"{what}, and do not agree. {seen.disagree[0]}"
            return Standstill(why, (*_machine(seen), *seen.disagree[1:]), (), where)
        why = f"{what}: none is missing, so look at the network between them, and at their devices.{_behind(ranks)}"
        return Standstill(why, tuple(more), (), where)
    if not ranks:
        return Standstill("No rank of the job was found here.", tuple(more))
    groups = _groups(does)
    parts = [
        f"{ranks_named(numbers)} {_does(ranks[numbers[0]], does[numbers[0]], many=len(numbers) > 1)}"
        for numbers in groups.values()
    ]
    return Standstill(f"{_upper('; '.join(parts))}.", tuple(more), (), where)


def _waits(one: Doing, rank: Rank, many: int) -> bool:
    """Return whether a rank waits for others: in a collective, for them to join, or idle in a backward pass."""
    if many == 1 and (rank.process is None or (rank.process.size or 1) == 1):
        return False
    return one.what in ("collective", "wait", "joining") or (one.what == "backward" and one.idle)


def _held(rank: Rank) -> bool:
    """Return whether a rank cannot go on as the others do: it is gone or stopped, or a worker of its, or it failed."""
    process = rank.process
    return process is None or process.state in _STATES or bool(rank.error or _of_workers(rank))


def _of_workers(rank: Rank) -> str:
    """Say what is wrong with the loader workers that a rank waits for; "" for nothing."""
    process = rank.process
    if process is None:
        return ""
    dead = [(pid, status & 0x7F, status >> 8) for pid, status in process.dead]
    if dead and doing(process).what == "loader":
        pid, signal, code = dead[0]
        how = f"was killed by signal {signal}" if signal else f"ended with exit code {code}"
        return f"its loader worker (process {pid}) {how}"
    for worker in rank.workers:
        if worker.state in _STATES and doing(process).what == "loader":
            return f"its loader worker (process {worker.pid}) {_STATES[worker.state]}"
    return ""


def _does(rank: Rank, one: Doing | None, *, many: bool = False) -> str:
    """Say what a rank does that others wait for: "is in DataLoader.__next__ (train.py:80): its worker …"."""
    process = rank.process
    if process is None or one is None:
        return f"{'have' if many else 'has'} ended{f' ({rank.error})' if rank.error else ''}"
    text = WORDS[one.what].sentence.format(name=one.name)
    if many:
        text = _plural(text)
    at = f" ({one.at}{': ' + one.text if one.text else ''})" if one.at else ""
    if process.state in _STATES:
        state = _plural(_STATES[process.state]) if many else _STATES[process.state]
        return f"{state}{f' at {one.at}' if one.at else ''}"
    if one.what == "unknown":
        return f"{text}: {process.unseen}"
    if rank.error:
        return f"{'handle' if many else 'handles'} {rank.error}, and {text}{at}"
    if wrong := _of_workers(rank):
        return f"{text}{at}: {wrong}"
    if one.what == "loader" and rank.workers:
        busy = [doing(worker) for worker in rank.workers if fetches(worker)]
        if busy:
            places = Counter(_worker_at(worker) for worker in busy).most_common(1)[0][0]
            are = "is" if len(busy) == 1 else "are"
            return f"{text}{at}: {count(len(busy), 'worker')} of {len(rank.workers)} {are} in {places}"
        return f"{text}{at}: its {count(len(rank.workers), 'worker')} wait for a task"
    if one.what == "code":
        return f"{text}{at}, and {'is idle: it waits for something outside of Python' if one.idle else 'is busy'}"
    return f"{text}{at}{one.holder}"


def _worker_at(one: Doing) -> str:
    if not one.at:
        return "the data set's code"
    return f"{one.at}{': ' + one.text if one.text else ''}{one.holder or (', idle' if one.idle else '')}"


_PLURALS = {"is": "are", "has": "have"}


def _plural(text: str) -> str:
    """Return what one does as what many do."""
    verb, space, rest = text.partition(" ")
    return f"{_PLURALS.get(verb, verb.removesuffix('s'))}{space}{rest}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _named(one: Doing) -> str:
    """Name the collective that ranks wait in, with the line: "all_reduce (train.py:88)"."""
    name = (
        one.name
        if one.what in ("collective", "joining")
        else "the backward pass"
        if one.what == "backward"
        else f".{one.name}()"
    )
    at = f" ({one.at})" if one.at else ""
    return f"{name}{at}"


def _groups(does: Mapping[int, Doing]) -> dict[tuple[object, ...], list[int]]:
    """Return the ranks that are in one place together, the largest groups first."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, one in sorted(does.items()):
        found[one.what, one.name, one.file, one.line].append(number)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[1])))


def _are(numbers: Sequence[int]) -> str:
    return f"{ranks_named(numbers)} {'is' if len(numbers) == 1 else 'are'}"


def _waiting(numbers: Sequence[int], does: Mapping[int, Doing]) -> str:
    """Begin the sentence with those that wait: "Ranks 0, 1 and 3 wait in all_reduce (train.py:88) for "."""
    if not numbers:
        return ""
    first, *rest = _groups({n: does[n] for n in numbers}).values()
    text = _upper(ranks_named(first))
    waits = "waits" if len(first) == 1 else "wait"
    others = f" ({'; '.join(f'{ranks_named(some)} in {_named(does[some[0]])}' for some in rest)})" if rest else ""
    return f"{text} {waits} in {_named(does[first[0]])}{others} for "


def _joined(blamed: Sequence[int], ranks: Mapping[int, Rank], does: Mapping[int, Doing], *, which: bool) -> str:
    """Name those that others wait for and say what they do: "rank 2, which is …"; without `which` as a sentence."""
    texts: dict[str, list[int]] = defaultdict(list)
    hosts = len({rank.host for rank in ranks.values()})
    for number in sorted(blamed):
        texts[_does(ranks[number], does.get(number))].append(number)
    parts = []
    for text, numbers in list(texts.items())[:4]:
        many = len(numbers) > 1
        said = _does(ranks[numbers[0]], does.get(numbers[0]), many=many) if many else text
        # A text may name the host itself.
        on = "" if hosts == 1 or " it is on " in said else _on(ranks[n].host for n in numbers)
        parts.append(f"{ranks_named(numbers)}{on}{', which' * which} {said}")
    left = len(texts) - len(parts)
    text = ("; and for " if which else "; ").join(parts) + (f"; and {left} more" if left > 0 else "")
    return text if which else _upper(text)


def _on(hosts: Iterable[str]) -> str:
    names = list(dict.fromkeys(hosts))
    return f" on {', '.join(names[:3])}{', …' * (len(names) > 3)}"


def _behind(ranks: Mapping[int, Rank]) -> str:
    """Say who has made fewer steps than the others; "" where all have made as many, or that is not known."""
    steps = {n: rank.step for n, rank in ranks.items() if rank.step is not None}
    if len(set(steps.values())) < 2:
        return ""
    most = max(steps.values())
    late = [n for n, step in steps.items() if step < most]
    have = "has" if len(late) == 1 else "have"
    first = ranks_named(n for n, step in steps.items() if step == most)
    return f" {_upper(ranks_named(late))} {have} ended step {min(steps.values()):,}, {first} step {most:,}."


def _machine(seen: Seen) -> Iterable[str]:
    for path in seen.full:
        yield f"The disk of {path} is full."
    for path in seen.silent:
        yield f"The disk of {path} does not answer."
