"""Writes a run folder as dlprof's recorder leaves it: run.json, and for each rank its facts, logs and trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from simulator import facts, kineto, memory, script
from simulator.hardware import DEVICES, power_w
from simulator.job import EPOCH_NS, Clock, Job, Place, Recording, groups, places
from simulator.kineto import FORMS
from simulator.loading import Fetched
from simulator.machine import Simulated, Simulation
from simulator.memory import Step, total_bytes
from simulator.play import record
from simulator.recorder import Chunked, Row
from simulator.streams import UNKNOWN, Work

MOST_BEHIND = 1_024  # a device further behind than so many steps loses its times
USAGE_NS = 250_000_000  # between two lines of what a process used


def write(folder: Path, job: Job, recording: Recording) -> Simulation:
    """Record a job into a folder, with dlprof's own layer or (light=False) as a folder of traces; return what ran."""
    simulation = record(job, recording)
    form = FORMS[recording.form]
    # The trace knows the links of a pipeline as sends and receives within the group of all ranks.
    listed = {name: ranks for name, (ranks, _) in groups(job).items() if name.isdigit()}
    of_ranks = places(job, recording, listed)
    for rank, place in zip(simulation.ranks, of_ranks, strict=True):
        if not recording.light:
            folder.mkdir(parents=True, exist_ok=True)
            kineto.write(folder / f"rank-{place.rank}.pt.trace.json.gz", rank, place, form, recording.shapes)
            continue
        at = write_logs(folder, rank, job, recording, place)
        kineto.write(at / "trace.json.gz", rank, place, form, recording.shapes)
    if recording.light:
        write_run(folder, job, simulation)
    return simulation


def write_logs(folder: Path, rank: Simulated, job: Job, recording: Recording, place: Place) -> Path:
    """Write all that dlprof's recorder leaves of a rank but its trace; return the rank's folder."""
    at = folder / "ranks" / f"{place.rank:05d}"
    at.mkdir(parents=True)
    (at / "facts.json").write_text(json.dumps(facts.of_rank(job, recording, place)))
    _lines(at / "steps.jsonl", _steps(rank, place.clock, job, recording))
    _lines(at / "stalls.jsonl", _stalls(rank, place.clock))
    ran = None if job.memory is None else memory.simulated(job)
    _lines(at / "memory.jsonl", _memory(rank, job, place, ran))
    _lines(at / "gpu.jsonl", _gpu(rank, job, place, ran))
    if rank.records.lines:
        text = script.stacks(rank, job, place).encode()
        (at / "stacks.txt.gz").write_bytes(gzip.compress(text, 1, mtime=0))
    if ran is not None:
        (at / "held.json").write_text(json.dumps(memory.held(job, ran)))
    if job.pipeline is not None:
        _lines(at / "chunks.jsonl", _chunks(rank, place))
    if rank.queue is not None:
        _lines(at / "loading.jsonl", _loading(rank, job, place.clock))
        if fetches := list(_fetches(rank, job, place.clock)):
            _lines(at / "fetches.jsonl", fetches)
    return at


def write_run(folder: Path, job: Job, simulation: Simulation) -> None:
    """Write run.json."""
    end = max(rank.records.rows[-1].end for rank in simulation.ranks)
    (folder / "run.json").write_text(json.dumps(facts.of_run(job, EPOCH_NS, EPOCH_NS + end)))


def _lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def _steps(rank: Simulated, clock: Clock, job: Job, recording: Recording) -> Iterable[dict[str, Any]]:
    rows = rank.records.rows
    before: Work | None = None
    for n, row in enumerate(rows):
        made: dict[str, Any] = {
            "step": row.number,
            "kind": row.kind,
            "start_ns": clock.at(row.start),
            "dur_ns": clock.at(row.end) - clock.at(row.start),
            "lead_ns": row.lead,
            "fetch_ns": row.fetch,
            "forward_ns": row.forward,
            "backward_ns": row.backward,
            "optimizer_ns": row.optimizer,
        }
        if recording.device_step:
            made["device_step_ns"] = _elapsed(before, row.ended) if n and _is_known(row, rows) else -1
        made |= {
            "fetches": row.fetches,
            "forwards": row.forwards,
            "backwards": row.backwards,
            "optimizer_steps": row.optimizer_steps,
            "unused_forward_ns": row.forward if row.kind == "validation" else 0,
            "samples": row.fetches * job.tokens_of(rank.rank) // job.model.sequence if rank.queue is not None else -1,
            "profiled": row.profiled,
            "first": row.first,
        }
        before = row.ended
        yield made


def _is_known(row: Row, rows: list[Row]) -> bool:
    """Return whether the recorder had the step's device time before it gave it up."""
    later = rows[row.number + MOST_BEHIND] if row.number + MOST_BEHIND < len(rows) else None
    return row.ended is not None and (later is None or row.ended.end <= later.end)


def _elapsed(before: Work | None, ended: Work | None) -> int:
    """Return the ns between two events, which tell time in half microseconds."""
    if before is None or ended is None or UNKNOWN in (before.end, ended.end):
        return -1
    return round((ended.end - before.end) / 500) * 500


def _stalls(rank: Simulated, clock: Clock) -> Iterable[dict[str, Any]]:
    for s in rank.records.stalls:
        yield {
            "kind": s.kind,
            "start_ns": clock.at(s.start),
            "dur_ns": s.end - s.start,
            "step": s.step,
            "generation": 2 if s.kind == "garbage_collection" else None,
            "path": s.path or None,
            "phase": s.phase,
            "reason": s.reason or None,
            "count": 1,
        }


def _loading(rank: Simulated, job: Job, clock: Clock) -> Iterable[dict[str, Any]]:
    assert rank.queue is not None
    own = iter([f for f in rank.queue.fetched if f.worker < 0])
    for w in rank.queue.waited:
        row: dict[str, Any] = {
            "kind": w.kind,
            "loader": 0,
            "start_ns": clock.at(w.start),
            "step": w.step,
            "count": 1,
            "dur_ns": w.end - w.start,
        }
        if w.ready >= 0:
            row |= {"worker": w.worker, "empty": int(not w.ready), "ready": w.ready, "outstanding": w.outstanding}
        if w.kind == "start":
            row["workers"] = " ".join(map(str, w.pids))
        if w.kind in ("first", "batch") and (fetched := next(own, None)) is not None:
            row |= _used(fetched, rank, job)
        yield row
    yield from _usage(rank, clock)


def _usage(rank: Simulated, clock: Clock) -> Iterable[dict[str, Any]]:
    """Return what the process used: its training thread computes whenever it does not wait."""
    doing = rank.records.doing
    rows = rank.records.rows
    begin, step, at = rows[0].start, 0, 0
    for row in rows:
        if row.end - begin < USAGE_NS and row is not rows[-1]:
            continue
        used = 0
        while at < len(doing) and doing[at][0] < row.end:
            start, what = doing[at]
            until = doing[at + 1][0] if at + 1 < len(doing) else row.end
            if what not in ("fetch", "sleep"):  # a thread that waits for its device spins
                used += max(min(until, row.end) - max(start, begin), 0)
            if until > row.end:
                break
            at += 1
        pinned = rank.queue.pinned if rank.queue is not None else ()
        pins = sum(max(min(until, row.end) - max(start, begin), 0) for start, until in pinned)
        yield {
            "kind": "usage", "loader": -1, "start_ns": clock.at(begin), "step": step, "count": 1,
            "dur_ns": row.end - begin, "cpu_ns": used + pins, "delay_ns": 0, "thread_ns": used,
        }  # fmt: skip
        begin, step = row.end, row.number + 1


def _fetches(rank: Simulated, job: Job, clock: Clock) -> Iterable[dict[str, Any]]:
    assert rank.queue is not None
    for f in rank.queue.fetched:
        if f.worker >= 0:
            yield {
                "worker": f.worker, "pid": f.pid, "start_ns": clock.at(f.start), "count": 1, "dur_ns": f.end - f.start,
                **_used(f, rank, job),
            }  # fmt: skip


def _used(fetched: Fetched, rank: Simulated, job: Job) -> dict[str, Any]:
    assert rank.queue is not None
    return {
        "collate_ns": rank.queue.loader.collate, "cpu_ns": fetched.cpu, "delay_ns": 0, "stored_bytes": 0,
        "read_bytes": 4_096, "tensors": 2, "tensor_bytes": job.batch.size,
    }  # fmt: skip


# -- what is sampled: the allocator's counters, the GPU's clocks, a pipeline's chunks


MEMORY_EVERY_NS = 250_000_000
SAMPLE_EVERY_NS = 500_000_000

# Bits of NVML's reasons for a clock (nvml.h, nvmlClocksEventReason...).
HW_THERMAL = 0x40

# Bytes of a parameter with its gradient and AdamW's two moments, in float32.
_KEPT = 16


def _memory(rank: Simulated, job: Job, place: Place, ran: Step | None = None) -> Iterator[dict[str, Any]]:
    """Return the lines of memory.jsonl: what the allocator holds, and how often it had to empty its cache."""
    reserved = round(job.used_memory * DEVICES[job.device].memory_bytes)
    kept, most = min(job.model.parameters * _KEPT, round(0.8 * reserved)), round(0.97 * reserved)
    if ran is not None:
        kept, most, reserved = ran.kept_bytes, ran.allocator.peak_allocated, ran.allocator.reserved
    pauses = job.pauses
    retries, read = 0, 0
    for row in rank.records.rows:
        if pauses.retry and row.number % pauses.retry_every == pauses.retry_every - 1:
            retries += 1
        if row.end - read < MEMORY_EVERY_NS:
            continue
        read = row.end
        yield {
            "at_ns": place.clock.at(row.end), "step": row.number, "device": place.device_index,
            "allocated_bytes": kept, "reserved_bytes": reserved, "peak_allocated_bytes": most,
            "peak_reserved_bytes": reserved, "retries": retries, "ooms": 0,
            "device_allocs": 40 + 6 * retries, "device_frees": 6 * retries,
        }  # fmt: skip


def _gpu(rank: Simulated, job: Job, place: Place, ran: Step | None = None) -> Iterator[dict[str, Any]]:
    """Return the lines of gpu.jsonl: clock, temperature, power, and why the clock is what it is."""
    device, used = DEVICES[job.device], round(job.used_memory * DEVICES[job.device].memory_bytes)
    if ran is not None:
        used = ran.allocator.reserved + ran.of.context
    share = dict(job.clocks).get(rank.rank, 1.0)
    rng = np.random.default_rng((job.seed, rank.rank, 1 << 29))
    end = rank.records.rows[-1].end
    hot = share < 1.0
    for at in range(SAMPLE_EVERY_NS // 2, end, SAMPLE_EVERY_NS):
        clock = device.max_clock_mhz * (share if hot else 1.0) * (1 - abs(float(rng.normal(0, 0.003))))
        yield {
            "at_ns": place.clock.at(at),
            "perf_ns": at,
            "busy_share": 0.99,
            "memory_busy_share": 0.5,
            "memory_used_bytes": used,
            "memory_total_bytes": total_bytes(job),
            "power_w": round(power_w(device, clock / device.max_clock_mhz), 1),
            "power_limit_w": float(device.power_w),
            "power_limit_default_w": float(device.power_w),
            "sm_clock_mhz": round(clock / 15) * 15,
            "memory_clock_mhz": 1_593,
            "sm_clock_max_mhz": device.max_clock_mhz,
            "temperature_c": 91 if hot else 64,
            "clock_reasons_bits": HW_THERMAL if hot else 0,
        }


def _chunks(rank: Simulated, place: Place) -> Iterator[dict[str, Any]]:
    """Return the lines of chunks.jsonl: the device's time, put where the host's call began."""
    by_step: dict[int, list[Chunked]] = {}
    for chunk in rank.records.chunks:
        by_step.setdefault(chunk.step, []).append(chunk)
    for step, made in sorted(by_step.items()):
        whole = next((c for c in made if c.action == "schedule"), None)
        if whole is None or whole.ended is None:
            continue
        began = place.clock.at(whole.called)
        rows = []
        for c in made:
            if c is not whole and c.ended is not None:
                start = began + c.begun.end - whole.begun.end
                rows.append((c.stage, c.microbatch, c.action, start, c.ended.end - c.begun.end))
        busy, dur = sum(r[4] for r in rows), whole.ended.end - whole.begun.end
        yield {"step": step, "action": "schedule", "start_ns": began, "dur_ns": dur, "busy_ns": busy}
        for stage, microbatch, action, start, took in rows:
            made_of = {"step": step, "action": action, "stage": stage, "microbatch": microbatch}
            yield made_of | {"start_ns": start, "dur_ns": took}
