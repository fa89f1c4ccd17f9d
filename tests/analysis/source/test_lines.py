"""Which lines count for a stack, which call operators most often, and what they call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.source.line_shares import busiest, call_sites, line_shares, names_in, over_ranks
from dlprof.analysis.source.patches import Call, Span
from dlprof.errors import NotMeasured
from tests.fixtures.runs import CPU, MS, light, measured, recorded
from tests.fixtures.sampled_stacks import LOADER, MAIN, WORKER, stacked

LIBRARY = "/lib/python3.11/site-packages"
BACKWARD = f"backward ({LIBRARY}/torch/_tensor.py:500)"
WORKING = 'process 10:"python train.py";process 11:"python train.py";thread (0x2): MainThread'


def test_a_stack_counts_for_the_innermost_line_of_the_users(tmp_path: Path) -> None:
    path = stacked(
        tmp_path,
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:68) 60\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:69) 30\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:69);dumps ({LIBRARY}/fast/json.py:5) 10\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:70);{BACKWARD} 40\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:61);{LOADER};decode (/w/data.py:7) 25\n",
        f"{WORKING};{WORKER};decode (/w/data.py:8) 50\n",
        f"{MAIN};run ({LIBRARY}/fancy/cli.py:3) 5\n",
        ranks=2,
    )
    frame = measured(path, line_shares).frame(line_shares)
    of_rank = frame[frame["rank"] == 0]
    rows = of_rank[["doing", "own", "file", "line", "function", "samples", "of"]].to_numpy().tolist()
    assert rows == [
        ["backward", True, "/w/train.py", 70, "main", 40, 40],
        ["fetch", True, "/w/data.py", 7, "decode", 25, 25],
        ["rest", True, "/w/train.py", 68, "main", 60, 105],
        ["rest", True, "/w/train.py", 69, "main", 40, 105],
        ["rest", False, "fancy/cli.py", 0, "run", 5, 105],
        ["worker", True, "/w/data.py", 8, "decode", 50, 50],
    ]
    assert of_rank["library"].tolist()[0] == "backward (torch/_tensor.py)"
    both = over_ranks(frame)
    first = both.iloc[0]
    assert (first["line"], first["samples"], first["of"], first["share"]) == (68, 120, 210, 120 / 210)


def test_what_the_users_line_called_is_named_where_it_was_seen_most(tmp_path: Path) -> None:
    log = f"main (/w/train.py:69);dumps ({LIBRARY}/fast/json.py:5);deep ({LIBRARY}/fast/x.py:1)"
    path = stacked(tmp_path, f"{MAIN};{log} 30\n", f"{MAIN};main (/w/train.py:69) 10\n")
    frame = measured(path, line_shares).frame(line_shares)
    assert frame[["line", "library", "samples"]].to_numpy().tolist() == [[69, "dumps (fast/json.py)", 40]]


def test_without_stacks_it_is_not_known(tmp_path: Path) -> None:
    run = measured(stacked(tmp_path, 'process 10:"python train.py";thread (0x2): other;f (/w/x.py:1) 5\n'), line_shares)
    with pytest.raises(NotMeasured):
        run.frame(line_shares)


# -- the line that calls operators most often, by the phase, and the function beside it


def line(number: int, function: str, *, after: str = "backward", phase: str = "", **operators: int) -> dict[str, Any]:
    of = {f"aten::{name}": n for name, n in operators.items()}
    return {"file": "a.py", "line": number, "function": function, "source": "x", "phase": phase, "after": after} | {
        "operators": of
    }


@pytest.mark.parametrize(
    ("lines", "places"),
    [
        ([], []),
        ([line(1, "f", mul=5), line(2, "f", mul=9)], [2]),
        ([line(1, "f", mul=9), line(2, "g", mul=3), line(3, "h", mul=8)], [1, 3]),
        # A function that hardly calls them says nothing.
        ([line(1, "f", mul=9), line(2, "g", mul=2)], [1]),
        ([line(1, "f", add=9), line(2, "g", mul=2)], [2]),
        ([line(1, "f", mul=9, after="forward"), line(2, "g", mul=9, phase="forward")], []),
    ],
)
def test_the_busiest_line_of_each_function(lines: list[dict[str, Any]], places: list[int]) -> None:
    found = busiest({"flops": {"lines": lines}}, "", "backward", {"aten::mul"})
    assert [place.line for place in found] == places
    for facts in ({}, {"flops": None}, {"flops": {"state": "off"}}):  # recordings without lines
        assert busiest(facts, "", "backward", {"aten::mul"}) == ()


# -- the calls of all ranks

ROW = {"kind": "save", "file": "train.py", "line": 7, "function": "main", "source": "torch.save(x)"}


def test_calls_are_those_of_all_ranks_each_once(tmp_path: Path) -> None:
    other = {**ROW, "line": 9}
    ranks = [(None, [light(n, MS) for n in range(9)], {**CPU, "calls": rows}) for rows in ([ROW], [ROW, other])]
    found = measured(recorded(tmp_path, *ranks), call_sites).frame(call_sites)
    assert [(call.line, call.source) for call in found] == [(7, "torch.save(x)"), (9, "torch.save(x)")]
    none = recorded(tmp_path / "none", (None, [light(n, MS) for n in range(9)], CPU))
    assert measured(none, call_sites).frame(call_sites) == []


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
