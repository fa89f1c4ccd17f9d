"""The calls of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.source.line_shares import call_sites, names_in
from dlprof.analysis.source.patches import Call, Span
from tests.fixtures.runs import CPU, MS, light, measured, recorded

ROW = {"kind": "save", "file": "train.py", "line": 7, "function": "main", "source": "torch.save(x)"}


def test_calls_are_those_of_all_ranks_each_once(tmp_path: Path) -> None:
    other = {**ROW, "line": 9}
    ranks = [(None, [light(n, MS) for n in range(9)], {**CPU, "calls": rows}) for rows in ([ROW], [ROW, other])]
    found = measured(recorded(tmp_path, *ranks), call_sites).frame(call_sites)
    assert [(call.line, call.source) for call in found] == [(7, "torch.save(x)"), (9, "torch.save(x)")]


def test_a_run_without_them_has_none(tmp_path: Path) -> None:
    assert (
        measured(recorded(tmp_path, (None, [light(n, MS) for n in range(9)], CPU)), call_sites).frame(call_sites) == []
    )


@pytest.mark.parametrize(
    ("source", "text", "names"),
    [
        ("loss = F.cross_entropy(model(images), labels)", "model(images)", ("model", "images")),
        ("out = self.net(batch.x, mask=m)", "self.net(batch.x, mask=m)", ("self.net", "batch.x")),
        ("out = model(x.to(device))", "model(x.to(device))", ("model", "")),
        ("out = model(**batch)", "model(**batch)", ("", "")),
        ("for x in model(images):", "model(images)", ("", "")),
    ],
)
def test_what_a_line_calls_and_with_what(source: str, text: str, names: tuple[str, str]) -> None:
    at = source.index(text)
    assert names_in(Call("forward", "t.py", 1, source=source, span=Span(1, 1, at, at + len(text)))) == names
