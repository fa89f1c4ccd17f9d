"""A sampler's log of dlprof outside its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.read.formats import Head
from dlprof.read.gpu_logs.sampled import read, recognise

LINE = '{"at_ns":1772939616000000000,"perf_ns":5,%s}\n'


@pytest.mark.parametrize(
    ("line", "source"), [('"busy_share":0.5', "gpu"), ('"core_percent":[9]', "host"), ('"rss_bytes":7', "processes")]
)
def test_what_is_in_a_line_says_which_sampler_it_is(line: str, source: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(LINE % line * 3)
    assert recognise(Head(tmp_path / "x"))
    assert set(read(tmp_path / "x").tables["samples"]["source"]) == {source}


@pytest.mark.parametrize("text", ["", "{}", '{"at_ns":5}\n', LINE % '"loss":5'])
def test_other_logs_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    assert not recognise(Head(tmp_path / "x"))
