"""A sweep of a real script: its points, what is kept of it, and how it goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="recording needs torch")

from dlprof.errors import DlprofError
from dlprof.result.sweep import FILE, from_json
from dlprof.trial.job import Job
from dlprof.trial.sweep.sweeping import Options, axis, begun, swept
from tests.fixtures.jobs import environment, running, tiny

SLEEPS = """
size, ms = int(sys.argv[1]), float(sys.argv[2])
if size == 3:
    raise SystemExit("three is too many")
for epoch in range(10_000):
    for batch in DataLoader(data, batch_size=size, drop_last=True):
        train(batch)
        time.sleep(ms / 1000)
"""

pytestmark = pytest.mark.long


def job(command: tuple[str, ...], cwd: Path) -> Job:
    return Job(command, cwd, environment(), {})


def test_points_are_measured_by_samples_and_one_that_dies_is_left_out(tmp_path: Path) -> None:
    script = tiny(tmp_path, SLEEPS)
    command = (sys.executable, str(script), "{size}", "20")
    folder, options = tmp_path / "sweep", Options(5, 12, 1)
    sweep = begun(command, [axis("size=2,3,4")], folder, options)
    said: list[str] = []
    done = swept(sweep, job(command, tmp_path), folder, options, lambda: False, said.append)
    two, three, four = done.points
    assert done.state == "complete"
    assert done.by_samples
    assert "three is too many" in three.why
    rates = [p.rate(samples=True) for p in (two, four)]
    assert all(rates)
    assert 1.5 < rates[1] / rates[0] < 2.5  # type: ignore[operator]
    assert len(said) == 3
    assert from_json(json.loads((folder / FILE).read_bytes())) == done
    assert running(script) == []


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    script = tiny(tmp_path, SLEEPS)
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


def test_the_curve_of_workers_is_predicted(tmp_path: Path) -> None:
    script = tiny(
        tmp_path,
        """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, n):
        time.sleep(0.01)
        return torch.zeros(8), torch.zeros(1)

for batch in DataLoader(Slow(), batch_size=4, num_workers=1):
    train(batch)
""",
    )
    command = (sys.executable, str(script))
    folder, options = tmp_path / "sweep", Options(5, 20, 1)
    sweep = begun(command, [axis("loader.num_workers=1,2")], folder, options)
    done = swept(sweep, job(command, tmp_path), folder, options, lambda: False)
    assert done.warnings == ()
    for point in done.points:
        assert point.step_ns is not None
        assert point.predicted_ns == pytest.approx(point.step_ns, rel=0.2)


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
