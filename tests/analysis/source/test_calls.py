"""The calls of all ranks."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.source.patches import Call
from tests.fixtures.runs import CPU, MS, called, light, recorded

ROW = {"kind": "save", "file": "train.py", "line": 7, "function": "main", "source": "torch.save(x)"}


def sites(call_sites: list[Call]) -> list[Call]:
    return call_sites


def test_calls_are_those_of_all_ranks_each_once(tmp_path: Path) -> None:
    other = {**ROW, "line": 9}
    ranks = [(None, [light(n, MS) for n in range(9)], {**CPU, "calls": rows}) for rows in ([ROW], [ROW, other])]
    found = called(recorded(tmp_path, *ranks), sites)
    assert [(call.line, call.source) for call in found] == [(7, "torch.save(x)"), (9, "torch.save(x)")]


def test_a_run_without_them_has_none(tmp_path: Path) -> None:
    assert called(recorded(tmp_path, (None, [light(n, MS) for n in range(9)], CPU)), sites) == []
