"""Hands out the figures of a job while it runs: to Prometheus, which asks for them, or by OTLP to who collects them.

A process of its own: `python -m dlprof.live.metrics RUN ADDRESS PARENT`. It ends with its parent, and what goes wrong
here is one line on stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dlprof import run_folder
from dlprof.live.follow import MANY, PARTS, Follower, Rank, host, machine, of, slowest
from dlprof.plain import tell, words_of
from dlprof.record.launch.process import tie

# Names, kinds and units after the conventions of Prometheus. Labels: run, host; rank, kind, phase where they are named.
METRICS = {
    "dlprof_ranks": ("gauge", "Ranks of this host that have ended a step."),
    "dlprof_step_seconds": ("gauge", "Mean of a rank's last steps."),
    "dlprof_own_seconds": ("gauge", "Of these, what waits for no other rank: fetch, lead and forward."),
    "dlprof_still_seconds": ("gauge", "Since the rank's last step ended."),
    "dlprof_steps_total": ("counter", "Steps by kind: train, validation, other."),
    "dlprof_samples_total": ("counter", "Samples by kind of step."),
    "dlprof_tokens_total": ("counter", "Tokens by kind of step."),
    "dlprof_phase_seconds_total": ("counter", "Time of the training thread by kind of step and phase of it."),
    "dlprof_stall_seconds_total": ("counter", "Stalls by their kind: garbage_collection, checkpoint, compilation."),
    "dlprof_memory_bytes": ("gauge", "Resident memory of the rank and of its loaders' workers."),
    "dlprof_cores": ("gauge", "CPU cores that the rank and its loaders' workers use."),
    "dlprof_gpu_busy_ratio": ("gauge", "Share of the time in which the GPU had work."),
    "dlprof_gpu_memory_bytes": ("gauge", "Memory in use on the GPU."),
    "dlprof_host_cpu_ratio": ("gauge", "Share of the host's cores in use."),
    "dlprof_host_memory_bytes": ("gauge", "Memory in use on the host."),
}
_FRESH_S = 0.2  # for which figures serve all metrics of one collection
_PUSH_MS = 10_000.0  # unless OTEL_METRIC_EXPORT_INTERVAL says otherwise


class Point(NamedTuple):
    """A value of a metric of METRICS; None: not measured."""

    name: str
    labels: Mapping[str, str]
    value: float | None


def points(follower: Follower) -> Iterator[Point]:
    """Return what is known now. Of more than MANY ranks: of the first one and the slowest one of the host."""
    base = {"run": follower.run.name, "host": os.uname().nodename}
    here, now = host(run_folder.host_folder(follower.run, base["host"])), [of(rank) for rank in follower.ranks]
    yield Point("dlprof_ranks", base, len(now))
    yield Point("dlprof_host_cpu_ratio", base, here["cpu_share"])
    yield Point("dlprof_host_memory_bytes", base, here["memory_used_bytes"])
    if len(now) > MANY:
        now = list({one.rank: one for one in (now[0], slowest(now)[0])}.values())
    for one in now:
        lives = sorted((life for life in follower.lives.values() if life.number == one.rank), key=lambda one: one.life)
        sampled, labels = machine(lives[-1]), base | {"rank": str(one.rank)}
        values = {
            "step_seconds": one.step_s,
            "own_seconds": one.own_s,
            "still_seconds": one.still_s,
            "memory_bytes": sampled["rss_bytes"] and sampled["rss_bytes"] + (sampled["workers_rss_bytes"] or 0),
            "cores": sampled["cores"],
            "gpu_busy_ratio": sampled["gpu_busy_share"],
            "gpu_memory_bytes": sampled["gpu_memory_bytes"],
        }
        for name, value in values.items():
            yield Point(f"dlprof_{name}", labels, value)
        for (name, kind, phase), total in _counted(lives).items():
            yield Point(f"dlprof_{name}_total", labels | {"kind": kind} | ({"phase": phase} if phase else {}), total)


def _counted(lives: Iterable[Rank]) -> dict[tuple[str, str, str], float]:
    """Return the counters of a rank by name, kind and phase: one that was restarted counts on."""
    found: dict[tuple[str, str, str], float] = defaultdict(float)
    for life in lives:
        for kind, sums in life.by_kind().items():
            parts = {part: sums[f"{part}_ns"] for part in PARTS}
            for name in ("steps", "samples", "tokens"):
                found[name, kind, ""] += sums[name]
            for phase, ns in (*parts.items(), ("rest", max(sums["dur_ns"] - sum(parts.values()), 0))):
                found["phase_seconds", kind, phase] += ns / 1e9
        for kind, ns in life.stalled_ns.items():
            found["stall_seconds", kind, ""] += ns / 1e9
    return found


class Readings:
    """The points of a run, read anew by whoever asks, at most once in a moment."""

    def __init__(self, run: Path) -> None:
        self._follower = Follower(run, here=True, most=1 << 62)
        self._lock, self._read_s = threading.Lock(), 0.0
        self._points: dict[str, list[tuple[dict[str, str], float]]] = {}

    def by_name(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Return the labels and values of each metric that has any."""
        with self._lock:
            if time.monotonic() - self._read_s > _FRESH_S:
                self._follower.read()
                self._points = {}
                for name, labels, value in points(self._follower):
                    if value is not None:
                        self._points.setdefault(name, []).append((dict(labels), value))
                self._read_s = time.monotonic()
            return self._points

    def collect(self) -> Iterator[Any]:
        """Return them as prometheus_client takes them."""
        from prometheus_client.core import Metric

        for name, found in self.by_name().items():
            family = Metric(name.removesuffix("_total"), METRICS[name][1], METRICS[name][0])
            for labels, value in found:
                family.add_sample(name, labels, value)
            yield family


def serve(readings: Readings, address: str) -> None:
    """Answer Prometheus until SIGTERM. Raises OSError where the port is in use, ImportError without its client."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(readings)
    name, _, port = address.rpartition(":")
    start_http_server(int(port), name.strip("[]"), registry)
    signal.sigwait({signal.SIGTERM})


def push(readings: Readings, url: str) -> None:
    """Push by OTLP until SIGTERM, and then the last figures. Raises ImportError without OpenTelemetry's packages."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    class Exporter(OTLPMetricExporter):
        said = False

        def export(self, *args: Any, **options: Any) -> MetricExportResult:
            result = super().export(*args, **options)
            if result is not MetricExportResult.SUCCESS and not self.said:
                self.said = True
                tell(f"--metrics: {url} takes none so far; the job goes on, and so do the attempts")
            return result

    def observed(name: str) -> Any:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, labels) for labels, value in readings.by_name().get(name, ())]

        return [observe]

    every = None if os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") else _PUSH_MS
    reader = PeriodicExportingMetricReader(Exporter(endpoint=url, timeout=5), export_interval_millis=every)
    provider = MeterProvider([reader], Resource.create({"service.name": "dlprof"}))
    meter = provider.get_meter("dlprof")
    for name, (kind, about) in METRICS.items():
        create = meter.create_observable_counter if kind == "counter" else meter.create_observable_gauge
        unit = {"seconds": "s", "bytes": "By", "ratio": "1"}.get(name.removesuffix("_total").rpartition("_")[2], "")
        create(name, observed(name), unit, about)
    signal.sigwait({signal.SIGTERM})
    time.sleep(_FRESH_S)  # so that the last figures are those of the end
    provider.shutdown(1500)


def main(run: str, address: str, parent: int) -> None:
    """Hand out until the parent ends, or says that the job has."""
    # Of all threads that are made here. What is meant for the script is sent to all processes of a job.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
    tie(signal.SIGTERM, parent)
    os.nice(10)
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - libraries' tracebacks; `tell` writes to the descriptor
    try:
        (push if "://" in address else serve)(Readings(Path(run)), address)
    except ImportError as e:
        tell(f"--metrics is off: {e.name} is not installed (pip install 'dlprof[metrics]')")
    except Exception as e:  # noqa: BLE001 - the job goes on
        tell(f"--metrics is off: {address}: {words_of(e)}")
    os._exit(0)  # no thread may keep it from that


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
