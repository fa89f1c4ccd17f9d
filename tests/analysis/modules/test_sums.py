"""Sums by module and part, and the table of a model of very many modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlprof.analysis.modules.frames import BACKWARD, FORWARD, OTHER, Frames, module_frames
from dlprof.analysis.modules.sums import GRAPH, MOST_MODULES, OUTSIDE, sums, table
from tests.fixtures import layers, runs


def frames_of(tmp_path: Path, *paths: str) -> Frames:
    made = layers.on_cpu([layers.called(path, "Linear", 10 * n, 5) for n, path in enumerate(paths)])
    return runs.rank_of(tmp_path, made).once(module_frames)


def test_values_are_added_up_by_module_and_part(tmp_path: Path) -> None:
    frames = frames_of(tmp_path, "a", "b")
    module, part = np.array([0, 0, 1, -1, 2]), np.array([FORWARD, FORWARD, BACKWARD, OTHER, OTHER])
    took, count = sums(frames, module, part, np.array([1, 2, 4, 8, 16])), sums(frames, module, part)
    rows = table(frames, {"compiled": np.array([-1, 1])}, ns=took, calls=count).to_dict("split")["data"]
    assert rows == [
        ["a", "Linear", "forward", 3.0, 2.0, 0],
        ["b", "Linear", "backward", 4.0, 1.0, 1],
        [OUTSIDE, "", "other", 8.0, 1.0, 0],
        [OUTSIDE, GRAPH, "other", 16.0, 1.0, 0],
    ]


def test_what_is_not_known_is_no_row_and_stays_unknown(tmp_path: Path) -> None:
    frames = frames_of(tmp_path, "a")
    took = sums(frames, np.array([0]), np.array([FORWARD]), np.array([1]))
    made = table(frames, {}, ns=took, flops=np.full_like(took, np.nan))
    assert len(made) == 1
    assert made["flops"].isna().all()


def test_very_many_modules_count_to_those_around_them(tmp_path: Path) -> None:
    paths = ["", "layers.0", *(f"layers.0.experts.{n}" for n in range(MOST_MODULES + 10))]
    frames = frames_of(tmp_path, *paths)
    every = np.arange(len(frames.paths))
    made = table(frames, {}, ns=sums(frames, every, np.full(len(every), FORWARD), np.ones(len(every))))
    assert made.set_index("path")["ns"].to_dict() == {"": 1.0, "layers.0": 1.0, "layers.0.experts": MOST_MODULES + 10}
