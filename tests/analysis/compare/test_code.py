"""Where the program of two runs differs: not where a setting or what A names was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from dlprof.analysis.compare.code import changed
from dlprof.analysis.compare.comparison import compare
from dlprof.analysis.estimate import change
from dlprof.report.compare import text
from dlprof.result import Place, Result, RunPart
from tests.fixtures.comparisons import ADVICE, WORKERS, clear, found, run
from tests.fixtures.jobs import DLPROF, launch, record, tiny
from tests.fixtures.results import MS

LINES = tuple(f"line_{n}()" for n in range(1, 61))
LOADER = "loader = DataLoader(data, num_workers=0)"
A = (*LINES[:9], LOADER, *LINES[9:])  # the loader's is line 10, line_40 line 41
SLEEPS = found("step_python", 10, change("take the sleep out"), where=(Place("train.py", 41),))


def edited(**lines: str | None) -> tuple[str, ...]:
    """Return A with other lines, of these numbers; None: without."""
    return tuple(new for n, old in enumerate(A, 1) if (new := lines.get(f"l{n}", old)) is not None)


FOUR = LOADER.replace("0", "4")
CASES = {
    "the same": (A, "train.py", ()),
    "the setting": (edited(l10=FOUR), "train.py", ()),
    "more beside it": (edited(l10=FOUR, l40="x", l41="y", l42="z", l50="w"), "train.py", ("train.py:40–42, 50",)),
    "one line more": ((*A[:30], "new()", *A[30:]), "train.py", ("train.py:31",)),
    "a line less": (edited(l30=None), "train.py", ("train.py:30",)),
    "blank and indented": ((*A[:20], "", "    " + A[20], *A[21:]), "train.py", ()),
    "what A names": (edited(l41=None), "train.py", ()),
    "beside what A names": (edited(l44="x"), "train.py", ("train.py:44",)),
    "a script of another name": (edited(l20="x"), "train_2.py", ("train_2.py:20",)),
    "many": (edited(**{f"l{n}": "x" for n in range(20, 40, 3)}), "train.py", ("train.py:20, 23, 26, 29 …",)),
}


def kept(folder: Path, lines: tuple[str, ...], script: str = "train.py", model: str = "same()") -> Path:
    path = folder / "ranks/00000/sources.json"
    path.parent.mkdir(parents=True)
    files = {script: {"sha256": "", "text": "\n".join(lines)}, "model.py": {"sha256": "", "text": model}}
    path.write_text(json.dumps({"format": 1, "files": files}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_lines_that_changed_too(case: str, tmp_path: Path) -> None:
    lines, script, expected = CASES[case]
    told = found("input_wait", 30, ADVICE)
    a, b = run(100, told if case != "what A names" else SLEEPS, facts=WORKERS[:1]), run(70, facts=WORKERS[1:2])
    assert changed(a, b, kept(tmp_path / "a", A), kept(tmp_path / "b", lines, script)) == expected


@pytest.mark.parametrize("broken", ["{}", '{"files": 1}', '{"files": {"train.py": {"text": 1}, "x": 2}}', None])
def test_runs_without_copies_are_not_compared(broken: str | None, tmp_path: Path) -> None:
    b = kept(tmp_path / "b", A)
    (tmp_path / "a/ranks/00000").mkdir(parents=True)
    if broken is not None:
        (tmp_path / "a/ranks/00000/sources.json").write_text(broken)
    assert changed(run(100), run(70), tmp_path / "a", b) == changed(run(100), run(70), b, tmp_path / "a") == ()


def test_another_program_is_not_better_than_predicted_and_its_gain_is_not_the_settings() -> None:
    told = found("input_wait", 30, ADVICE)
    a, b = run(100, told, facts=WORKERS[:1]), run(20, clear("input_wait"), facts=WORKERS[1:2])
    same, other = compare(a, b), compare(a, b, ("train.py:40–42",))
    assert same.prediction is not None
    assert (same.prediction.verdict, same.doubts) == ("better", ())
    assert other.prediction is not None
    assert (other.prediction.verdict, other.prediction.reached) == ("unknown", None)
    assert other.doubts[0].startswith("your code changed too: train.py:40–42")
    shown = " ".join(text.render(other, 200).split())
    assert "what of it they gained is not known, as the code changed too" in shown
    assert "better than predicted" not in shown
    assert "your code changed: x.py:1" in compare(run(100), run(50), ("x.py:1",)).doubts[0]


def parts(total: float, steady: float, steps: int = 100, **more: float) -> tuple[RunPart, ...]:
    """Return the budget of a run that takes `total` ms: warm-up of ten steps, steady ones, and more."""
    told = {"warmup": 10 * 5.0, "steady": steps * steady, **more}
    told = {"launch": total - sum(told.values()), **told}
    counts = {"warmup": 10, "steady": steps, "validation": 5, "epoch_ends": 10}
    return tuple(RunPart(part, counts.get(part, 0), ms * MS, ms / total) for part, ms in told.items())


WHOLE: list[tuple[Result, Result, str]] = [
    (
        run(35.3, budget=parts(6000, 35.3)),
        run(10, budget=parts(2128, 10)),
        "a step takes 10.0 ms instead of 35.3 ms. The whole job: 2.82 × faster (2.13 s instead of 6.00 s).",
    ),
    # A shorter run: what the loop takes for a step, with validation, and without setting up.
    (
        run(30, budget=parts(9000, 30, epoch_ends=500.0, validation=1300.0)),
        run(10, budget=parts(3000, 10, steps=40, epoch_ends=500.0, validation=1300.0)),
        "30.0 ms. The training loop, for each step: 1.11 × faster (38.3 ms instead of 42.5 ms).",
    ),
    (run(35.3, budget=parts(6000, 35.3)), run(10), "instead of 35.3 ms."),
    (run(35.3), run(35.3), "No difference beyond noise: a step takes 35.3 ms in A and 35.3 ms in B."),
]


@pytest.mark.parametrize(("a", "b", "expected"), WHOLE)
def test_the_gain_of_the_whole_job_stands_beside_that_of_the_step(a: Result, b: Result, expected: str) -> None:
    first, _ = text.headline(compare(a, b))
    assert first.replace("\xa0", " ").endswith(expected)


def test_steps_of_other_micro_batches_are_not_alike() -> None:
    a, b = run(100), run(400)
    assert b.window is not None
    c = compare(a, replace(b, window=replace(b.window, micro_batches=4)))
    assert c.other_work == ("a step is of 1 micro-batches in A and of 4 in B",)
    assert c.prediction is None


@pytest.mark.long
def test_two_recordings_of_an_edited_script(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    body = "for batch in DataLoader(data, batch_size=1, num_workers=0):\n    train(batch)\n    time.sleep(0.002)\n"
    for name, script in (("a", body), ("b", body.replace("0.002", "0.001 * 0.1"))):
        record(tiny(tmp_path, script), folder=tmp_path / name, options=("--no-trace", "--no-sample"))
    done = launch([*DLPROF, "compare", "a", "b", "-o", "c"], tmp_path)
    last = len((tmp_path / "train.py").read_text().splitlines())
    assert f"your code changed: train.py:{last}" in " ".join(done.stdout.split()), done.stderr
    checked = launch([*DLPROF, "check", "b", "--baseline", "a"], tmp_path)
    assert f"your code changed too: train.py:{last}" in checked.stdout + checked.stderr
    assert "changed" not in launch([*DLPROF, "compare", "a", "a", "-o", "d"], tmp_path).stdout
