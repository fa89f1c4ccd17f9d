"""The scripts that are recorded on a GPU, on the CPU: a few steps of each, and what each says of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu import cases, timing
from benchmarks.gpu.bench import SCRIPTS
from benchmarks.gpu.jobs import Ended, must, python, run
from tests.fixtures.jobs import TORCHRUN

pytestmark = pytest.mark.long


def script(folder: Path, name: str, *args: str) -> Ended:
    return must(name, run(python(SCRIPTS / f"{name}.py", "--device", "cpu", *args), folder, 120.0))


# Runs scripts, each with words of its own, in one process: it imports torch once.
IN_TURN = """
import json, os, runpy, sys
for path, *words in json.loads(sys.argv[1]):
    sys.path[0] = os.path.dirname(path)
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")
"""


def lines_in_turn(folder: Path, what: str, *runs: Sequence[str]) -> list[str]:
    """Run scripts, each run a path below SCRIPTS with its words, and return what they printed."""
    words = json.dumps([[str(SCRIPTS / path), "--device", "cpu", *words] for path, *words in runs])
    # They share the cores with whatever else runs: threads that wait for each other would wait for long.
    ended = run(python("-c", IN_TURN, words), folder, 240.0, {"OMP_NUM_THREADS": "1"})
    return [text for _, text in must(what, ended).lines]


def in_turn(folder: Path, name: str, *runs: Sequence[str]) -> list[str]:
    """Run a script with each of these words, and return the last lines that it printed, one a run."""
    return lines_in_turn(folder, name, *((f"{name}.py", *words) for words in runs))[-len(runs) :]


@pytest.mark.slow
def test_the_modes_learn_the_same(tmp_path: Path) -> None:
    modes = ("eager", "compiled", "graph", "replay")
    args = ("--steps", "4", "--layers", "1")
    lines = in_turn(tmp_path, "modes", *(("--mode", mode, *args) for mode in modes))
    said = {mode: json.loads(line) for mode, line in zip(modes, lines, strict=True)}
    assert [one["mode"] for one in said.values()] == list(modes)
    assert all(one["steps"] == 4 for one in said.values())
    assert said["eager"]["losses"] == said["compiled"]["losses"] == said["graph"]["losses"]
    assert said["replay"]["losses"][0] > said["replay"]["losses"][-1]


@pytest.mark.flaky(reruns=3)  # gloo may abort a rank whose peer has gone
def test_two_ranks_of_which_the_last_is_late_by_what_was_planted(tmp_path: Path) -> None:
    args = ("--device", "cpu", "--steps", "12", "--late-ms", "30", "--out", str(tmp_path))
    must("ranks", run(python(*TORCHRUN, SCRIPTS / "ranks.py", *args), tmp_path, 120.0))
    arrived = {rank: json.loads((tmp_path / f"arrived-{rank}.json").read_text()) for rank in (0, 1)}
    # At least: two ranks share the cores of this machine with whatever else it does.
    assert timing.lateness_ms(arrived, late=1, skip=2) > 20


@pytest.mark.parametrize(
    "needs", sorted({case.needs for case in cases.CASES}), ids=lambda needs: "-".join(needs) or "torch"
)
def test_the_scripts_of_the_advice_train_as_they_are_and_fixed(tmp_path: Path, needs: tuple[str, ...]) -> None:
    for library in needs:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not here")
    names = [case.script for case in cases.CASES if case.needs == needs]
    words = ("--tiny", "--steps", "4")
    runs = [(f"advice/{name}.py", *words, *fixed) for name in names for fixed in ((), ("--fixed",))]
    lines = lines_in_turn(tmp_path, ", ".join(names), *runs)
    steps = [step for text in lines if (step := timing.step_ms_said([(0.0, text)])) is not None]
    assert len(steps) == 2 * len(names)
    assert min(steps) > 0
