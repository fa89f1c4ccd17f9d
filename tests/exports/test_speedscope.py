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


OTHER = "thread (0x2): pool-1"


def test_stacks_of_threads_without_a_phase_are_written_as_they_are(tmp_path: Path) -> None:
    other = f'process 10:"python train.py";{OTHER};work (pool.py:3) 7\n'
    told = written(stacked(tmp_path / "run", f"{MAIN};main (train.py:5) 3\n", other), tmp_path / "s.json")
    frames = told["shared"]["frames"]
    seen = {p["name"]: [[frames[i]["name"] for i in stack] for stack in p["samples"]] for p in told["profiles"]}
    assert seen == {"training thread": [["(between the phases)", "main"]], "other threads": [["work"]]}


@pytest.mark.parametrize(
    ("file", "content", "unit"),
    [
        ("stacks.txt", "main (a.py:1);work (a.py:2) 5\nmain (a.py:1) 3\n", "none"),
        (
            "profile.speedscope.json",
            json.dumps(
                {
                    "$schema": speedscope.SCHEMA,
                    "shared": {"frames": [{"name": "main", "file": "a.py", "line": 1}]},
                    "profiles": [
                        {"type": "sampled", "name": "t", "unit": "seconds", "startValue": 0, "endValue": 8}
                        | {"samples": [[0]], "weights": [8]}
                    ],
                }
            ),
            "nanoseconds",
        ),
    ],
)
def test_stacks_of_other_tools_are_written_too(tmp_path: Path, file: str, content: str, unit: str) -> None:
    (tmp_path / file).write_text(content)
    (profile,) = written(tmp_path / file, tmp_path / "s.json")["profiles"]
    assert (profile["name"], profile["unit"]) == (f"training thread · {file}", unit)
    assert sum(profile["weights"]) == profile["endValue"] == (8 if unit == "none" else 8_000_000_000)


def test_without_stacks_there_is_nothing_to_export(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", (None, [light(n, MS) for n in range(9)], CPU))
    with pytest.raises(DlprofError, match="no Python stacks were seen"):
        speedscope.write(open_run(path), tmp_path / "s.json")
    assert not (tmp_path / "s.json").exists()
