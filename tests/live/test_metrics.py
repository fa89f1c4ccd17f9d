"""The figures of a running job as monitoring takes them: asked for over HTTP, pushed by OTLP, drawn by a dashboard."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dlprof.live.follow import MANY, Follower
from dlprof.live.metrics import METRICS, points
from dlprof.record.launch.options import metrics
from tests.fixtures.followed import MS, begin, lines, rank, step, steps
from tests.fixtures.jobs import environment, free_port, is_running, rows, spawned, tiny, until, wrapped
from tests.fixtures.places import ROOT
from tests.fixtures.sampling import leave_word

PHASES = ("fetch", "lead", "forward", "backward", "optimizer")
JOB = """
for epoch in range(2):
    for batch in DataLoader(data, batch_size=8):
        train(batch)
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=16):
            model(batch[0])
print("trained", flush=True)
sys.stdin.readline()
sys.exit(3)
"""


def by_hand(log: list[dict[str, Any]]) -> Counter[tuple[str, str, str]]:
    """Return the counters that a step log amounts to."""
    found: Counter[tuple[str, str, str]] = Counter()
    for row in log:
        found["dlprof_steps_total", row["kind"], ""] += 1
        found["dlprof_samples_total", row["kind"], ""] += max(row["samples"], 0)
        for phase in PHASES:
            found["dlprof_phase_seconds_total", row["kind"], phase] += max(row[f"{phase}_ns"], 0) / 1e9
    return found


def asked(port: str) -> dict[tuple[str, str, str], float]:
    """Return what is served, by name, kind and phase; nothing where nobody listens yet."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families as parsed

    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    every = [sample for family in parsed(text) for sample in family.samples]
    assert {sample.name for sample in every} <= METRICS.keys()
    assert all(sample.labels["run"] and sample.labels["host"] == os.uname().nodename for sample in every)
    return {(s.name, s.labels.get("kind", ""), s.labels.get("phase", "")): s.value for s in every}


@pytest.mark.long
def test_what_is_served_of_a_running_job_is_its_step_log(tmp_path: Path) -> None:
    run, port = tmp_path / "run", free_port()
    command = wrapped(
        run, [sys.executable, tiny(tmp_path, JOB)], "--no-trace", "--stacks", "off", "--metrics", f":{port}"
    )
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with spawned(command, env=environment(), **pipes) as job:
        assert job.stdout is not None
        assert job.stdin is not None
        assert job.stdout.readline() == "trained\n"
        log = run / "ranks" / "00000"
        assert until(lambda: len(rows(log)) >= 24)
        assert until(lambda: asked(port))
        assert until(lambda: asked(port).get(("dlprof_steps_total", "validation", ""), 0) >= 8)
        found, wanted = asked(port), by_hand(rows(log))
        assert {name: found[name] for name in wanted} == pytest.approx(wanted)
        assert found["dlprof_ranks", "", ""] == 1
        assert found["dlprof_step_seconds", "", ""] > 0
        job.stdin.write("\n")
        job.stdin.flush()
    assert job.returncode == 3
    assert asked(port) == {}  # it has ended with the job


@pytest.mark.long
def test_a_port_in_use_is_one_line_and_the_job_goes_on(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as taken:
        waits = "import sys; sys.stdin.readline(); sys.exit(3)"
        words = [sys.executable, "-c", waits]
        command = wrapped(tmp_path / "run", words, "--no-sample", "--quiet", "--metrics", str(taken.server_port))
        with spawned(command, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
            assert job.stderr is not None
            assert job.stdin is not None
            said = job.stderr.readline()
            job.stdin.write("\n")
            job.stdin.flush()
            rest = job.stderr.read()
        assert job.returncode == 3
        assert said.startswith(f"dlprof: --metrics is off: 127.0.0.1:{taken.server_port}: ")
        assert rest.startswith("dlprof: nothing was recorded")
        assert len(rest.splitlines()) == 1


def here(run: Path, number: int, log: list[dict[str, Any]], life: str = "") -> None:
    """Make the folder of a rank of this host."""
    folder = rank(run, number, log, life=life).parent
    leave_word(run, folder.relative_to(run / "ranks").as_posix(), 10 * number + len(life), since=1)


@contextmanager
def collector(answer: int) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """Listen for what is pushed; yield the port and the bodies with their paths."""
    bodies: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, body))
            self.send_response(answer)
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port, bodies
        finally:
            server.shutdown()


@contextmanager
def pushing(run: Path, port: int) -> Iterator[subprocess.Popen[Any]]:
    """Push the metrics of a run, until the block ends."""
    words = [
        sys.executable,
        "-m",
        "dlprof.live.metrics",
        str(run),
        metrics(f"otlp://127.0.0.1:{port}"),
        str(os.getpid()),
    ]
    env = environment(OTEL_METRIC_EXPORT_INTERVAL="100")
    with spawned(words, env=env, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


def test_what_is_pushed_is_the_step_log_and_is_complete_at_the_end(tmp_path: Path) -> None:
    decoded = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    run, log = begin(tmp_path / "run"), steps(12)
    here(run, 0, log)
    with collector(200) as (port, bodies):
        with pushing(run, port) as process:
            assert until(lambda: bodies)
            log += [step(12, log[-1]["start_ns"] + 10 * MS)]
            (run / "ranks" / "00000" / "steps.jsonl").write_text(lines(log))
        assert process.returncode == 0
        path, body = bodies[-1]
    assert path == "/v1/metrics"
    (resource,) = decoded.ExportMetricsServiceRequest.FromString(body).resource_metrics
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "dlprof"
    found = {}
    for metric in resource.scope_metrics[0].metrics:
        kind = METRICS[metric.name][0]
        assert metric.sum.is_monotonic == (kind == "counter")
        for point in (metric.sum if kind == "counter" else metric.gauge).data_points:
            labels = {a.key: a.value.string_value for a in point.attributes}
            assert labels["run"] == "run"
            found[metric.name, labels.get("kind", ""), labels.get("phase", "")] = point.as_double or point.as_int
    wanted = by_hand(log)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_a_collector_that_refuses_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    run = begin(tmp_path / "run")
    here(run, 0, steps(12))
    with collector(400) as (port, bodies), pushing(run, port) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert until(lambda: len(bodies) > 2)
        process.terminate()
        rest = process.stderr.read()
    assert said.startswith(f"dlprof: --metrics: http://127.0.0.1:{port}/v1/metrics takes none")
    assert rest == ""


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    port = free_port()
    code = (
        "import os, subprocess, sys, time\n"
        f"words = ['-m', 'dlprof.live.metrics', {str(tmp_path)!r}, '127.0.0.1:{port}', str(os.getpid())]\n"
        "print(subprocess.Popen([sys.executable, *words]).pid, flush=True); time.sleep(1000)"
    )
    with spawned([sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        here(tmp_path, 0, steps(3))
        assert until(lambda: asked(port))
        parent.kill()
    assert until(lambda: not is_running(pid))


def test_without_its_library_it_is_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        f"from dlprof.live.metrics import main; main({str(tmp_path)!r}, '127.0.0.1:1', {os.getpid()})"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert re.fullmatch(r"dlprof: --metrics is off: prometheus_client is not installed \(.*\)\n", done.stderr)


def test_a_restarted_rank_counts_on_and_a_rank_of_another_host_is_left_out(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    here(run, 0, steps(12))
    here(run, 0, steps(3), ".r1")
    rank(run, 1, steps(5))
    follower = Follower(run, here=True)
    follower.read()
    found = [point for point in points(follower) if point.name == "dlprof_steps_total"]
    assert [(point.labels["rank"], point.value) for point in found] == [("0", 15)]


@pytest.mark.parametrize(("count", "labelled"), [(MANY, set(map(str, range(MANY)))), (MANY + 1, {"0", "40"})])
def test_of_many_ranks_the_first_and_the_slowest_are_labelled(count: int, labelled: set[str], tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    for number in range(count):
        here(run, number, steps(3, lead_ns=2 * MS if number == 40 else 0))
    follower = Follower(run, here=True)
    follower.read()
    found = list(points(follower))
    assert {point.labels["rank"] for point in found if "rank" in point.labels} == labelled
    assert [point.value for point in found if point.name == "dlprof_ranks"] == [count]


ADDRESSES = {
    "": "",
    ":9400": "127.0.0.1:9400",
    "9400": "127.0.0.1:9400",
    "0.0.0.0:9400": "0.0.0.0:9400",
    "[::1]:9400": "[::1]:9400",
    "node-1.site:1": "node-1.site:1",
    "otlp://h": "http://h:4318/v1/metrics",
    "otlp://h:99": "http://h:99/v1/metrics",
    "otlp+https://h:1/x": "https://h:1/x",
    "x": None,
    ":0": None,
    ":65536": None,
    "http://h": None,
    "otlp://": None,
    "otlp://h:65536": None,
    "otlp://user:password@h": None,
}


@pytest.mark.parametrize(("text", "address"), ADDRESSES.items())
def test_an_address_is_of_this_host_alone_unless_it_says_otherwise(text: str, address: str | None) -> None:
    if address is None:
        with pytest.raises(ValueError, match="HOST:PORT"):
            metrics(text)
    else:
        assert metrics(text) == address


def test_the_dashboard_draws_what_is_exported(tmp_path: Path) -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    assert board["title"]
    assert board["schemaVersion"] >= 36
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    named, variables = set(), {variable["name"] for variable in board["templating"]["list"]}
    places = set()
    for panel in board["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        places.add((where["x"], where["y"]))
        for target in panel["targets"]:
            named |= set(re.findall(r"\bdlprof_\w+", target["expr"]))
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
            assert target["expr"].count("(") == target["expr"].count(")")
    assert len(places) == len(board["panels"])
    assert named == set(METRICS)


def test_grafanas_own_types_know_all_of_the_dashboard() -> None:
    """What these do not know is dropped when a dashboard is read into them."""
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))

    def kept(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, dict):
            return all(name in theirs and kept(value, theirs[name]) for name, value in ours.items())
        if isinstance(ours, list):
            return len(ours) == len(theirs) and all(map(kept, ours, theirs))
        return bool(ours == theirs)

    assert kept(board, read)
    assert not kept(board | {"refreshed": "5s"}, read)


def test_the_documentation_names_every_metric() -> None:
    text = (ROOT / "docs" / "watch.md").read_text()
    assert [name for name in METRICS if f"`{name}`" not in text] == []
