"""How long a rank's training thread stands still in a mean steady step, as the kernel tells it for the whole run."""

from __future__ import annotations

from dlprof.engine import RankData
from dlprof.measures.loader import in_steady
from dlprof.measures.steps import ENOUGH, standard_error, timing


def blocked(rank: RankData) -> tuple[float, float] | None:
    """Give the time in which the training thread neither ran nor was ready to, and its standard error, ns a step.

    What it waits for does not show: another rank, its loader, a disk. None where the kernel does not tell, or where it
    says little: a thread that shares its work with others waits for those, one on a GPU for the device, and backends
    other than gloo keep it busy while they wait.
    """
    cpu, device = rank.facts.get("cpu") or {}, rank.facts.get("device") or {}
    gloo = "gloo" in str(rank.facts.get("backend") or rank.trace_facts.get("backend"))
    if not gloo or device.get("type") != "cpu" or cpu.get("torch_threads") != 1 or not rank.has("loading"):
        return None
    usage = rank.table("loading")
    usage = usage[(usage["kind"] == "usage") & (usage["thread_ns"] >= 0) & (usage["delay_ns"] >= 0)]
    begin, took = usage["start_ns"].to_numpy(), usage["dur_ns"].to_numpy()
    usage = usage[in_steady(rank, begin) & in_steady(rank, begin + took - 1)]
    if len(usage) < ENOUGH:
        return None
    idle = (usage["dur_ns"] - usage["thread_ns"] - usage["delay_ns"]).clip(lower=0)
    step = timing(rank).step_ns
    noise = standard_error((idle / usage["dur_ns"].clip(lower=1)).to_numpy(dtype=float))
    return float(idle.sum() / usage["dur_ns"].sum()) * step, noise * step
