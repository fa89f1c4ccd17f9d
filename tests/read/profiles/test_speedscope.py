"""Speedscope's JSON: a file that py-spy 0.4 recorded, and profiles of both kinds by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.profiles.speedscope import read, recognise
from tests.fixtures.logged import GOLDEN

FRAMES = [{"name": "main", "file": "t.py", "line": 1}, {"name": "f"}, {"name": "g"}]


def written(folder: Path, *profiles: dict[str, Any], **more: Any) -> Path:
    data = {"$schema": "https://www.speedscope.app/file-format-schema.json", "shared": {"frames": FRAMES}} | more
    (folder / "x").write_text(json.dumps(data | {"profiles": profiles}))
    assert recognise(Head(folder / "x"))
    return folder / "x"


def weights(path: Path) -> dict[str, int]:
    table = read(path).tables["stacks"]
    return dict(zip(table["stack"], table["samples"], strict=True))


def test_a_file_of_py_spy() -> None:
    path = GOLDEN / "pyspy.speedscope.json.gz"
    assert recognise(Head(path))
    table = read(path).tables["stacks"]
    phases = table.groupby("phase", observed=True)["samples"].sum()
    assert phases["fetch"] == 2_420_000_000  # 242 samples of 10 ms
    assert phases["backward"] == 150_000_000


def test_events_are_the_time_between_them(tmp_path: Path) -> None:
    events = [("O", 0, 0), ("O", 10, 1), ("C", 40, 1), ("O", 40, 2), ("C", 100, 0)]
    profile = {
        "type": "evented",
        "name": "t",
        "unit": "milliseconds",
        "startValue": 0,
        "endValue": 100,
        "events": [{"type": kind, "at": at, "frame": frame} for kind, at, frame in events],
    }
    main, f, g = "main (t.py:1)", "f (<unknown>:0)", "g (<unknown>:0)"
    assert weights(written(tmp_path, profile)) == {
        main: 10_000_000,
        f"{main};{f}": 30_000_000,
        f"{main};{g}": 60_000_000,
    }


def test_samples_weigh_what_they_say(tmp_path: Path) -> None:
    profile = {
        "type": "sampled",
        "name": "t",
        "unit": "none",
        "samples": [[0, 1], [0], [7], [0, 1]],
        "weights": [2, 1, 9, 3],
    }
    assert weights(written(tmp_path, profile)) == {"main (t.py:1)": 1, "main (t.py:1);f (<unknown>:0)": 5}


def test_what_counts_something_else_than_time_is_left_out(tmp_path: Path) -> None:
    one = {"type": "sampled", "name": "t", "samples": [[0]], "weights": [2]}
    path = written(tmp_path, {**one, "unit": "seconds"}, {**one, "unit": "bytes"})
    assert weights(path) == {"main (t.py:1)": 2_000_000_000}
    assert len(read(path).warnings) == 1


@pytest.mark.parametrize(
    "profile",
    [
        {"type": "sampled", "samples": [[0]], "weights": [1e300]},
        {"type": "sampled", "samples": [[-1]], "weights": [1]},
        {
            "type": "evented",
            "events": [{"type": "C", "at": 1, "frame": 0}, {"at": "x"}, {"type": "O", "at": 2, "frame": 99}],
        },
    ],
)
def test_nonsense_is_no_stack(profile: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DlprofError):
        read(written(tmp_path, profile))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"type": "sampled", "samples": [[0]], "weights": [1]})
    path.write_text(path.read_text()[:-5])
    with pytest.raises(DlprofError, match="not a whole"):
        read(path)


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": []}', '{"profiles": []}', "[]"])
def test_other_files_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    assert not recognise(Head(tmp_path / "x"))
