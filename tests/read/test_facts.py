"""What a run and its ranks say of themselves enters checked, and what our own recorder writes passes whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read import facts
from tests.fixtures import jobs

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch, in DataLoader(TensorDataset(torch.randn(12, 3, 8, 8)), batch_size=4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch).float().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def put(folder: Path, content: Any) -> Path:
    path = folder / "facts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_the_recorder_writes_is_of_the_declared_kinds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    jobs.record(tmp_path / "train.py", folder=tmp_path / "run", options=["--no-trace"])
    rank, run = tmp_path / "run" / "ranks" / "00000" / "facts.json", tmp_path / "run" / "run.json"
    for path, shape in ((rank, facts.RANK), (run, facts.RUN)):
        written, reading = json.loads(path.read_text()), facts.read(path, shape)
        assert reading.warnings == ()
        assert reading.facts == written
        assert set(shape) <= set(written)
    said = facts.read(rank).facts
    assert said["loaders"]
    assert said["models"]
    assert said["optimizers"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", "8"),
        ("world_size", -1),
        ("world_size", 2**63),
        ("world_size", True),
        ("world_size", 8.0),
        ("host", ["node"]),
        ("grad_scaler", 1),
        ("env", []),
        ("loaders", {}),
        ("later", [[[[1]]]]),
    ],
)
def test_a_fact_of_another_kind_is_left_out_with_a_word(tmp_path: Path, name: str, value: Any) -> None:
    reading = facts.read(put(tmp_path, {name: value, "pid": 4711}))
    assert reading.facts == {"pid": 4711}
    (said,) = reading.warnings
    assert said.endswith(f": {name}")


def test_within_a_fact_only_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    told = {"loaders": [{"role": "train", "num_workers": "4"}, 5], "device": {"name": 7, "type": "cuda"}}
    reading = facts.read(put(tmp_path, told))
    assert reading.facts == {"loaders": [{"role": "train"}], "device": {"type": "cuda"}}
    assert reading.warnings[0].endswith(": loaders[0].num_workers, loaders[1], device.name")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "1" * 30])
def test_a_number_that_result_json_cannot_hold_is_left_out(tmp_path: Path, number: str) -> None:
    assert facts.read(put(tmp_path, f'{{"env": {{"A": {number}}}, "later": {number}}}')).facts == {"env": {}}


def test_unknown_values_and_facts_of_a_later_dlprof_pass(tmp_path: Path) -> None:
    told = {"host": None, "loaders": [{"num_workers": None}], "power": {"watts": 1.5, "limits": [300, 700]}}
    reading = facts.read(put(tmp_path, told))
    assert (reading.facts, reading.warnings) == (told, ())


def test_many_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    (said,) = facts.read(put(tmp_path, {name: [[]] for name in facts.RANK})).warnings
    assert said.endswith(" …")
    assert len(said) < 200


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "[" * 100_000, '{"a": ' * 100_000, "1" * 5000])
def test_a_broken_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DlprofError, match=r"facts\.json is broken"):
        facts.read(put(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="no such file"):
        facts.read(tmp_path / "facts.json")
