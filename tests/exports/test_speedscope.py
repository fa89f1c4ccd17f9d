"""Stacks in speedscope's format: a profile a rank and role, and every sample in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.exports import speedscope
from dlprof.read.run import open_run
from tests.fixtures.runs import CPU, MS, light, recorded
from tests.fixtures.sampled_stacks import LOADER, MAIN, stacked


def written(path: Path, out: Path) -> Any:
    speedscope.write(open_run(path), out)
    return json.loads(out.read_text())


def test_profiles_frames_and_weights(tmp_path: Path) -> None:
    path = stacked(
        tmp_path / "run",
        f"{MAIN};main (train.py:5);{LOADER} 30\n",
        f"{MAIN};main (train.py:7) 12\n",
    )
    told = written(path, tmp_path / "s.json")
    assert told["$schema"] == speedscope.SCHEMA
    (profile,) = told["profiles"]
    assert (profile["type"], profile["unit"], profile["name"]) == ("sampled", "none", "training thread")
    frames = told["shared"]["frames"]
    seen = {
        tuple(frames[i]["name"] for i in stack): times
        for stack, times in zip(profile["samples"], profile["weights"], strict=True)
    }
    assert seen == {
        ("(waiting for the loader)", "main", "__next__"): 30,
        ("(between the phases)", "main"): 12,
    }
    assert (profile["startValue"], profile["endValue"]) == (0, 42)
    assert {"name": "main", "file": "train.py", "line": 5} in frames


def test_each_rank_has_profiles_that_share_frames(tmp_path: Path) -> None:
    told = written(stacked(tmp_path / "run", f"{MAIN};main (train.py:5) 3\n", ranks=2), tmp_path / "s.json")
    assert [p["name"] for p in told["profiles"]] == ["rank 0 · training thread", "rank 1 · training thread"]
    assert told["profiles"][0]["samples"] == told["profiles"][1]["samples"]
    assert len(told["shared"]["frames"]) == 2


def test_the_rarest_stacks_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedscope, "MOST_STACKS", 2)
    stacks = [f"{MAIN};f{n} (train.py:{n}) {n}\n" for n in range(1, 6)]
    (profile,) = written(stacked(tmp_path / "run", *stacks), tmp_path / "s.json")["profiles"]
    assert profile["weights"] == [5, 4]
    assert profile["name"] == "training thread (3 rarer stacks left out)"


def test_without_stacks_there_is_nothing_to_export(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", (None, [light(n, MS) for n in range(9)], CPU))
    with pytest.raises(DlprofError, match="no Python stacks were seen"):
        speedscope.write(open_run(path), tmp_path / "s.json")
    assert not (tmp_path / "s.json").exists()
