"""Embeddings on the host: found with what the job gains on the device, silent on a job that has them there."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.host.rules.host_embedding import RULE
from simulator import folder, play
from simulator.faults import FAULTS
from simulator.faults.fault import recording
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

FAULT = next(f for f in FAULTS if f.name == "host_tables")
JOB = FAULT.make(5)


def test_found_with_what_tables_on_the_device_gain(tmp_path: Path) -> None:
    folder.write(tmp_path / "run", JOB, recording(JOB, FAULT.name))
    found = ask(RULE, tmp_path / "run")
    assert found.state == "found"
    gain = play.true(JOB).period_ns - play.true(FAULT.fix(JOB)).period_ns
    assert found.saving_ns == pytest.approx(gain, rel=0.1)
    assert "embedding.to(device)" in found.advice[0]
    assert found.evidence is not None
    assert dict(found.evidence.rows)["updates on the host"] == 0


def test_tables_on_the_device_are_left_alone(tmp_path: Path) -> None:
    folder.write(tmp_path / "run", FAULT.fix(JOB), recording(JOB, FAULT.name))
    assert ask(RULE, tmp_path / "run").state == "clear"


def test_a_cpu_has_no_other_place_for_them(tmp_path: Path) -> None:
    steps = [runs.light(n, 10 * MS) for n in range(30)]
    assert ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU))).state == "does_not_apply"
