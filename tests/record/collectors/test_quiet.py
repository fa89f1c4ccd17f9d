"""What a job does not use costs it nothing: no file of a collector, no import, no CUDA."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dlprof.record.collectors.overrides import Overrides
from tests.fixtures.jobs import facts, record, rows, tiny

pytest.importorskip("torch", reason="recording needs torch")

HEAVY = (
    "line_profiler",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.utils.flop_counter",
)
JOB = f"""
import gc
gc.disable()
before = {{name for name in {HEAVY!r} if name in sys.modules}}
for epoch in range(2):
    for batch in DataLoader(data, batch_size=4):
        train(batch)
print({{name for name in {HEAVY!r} if name in sys.modules}} - before, torch.cuda.is_initialized())
assert "passing" not in str(vars())
"""


def test_a_plain_job_leaves_no_file_no_word_and_imports_nothing(tmp_path: Path) -> None:
    done = record(tiny(tmp_path, JOB), folder=tmp_path / "run", options=["--no-trace", "--no-sample"])
    assert done.stdout == "set() False\n"
    rank = tmp_path / "run/ranks/00000"
    told = facts(rank)
    assert (told["warnings"], told["pipeline"], told["flops"]["state"]) == ([], None, "counted")
    assert sum(row["optimizer_steps"] for row in rows(rank)) == 32
    written = {path.name for path in rank.iterdir()}
    assert written == {"facts.json", "records.jsonl"}
    logs = {json.loads(line)["log"] for line in (rank / "records.jsonl").read_text().splitlines()}
    assert logs == {"held", "loading", "sources", "stalls", "steps"}
    assert rows(rank, "stalls") == []
    process = rows(rank, "held")[-1]["process"]
    assert 0 < process["before_bytes"] < process["anonymous_bytes"]


def test_without_overrides_nothing_is_installed_and_nothing_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLPROF_SET", raising=False)
    before = set(sys.modules)
    made = Overrides()
    made.start(None)  # type: ignore[arg-type]
    made.step([])
    made.stop()
    assert {m for m in set(sys.modules) - before if m.startswith("dlprof.record.overrides")} == set()
