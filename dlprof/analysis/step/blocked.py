"""How long a rank's training thread stands still in a mean steady step, as the kernel counts it for the whole run."""

from __future__ import annotations

import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.input.loader import in_steady, training_fetches
from dlprof.analysis.timeline.steady import ENOUGH, device_type, light_steps, standard_error, steady_steps
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured


@within_rank
def steady_usage(loading: Frame = needs(schema.LOADING), light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return the rows of `loading` of what a rank's process used of its cores within steady steps."""
    usage = loading[(loading["kind"] == "usage") & (loading["delay_ns"] >= 0)]
    begin, took = usage["start_ns"].to_numpy(), usage["dur_ns"].to_numpy()
    return usage[in_steady(light_steps, begin) & in_steady(light_steps, begin + took - 1)]


@within_rank
def alone_usage(steady_usage: Maybe[Frame] = maybe(steady_usage), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the same for a rank on which only the training thread computes; raise NotMeasured for any other.

    On other ranks, standing still may not mean waiting for ranks: the thread waits for its helper threads or for the
    GPU, and backends other than gloo keep it busy while they wait.
    """
    gloo = "gloo" in str(rank.facts.get("backend") or rank.trace_facts.get("backend"))
    alone = device_type(rank) == "cpu" and (rank.facts.get("cpu") or {}).get("torch_threads") == 1
    usage = steady_usage.get() if gloo and alone and steady_usage else None
    usage = None if usage is None else usage[usage["thread_ns"] >= 0]
    if usage is None or len(usage) < ENOUGH:
        raise NotMeasured("what the ranks' threads use of their cores was not recorded, or does not tell what they do")
    return usage


@within_rank
def blocked(
    alone_usage: Maybe[Frame] = maybe(alone_usage), timing: Timing = needs(timing)
) -> tuple[float, float] | None:
    """Return the time in which the training thread neither ran nor was ready to, and its standard error, ns a step.

    That it waits for another rank, its loader, or a disk. None: not known.
    """
    usage = alone_usage.or_none()
    if usage is None:
        return None
    idle = (usage["dur_ns"] - usage["thread_ns"] - usage["delay_ns"]).clip(lower=0)
    noise = standard_error((idle / usage["dur_ns"].clip(lower=1)).to_numpy(dtype=float))
    return float(idle.sum() / usage["dur_ns"].sum()) * timing.step_ns, noise * timing.step_ns


@per_rank
def contention(
    alone_usage: Frame = needs(alone_usage),
    timing: Timing = needs(timing),
    loading: Frame = needs(schema.LOADING),
    training_fetches: Maybe[Frame] = maybe(training_fetches),
    steady_steps: Frame = needs(steady_steps),
) -> pd.DataFrame:
    """Return one row of what else than its training thread computes in a rank's mean steady step, ns.

    delay_ns: that thread is ready and has no core. others_ns: the CPU time of the process's other threads, which
    exchange, as there is one that computes. loader_ns: that of the training loader's workers.
    Raises NotMeasured where the kernel did not count it, or what the workers use was not recorded.
    """
    columns = ["delay_ns", "thread_ns", "cpu_ns"]
    delay, thread, cpu = (alone_usage[columns].sum() / alone_usage["dur_ns"].sum() * timing.step_ns).tolist()
    loader = 0.0
    if (loading["workers"].astype(str) != "").any():
        fetches = training_fetches.get()
        mine = fetches[(fetches["worker"] >= 0) & (fetches["cpu_ns"] >= 0)]
        if not len(mine):
            raise NotMeasured("what the loader's workers use of the cores was not recorded")
        loader = mine["cpu_ns"].sum() / mine["count"].sum() * steady_steps["fetches"].clip(lower=0).mean()
    return pd.DataFrame([{"delay_ns": delay, "others_ns": max(cpu - thread, 0.0), "loader_ns": loader}])
