"""Steps that grow or jump are found, with the phase; a slower machine, noise and a slow start are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from dlprof.analysis.step.rules.growing_steps import RULE
from tests.fixtures import readings, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

GPU = {"device": {"type": "cuda", "name": "NVIDIA A100-SXM4-80GB"}}
N = 203  # of which three warm up


def recorded(folder: Path, lengths: Callable[[int], dict[str, float]], facts: object = runs.CPU, n: int = N) -> Path:
    """Record steps with so many ms in each phase; "rest" is what is left of the step."""
    steps = []
    for step in range(n):
        phases = lengths(step)
        named = {f"{p}_ns": round(ms * MS) for p, ms in phases.items() if p != "rest"}
        total = round(sum(phases.values()) * MS)
        steps.append(runs.light(step, total, device_step_ns=total if facts is GPU else -1, **named))
    return runs.recorded(folder / "run", (None, steps, facts))  # type: ignore[arg-type]


def noise(step: int, share: float = 0.1) -> float:
    """Return a factor near 1, another one for each step."""
    return 1 + share * (Random(step).random() - 0.5)


def rest(step: int) -> dict[str, float]:
    return {"forward": 10 * noise(step), "backward": 10 * noise(-step), "rest": 0.5 * step}


# What a step takes, where it is recorded, and what must come out: kind, phase, and the share of the mean step that is
# saved at most; None: nothing is found.
CASES = [
    pytest.param(rest, runs.CPU, ("grow", "script's own lines", 0.63), id="a list that grows between the phases"),
    pytest.param(
        lambda n: {"forward": 10 * noise(n), "backward": 5 + 0.2 * n, "rest": 1.0},
        runs.CPU,
        ("grow", "backward", 0.49),
        id="a graph that is kept",
    ),
    pytest.param(
        lambda n: {"forward": 10 * noise(n) * (4 if n > 103 else 1), "optimizer": 10 * noise(-n)},
        runs.CPU,
        ("on", "forward", 0.42),
        id="denormals from the middle on",
    ),
    pytest.param(
        lambda n: {"forward": 10 + 0.1 * n, "backward": 10 + 0.1 * n},
        runs.CPU,
        None,
        id="a machine that gets slower slows all phases",
    ),
    pytest.param(lambda n: {"forward": 10 + 0.1 * n, "backward": 10 + 0.1 * n}, GPU, ("grow", "", 0.46), id="on a GPU"),
    pytest.param(lambda n: {"forward": 10 * noise(n, 1.5), "rest": 10.0}, runs.CPU, None, id="noise"),
    pytest.param(lambda n: {"forward": 10.0, "rest": 10 - 0.02 * n}, runs.CPU, None, id="steps that become shorter"),
    pytest.param(lambda n: {"forward": 10.0, "rest": 10 + 0.01 * n}, runs.CPU, None, id="too little"),
    pytest.param(
        lambda n: {"forward": 10.0, "rest": 100.0 if 80 < n < 120 else 10.0}, runs.CPU, None, id="longer for a while"
    ),
    pytest.param(
        lambda n: {"optimizer": 2.0 if n < 103 else 30.0, "rest": 33.0 if n < 43 else 30.0 if n < 103 else 10.0},
        runs.CPU,
        None,
        id="a phase that jumps in steps about as long as before",
    ),
    pytest.param(lambda n: {"forward": 10.0, "rest": 10 + 30 * (n % 2)}, runs.CPU, None, id="in turn"),
]


@pytest.mark.parametrize(("lengths", "facts", "told"), CASES)
def test_steps_that_grow_are_found_with_their_phase(
    tmp_path: Path, lengths: Callable[[int], dict[str, float]], facts: object, told: tuple[str, str, float] | None
) -> None:
    found = ask(RULE, recorded(tmp_path, lengths, facts))
    if told is None:
        assert found.state == "clear"
        return
    kind, phase, share = told
    assert found.state == "found"
    assert kind in found.title
    assert phase in found.summary
    assert found.share == pytest.approx(share, abs=0.02)
    assert not found.at_most


def varying(n: int) -> dict[str, float]:
    """Return phases of which the optimizer becomes longer, by another factor in each stretch."""
    return {"forward": 5.0, "optimizer": 2.0 if n < 80 else 20.0 + 15 * (n // 40 % 2)}


@pytest.mark.parametrize(("at", "state"), [((50, 90), "found"), ((0, 90), "found"), ((150, 180), "clear")])
def test_a_jump_is_known_by_when_values_became_subnormal(at: tuple[int, int], state: str, tmp_path: Path) -> None:
    seen = [{"step": at[0], "state": 0.0}, {"step": at[1], "state": 0.5}]
    assert ask(RULE, recorded(tmp_path / "a", varying, {**runs.CPU, "subnormal": seen})).state == state
    assert ask(RULE, recorded(tmp_path / "b", varying)).state == "clear"


def test_longer_texts_take_longer(tmp_path: Path) -> None:
    steps = [runs.light(n, (20 + n // 4) * MS, forward_ns=10 * MS, tokens=1_000 + 10 * n) for n in range(N)]
    assert ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU))).state == "clear"


def test_few_steps_tell_nothing(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, rest, n=40)).state == "not_measured"


def test_the_last_step_and_when_it_has_doubled_are_said(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, lambda n: {"forward": 20.0, "rest": 1.0 * n}))
    # The medians of the first and the last twenty of 200 steps; each is 1 ms longer than the one before.
    assert found.title == "Steps grow from 32.5 ms to 212.5 ms"
    assert "by 1.00 ms with every step: in 212 more steps" in found.summary


def jumping(n: int) -> dict[str, float]:
    """Return phases of which the optimizer jumps, while the lines between vary by whole stretches."""
    return {"forward": 5.0, "optimizer": 2.0 if n < 80 else 30.0, "rest": 4.0 if n < 40 else 1.0}


@pytest.mark.parametrize(
    ("looks", "said", "advice"),
    [
        ([(0, 0.0, 0.0), (60, 0.0, 0.0), (120, 0.0, 0.25)], "25 % of the optimizer's state", "set_flush_denormal"),
        ([(60, 0.0, 0.0), (150, 0.3, 0.0)], "30 % of the parameters", "set_flush_denormal"),
        # As many before as after.
        ([(60, 0.0, 0.25), (150, 0.0, 0.25)], "", "find what a step appends"),
        ([], "", "find what a step appends"),
    ],
)
def test_values_that_became_subnormal_meanwhile_are_the_cause(
    looks: list[tuple[int, float, float]], said: str, advice: str, tmp_path: Path
) -> None:
    place = {"kind": "optimizer_step", "file": "train.py", "line": 18, "function": "main", "source": "optimizer.step()"}
    seen = [{"step": step, "parameters": parameters, "state": state} for step, parameters, state in looks]
    found = ask(RULE, recorded(tmp_path, jumping, {**runs.CPU, "subnormal": seen, "calls": [place]}))
    assert (found.state, "optimizer" in found.summary) == ("found", True)
    assert ("subnormal" in found.summary, said in found.summary) == (bool(said), True)
    assert advice in found.changes[0].text
    assert [(p.file, p.line) for p in found.where] == ([("train.py", 18)] if said else [])


@pytest.mark.parametrize(
    ("others", "waited", "state"),
    [
        (1.0, 0.6, "clear"),
        (0.0, 0.6, "found"),  # for threads of its own
        (1.0, 0.05, "found"),  # though others compute, the training thread has its core
    ],
)
def test_steps_that_wait_for_cores_of_other_programs_do_not_grow(
    others: float, waited: float, state: str, tmp_path: Path
) -> None:
    length = [(10 + 10 * (1 if n < 103 else 4)) * MS for n in range(N)]
    start = [sum(length[:n]) for n in range(N)]
    steps = [
        runs.light(n, length[n], traces.BASE_NS + start[n], forward_ns=length[n] - 10 * MS, optimizer_ns=10 * MS)
        for n in range(N)
    ]
    path = runs.recorded(tmp_path / "run", (None, steps, runs.CPU))
    turn, tenths = start[103], range(sum(length) // (100 * MS))
    late = [max(n * 100 * MS - turn, 0) for n in tenths]
    at = [{"at_ns": traces.BASE_NS + n * 100 * MS} for n in tenths]
    readings.write(
        path / "ranks/00000/processes.jsonl",
        (t | {"main_thread_waited_ns": waited * ns} for t, ns in zip(at, late, strict=True)),
    )
    use = [{"core_percent": [100 * (1 + others * (ns > 0)) / 2] * 2, "job_cpu_s": n / 10} for n, ns in enumerate(late)]
    readings.write(path / "hosts/node-1/host.jsonl", (t | one for t, one in zip(at, use, strict=True)))
    assert ask(RULE, path).state == state
