"""What the lines of a script take by the operators that they call, with their part of the backward pass."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis import idioms
from dlprof.analysis.compute.rules import costly_line, needless_products
from dlprof.analysis.source.line_shares import CostlyLine
from dlprof.analysis.source.line_work import OperatorPasses, _shares
from dlprof.result import Place
from tests.fixtures.jobs import COMPILES_NOTHING, launch, wrapped
from tests.fixtures.runs import MS

pytest.importorskip("torch", reason="recording needs torch")

TRAINS = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
book = torch.nn.Parameter(torch.randn(400, 48))
layer = torch.nn.Linear(48, 48)
optimizer = torch.optim.SGD([book, *layer.parameters()], lr=0.01)
x = torch.randn(300, 48)


def distances(x, book):
    return (x.unsqueeze(1) - book.unsqueeze(0)).pow(2).sum(2)


def small(x):
    return (x - x.mean()).pow(2).sum()


for _ in range(60):
    hidden = layer(x)
    far = distances(hidden, book)
    loss = far.softmax(1).mul(far).mean() + small(hidden)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "train.py").write_text(COMPILES_NOTHING + TRAINS)
    done = launch(wrapped(folder / "run", [sys.executable, "train.py"]), folder)
    assert done.returncode == 0, done.stderr
    again = launch([sys.executable, "-m", "dlprof.cli", "report", "run", "--quiet"], folder)
    assert again.returncode == 0, again.stderr
    return json.loads((folder / "run/result.json").read_text())


@pytest.mark.long
def test_the_line_that_computes_most_is_first_with_its_part_of_the_backward_pass(said: Any) -> None:
    first = said["lines"][0]
    assert first["source"] == "return (x.unsqueeze(1) - book.unsqueeze(0)).pow(2).sum(2)"
    assert first["function"] == "distances"
    # Of `pow` and `sub` the small line has a thousandth of the bytes, though as many calls.
    small = next((one for one in said["lines"] if one["function"] == "small"), {"ns": 0.0})
    assert small["ns"] < 0.05 * first["ns"]
    assert 0.2 * first["ns"] < first["backward_ns"] < first["ns"]
    assert first["share"] > 0.6
    assert sum(one["share"] for one in said["lines"]) <= 1 + 1e-9


@pytest.mark.long
def test_it_is_named_as_needless_with_what_a_product_would_save_at_most(said: Any) -> None:
    found = next(one for one in said["outcomes"] if one["id"] == "costly_line")
    assert found["state"] == "found"
    assert found["at_most"]
    assert "torch.cdist" in found["changes"][0]["text"]
    assert found["where"][0]["function"] == "distances"
    assert found["saving_ns"] > 0.4 * said["window"]["step_ns"]


JACOBIAN = "(row,) = torch.autograd.grad(y[:, n].sum(), x, create_graph=True)"


@pytest.mark.parametrize(
    ("beside", "function", "line", "places", "took"),
    [
        (JACOBIAN, "penalty", 9, [9, 10], 95.0),  # what is done with each row is part of it, and its second derivatives
        (JACOBIAN, "penalty", 6, [], 0.0),  # too far away
        (JACOBIAN, "another", 9, [], 0.0),
        ("mask = torch.tril(torch.ones(n, n))", "penalty", 9, [], 0.0),  # whose time is its own
    ],
)
def test_a_line_is_known_by_one_beside_it_of_which_it_is_part(
    beside: str, function: str, line: int, places: list[int], took: float
) -> None:
    at = {
        "rank": 0,
        "file": "/w/train.py",
        "phase": "",
        "of_ns": 100.0,
        "second_ns": 20.0,
        "calls": 80,
        "operators": "aten::sum",
    }
    known = {"line": line, "function": function, "source": beside, "forward_ns": 5.0, "backward_ns": 0.0}
    costly = {"line": 10, "function": "penalty", "source": "total = total + row.square().sum()"}
    rows = [
        at | costly | {"forward_ns": 30.0, "backward_ns": 40.0, "gain_ns": 70.0},
        at | known | {"gain_ns": math.nan},
    ]
    found = costly_line._traced(pd.DataFrame(rows), None)
    assert [(ns, [line.place.line, *(one.line for one in line.callers)]) for ns, _, line in found.values()] == (
        [(took, places)] if places else []
    )


@pytest.mark.parametrize(
    ("calls", "ns", "loop", "took"),
    [
        (150, 5 * MS, "loops_in_python", 22 * MS),  # with the line beside it, 300 together
        (80, 5 * MS, "loops_in_python", 0),  # too few are as many layers, or parts of a batch
        (150, 5 * MS, "", 0),
        (150, 20 * MS, "loops_in_python", 0),  # each as long as a layer
    ],
)
def test_a_loop_over_elements_is_known_by_the_stacks(calls: int, ns: int, loop: str, took: int) -> None:
    at = {"rank": 0, "file": "/w/net.py", "function": "similarity", "phase": "forward", "operators": "aten::sum"}
    at |= {"of_ns": 99.0 * MS, "second_ns": 9.0 * MS, "calls": calls}
    rows = [
        at
        | {"line": 9, "source": "rows.append(f(x))", "forward_ns": ns, "backward_ns": 9.0 * MS, "gain_ns": 15.0 * MS},
        at | {"line": 8, "source": "own = g(x)", "forward_ns": 3.0 * MS, "backward_ns": 4.0 * MS, "gain_ns": math.nan},
    ]
    stacks = pd.DataFrame({"rank": [0, 1], "function": "similarity", "line": 9, "idiom": [loop, idioms.LOOPS]})
    found = costly_line._traced(pd.DataFrame(rows), stacks)
    assert {rank: (ns, line.place.line) for rank, (ns, _, line) in found.items()} == ({0: (took, 9)} if took else {})
    assert costly_line._traced(pd.DataFrame(rows), None) == {}


@pytest.mark.parametrize(
    ("function", "rank", "ns"), [("penalty", 0, 15.0), ("another", 0, 0.0), ("penalty", 1, 0.0)], ids=str
)
def test_a_line_that_differentiates_has_what_grad_takes(function: str, rank: int, ns: float) -> None:
    at = {"rank": 0, "doing": "backward", "function": "penalty", "of": 80}
    rows = [at | {"idiom": idioms.JACOBIAN, "samples": 30}, at | {"idiom": "", "samples": 40}]
    phases = pd.DataFrame({"rank": 0, "phase": ["backward", "rest"], "ns": [40.0, 90.0]})
    line = CostlyLine(Place("train.py", 9, function), (), 0.5, JACOBIAN, idioms.BY_NAME[idioms.JACOBIAN])
    assert costly_line._in_grad(pd.DataFrame(rows), phases, rank, line) == ns


def test_a_line_has_its_part_of_the_time_between_operators() -> None:
    row = {"rank": 0, "file": "/w/train.py", "function": "penalty", "line": 9, "calls": 30}
    rows = [row, row | {"line": 10, "calls": 15}, row | {"line": 40, "calls": 45}, row | {"rank": 1, "calls": 8}]
    line = CostlyLine(Place("train.py", 9, "penalty"), (), 0.5, "", None)
    took = [costly_line._between(pd.DataFrame(rows), {0: 60.0, 1: 5.0}, rank, line) for rank in (0, 1, 2)]
    assert took == [30.0, 5.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "trains", "gone"),
    [
        ("repeated", True, 3 / 4 * (8 + 20) + 2.0),  # of what the forward pass moves, and as much of the backward pass
        ("repeated", False, 3 / 4 * 8 + 2.0),
        ("constant", False, 3 / 4 * 8 + 2.0),
    ],
)
def test_what_is_computed_again_takes_its_part_of_the_backward_pass(kind: str, trains: bool, gone: float) -> None:
    none = np.array([])
    ns = {("aten::matrix_exp", False): 8.0, ("aten::matrix_exp", True): 20.0, ("aten::tril", False): 2.0}
    passes = OperatorPasses(none, none, none, none, ns, {"aten::matrix_exp": 400, "aten::tril": 40})
    flow = {"kind": kind, "used": 0.0, "shape": "", "calls": 1, "trains": trains}
    flow["moved"] = {"aten::matrix_exp": 300, "aten::tril": 50, "aten::unknown": 7}
    operators = pd.DataFrame({"operator": ["aten::matrix_exp"], "shape": [""], "calls": [4], "ns": [99.0]})
    row = needless_products._row(flow, operators, {"aten::matrix_exp": 800.0}, 3, passes)
    assert row["gone_ns"] == pytest.approx(gone)


def test_scores_in_a_loss_have_its_whole_backward_pass() -> None:
    none = np.array([])
    ns = {("aten::_log_softmax", False): 8.0, ("aten::_log_softmax", True): 12.0, ("aten::nll_loss_forward", True): 4.0}
    passes = OperatorPasses(none, none, none, none, ns | {("aten::sum", True): 50.0}, {})
    flow = {"kind": "unused_rows", "used": 0.25, "shape": "", "calls": 1, "read_by": "aten::nll_loss_forward"}
    operators = pd.DataFrame({"operator": ["aten::sum"], "shape": [""], "calls": [4], "ns": [99.0]})
    rows = [needless_products._row(flow, operators, {}, n, passes)["gone_ns"] for n in (3, 1)]
    assert rows == [0.75 * 24, 0.75 * 8]


@pytest.mark.parametrize(
    ("called", "moved", "shares"),
    [
        # By bytes where they are known, by calls where not.
        ([{"pow": 1}, {"pow": 1}], [{"pow": 30}, {"pow": 10}], [{"pow": 0.75}, {"pow": 0.25}]),
        ([{"pow": 1}, {"pow": 3}], [{}, {}], [{"pow": 0.25}, {"pow": 0.75}]),
        ([{"view": 1, "mm": 2}, {"view": 1}], [{"mm": 5}, {}], [{"view": 0.5, "mm": 1.0}, {"view": 0.5}]),
        ([{}], [{}], [{}]),
    ],
)
def test_lines_share_the_time_of_an_operator(
    called: list[dict[str, int]], moved: list[dict[str, int]], shares: list[dict[str, float]]
) -> None:
    assert _shares(called, moved) == shares


@pytest.mark.parametrize(
    ("calls", "ns", "is_large"),
    [(18, 90 * MS, True), (2_000, 90 * MS, False), (0, 0, False)],
    ids=["layers", "an element a turn", "no operator"],
)
def test_a_loop_over_large_operators_is_no_loop_over_elements(calls: int, ns: int, is_large: bool) -> None:
    frame = pd.DataFrame([{"rank": 0, "file": "/w/net.py", "line": 5, "calls": calls, "forward_ns": float(ns)}])
    line = CostlyLine(Place("net.py", 5, "forward"), (), 0.9, "m = message(h)", idioms.BY_NAME[idioms.LOOPS])
    assert costly_line._is_large(frame, 0, line) == is_large
    assert not costly_line._is_large(frame, 1, line)
    assert not costly_line._is_large(None, 0, line)


@pytest.mark.parametrize(("function", "times"), [("f", 3.0), ("of another", None)])
def test_what_a_lines_part_of_the_backward_pass_takes(function: str, times: float | None) -> None:
    columns = ["rank", "function", "file", "line", "forward_ns", "backward_ns"]
    frame = pd.DataFrame([(0, "f", "/w/train.py", 8, 2.0, 5.0), (0, "f", "/w/train.py", 7, 1.0, 4.0)], columns=columns)
    line = CostlyLine(Place("train.py", 7, function), (), 0.5, "", None)
    assert costly_line._backward(frame, 0, line) == times
