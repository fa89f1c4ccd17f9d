"""The picture of the steps."""

from __future__ import annotations

from pathlib import Path

from dlprof.diagnosis import diagnose
from dlprof.run import open_run
from tests import runs
from tests.measures.test_arithmetic import A100
from tests.runs import MS


def test_the_picture_of_the_steps_tells_the_counted_step_from_the_window(tmp_path: Path) -> None:
    slowed = {9, 20, 21, 22}
    steps = [runs.light(n, 10 * MS, profiled=int(n in slowed)) for n in range(30)]
    path = runs.recorded(tmp_path / "run", (None, steps, {"device": A100}))
    (panel,) = [p for p in diagnose(open_run(path), (), jobs=1).panels if p.title == "Steps over the run"]
    assert panel.note.startswith("Steps 9 and 20 to 22: ")
