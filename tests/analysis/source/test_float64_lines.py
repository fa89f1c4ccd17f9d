"""Where a script brings in float64 is found in the copies of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.source.statements import float64_lines
from tests.fixtures import runs


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("frame = read()\nvalues = frame.to_numpy()\nseries = torch.from_numpy(values.T.copy())", [2]),
        ("series = torch.as_tensor(np.load(path)).cuda()", [1]),
        ("values = frame.to_numpy(np.float32)\nseries = torch.from_numpy(values)", []),
        ("values = np.zeros(5, dtype=np.float32)\nseries = torch.from_numpy(values)", []),
        ("values = frame.to_numpy()\nprint(values.mean())", []),  # no tensor is made of it
        ("x = 1\ntorch.set_default_dtype(torch.float64)\nseries = torch.from_numpy(np.load(path))", [2]),
        ("net = Net()\nnet = net.double()", [2]),
        ("net = Net().to(device, dtype=torch.float64)", [1]),
        ("sums = np.zeros(5, dtype=np.float64)", []),  # a metric of the script's
        ("if x.dtype == torch.float64:\n    raise ValueError(x)", []),
        ("no python (", []),
    ],
)
def test_where_float64_comes_in(tmp_path: Path, script: str, lines: list[int]) -> None:
    run = runs.recorded(tmp_path / "run", (None, [runs.light(0, 1)], runs.CPU))
    kept = {"format": 1, "files": {"train.py": {"sha256": "", "text": script}}}
    (run / "ranks/00000/sources.json").write_text(json.dumps(kept))
    found = runs.measured(run, float64_lines).frame(float64_lines)
    assert [(place.file, place.line) for place in found] == [("train.py", line) for line in lines]
    assert all(place.what in script.splitlines()[line - 1] for place, line in zip(found, lines, strict=True))


@pytest.mark.parametrize("text", ["{", '{"files": 1}', None])
def test_a_recording_without_its_files_names_none(tmp_path: Path, text: str | None) -> None:
    run = runs.recorded(tmp_path / "run", (None, [runs.light(0, 1)], runs.CPU))
    if text is not None:
        (run / "ranks/00000/sources.json").write_text(text)
    assert runs.measured(run, float64_lines).frame(float64_lines) == []
