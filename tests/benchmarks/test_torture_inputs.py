"""The torture of inputs: its sources are read when sound, and it sees what breaks and what takes too much."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.torture import inputs

UNREAD = {"execution_trace"}  # a format that is known, and not read


@pytest.mark.long
def test_sound_sources_are_read(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    made = {n: path for n, path in inputs.sources(tmp_path / "sources").items() if "/" not in n}
    refused = set()
    for name, path in made.items():
        work = tmp_path / "work" / name
        (work / "input").mkdir(parents=True)
        tried = inputs.reported(inputs.copied(path, work / "input"), work)
        assert tried.outcome in ("full", "refused"), tried
        if tried.outcome == "refused":
            refused.add(name)
    assert refused == UNREAD


@pytest.mark.long
@pytest.mark.parametrize(("memory", "seconds"), [(300 << 20, 60), (6 << 30, 0.01)])
def test_what_takes_too_much_is_seen(tmp_path: Path, memory: int, seconds: float) -> None:
    (tmp_path / "sources").mkdir()
    path = inputs.copied(inputs.sources(tmp_path / "sources")["job"], tmp_path)
    assert inputs.reported(path, tmp_path, memory, seconds).outcome in inputs.OUTCOMES[3:]


def test_inputs_follow_from_the_seed_and_differ() -> None:
    data = b'{"a": 1, "b": [2, "three"]}' * 50
    made = [inputs.changed(data, random.Random(n)) for n in range(50)]
    assert made == [inputs.changed(data, random.Random(n)) for n in range(50)]
    assert len({*made, data}) > 40


def test_the_table_adds_up() -> None:
    text = inputs.table({"a": Counter(full=2, refused=1), "b": Counter(partial=4)})
    assert text.splitlines()[-1].split() == ["all", "7", "2", "4", "1", "0", "0"]
