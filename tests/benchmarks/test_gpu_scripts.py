"""The scripts that are recorded on a GPU, on the CPU: a few steps of each, and what each says of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu import cases, live, timing
from benchmarks.gpu.bench import SCRIPTS
from benchmarks.gpu.jobs import Ended, must, python, run

pytestmark = pytest.mark.long


def script(folder: Path, name: str, *args: str) -> Ended:
    return must(name, run(python(SCRIPTS / f"{name}.py", "--device", "cpu", *args), folder, 120.0))


# Runs scripts, each with words of its own, in one process: it imports torch once.
IN_TURN = """
import json, os, runpy, sys, torch
torch.backends.mkldnn.set_flags(False)  # oneDNN has no LSTM in bfloat16 for CPUs without AVX-512
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


@pytest.mark.parametrize(
    "needs",
    [
        pytest.param(needs, marks=() if "pandas" in needs else pytest.mark.slow)
        for needs in sorted({case.needs for case in cases.CASES})
    ],
    ids=lambda needs: "-".join(needs) or "torch",
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


@pytest.mark.slow
def test_the_job_that_is_looked_at_tells_its_own_step_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    stuck = ("--stuck", "3", "--stuck-s", "0.5")
    ended = script(tmp_path, "live_job", "--stop", str(tmp_path / "stop"), "--begin", str(tmp_path / "stop"), *stuck)
    began, stands, told = [json.loads(text) for _, text in ended.lines]
    assert began["pid"] > 0
    assert stands == {"stuck": 3}
    assert told["step"] == live.EVERY
    # Nineteen steps that wait for 24 ms, and one that waits for half a second: a slow machine only waits for longer.
    waited_s = told["waits"] * told["step_s"] * live.EVERY
    assert waited_s > 19 * 0.024 + 0.5
    assert told["waits"] < 1.0
