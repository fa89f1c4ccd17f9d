"""Loops between the phases: each is told what replaces it, and the line where it stands."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.rules.parameter_loop import RULE
from dlprof.result import Outcome
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.phases import US, loop, one_by_one, trained
from tests.fixtures.sampled_stacks import MAIN

FACTS: dict[str, Any] = {**runs.GPU, "versions": {"torch": "2.11.0"}}


def found(folder: Path, *names: str, after: str = "backward", reads: bool = False, **facts: Any) -> Outcome:
    made = trained(lambda at, ids: loop(at, ids, 40, *names, reads=reads), length=4_200 * US, after=after)
    said = ask(RULE, runs.recorded(folder / "run", (made, [], FACTS | facts)))
    assert said.state == "found"
    return said


@pytest.mark.parametrize(
    ("names", "after", "reads", "cures"),
    [
        (["linalg_vector_norm"], "backward", True, ["get_total_norm", "every k steps"]),
        (["linalg_vector_norm"], "backward", False, ["get_total_norm"]),
        (["mul_", "add_"], "optimizer", False, ["AveragedModel"]),
        (["lerp_"], "backward", False, ["_foreach_lerp_"]),
        (["mul_"], "backward", False, ["_foreach_mul_"]),
        (["clamp_"], "backward", False, ["clip_grad_value_"]),
        (["zero_"], "optimizer", False, ["set_to_none=True"]),
        (["isnan"], "backward", True, ["total norm", "every k steps"]),
        (["histc"], "backward", False, ["_foreach_*"]),
    ],
)
def test_each_loop_is_told_what_replaces_it(
    tmp_path: Path, names: list[str], after: str, reads: bool, cures: list[str]
) -> None:
    said = found(tmp_path, *names, after=after, reads=reads)
    assert len(said.advice) == len(cures)
    assert all(cure in text for cure, text in zip(cures, said.advice, strict=True))
    assert "over parameters" in said.title
    assert "a loop of 40 turns" in said.summary
    assert ("waits for the device each time" in said.summary) == reads


def test_an_older_torch_has_no_total_norm(tmp_path: Path) -> None:
    (text,) = found(tmp_path, "linalg_vector_norm", versions={"torch": "2.4.1"}).advice
    assert "clip_grad_norm_" in text
    assert "get_total_norm" not in text


@pytest.mark.parametrize(("parameters", "over"), [(60, "samples"), (20, "parameters")])
def test_a_loop_in_the_loss_is_over_samples_unless_it_turns_for_each_parameter(
    tmp_path: Path, parameters: int, over: str
) -> None:
    facts = FACTS | {"optimizers": [{"class": "AdamW", "parameters": parameters}]}
    said = ask(RULE, runs.recorded(tmp_path / "run", (one_by_one(), [], facts)))
    assert f"over {over}" in said.title
    assert ("all samples of the batch at once" in said.advice[0]) == (over == "samples")
    assert "with its part of the backward pass" in said.summary


def line(number: int, function: str, calls: int, source: str = "p.mul_(2)") -> dict[str, Any]:
    of = {"phase": "", "after": "backward", "calls": calls, "operators": {"aten::mul_": calls}}
    return {**of, "file": "train.py", "line": number, "function": function, "source": source}


ONE_CALLS_THE_OTHER = "step (train.py:5);scale (train.py:2)"


@pytest.mark.parametrize(
    ("lines", "stacks", "places"),
    [
        ([line(2, "scale", 30), line(5, "step", 20), line(7, "log", 1)], {ONE_CALLS_THE_OTHER: 8}, [5, 2]),
        ([line(2, "scale", 30), line(5, "step", 20)], {}, [2, 5]),
        # Where no line was recorded, it is where the stacks are: in a function rather than the script's main part.
        ([], {"scale (train.py:2)": 8, "step (train.py:5)": 1}, [2]),
        ([], {"scale (train.py:2)": 2}, []),
    ],
)
def test_its_line_is_where_it_turns(
    tmp_path: Path, lines: list[dict[str, Any]], stacks: dict[str, int], places: list[int]
) -> None:
    flops = {"state": "counted", "total": 1, "lines": lines}
    made = trained(lambda at, ids: loop(at, ids, 40, "mul_"), length=4_200 * US)
    run = runs.recorded(tmp_path / "run", (made, [], FACTS | {"flops": flops, "pid": 10}))
    told = "".join(f"{MAIN};<module> (train.py:9);{frames} {n}\n" for frames, n in stacks.items())
    (run / "ranks/00000/stacks.txt.gz").write_bytes(gzip.compress(told.encode()))
    said = ask(RULE, run)
    assert [place.line for place in said.where] == places
