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
from dlprof.live.follow import MANY, PARTS, Follower, host, machine, of, slowest
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
    """A value of a metric of METRICS."""

    name: str
    labels: Mapping[str, str]
    value: float


def points(follower: Follower) -> Iterator[Point]:
    """Return what is known now. Of more than MANY ranks: of the first one and the slowest one of the host."""
    base = {"run": follower.run.name, "host": os.uname().nodename}
    now = [of(rank) for rank in follower.ranks]
    here = host(run_folder.host_folder(follower.run, base["host"]))
    yield Point("dlprof_ranks", base, len(now))
    yield Point("dlprof_host_cpu_ratio", base, here["cpu_share"])
    yield Point("dlprof_host_memory_bytes", base, here["memory_used_bytes"])
    if len(now) > MANY:
        now = list({one.rank: one for one in (now[0], slowest(now)[0])}.values())
    for one in now:
        labels = base | {"rank": str(one.rank)}
        lives = sorted((life for life in follower.lives.values() if life.number == one.rank), key=lambda one: one.life)
        sampled = machine(lives[-1])
        yield Point("dlprof_step_seconds", labels, one.step_s)
        yield Point("dlprof_own_seconds", labels, one.own_s)
        yield Point("dlprof_still_seconds", labels, one.still_s)
        rss = sampled["rss_bytes"]
        yield Point("dlprof_memory_bytes", labels, rss and rss + (sampled["workers_rss_bytes"] or 0))
        yield Point("dlprof_cores", labels, sampled["cores"])
        yield Point("dlprof_gpu_busy_ratio", labels, sampled["gpu_busy_share"])
        yield Point("dlprof_gpu_memory_bytes", labels, sampled["gpu_memory_bytes"])
        counted: dict[tuple[str, str, str], float] = defaultdict(float)
        for life in lives:  # a restarted rank counts on
            for kind, sums in life.by_kind().items():
                for name in ("steps", "samples", "tokens"):
                    counted[f"dlprof_{name}_total", kind, ""] += sums[name]
                rest = sums["dur_ns"] - sum(sums[f"{part}_ns"] for part in PARTS)
                for part, ns in (*((part, sums[f"{part}_ns"]) for part in PARTS), ("rest", max(rest, 0))):
                    counted["dlprof_phase_seconds_total", kind, part] += ns / 1e9
            for kind, ns in life.stalled_ns.items():
                counted["dlprof_stall_seconds_total", kind, ""] += ns / 1e9
        for (name, kind, phase), value in counted.items():
            yield Point(name, labels | {"kind": kind} | ({"phase": phase} if phase else {}), value)


class Readings:
    """The points of a run, read anew by whoever asks, at most once in a moment."""

    def __init__(self, run: Path) -> None:
        self._follower = Follower(run, here=True, most=1 << 62)
        self._lock = threading.Lock()
        self._read_s, self._points = 0.0, dict[str, list[Point]]()

    def by_name(self) -> dict[str, list[Point]]:
        """Return the points of each metric that has any."""
        with self._lock:
            if time.monotonic() - self._read_s > _FRESH_S:
                self._follower.read()
                self._points = {}
                for point in points(self._follower):
                    if point.value is not None:
                        self._points.setdefault(point.name, []).append(point)
                self._read_s = time.monotonic()
            return self._points

    def collect(self) -> Iterator[Any]:
        """Return them as prometheus_client takes them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, found in self.by_name().items():
            kind, about = METRICS[name]
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, about)
            for point in found:
                family.add_sample(name, dict(point.labels), point.value)
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
            return [Observation(point.value, dict(point.labels)) for point in readings.by_name().get(name, ())]

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
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # of all threads that are made here
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
