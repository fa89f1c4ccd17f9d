"""How long a rank's training thread stands still in a mean steady step, as the kernel tells it for the whole run.

It does so for what it waits for, and where it is ready and no core is free: others compute then.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Maybe, RankFacts, per_rank, within_rank
from dlprof.analysis.input.loader import in_steady
from dlprof.analysis.timeline.steady import ENOUGH, standard_error
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured


@within_rank
def blocked(usage: pd.DataFrame | None, timing: Maybe[Timing]) -> tuple[float, float] | None:
    """Return the time in which the training thread neither ran nor was ready to, and its standard error, ns a step.

    What it waits for does not show: another rank, its loader, a disk. None where the kernel does not tell, or where it
    says little: a thread that shares its work with others waits for those, one on a GPU for the device, and backends
    other than gloo keep it busy while they wait.
    """
    if usage is None:
        return None
    idle = (usage["dur_ns"] - usage["thread_ns"] - usage["delay_ns"]).clip(lower=0)
    step = timing.get().step_ns
    noise = standard_error((idle / usage["dur_ns"].clip(lower=1)).to_numpy(dtype=float))
    return float(idle.sum() / usage["dur_ns"].sum()) * step, noise * step


@per_rank
def contention(
    usage: pd.DataFrame | None,
    timing: Maybe[Timing],
    loading: Maybe[pd.DataFrame],
    training_fetches: Maybe[pd.DataFrame],
    light_steps: Maybe[pd.DataFrame],
) -> pd.DataFrame:
    """Return one row of what computes in a rank's mean steady step beside its training thread, ns.

    delay_ns: that thread is ready and has no core. others_ns: the CPU time of the process's other threads, which
    exchange, as there is one that computes. loader_ns: that of the training loader's workers.
    Raises NotMeasured where the kernel does not tell, as `blocked` does, or what the workers use was not recorded.
    """
    if usage is None:
        raise NotMeasured("what the ranks' threads use of their cores was not recorded, or does not tell what they do")
    share = usage[["delay_ns", "thread_ns", "cpu_ns"]].sum() / usage["dur_ns"].sum() * timing.get().step_ns
    others = max(float(share["cpu_ns"] - share["thread_ns"]), 0.0)
    return pd.DataFrame(
        {
            "delay_ns": [share["delay_ns"]],
            "others_ns": [others],
            "loader_ns": [_loader_ns(loading.get(), training_fetches, light_steps)],
        }
    )


def _loader_ns(loading: pd.DataFrame, training_fetches: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame]) -> float:
    """Return the CPU time of the training loader's workers in a mean steady step, ns."""
    if not (loading["workers"].astype(str) != "").any():
        return 0.0
    fetches = training_fetches.get()
    mine = fetches[(fetches["worker"] >= 0) & (fetches["cpu_ns"] >= 0)]
    if not len(mine):
        raise NotMeasured("what the loader's workers use of the cores was not recorded")
    steps = light_steps.get()
    asked = float(steps.loc[steps["steady"], "fetches"].clip(lower=0).mean())
    return float(mine["cpu_ns"].sum() / mine["count"].sum()) * asked


@within_rank
def usage(loading: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame], rank: RankFacts) -> pd.DataFrame | None:
    """Return what the kernel counted in the steady steps, where the training thread computes alone; else None."""
    cpu, device = rank.facts.get("cpu") or {}, rank.facts.get("device") or {}
    gloo = "gloo" in str(rank.facts.get("backend") or rank.trace_facts.get("backend"))
    if not gloo or device.get("type") != "cpu" or cpu.get("torch_threads") != 1 or not loading:
        return None
    usage = loading.get()
    usage = usage[(usage["kind"] == "usage") & (usage["thread_ns"] >= 0) & (usage["delay_ns"] >= 0)]
    begin, took = usage["start_ns"].to_numpy(), usage["dur_ns"].to_numpy()
    usage = usage[in_steady(light_steps.get(), begin) & in_steady(light_steps.get(), begin + took - 1)]
    return usage if len(usage) >= ENOUGH else None
