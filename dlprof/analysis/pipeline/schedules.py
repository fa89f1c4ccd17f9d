"""What each rank of a pipeline does and in which order, by the name of its schedule; and how long such an order takes.

The grids follow the papers of the schedules, as torch.distributed.pipelining runs them. Their replay needs only how
long each action takes: every rank does its own in their order, each as soon as what it needs is there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan

from msgspec import Struct

# A stage's work on one micro-batch: stage, what (forward; backward, or its halves input and weight), micro-batch.
Action = tuple[int, str, int]
ACTIONS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}  # by their initials in torch's names of ranges

GPIPE = "ScheduleGPipe"
ONE_F_ONE_B = "Schedule1F1B"
INTERLEAVED = "ScheduleInterleaved1F1B"
LOOPED_BFS = "ScheduleLoopedBFS"
INTERLEAVED_ZERO_BUBBLE = "ScheduleInterleavedZeroBubble"
ZBV = "ScheduleZBVZeroBubble"
DUAL_PIPE_V = "ScheduleDualPipeV"

SINGLE = (GPIPE, ONE_F_ONE_B)  # one stage a rank
LOOPED = (INTERLEAVED, LOOPED_BFS, INTERLEAVED_ZERO_BUBBLE)  # of p ranks, rank r has the stages r, r + p, ...
V_SHAPED = (ZBV, DUAL_PIPE_V)  # rank r has the stages r and 2p − 1 − r
FAMILIES = (SINGLE, LOOPED, V_SHAPED)  # which take the same stages
SCHEDULES = (*SINGLE, *LOOPED, *V_SHAPED)

# The backward pass is in two halves, and the one for the weights may wait.
SPLIT = (INTERLEAVED_ZERO_BUBBLE, ZBV, DUAL_PIPE_V)

# Schedules that fill and drain once a step: (p − 1) of v·m + p − 1 slots are idle on each of p ranks, with v chunks a
# rank and m micro-batches (Huang et al., GPipe, 2019; Narayanan et al., Megatron-LM, 2021). What is published of those
# that split the backward holds only where forward, input and weight pass take the same time: their grid is replayed.
_FILL_AND_DRAIN = (GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS)


class Grid(Struct, frozen=True):
    """The actions of each rank, in order. A `held` action hands its result on only after the next action."""

    rows: tuple[tuple[Action, ...], ...]
    held: frozenset[Action] = frozenset()


def short(schedule: str) -> str:
    """Return a schedule's name as papers have it: 1F1B."""
    return schedule.removeprefix("Schedule")


def closed_form(schedule: str, ranks: int, microbatches: int, chunks: int) -> float:
    """Return the bubble of a schedule with stages alike and free hand-over; NaN: there is no such formula.

    It holds where the micro-batches are a multiple of the ranks.
    """
    return (ranks - 1) / (chunks * microbatches + ranks - 1) if schedule in _FILL_AND_DRAIN else nan


def runs(schedule: str, ranks: int, microbatches: int, chunks: int) -> bool:
    """Return whether torch takes so many micro-batches, `chunks` stages a rank, for a schedule that is known here."""
    if schedule not in SCHEDULES or min(ranks, microbatches, chunks) < 1:
        return False
    if schedule in SINGLE:
        return chunks == 1 and (schedule == GPIPE or microbatches >= ranks)
    if schedule in V_SHAPED:
        return chunks == 2 and (schedule == ZBV or microbatches >= 2 * ranks)
    rounds = max(1, microbatches // ranks)
    return chunks >= 2 and (schedule == LOOPED_BFS or microbatches % rounds == 0)


def grid(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> Grid:
    """Return what each rank does; for what `runs` refuses, ValueError."""
    if not runs(schedule, ranks, microbatches, chunks):
        raise ValueError(f"{schedule} with {microbatches} micro-batches on {ranks} ranks of {chunks} stages")
    if schedule in V_SHAPED:
        make = _zbv if schedule == ZBV else _dual_pipe_v
        built = [_numbered(r, ranks, microbatches, make(r, ranks, microbatches)) for r in range(ranks)]
        return Grid(tuple(row for row, _ in built), frozenset(a for _, held in built for a in held))
    if schedule in (GPIPE, LOOPED_BFS):
        return Grid(tuple(_breadth_first(schedule, r, ranks, microbatches, chunks) for r in range(ranks)))
    return Grid(tuple(_one_by_one(schedule, r, ranks, microbatches, chunks) for r in range(ranks)))


def _breadth_first(schedule: str, rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    """All micro-batches through a stage, then through the rank's next; back in the reverse order of stages."""
    stages = range(rank, ranks * chunks, ranks)
    # Huang et al., GPipe, 2019, as torch has it: the first micro-batch comes back first. Lamy-Poirier, Breadth-First
    # Pipeline Parallelism, 2022: the last one does.
    back = range(microbatches) if schedule == GPIPE else range(microbatches)[::-1]
    forward = [(s, "forward", m) for s in stages for m in range(microbatches)]
    return (*forward, *((s, "backward", m) for s in reversed(stages) for m in back))


def _one_by_one(schedule: str, rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    """One forward, one backward, after as many forwards as it takes until the first gradients are back.

    Narayanan et al., Megatron-LM, 2021; with the backward in halves, Qi et al., Zero Bubble Pipeline Parallelism, 2023.
    """
    size = microbatches // max(1, microbatches // ranks)  # of a round: so many go through a stage before the next one
    away = ranks - 1 - rank
    total = chunks * microbatches
    order = [divmod(k, size * chunks) for k in range(total)]  # which round, and which place in it
    forward = [(rank + ranks * (at // size), "forward", turn * size + at % size) for turn, at in order]
    back = [(rank + ranks * (chunks - 1 - at // size), turn * size + at % size) for turn, at in order]
    # The first gradients come twice as late for a rank further from the end; half as many forwards are enough where
    # the weights' half of the backward fills the gap.
    halves = schedule in SPLIT
    ahead = away if schedule == ONE_F_ONE_B else (chunks - 1) * size + away * (1 if halves else 2)
    weights = [(stage, "weight", which) for stage, which in back if halves]
    row: list[Action] = forward[:ahead]
    for k, (stage, which) in enumerate(back):
        row += forward[ahead + k : ahead + k + 1]
        row.append((stage, "input" if halves else "backward", which))
        # Rank r puts off the weights of its first r micro-batches.
        row += weights[k - rank : k - rank + 1] if k >= rank else []
    return (*row, *weights[max(0, total - rank) :])


# In the grids of the V-shaped schedules, a word is an action of the rank's stage 0 or 1: F forward, B backward, I and W
# its halves. "W" alone is the weights' half that has waited longest, "+" what is done as one with what follows.


def _zbv(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6; extra micro-batches are left out afterwards."""
    count = max(microbatches, 2 * ranks - 1)
    away = ranks - rank
    words = ["F0"] * (2 * away - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * away
    for k in range(count - ranks):
        words += ["F0"] * (k < count - 2 * ranks + 1 + rank) + ["I0", "W0", "F1", "I1", "W1"]
    words += ["I0", "I1"] * rank + ["I0", "W0"] * away
    return words + ["W1"] * rank + ["W0"] * rank


def _dual_pipe_v(rank: int, ranks: int, microbatches: int) -> list[str]:
    """DeepSeek-AI, DualPipe, 2024, cut in half: a forward and a backward are done as one in the steady part."""
    away = ranks - 1 - rank
    words = ["F0"] * (2 * away) + ["F0", "F1"] * (rank + 1) + ["I1", "W", "F1"] * away
    steady = ["F0+", "B1", "F1+", "B0"] * (microbatches - 2 * ranks + rank + 1)
    if away == 0 and steady:
        steady[0] = "F0"
    words += steady + ["B1", "F1+", "B0"] * away
    # Half way down, the backward passes are split, and what is put off fills the end.
    half = rank + 1
    words += (["B1", "B0"] * half)[:half] + (["I1", "I0"] * half)[half:]
    return words + ["W", "I0"] * away + ["W"] * half


def _numbered(rank: int, ranks: int, microbatches: int, words: Iterable[str]) -> tuple[tuple[Action, ...], set[Action]]:
    """Return the words as actions, each of its kind's next micro-batch, and which of them are held."""
    stages = (rank, 2 * ranks - 1 - rank)
    count: Counter[str] = Counter()
    put_off: deque[Action] = deque()
    row: list[Action] = []
    held = set()
    for word in words:
        if word == "W":
            row += [put_off.popleft()] if put_off else []
            continue
        kind, stage = word[0], stages[int(word[1])]
        counted = word[:2].replace("I", "B")  # whole or half, it is the next to go back
        which = count[counted]
        count[counted] += 1
        if which < microbatches:
            row.append((stage, ACTIONS[kind], which))
            put_off += [(stage, "weight", which)] * (kind == "I")
            held |= {row[-1]} if word.endswith("+") else set()
    return tuple(row), held


# The direction of an action's result: to the next stage, or back to the one before.
_WAY = {"forward": 1, "backward": -1, "input": -1}


def replay(
    rows: Sequence[Sequence[Action]],
    took: Mapping[Action, float],
    held: frozenset[Action] = frozenset(),
    launch: float = 0.0,
    hand_over: float = 0.0,
) -> float:
    """Return the length of a step: the longest time of any rank from its first action's begin to its last one's end.

    Each action takes as long as `took` says, after `launch`; what comes from another rank arrives `hand_over` later.
    The weights' half and a reduction wait for nothing but their turn. Steps may overlap, as in a job they do: a rank
    that is through begins the next. NaN where ranks wait for each other for good.
    """
    home = {stage: rank for rank, row in enumerate(rows) for stage, _, _ in row}
    ready: dict[tuple[int, int, int], float] = {}  # when a stage has passed a micro-batch on, or its gradients back
    lasted: list[float] = []

    def work(rank: int, row: Sequence[Action]) -> Iterator[None]:
        """Do a rank's actions in their order; yield where what the next one needs is not there yet."""
        began = now = 0.0
        for k, (stage, what, which) in enumerate(row):
            way = _WAY.get(what, 0)
            source = home.get(stage - way)
            if way and source is not None:
                while (there := ready.get((stage - way, way, which))) is None:
                    yield
                now = max(now, there if source == rank else there + hand_over)
            began = began if k else now
            now += launch + took[row[k]]
            if row[k] not in held:
                ready[stage, way, which] = now
            if k and row[k - 1] in held:
                stage, what, which = row[k - 1]
                ready[stage, _WAY[what], which] = now
        lasted.append(now - began)

    waiting, known = [work(rank, row) for rank, row in enumerate(rows)], -1
    while waiting and len(ready) > known:
        known = len(ready)
        waiting = [rank for rank in waiting if next(rank, True) is None]
    return nan if waiting else max(lasted, default=0.0)
