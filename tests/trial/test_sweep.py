"""What a sweep goes through, the words of each size, and sweeps of real scripts that stop and go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from dlprof.errors import DlprofError
from dlprof.read.run import open_run
from dlprof.result.sweep import FILE, Axis, Point, Reading
from dlprof.trial.job import Job
from dlprof.trial.sweep import (
    MOST_POINTS,
    Options,
    Running,
    axis,
    begun,
    filled,
    filled_for,
    grid,
    placeholders,
    record_sizes,
    settings,
    swept,
    threads,
)
from tests.fixtures.jobs import environment, running, tiny


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("n=0,1,2", "0 1 2"),
        ("n=0..3", "0 1 2 3"),
        ("n=0..8..4", "0 4 8"),
        ("n=8..70*2", "8 16 32 64"),
        ("n=0,2..4,2", "0 2 3 4"),
        ("n=fp32,bf16", "fp32 bf16"),
    ],
)
def test_values(word: str, values: str) -> None:
    assert axis(word) == Axis("n", tuple(values.split()))


@pytest.mark.parametrize("word", ["n", "=1", "n=", "n=,", "n=4..1", "n=0..8*2", "n=1..8*1", "n=0..9999", "a b=1"])
def test_no_axis(word: str) -> None:
    with pytest.raises(DlprofError):
        axis(word)


def test_a_grid() -> None:
    assert grid([axis("a=1,2"), axis("b=x,y")]) == [
        {"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "2", "b": "x"}, {"a": "2", "b": "y"}
    ]  # fmt: skip
    with pytest.raises(DlprofError, match=str(MOST_POINTS)):
        grid([axis("a=0..50"), axis("b=0..50")])
    with pytest.raises(DlprofError, match="twice"):
        grid([axis("a=1"), axis("a=2")])


def test_axes_are_settings_or_stand_in_the_command() -> None:
    axes = [axis("loader.num_workers=0,2"), axis("batch=8")]
    command = ("python", "train.py", "--batch-size={batch}")
    assert placeholders(axes, command) == {"batch"}
    values = {"loader.num_workers": "2", "batch": "8"}
    assert filled(command, values) == ("python", "train.py", "--batch-size=8")
    assert settings(values, {"batch"}) == {"loader.num_workers": 2}
    with pytest.raises(DlprofError, match=r"\{batch\}"):
        placeholders(axes, ("python", "train.py"))
    with pytest.raises(DlprofError, match="a whole number"):
        placeholders([axis("loader.num_workers=many")], command)


@pytest.mark.parametrize(
    ("axes", "command", "each"),
    [
        ("n=1,2,4", "torchrun --nproc-per-node {n} train.py", 2),
        ("n=1,2,4", "python -m torch.distributed.run --nproc_per_node={n} train.py", 2),
        ("n=16", "torchrun --nproc-per-node {n} train.py", 1),
        ("n=1,2", "torchrun --nproc-per-node 2 train.py --size {n}", None),
        ("n=gpu", "torchrun --nproc-per-node {n} train.py", None),
        ("n=1,2 torch.num_threads=1", "torchrun --nproc-per-node {n} train.py", None),
        ("loader.num_workers=1", "train.py", None),
    ],
)
def test_threads_of_a_process(axes: str, command: str, each: int | None) -> None:
    assert threads([axis(word) for word in axes.split()], command.split(), 8) == each


SLEEPS = """
if sys.argv[1] == "3":
    raise SystemExit("three is too many")
for epoch in range(10_000):
    for batch in DataLoader(data, batch_size=2):
        train(batch)
        time.sleep(0.01)
"""

WORDS = ("torchrun", "--nproc-per-node", "{ranks}", "train.py", "--batch={batch}")


def test_words_of_a_size() -> None:
    assert filled_for(WORDS, 4, 64, strong=False) == ("torchrun", "--nproc-per-node", "4", "train.py", "--batch=64")
    assert filled_for(WORDS, 4, 64, strong=True)[-1] == "--batch=16"
    assert filled_for(WORDS[:-1], 4, None, strong=False)[-1] == "train.py"
    with pytest.raises(DlprofError, match="name it with --batch"):
        filled_for(WORDS, 4, None, strong=False)
    with pytest.raises(DlprofError, match="not a multiple"):
        filled_for(WORDS, 3, 64, strong=True)


@pytest.mark.slow
def test_sizes_are_recorded_in_turn_and_one_that_dies_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    script = tiny(tmp_path, SLEEPS)
    jobs = {n: Job((sys.executable, str(script), str(n)), tmp_path, environment(), {}) for n in (1, 3)}
    said: list[str] = []
    folder = tmp_path / "scale"
    done = record_sizes(jobs, folder, lambda: False, said.append, minutes=5, steps=60, rounds=2)
    assert [p.name for p in done.paths[1]] == ["ranks-0001-1", "ranks-0001-2"]
    assert [len(open_run(p).ranks) for p in done.paths[1]] == [1, 1]
    ((name, why),) = done.failed
    assert (name, "three is too many" in why) == ("3 ranks", True)
    assert running(script) == []
    # What is there is not recorded again.
    again = record_sizes({1: jobs[1]}, folder, lambda: True, minutes=5, steps=60, rounds=2)
    assert again.paths == done.paths
    assert again.lacking == ""
    stopped = record_sizes({1: jobs[1]}, folder, lambda: True, minutes=5, steps=60, rounds=3)
    assert "interrupted" in stopped.lacking


SAMPLES = """
size, ms = int(sys.argv[1]), float(sys.argv[2])
if size == 3:
    raise SystemExit("three is too many")
for epoch in range(10_000):
    for batch in DataLoader(data, batch_size=size, drop_last=True):
        train(batch)
        time.sleep(ms / 1000)
"""


@pytest.mark.parametrize(
    ("steps", "rounds", "measured"),
    [
        # Runs of a point differ by 1 %: 2 × is clear, and 0.2 % is near enough.
        ([[100, 101], [50, 50.5]], 2, [2, 2]),
        ([[100, 100.1], [100.2, 100.3]], 2, [2, 2]),
        # They differ by 30 %: two are told apart from the third only with more runs, and not from each other.
        ([[100, 130, 100, 130, 100, 130], [101, 131] * 3, [900, 1200] * 3], 2, [6, 6, 2]),
        ([[100, 130, 100, 100, 100], [130, 170, 130, 130, 130]], 2, [4, 4]),
        ([[100], [101]], 1, [1, 1]),
    ],
)
def test_points_are_measured_until_they_are_told_apart(
    tmp_path: Path, steps: list[list[float]], rounds: int, measured: list[int]
) -> None:
    axes, command, options = [axis(f"n=0..{len(steps) - 1}")], ("train.py", "{n}"), Options(rounds=rounds)
    said: list[str] = []

    class Given(Running):
        def read(self, place: int, point: Point) -> None:
            ns = steps[place][len(point.readings)] * 1e6
            points = list(self.sweep.points)
            points[place] = replace(point, readings=(*point.readings, Reading(ns)))
            self.sweep = replace(self.sweep, points=tuple(points))

    sweep = Given(
        begun(command, axes, tmp_path, options), job(command, tmp_path), tmp_path, options, lambda: False, said.append
    )
    sweep.measure()
    assert [len(p.readings) for p in sweep.sweep.points] == measured
    assert sweep.sweep.state == "complete"
    assert bool(said) == (max(measured) > rounds)


def job(command: tuple[str, ...], cwd: Path) -> Job:
    return Job(command, cwd, environment(), {})


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    script = tiny(tmp_path, SAMPLES)
    command = (sys.executable, str(script), "{size}", "10")
    folder, options = tmp_path / "sweep", Options(5, 12, 1)
    axes = [axis("size=2,4")]
    sweep = begun(command, axes, folder, options)
    first = swept(sweep, job(command, tmp_path), folder, options, (folder / FILE).exists)
    assert first.state == "interrupted"
    assert sum(len(p.readings) for p in first.points) == 1
    again = begun(command, axes, folder, options)
    assert [p.readings for p in again.points] == [p.readings for p in first.points]
    done = swept(again, job(command, tmp_path), folder, options, lambda: False)
    assert done.state == "complete"
    assert done.points[0].readings == first.points[0].readings
    assert running(script) == []
    with pytest.raises(DlprofError, match="another command"):
        begun((*command, "more"), axes, folder, options)
    (folder / FILE).write_text("{")
    with pytest.raises(DlprofError, match="broken"):
        begun(command, axes, folder, options)


def test_of_its_command_little_is_kept_and_another_is_known_from_it(tmp_path: Path) -> None:
    folder, options, axes = tmp_path / "sweep", Options(5, 12, 1), [axis("size=2")]
    command = (sys.executable, "train.py", "--size", "{size}", "--data", "/mnt/hunter2")
    first = begun(command, axes, folder, options)
    swept(first, job(command, tmp_path), folder, options, lambda: True)
    assert first.command == (sys.executable, "train.py", "--size", "{size}", "--data", "…")
    assert "hunter2" not in (folder / FILE).read_text()
    assert begun(command, axes, folder, options).digest == first.digest
    with pytest.raises(DlprofError, match="another command"):
        begun((*command[:-1], "/mnt/hunter3"), axes, folder, options)
