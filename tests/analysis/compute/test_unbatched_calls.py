"""A model that is called for one element after the other, in a loop whose turns do not need each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.compute.rules import unbatched_calls
from tests.fixtures import layers, runs, traces
from tests.fixtures.recurrent import US
from tests.fixtures.ruled import Case, check, clear, found, jobs
from tests.fixtures.runs import MS
from tests.fixtures.sampled_stacks import MAIN, burst

INDEPENDENT = "    for x in frames:\n        seen.append(net(x))"
GROWING = "    for t in range(n):\n        seen.append(net(x[:, : t + 1]))"
RECURRENT = "    for x in frames:\n        h = net(x, h)"
STACKS = {f"{MAIN};<module> (/me/train.py:70);embed (/me/train.py:3);forward (/me/train.py:40)": 90}
# Each turn: a call of 0.9 ms with operators of 0.5 and 0.005 ms, and 0.1 ms of Python until the next one.
CALL, BETWEEN, LONG, SHORT, STEP = 900 * US, 100 * US, 500 * US, 5 * US, 20 * MS


def calling(folder: Path, loop: str, calls: int, parameters: int = 8) -> Path:
    """Record three steps, each with some calls of the module "net" and 4 ms of other operators."""
    events = []
    for step in range(3):
        at = step * STEP
        events += [traces.step(step, at, STEP), traces.op("aten::other", at + STEP - 5 * MS, 4 * MS)]
        for turn in range(calls):
            begin = at + turn * (CALL + BETWEEN)
            events.append(layers.called("net", "Net", begin, CALL))
            events.append(layers.called("net.inner", "Linear", begin + US, CALL - 2 * US))
            events += [traces.op("aten::mm", begin + 20 * US, LONG), traces.op("aten::add", begin + 600 * US, SHORT)]
    run = runs.recorded(folder / "run", (layers.on_cpu(events), [], {**runs.CPU, "pid": 10, "directory": "/me/"}))
    rows = [{"path": "net", "kind": "Net"}, {"path": "net.inner", "kind": "Linear"}]
    sized = {"parameters": parameters, "parameter_bytes": 4 * parameters, "bucket": -1, "sharded": 0}
    (run / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(row | sized) + "\n" for row in rows))
    kept = {"format": 1, "files": {"train.py": {"sha256": "", "text": f"def embed(net):\n{loop}\n"}}}
    (run / "ranks/00000/sources.json").write_text(json.dumps(kept))
    return burst(run, STACKS)


def starts(calls: int) -> float:
    """What is saved of so many calls: Python in and between them, and 10 µs of each operator at most, ns."""
    gaps = calls * (CALL - LONG - SHORT) + (calls - 1) * BETWEEN
    return (gaps + calls * (10 * US + SHORT)) * (1 - 1 / calls)


of = jobs(calling)
AT = [("train.py", 3)]
CASES = {
    "frames": found(of(INDEPENDENT, 8), starts(8), "8 times", "one call for all turns", at_most=True, where=AT),
    "four frames": found(of(INDEPENDENT, 4), starts(4), at_most=True),
    "prefixes": found(
        of(GROWING, 8),
        STEP * 8 * (LONG + SHORT) / (8 * (LONG + SHORT) + 4 * MS) * 7 / 8,
        "causal mask",
        at_most=False,
        where=AT,
    ),
    "a recurrence": clear(of(RECURRENT, 8)),
    "three inputs": clear(of(INDEPENDENT, 3)),
    "an activation": clear(of(INDEPENDENT, 8, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_unbatched_calls(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    check(unbatched_calls.RULE, case, tmp_path)
