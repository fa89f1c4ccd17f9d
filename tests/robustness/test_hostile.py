"""Files that somebody has broken, by chance or on purpose: a partial answer with a warning or one line, no traceback.

A small run with every file that a recording leaves is made; then one of its files is changed, in its bytes or in what
its JSON says, and the whole run is diagnosed. No measure and no rule may break by it.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.errors import DlprofError
from dlprof.read.run import open_run
from dlprof.result import Result
from dlprof.result.stored import to_json
from tests.fixtures import holding, runs, traces
from tests.fixtures.runs import MS

HOST = "node-1"
BROKE = re.compile(r"\b(?:[A-Z]\w+Error|dlprof failed)\b")

# What a value may become.
HOSTILE: tuple[Any, ...] = (
    *(None, True, "", "text", "\x1b[2J\n", "٣", "1e999", -1, 0, 1, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**30),
    *(-(2**63), 0.5, 1e308, [], {}, [[]], {"a": {"b": [1]}}, ["x"] * 3, "x" * 70_000),
)
RAW = (b"1e999", b"-1e999", b"NaN", b"Infinity", b"{" * 3_000, b"[" * 100_000, b"\xff\xfe", b"\0" * 100, b"9" * 5_000)


def lines(*said: dict[str, Any]) -> str:
    return "".join(json.dumps(one) + "\n" for one in said)


def whole_run(folder: Path) -> Path:
    """Make a run of two ranks with everything that there can be of them."""
    at = traces.BASE_NS
    steps = [runs.light(n, 100 * MS, fetch_ns=30 * MS, forward_ns=20 * MS, backward_ns=30 * MS) for n in range(40)]
    stalls = [runs.stall("garbage_collection", n, 5 * MS, 40 * MS) for n in range(10, 30, 3)]
    models = [{"parameters": 10, "parameter_bytes": 40, "dtypes": {"float32": 1}, "training": True, "ddp": {}}]
    facts = {
        **runs.CPU,
        "pid": 7,
        "cpu": {"cores": 4, "threads": 1},
        "models": models,
        "loaders": [{"role": "train", "num_workers": 2, "batch_size": 8, "prefetch_factor": 2}],
        "optimizers": [{"name": "SGD", "fused": False, "foreach": None}],
        "clock": {"unix_ns": at, "perf_ns": 0},
        "window": {"state": "exported", "first_step": 12, "last_step": 16},
        "ended": "exit",
    }
    made = traces.training()
    run = runs.recorded(folder, (made, steps, facts), (made, steps, facts), stalls=[stalls, stalls], hosts=[HOST])
    for number in range(2):
        runs.loading(run, number, step=100 * MS, wait=30 * MS, fetch=90 * MS, cpu=50 * MS, n=40, workers=2)
    rank = run / "ranks/00000"
    memory = {"at_ns": at, "step": 1, "allocated_bytes": 10, "reserved_bytes": 20, "retries": 0, "ooms": 0}
    (rank / "memory.jsonl").write_text(lines(*({**memory, "at_ns": at + n * MS, "step": n} for n in range(30))))
    counted = {"role": "main", "function": "m:f", "file": "m.py", "first": 1, "source": "def f():\n  pass\n"}
    (rank / "lines.jsonl").write_text(lines({**counted, "lines": [[1, 2, 300], [2, 2, 400]]}))
    effect = {"value": 4, "applied": 1, "before": [0], "places": [["train.py", 12, "main"]], "error": None}
    (rank / "overrides.json").write_text(json.dumps({"loader.num_workers": effect, "gc.freeze": effect}))
    holding.write(run, [holding.row("parameter", "layer", 400), holding.row("activation", "layer", 900)])
    sampled = [
        {"at_ns": at + n * 1_000 * MS, "gpu.use": 0.5, "cpu.use": 0.25, "memory_used": 1 << 30} for n in range(9)
    ]
    (rank / "gpu.jsonl").write_text(lines(*sampled))
    (rank / "processes.jsonl").write_text(lines(*sampled))
    chunk = {"start_ns": at, "dur_ns": MS, "step": 12, "stage": 0, "chunk": 0, "action": "forward", "stages": 2}
    (rank / "chunks.jsonl").write_text(lines(chunk, {**chunk, "action": "backward", "start_ns": at + 2 * MS}))
    burst = json.dumps({"start_ns": at, "end_ns": at + 1_000 * MS, "rate": 50})
    stack = 'process 7:"python train.py";thread (1): MainThread;main (train.py:3);f (train.py:9) 12\n'
    (rank / "stacks.txt.gz").write_bytes(gzip.compress(f"#{burst}\n{stack}".encode()))
    host = run / "hosts" / HOST
    host.mkdir(parents=True)
    (host / "host.jsonl").write_text(lines(*sampled))
    (host / "warnings.txt").write_text("something odd\n")
    (host / "boot").write_text("abc")
    (run / "tasks").mkdir()
    (run / "tasks/0.json").write_text(json.dumps({"host": HOST, "number": 0, "exit": {"code": 0, "signal": None}}))
    (run / "log.csv").write_text("timestamp, utilization.gpu [%]\n2026/01/01 00:00:00.000, 50 %\n")
    return run


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def written(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def changed(value: Any, at: random.Random) -> Any:
    """Return a piece of JSON with one value in it replaced, left out, or twice."""
    if isinstance(value, dict) and value and at.random() < 0.9:
        key = at.choice(sorted(value))
        if at.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: changed(value[key], at)}
    if isinstance(value, list) and value and at.random() < 0.9:
        place = at.randrange(len(value))
        if at.random() < 0.15:
            return [*value, *value[place:]]
        return [*value[:place], changed(value[place], at), *value[place + 1 :]]
    return at.choice(HOSTILE)


def in_its_json(data: bytes, at: random.Random) -> bytes:
    """Change one value: of the whole, or of one line."""
    try:
        return json.dumps(changed(json.loads(data), at)).encode()
    except ValueError:
        some = data.split(b"\n")
        place = at.randrange(len(some))
        try:
            some[place] = json.dumps(changed(json.loads(some[place]), at)).encode()
        except ValueError:
            return in_its_bytes(data, at)
        return b"\n".join(some)


def in_its_bytes(data: bytes, at: random.Random) -> bytes:
    """Cut it off, or put something into it that does not belong there."""
    begin = at.randrange(len(data) + 1)
    how = at.randrange(4)
    if how == 0:
        return data[:begin]
    if how == 1:
        return data[:begin] + at.randbytes(at.randrange(1, 40)) + data[begin + at.randrange(40) :]
    if how == 2:
        return data[:begin] + data[begin + at.randrange(200) :]
    # In the place of a number or a text.
    found = list(re.finditer(rb'(?<=[:\[, ])(?:-?\d+|"[^"]*")', data))
    if not found:
        return data[:begin] + at.choice(RAW) + data[begin:]
    here = at.choice(found)
    return data[: here.start()] + at.choice(RAW) + data[here.end() :]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("sound") / "run")


def diagnosed(run: Path) -> None:
    """Diagnose a run; where that cannot be, it is said in one line."""
    try:
        result = diagnose(open_run(run), RULES, jobs=1)
    except DlprofError as e:
        said = str(e)
    else:
        said = ""
        healthy(result)
    assert "\n" not in said


def healthy(result: Result) -> None:
    """Nothing of ours broke, and the result can be written."""
    assert [o for o in result.outcomes if o.state == "error"] == []
    assert [text for text in result.run.warnings if BROKE.search(text)] == []
    json.dumps(to_json(result), allow_nan=False)


def test_the_sound_run_is_read_without_a_warning(sound: Path) -> None:
    result = diagnose(open_run(sound), RULES, jobs=1)
    assert [o for o in result.outcomes if o.state == "error"] == []
    expected = (f"{HOST}: something odd", "the traced steps take", "rank 0: log.csv: its times have no zone")
    assert [text for text in result.run.warnings if not text.startswith(expected)] == []


SLOWLY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", [in_its_json, in_its_bytes])
@settings(SLOWLY, max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_no_damage_to_a_file_breaks_a_diagnosis(
    sound: Path, tmp_path: Path, how: Callable[[bytes, random.Random], bytes], seed: int
) -> None:
    at = random.Random(seed)
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(sound, run)
    path = at.choice(sorted(path for path in run.rglob("*") if path.is_file()))
    written(path, how(unpacked(path), at))
    diagnosed(run)


@pytest.mark.parametrize("raw", RAW)
def test_a_result_file_that_is_no_json_is_told_in_one_line(tmp_path: Path, raw: bytes) -> None:
    from click.testing import CliRunner

    from dlprof.cli import cli

    path = tmp_path / "result.json"
    path.write_bytes(b'{"format": 1, "saving": ' + raw + b"}")
    done = CliRunner().invoke(cli, ["compare", str(path), str(path), "--quiet", "-o", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert done.output.startswith("dlprof: ")


def test_work_of_the_device_that_no_step_launched_is_named_and_breaks_no_rule(tmp_path: Path) -> None:
    trained = [e for e in traces.training()["traceEvents"] if not e["name"].startswith("ProfilerStep")]
    later = [traces.step(n, (500 + n) * MS, MS) for n in range(3)]
    result = diagnose(open_run(runs.foreign(tmp_path, traces.trace(*trained, *later, world_size=1))), RULES, jobs=1)
    healthy(result)
    said = "the device's work in the trace was launched in none of its steady steps"
    assert [w for w in result.run.warnings if w.startswith(said)]
    (why,) = [o.why for o in result.outcomes if o.id == "host_bound"]
    assert why == said
