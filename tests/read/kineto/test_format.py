"""Traces of torch's profiler as a format: their rank, and when they began, for windows of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.read.formats import Head
from dlprof.read.kineto.format import read, recognise
from tests.fixtures import traces


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank7.json", 7),
        ("some.json", None),
    ],
)
def test_a_rank_is_told_by_the_name_where_nothing_else_does(tmp_path: Path, name: str, rank: int | None) -> None:
    (part,) = recognise(Head(traces.write(tmp_path / name, traces.training(rank=None))))
    assert (part.rank, part.piece) == (rank, "")


def test_it_began_with_its_first_event(tmp_path: Path) -> None:
    (part,) = recognise(Head(traces.write(tmp_path / "a.json", traces.training())))
    assert part.began_ns == traces.BASE_NS + 10_000_000


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"text", b'{"a": [1]}'])
def test_other_files_are_none(tmp_path: Path, content: bytes) -> None:
    assert not recognise(Head(traces.write(tmp_path / "a.json", content)))


def test_it_is_read_whole(tmp_path: Path) -> None:
    assert len(read(traces.write(tmp_path / "a.json", traces.training())).tables["traced_steps"]) == 3
