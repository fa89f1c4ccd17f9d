"""A result that is shown to anybody names no user, no host and no folder."""

from __future__ import annotations

import json

from dlprof.report.sharing import shareable
from dlprof.result import Fact, Outcome, Result, RunInfo
from dlprof.result.stored import to_json

RESULT = Result(
    run=RunInfo(
        path="/scratch/alice/runs/train",
        command=("python", "/home/alice/project/train.py", "--out", "/scratch/alice/out", "--owner", "alice"),
        hosts=("gpu-17.cluster.example.org", "gpu-18"),
        warnings=("gpu-18: py-spy: permission denied: /home/alice/bin/py-spy",),
    ),
    window=None,
    outcomes=(Outcome("input_wait", "found", "Waits", summary="rank 1 on gpu-17.cluster.example.org is late"),),
    facts=(Fact("Job", "folder", "/home/alice/project"), Fact("Job", "seen", "load (/home/alice/project/data.py:12)")),
)


def test_names_and_folders_go_and_what_is_measured_stays() -> None:
    shared = shareable(RESULT)
    said = json.dumps(to_json(shared))
    for word in ("alice", "gpu-17", "gpu-18", "cluster", "scratch"):
        assert word not in said, word
    assert shared.run.hosts == ("host1", "host2")
    assert shared.run.command == ("python", "…/train.py", "--out", "…/out", "--owner", "user")
    assert shared.outcomes[0].summary == "rank 1 on host1 is late"
    assert shared.facts[1].value == "load (…/data.py:12)"


def test_what_tells_nobody_stays_as_it_is() -> None:
    result = Result(run=RunInfo("run", command=("python", "train.py"), hosts=("localhost",)), window=None)
    assert shareable(result) == result
