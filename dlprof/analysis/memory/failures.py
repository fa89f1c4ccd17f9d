"""Ranks that ran out of memory, and how it is known: from a snapshot, from the error that ended the rank, or from the
kernel that killed it.

Which changes would have avoided running out of memory, predicted from the memory counted in an earlier step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isnan, nan
from typing import Any

import pandas as pd

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.memory.snapshot import memory_state, shortened
from dlprof.analysis.timeline.steady import light_steps
from dlprof.result import Change
from dlprof.units import digits, size

SNAPSHOT, ERROR, KERNEL, KILLED = "snapshot", "error", "kernel", "killed"

# A process that was killed with this share of memory in use is assumed to have run out of it if no other cause is
# known: readings are seconds apart.
_NEARLY_ALL = 0.9

# What torch.OutOfMemoryError says (c10/cuda/CUDACachingAllocator.cpp), in units of 1024.
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_SAID = {
    "requested_bytes": re.compile(rf"Tried to allocate {_SIZE}"),
    "total_bytes": re.compile(rf"total capacity of {_SIZE}"),
    "device_free_bytes": re.compile(rf"of which {_SIZE} is free"),
    "allocated_bytes": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "free_bytes": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
_ON_HOST = re.compile(r"you tried to allocate (\d+) bytes")

COLUMNS = (
    "rank", "device", "how", "requested_bytes", "allocated_bytes", "reserved_bytes", "free_bytes", "device_free_bytes",
    "total_bytes", "ooms", "site", "step", "text",
)  # fmt: skip


@per_rank
def last_memory(
    memory: Maybe[Frame] = maybe(schema.MEMORY),
    samples: Maybe[Frame] = maybe(schema.SAMPLES),
    light_steps: Maybe[Frame] = maybe(light_steps),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the last readings of a rank's memory, one row; NaN: not read.

    Columns: step (the last one; −1: none), allocated_bytes and reserved_bytes (of PyTorch's allocator), process_bytes
    (of the process and its children), available_bytes (on the host, where this rank read it), limit_bytes (of its
    container, else of the host).
    """
    steps, read = light_steps.or_none(), samples.or_none()
    row: dict[str, float] = {"step": -1 if steps is None or not len(steps) else int(steps["step"].iloc[-1])}
    row |= dict.fromkeys(("allocated_bytes", "reserved_bytes"), nan)
    if memory:
        last = memory.get().iloc[-1]
        row |= {name: float(last[name]) for name in ("allocated_bytes", "reserved_bytes")}

    def latest(source: str, metric: str) -> float:
        mine: Any = [] if read is None else read.loc[(read["source"] == source) & (read["metric"] == metric), "value"]
        return float(mine.iloc[-1]) if len(mine) else nan

    available, used = latest("host", "memory_available_bytes"), latest("host", "memory_used_bytes")
    children = latest("processes", "children_rss_bytes")
    device = rank.facts.get("device") or {}
    whole = available + used
    if isnan(whole) and device.get("type") == "cpu":
        whole = float(device.get("memory_bytes") or nan)
    limit = (rank.facts.get("cpu") or {}).get("memory_limit_bytes")
    row |= {
        "process_bytes": latest("processes", "rss_bytes") + (0.0 if isnan(children) else children),
        "available_bytes": available,
        "limit_bytes": whole if limit is None else min(float(limit), whole) if not isnan(whole) else float(limit),
    }
    return pd.DataFrame([row])


@across_ranks
def memory_failures(
    memory_state: Maybe[Frame] = maybe(memory_state),
    last_memory: Maybe[Frame] = maybe(last_memory),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Return a row for each device of a rank that ran out of memory; no row where nothing shows that.

    Columns: rank, device ("0" for a GPU, "host"), how it is known (SNAPSHOT: from the allocator's events; ERROR: from
    the error that ended the process; KERNEL: from the kernel's count of out-of-memory kills; KILLED: the process was
    killed with nearly all memory in use), requested_bytes, allocated_bytes, reserved_bytes, free_bytes (reserved and
    not allocated), device_free_bytes, total_bytes, ooms, site, step, text. NaN and "": not known; step −1.
    """
    rows: list[dict[str, Any]] = []
    last = last_memory.or_none()
    read = {} if last is None else {int(row["rank"]): row for row in last.to_dict("records")}
    state = memory_state.or_none()
    if state is not None:
        for row in state[state["moment"] == "oom"].to_dict("records"):
            step = read.get(int(row["rank"]), {}).get("step", -1)
            total = (job.facts[int(row["rank"])].get("device") or {}).get("memory_bytes") or nan
            known = {"device": str(row["device"]), "how": SNAPSHOT, "step": step, "total_bytes": total, "text": ""}
            rows.append({**{str(k): v for k, v in row.items()}, **known})
    there = {int(row["rank"]) for row in rows}
    rows += [row for row in _of_errors(job, read) if row["rank"] not in there]
    rows = rows or list(_of_kills(job, read))
    unknown = dict.fromkeys(COLUMNS, nan) | {"ooms": 1, "site": "", "step": -1, "text": ""}
    return pd.DataFrame([unknown | row for row in rows], columns=list(COLUMNS))


def _of_errors(job: Job, read: dict[int, dict[Any, Any]]) -> Iterator[dict[str, Any]]:
    for rank in job.ranks:
        failure = job.facts[rank].get("failure") or {}
        text, device = str(failure.get("text") or ""), job.facts[rank].get("device") or {}
        if not failure:
            continue
        on_gpu = failure.get("type") == "OutOfMemoryError"
        sizes = {name: _size(pattern.search(text)) for name, pattern in _SAID.items()}
        found, last = _ON_HOST.search(text), read.get(rank, {})
        if not on_gpu:
            sizes["requested_bytes"] = float(found[1]) if found else nan
            sizes |= {"allocated_bytes": last.get("process_bytes", nan), "total_bytes": last.get("limit_bytes", nan)}
        elif isnan(sizes["allocated_bytes"]):
            sizes["allocated_bytes"] = last.get("allocated_bytes", nan)
        site = str(failure.get("site") or "")
        yield {
            "rank": rank,
            "device": str(device.get("index", 0)) if on_gpu else "host",
            "how": ERROR,
            **sizes,
            "reserved_bytes": sizes["allocated_bytes"] + sizes["free_bytes"],
            "site": shortened([site])[site] if site else "",
            "step": last.get("step", -1),
            "text": text,
        }


def _of_kills(job: Job, read: dict[int, dict[Any, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the ranks that were killed, if the host ran out of memory."""
    code, signal = job.run.exit.get("code"), job.run.exit.get("signal")
    if not job.run.recorded or (code == 0 and not signal):
        return
    for rank in job.ranks:
        last = read.get(rank)
        if last is None or job.facts[rank].get("ended"):
            continue  # it wrote that it ended: it was not killed
        used, limit = last["process_bytes"], last["limit_bytes"]
        on_host = sum(r["process_bytes"] for q, r in read.items() if settings.host(job, q) == settings.host(job, rank))
        near = on_host >= _NEARLY_ALL * limit or last["available_bytes"] <= (1 - _NEARLY_ALL) * limit
        if job.run.oom_kills or near:
            yield {
                "rank": rank, "device": "host", "how": KERNEL if job.run.oom_kills else KILLED,
                "allocated_bytes": used, "device_free_bytes": last["available_bytes"], "total_bytes": limit,
                "step": last["step"],
            }  # fmt: skip


def _size(found: re.Match[str] | None) -> float:
    return nan if found is None else float(found[1]) * _UNITS[found[2]]


_MOST = 5  # changes that are named

_WORTH = 0.02  # of the memory needed; changes that save less are not named

# If a failure needed so many times the counted memory, the count does not apply: memory grew, or another kind of step
# ran.
_GROWN = 2.0

_NUMERICS = ("batch", "autocast", "16_bits", "8_bit")


def cures(memory_what_if: pd.DataFrame | None, failure: dict[Any, Any]) -> list[Change]:
    """Return the changes with which the job would have fitted: those that compute the same numbers first, and of these
    the one with the highest predicted peak.

    The job needed the allocated memory and the failed request. The ratio of that to the counted memory is assumed to
    be the same with each change: a longer batch needs more of everything that grows. Returns nothing where the job
    needed far more than was counted.
    """
    held, requested, total = (failure[name] for name in ("allocated_bytes", "requested_bytes", "total_bytes"))
    if memory_what_if is None or isnan(total) or isnan(held):
        return []
    rows = memory_what_if[memory_what_if["change"] != ""]
    if not len(rows) or (str(rows["device"].iloc[0]) == "cpu") != (failure["device"] == "host"):
        return []
    # A process that was killed had filled the memory, whatever was read last.
    needed = held + requested if not isnan(requested) else max(held, total)
    now = float(rows["now_bytes"].iloc[0])
    scale = max(needed / now, 1.0) if now else 1.0
    if scale > _GROWN:
        return []
    found = rows.assign(then=rows["then_bytes"] * scale, numerics=rows["change"].isin(_NUMERICS))
    found = found[(found["then"] <= total) & (found["then"] < needed * (1 - _WORTH))]
    found = found.sort_values(["numerics", "then"], ascending=[True, False], kind="stable").head(_MOST)
    return [
        Change(
            f"{named(row['change'], row['value'])}: about {size(row['then'])} instead of {size(needed)}",
            numerics=bool(row["numerics"]),
            peak_bytes=(needed, float(row["then"])),
        )
        for row in found.to_dict("records")
    ]


def named(change: str, value: str) -> str:
    """Return a change in words, with code as `code`."""
    if change == "batch":
        return f"{digits(float(value))} times the batch"
    if change == "shard":
        stage, _, ranks = value.partition("/")
        how = "`fully_shard` (ZeRO 3)" if stage == "3" else f"ZeRO {stage}"
        return f"{how} over the {ranks} ranks"
    return {
        "autocast": "autocast to 16 bits",
        "16_bits": "model and optimizer in 16 bits",
        **dict.fromkeys(("checkpoint", "checkpoint_only"), f"`torch.utils.checkpoint` around `{value}`"),
        "fused_attention": "`scaled_dot_product_attention`",
        "8_bit": "an optimizer with 8-bit state",
        "offload": "the optimizer state on the host",
        "microbatches": f"{value} micro-batches",
        "schedule": f"the pipeline schedule {value}",
    }[change]
