"""How the first cure of a report is judged by what was measured, and what a script that fails costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import advice, cases
from benchmarks.gpu.judges import JUDGES, Recording
from tests.benchmarks.test_h200 import truth

# What the judge makes of a report: a step of 40 ms, of which the fixed script takes 30.
ORACLE = truth(40.0, 30.0, "one norm", "get_total_norm", rules=["host_sync", "host_bound"], lines=[17, 28])
CHANGE: dict[str, Any] = {"text": "`get_total_norm`, not read", "settings": [], "at": None}


def finding(rule: str = "host_sync", saving_ms: float = 10.0, line: int = 17, **more: Any) -> dict[str, Any]:
    said = {"id": rule, "state": "found", "saving_ns": saving_ms * 1e6, "share": saving_ms / 40}
    said |= {"error_ns": 1e6, "at_most": False}
    said |= {"speedup": 40 / (40 - saving_ms), "where": [{"line": line}], "changes": [CHANGE], "scope": "step"}
    return said | more


def failed(*outcomes: Mapping[str, Any], judge: str = "advice", **oracle: Any) -> list[str]:
    said = {"window": {"step_ns": 40e6}, "outcomes": outcomes}
    parts = JUDGES[judge](Recording(Path(), said, ORACLE | oracle))
    return [part.name for part in parts if part.state == "failed"]


OTHER: dict[str, Any] = {"text": "`torch.compile(model)`", "settings": [], "at": None}
BATCH = finding("memory_headroom", 20.0, changes=[{**OTHER, "training": True}])


@pytest.mark.parametrize(
    ("outcomes", "wrong"),
    [
        ([finding()], []),
        # The first cure is what counts, and a change of the training is none.
        ([BATCH, finding()], []),
        ([finding("memory_headroom", 20.0, changes=[OTHER]), finding()], ["cause", "change"]),
        ([finding("input_wait")], ["cause"]),
        ([finding(line=3)], ["line"]),
        ([finding(line=3, changes=[{**CHANGE, "at": {"line": 28}}])], []),
        ([finding(where=[])], ["line"]),
        ([finding(changes=[OTHER, CHANGE])], ["change"]),
        ([finding(changes=[])], ["change"]),
        ([finding(changes=[{**OTHER, "settings": [{"name": "norm", "to": "get_total_norm"}]}])], []),
        # 34 ms are within 15 % of 30, and outside 33 to 35; 35.5 ms are not.
        ([finding(saving_ms=6.0)], ["range"]),
        ([finding(saving_ms=5.0)], ["step after", "range"]),
        ([finding(saving_ms=16.0)], ["step after", "speed-up", "range"]),
        ([finding(saving_ms=6.0, error_ns=4.2e6)], []),
        # Without a ± there is no range to be outside of.
        ([finding(saving_ms=6.0, error_ns=0.0)], []),
        ([{**finding(), "state": "clear"}], ["cause"]),
        ([], ["cause"]),
        ([finding(), {"id": "gc_pauses", "state": "error", "why": "x"}], ["no rule ends with an error"]),
    ],
)
def test_the_judge_of_the_first_cure(outcomes: list[dict[str, Any]], wrong: list[str]) -> None:
    assert failed(*outcomes) == wrong


def test_of_a_change_that_gives_nothing_nothing_may_be_promised() -> None:
    assert failed(finding(), fixed_ms=40.5) == ["cause"]
    assert failed(finding(saving_ms=1.5), fixed_ms=40.5) == []
    assert failed(finding("gc_pauses"), finding(changes=[OTHER]), fixed_ms=40.5) == []
    assert failed(fixed_ms=40.5) == []
    # A script that is mended: the same.
    assert failed(finding(), judge="remedied") == ["fixed"]
    assert failed(finding(saving_ms=1.5), finding("gc_pauses"), judge="remedied") == []


def test_nothing_may_be_promised_of_a_healthy_script() -> None:
    assert failed(finding(saving_ms=5.0), remedy=[]) == ["cause"]
    assert failed(finding(saving_ms=0.5), remedy=[]) == []


def test_a_change_without_a_price_is_judged_without_one() -> None:
    assert failed(finding(saving_ms=39.0), promised=False) == []
    assert failed(finding("input_wait", saving_ms=39.0), promised=False) == ["cause"]


def test_every_script_has_a_case_and_every_case_its_marks() -> None:
    scripts = {path.stem for path in cases.FOLDER.glob("*.py")} - {"clock", "networks"}
    assert {case.script for case in cases.CASES} == scripts
    assert len(cases.CASES) == len(scripts)
    for case in cases.CASES:
        text = (cases.FOLDER / f"{case.script}.py").read_text()
        assert bool(case.lines) == bool(case.remedy) == ("args.fixed" in text), case.script
        assert text.count("dlprof") == 0, case.script
        oracle = advice.oracle_of(case, [2.0, 4.0], [1.0, 2.0])
        assert (oracle["plain_ms"], oracle["fixed_ms"], oracle["runs"]) == (3.0, 1.5, 2)
        assert json.loads(json.dumps(oracle)) == oracle
