"""The device's work by module is what the simulated job did for it, however far behind its host the device is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.work import module_work
from dlprof.analysis.timeline.device import device_sets
from dlprof.analysis.timeline.steps import timing
from dlprof.read.run import open_run
from simulator import folder
from simulator.faults.fault import base, step_of, with_script
from simulator.job import Job, Optimizer, Recording
from simulator.play import work_by_module

NAMED = replace(base(3), modules=True)


@pytest.mark.parametrize(
    ("job", "form"),
    [
        (NAMED, "torch-2.13"),
        (NAMED, "rocm-6"),
        (replace(NAMED, ranks=2), "torch-2.13"),
        (replace(NAMED, optimizer=Optimizer(kind="foreach")), "torch-2.4"),
        (with_script(NAMED, items=1, after=round(0.3 * step_of(NAMED))), "torch-2.8"),
    ],
)
def test_the_work_of_each_module_is_what_was_launched_for_it(tmp_path: Path, job: Job, form: str) -> None:
    simulation = folder.write(tmp_path / "run", job, Recording(form=form))
    for rank, simulated in zip(open_run(tmp_path / "run").ranks, simulation.ranks, strict=True):
        data = RankData(rank)
        found, steps = data.once(module_work), data.once(timing)
        numbers = steps.numbers.tolist()
        launched = [work for stream in simulated.work.values() for work in stream]
        expected = work_by_module(launched, range(numbers[0], numbers[-1] + 1))
        taken = found[found["device_ns"] > 0].groupby(["path", "part"])["device_ns"].sum().to_dict()
        assert taken.keys() == expected.keys()
        assert taken == pytest.approx(expected, rel=1e-6)
        # And of the steps, all is told in which the device does anything.
        busy = iv.total(iv.intersect(data.once(device_sets).busy, iv.merge(steps.windows)))
        assert found["exposed_ns"].sum() == pytest.approx(busy / len(steps.windows))
        calls = found.set_index(["path", "part"])["calls"]
        assert calls["block0.qkv", "forward"] == 1
        assert calls["block0.qkv", "backward"] >= 1
