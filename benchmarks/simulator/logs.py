"""Writes what is sampled during the job: the allocator's counters, the GPU's clocks, a pipeline's chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.simulator.hardware import DEVICES, Device
from benchmarks.simulator.job import Job
from benchmarks.simulator.memory import Step, total_bytes
from benchmarks.simulator.places import Place
from benchmarks.simulator.records import Chunked
from benchmarks.simulator.simulation import Simulated

MEMORY_EVERY_NS = 250_000_000
SAMPLE_EVERY_NS = 500_000_000

# Bits of NVML's reasons for a clock (nvml.h, nvmlClocksEventReason...).
HW_THERMAL = 0x40

# What a busy GPU takes of its limit at its highest clock, and how much of that switches: the rest leaks, or is the
# memory's. Switching takes c·f·V²; the voltage falls with the clock until it is at its least.
_BUSY = 0.8
_SWITCHING = 0.7
_LEAST_VOLTAGE = 0.75  # of that at the highest clock

# Bytes of a parameter with its gradient and AdamW's two moments, in float32.
_KEPT = 16


def memory(rank: Simulated, job: Job, place: Place, ran: Step | None = None) -> Iterator[dict[str, Any]]:
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


def _power_w(device: Device, clock: float) -> float:
    """Return what a busy GPU takes at a share of its highest clock, W."""
    voltage = max(clock, _LEAST_VOLTAGE)
    return _BUSY * device.power_w * (1 - _SWITCHING + _SWITCHING * clock * voltage**2)


def gpu(rank: Simulated, job: Job, place: Place, ran: Step | None = None) -> Iterator[dict[str, Any]]:
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
            "power_w": round(_power_w(device, clock / device.max_clock_mhz), 1),
            "power_limit_w": float(device.power_w),
            "power_limit_default_w": float(device.power_w),
            "sm_clock_mhz": round(clock / 15) * 15,
            "memory_clock_mhz": 1_593,
            "sm_clock_max_mhz": device.max_clock_mhz,
            "temperature_c": 91 if hot else 64,
            "clock_reasons_bits": HW_THERMAL if hot else 0,
        }


def chunks(rank: Simulated, place: Place) -> Iterator[dict[str, Any]]:
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
