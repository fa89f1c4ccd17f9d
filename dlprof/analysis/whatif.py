"""A run's step with the changes that a user requests: each alone, and all of them combined.

A rank's own step is replayed (`replays`). If its loader was recorded, its batches are replayed too: with a device twice
as fast, the loader may not keep up. The job is then as fast as its slowest rank. Each answer states what the recording
lacks.

The steps of a rank with a device are replayed with kernels, copies, the host and collectives at the requested speeds.
How much of a collective is waiting for other ranks is known only across ranks, so its length is replayed at several
shares, and values in between are interpolated. A rank without a device has no replay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import transfers
from dlprof.analysis.communication.exchange_plans import Fit, exposed_transfer, fitted
from dlprof.analysis.engine import (
    ALSO,
    JOB,
    Frame,
    Job,
    Maybe,
    Measured,
    MeasureFailed,
    Progress,
    RankData,
    by_rank,
    maybe,
    measure,
    needs,
)
from dlprof.analysis.estimate import error_of
from dlprof.analysis.input.fetch_replay import replayed
from dlprof.analysis.input.input_waits import AllLoopTimes, correction, input_waits, loop_times, trusted
from dlprof.analysis.pipeline.pipeline_plans import Model, pipeline_models
from dlprof.analysis.step.breakdown import breakdown, part, part_noise
from dlprof.analysis.step.savings import own_time, saving, saving_input
from dlprof.analysis.step.throughput import throughput
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.steps import mean_step_ns, step_series
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.run import Run
from dlprof.result.figures import Throughput
from dlprof.result.scale import Answer, Answers

PERFECT = math.inf

_FACTOR = re.compile(r"[x×]?\s*(\d+(?:\.\d+)?)\s*[x×]?")


class Request(Struct, frozen=True):
    """Changes of a run. Factors say how many times as fast something is; None: as it is."""

    input: float | None = None  # making batches; PERFECT: each is ready when it is requested
    workers: int | None = None
    network: float | None = None  # moving bytes between ranks; PERFECT: in no time
    device: float | None = None  # computing: kernels, or on a CPU all operators
    host: float | None = None  # Python, operators and launches on a GPU's host
    copies: float | None = None  # between host and device
    stages: bool = False  # of a pipeline, all alike
    microbatches: int | None = None
    schedule: str | None = None  # of a pipeline

    @property
    def named(self) -> tuple[str, ...]:
        """The changes in words, as in the request."""
        return tuple(_written(name, getattr(self, name)) for name in self.__struct_fields__ if self._sets(name))

    @property
    def singles(self) -> Iterator[Request]:
        """Each change alone."""
        for name in self.__struct_fields__:
            if self._sets(name):
                yield replace(Request(), **{name: getattr(self, name)})

    def without(self, others: Iterable[Request]) -> Request:
        """Return the changes that none of the others makes."""
        none = Request()
        names = {name for one in others for name in one.__struct_fields__ if one._sets(name)}
        return replace(self, **{name: getattr(none, name) for name in names})

    @property
    def of_pipeline(self) -> bool:
        """Whether it changes a pipeline."""
        return self.stages or self.microbatches is not None or self.schedule is not None

    @property
    def of_input(self) -> bool:
        """Whether it changes how batches are made."""
        return self.input is not None or self.workers is not None

    def _sets(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False  # 0 workers are a request


def _written(name: str, value: float | int | str | bool) -> str:
    if name == "stages":
        return "even stages"
    if name in ("workers", "microbatches", "schedule"):
        return f"{name} {value}"
    if value == PERFECT:
        return f"perfect {name}"
    return f"{name} {value:g} × as fast"


def factor(text: str) -> float:
    """Return the factor that "x2", "2x", "1.5" or "perfect" stands for; raise DlprofError for any other text."""
    if text.strip().lower() == "perfect":
        return PERFECT
    m = _FACTOR.fullmatch(text.strip().lower())
    value = float(m[1]) if m else 0.0
    if not 0 < value < 1e6:
        raise DlprofError(f"{text!r} is no speed; write 2x, 1.5x or perfect")
    return value


# The loaders of so many ranks, the slowest, are replayed. The others are assumed to gain the mean of these.
_MOST_RANKS = 32

# What a CPU job's step is made of that is faster with a faster CPU.
_COMPUTED = ("computation", "optimizer_host", "host")


class Known(Struct, frozen=True):
    """What of a run the answers are made from. Its fields are needs: the engine fills them."""

    job: Job = needs(JOB)
    mean_step_ns: float = needs(mean_step_ns)
    own_time: Frame = needs(own_time)
    step_series: Maybe[Frame] = maybe(step_series)
    breakdown: Maybe[Frame] = maybe(breakdown)
    input_waits: Maybe[Frame] = maybe(input_waits)
    loop_times: Maybe[AllLoopTimes] = maybe(loop_times)
    exposed_transfer: Maybe[pd.Series[float]] = maybe(exposed_transfer)
    fitted: Maybe[Fit | None] = maybe(fitted)
    transfers: Maybe[Frame] = maybe(transfers)
    pipeline_models: Maybe[list[Model]] = maybe(pipeline_models)
    throughput: Maybe[Throughput] = maybe(throughput)


def answers(run: Run, request: Request, jobs: int | None = None, progress: Progress | None = None) -> Answers:
    """Return what the changes give on a run; raise NotMeasured where no step of it is known."""
    singles = tuple(request.singles)
    every = (*singles, request) if len(singles) > 1 else singles
    measured = measure(run, [Known], jobs, progress, also=partial(replays, (Request(), *every)))
    return answered(measured, every, len(singles))


def predictions(run: Run, changes: Sequence[Request]) -> list[Answer]:
    """Return what each of several changes gives alone; raise NotMeasured where no step of the run is known."""
    measured = measure(run, [Known], also=partial(replays, (Request(), *changes)))
    return list(answered(measured, changes, len(changes)).alone)


def answered(measured: Measured, every: Sequence[Request], singles: int) -> Answers:
    """Return the answers from what was measured: of `every`, the first so many are single changes."""
    try:
        known = measured.call(Known)
    except MeasureFailed as e:
        raise NotMeasured(f"dlprof failed to measure it: {e}") from None
    try:
        frame = measured.frame(ALSO)
    except NotMeasured:
        frame = pd.DataFrame(columns=["rank", *COLUMNS])
    alone = tuple(_answer(known, one, _Replayed(frame, n)) for n, one in enumerate(every[:singles], 1))
    combined = None
    if len(every) > singles:
        # A change without an answer of its own is left out.
        lacking = [one for one, a in zip(every, alone, strict=False) if a.step_ns is None]
        request = every[singles].without(lacking)
        combined = _answer(known, request, _Replayed(frame, singles + 1)) if request.named else None
    return Answers(known.mean_step_ns, alone, combined, known.throughput.or_none())


class _Replayed(Struct, frozen=True):
    """The replays of all ranks with one change; place 0 of `frame` is the ranks as they are."""

    frame: pd.DataFrame
    place: int

    def ratio(self, rank: int, fetch: float, left: float = 1.0, *, changed: bool = True) -> float | None:
        """Return the step of a rank as a multiple of its step as it is; None where it was not replayed."""
        f, place = self.frame, self.place if changed else 0
        mine = f[(f["rank"] == rank) & (f["change"] == place) & (f["fetch"] == fetch)].sort_values("communication")
        return float(np.interp(left, mine["communication"], mine["ratio"])) if len(mine) else None


def _answer(known: Known, change: Request, replayed: _Replayed) -> Answer:
    try:
        step, unknown = _step(known, change, replayed)
    except NotMeasured as e:
        return Answer(change.named, None, str(e))
    parts = known.breakdown.or_none()
    noise = part_noise(parts, "input_wait") if change.of_input and parts is not None else 0.0
    error = error_of(known.mean_step_ns - step, known.mean_step_ns, noise)
    return Answer(change.named, step, error_ns=error, unknown=tuple(dict.fromkeys(unknown)))


def _step(known: Known, change: Request, replays: _Replayed) -> tuple[float, list[str]]:
    """Return the mean steady step with some changes, and what is not known of it; raise NotMeasured."""
    unknown: list[str] = []
    factor = _of_pipeline(known, change, unknown) if change.of_pipeline else 1.0
    local = replace(change, stages=False, microbatches=None, schedule=None)
    gone: dict[int, float] = {}
    if local.named:
        own = known.own_time.set_index("rank")["own_ns"]
        slowest = own.sort_values(ascending=False).index[:_MOST_RANKS]
        for rank in slowest:
            gone[int(rank)] = _gained(known, local, replays, int(rank), float(own[rank]), unknown)
        like = float(np.mean([gone[r] / max(own[r], 1.0) for r in gone]))
        gone |= {int(r): like * float(own[r]) for r in own.index if r not in gone}
    gain = _settled(known, local, gone) if gone else 0.0
    if change.device is not None and settings.on_cpu(known.job) and len(known.job.ranks) > 1:
        unknown.append("ranks that share a host may share its memory bandwidth, which is no faster")
    return max((known.mean_step_ns - gain) * factor, 0.0), unknown


def _settled(known: Known, change: Request, gone: Mapping[int, float]) -> float:
    """Return how much shorter the job's step is where each rank's own time is shorter by so much; below 0: longer."""
    series = known.step_series.or_none()
    if change == Request(input=PERFECT) and series is not None:
        return saving_input(series, known.own_time, gone)
    if min(gone.values()) >= 0:
        return saving(known.own_time, gone)
    own = known.own_time.set_index("rank")["own_ns"]
    return float(own.max() - max(own[r] - ns for r, ns in gone.items()))


def _gained(known: Known, change: Request, replays: _Replayed, rank: int, own_ns: float, unknown: list[str]) -> float:
    """Return how much shorter a rank's own time is, ns; below 0: longer."""
    cpu = settings.on_cpu(known.job)
    left = _communication_left(known, change, rank, unknown) if change.network is not None and not cpu else 1.0
    now, then = replays.ratio(rank, 0.0, changed=False), replays.ratio(rank, 0.0, left)
    if now is None or then is None:
        if not cpu:
            raise NotMeasured("the traced steps cannot be replayed: the trace lacks launches, or steps")
        return _gained_on_cpu(known, change, rank, own_ns, unknown)
    step = known.mean_step_ns
    if change.input == PERFECT:
        return (1 - then) * step
    lacking = _lacking(known, rank)
    if not lacking:
        return step - _with_loader(known.loop_times.get(), rank, change, then / now if now else 1.0)
    if change.of_input:
        raise NotMeasured(f"the batches of rank {rank} were not recorded: {lacking}")
    if change.device is not None or change.host is not None:
        unknown.append("whether the loader keeps up with faster steps is not known: its batches were not recorded")
    whole = replays.ratio(rank, 1.0, left)
    return (1 - (then if whole is None else whole)) * step


def _gained_on_cpu(known: Known, change: Request, rank: int, own_ns: float, unknown: list[str]) -> float:
    """Return the same for a rank without a device: its parts of the step at the requested speeds."""
    if change.host is not None or change.copies is not None:
        raise NotMeasured("the job trains on the CPU: device is what computes there, and nothing is copied")
    frame = known.breakdown.get()

    def of(*categories: str) -> float:
        return part(frame, *categories).get(rank, 0.0)

    removed = 0.0
    if change.device is not None:
        removed += of(*_COMPUTED) * (1 - 1 / change.device)
    if change.network is not None:
        transfer = float(known.exposed_transfer.get().get(rank, 0.0))
        removed += transfer * (1 - 1 / change.network)
        unknown.append("what of a transfer is starting it, which a faster network leaves, is not known on a CPU")
    waits = known.input_waits.or_none()
    wait = 0.0 if waits is None else by_rank(waits, "wait_ns").get(rank, 0.0)
    if change.input == PERFECT:
        if waits is None:
            raise NotMeasured(known.input_waits.why())
        return removed + wait
    lacking = _lacking(known, rank)
    if not lacking:
        loop = max(own_ns - wait, 1.0)
        return known.mean_step_ns - _with_loader(known.loop_times.get(), rank, change, max(loop - removed, 1.0) / loop)
    if change.of_input:
        raise NotMeasured(f"the batches of rank {rank} were not recorded: {lacking}")
    return removed


def _with_loader(recordings: AllLoopTimes, rank: int, change: Request, own: float) -> float:
    """Return a rank's step if the loop's own work takes `own` times as long and the loader changes as requested."""
    now, pace = trusted(recordings, rank), recordings.of(rank)
    then = replace(pace, own=pace.own * own)
    if change.input is not None:
        then = replace(
            then,
            fetch=then.fetch / change.input,
            fetch_cpu=then.fetch_cpu / change.input,
            collate=then.collate / change.input,
            collate_cpu=then.collate_cpu / change.input,
            others_cpu=then.others_cpu / change.input,
        )
    workers = pace.workers if change.workers is None else change.workers
    return correction(recordings, rank, now)(replayed(then, workers)).step_ns


def _lacking(known: Known, rank: int) -> str:
    """Return why the loader of a rank cannot be replayed; "" where it can."""
    try:
        trusted(known.loop_times.get(), rank)
    except (NotMeasured, MeasureFailed) as e:
        return str(e)
    return ""


def _communication_left(known: Known, change: Request, rank: int, unknown: list[str]) -> float:
    """Return the remaining share of a rank's collectives on a faster network: the waiting in them stays."""
    assert change.network is not None
    exposed_transfer = known.exposed_transfer.get()
    exposed = part(known.breakdown.get(), "communication").get(rank, 0.0)
    moves = min(float(exposed_transfer.get(rank, 0.0)) / exposed, 1.0) if exposed > 0 else 1.0
    fit, transfers = known.fitted.or_none(), known.transfers.or_none()
    if change.network == PERFECT:
        return 1 - moves
    if fit is None or transfers is None:
        unknown.append("what of a collective is starting it, which a faster network leaves, is not known")
    else:
        sized = transfers.loc[transfers["bytes"] > 0, "bytes"]
        moving = float(sized.sum()) * fit.byte_ns
        moves *= moving / max(moving + len(sized) * fit.start_ns, 1.0)
    return 1 - moves * (1 - 1 / change.network)


def _of_pipeline(known: Known, change: Request, unknown: list[str]) -> float:
    """Return the pipeline's step with other settings as a multiple of its present step: the slowest of several."""
    if change.device is not None or change.network is not None:
        unknown.append("a pipeline's gain is taken to be the same share of a step that is faster anyway")
    ratios = []
    for model in known.pipeline_models.get():
        then = model.step_with(schedule=change.schedule, microbatches=change.microbatches, even=change.stages)
        ratios.append(1 - (model.pipe.step_ns - then) * model.pipe.calls_a_step / known.mean_step_ns)
    return max(ratios, default=1.0)


# Shares of the collectives' length that are left.
LEFT = (0.0, 0.5, 1.0)

COLUMNS = ("change", "fetch", "communication", "ratio")


def replays(changes: Sequence[Request], rank: RankData) -> pd.DataFrame:
    """Return the rank's step with each change, as a multiple of its present step.

    Columns: change (its place in `changes`), fetch (1: with the wait for data as it is, 0: without), communication (the
    share of the collectives' length that is left), ratio. No rows where the trace cannot be replayed.
    """

    def ratios(what_if: Maybe[WhatIf] = maybe(what_if), device_work: Maybe[Frame] = maybe(device_work)) -> pd.DataFrame:
        steps = what_if.or_none()
        if steps is None or steps.measured_ns <= 0:
            return pd.DataFrame({c: pd.Series(dtype=float) for c in COLUMNS})
        work = device_work.get().iloc[steps.replay.rows]
        rows = []
        for n, one in enumerate(changes):
            for left in LEFT if one.network is not None else (1.0,):
                durations = _durations(one, work, steps.replay.durations, left)
                share = 1 / one.host if one.host else 1.0
                rows += [
                    (n, fetch, left, steps.left(durations, share, fetch=fetch, python=share)) for fetch in (0.0, 1.0)
                ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    return rank.call(ratios)


def _durations(change: Request, work: pd.DataFrame, now: NDArray[np.int64], left: float) -> NDArray[np.int64]:
    """Return how long each piece of the device's work takes; kernels keep the least that any kernel takes."""
    then = now.astype(float)
    if change.device is not None:
        least = np.minimum(now, device.LEAST_KERNEL_NS)
        then = np.where(host.is_kind(work, "kernel"), least + (now - least) / change.device, then)
    if change.copies is not None:
        then = np.where(host.is_kind(work, "copy"), now / change.copies, then)
    if change.network is not None:
        then = np.where(host.is_kind(work, "communication"), now * left, then)
    durations: NDArray[np.int64] = np.rint(then).astype(np.int64)
    return durations
