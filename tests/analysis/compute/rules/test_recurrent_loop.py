"""A recurrent network that is written out: found with the library's own, and the line that computes its gates."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.compute.rules.recurrent_loop import RULE
from tests.fixtures.asking import ask
from tests.fixtures.recurrent import GRU, LSTM, RNN, network

GATES = {"phase": "forward", "after": "forward", "file": "train.py", "line": 22, "function": "Cell.forward"}
LINES = [{**GATES, "source": "x.tanh()", "calls": 9, "operators": {"aten::tanh": 9}}]


@pytest.mark.parametrize(
    ("body", "cure"),
    [(LSTM, "`nn.LSTM("), (GRU, "`nn.GRU("), (RNN, "`nn.RNN("), ("lstm_cell", "instead of its cell in a loop")],
)
def test_it_is_found_with_the_librarys_own(tmp_path: Path, body: str, cure: str) -> None:
    found = ask(RULE, network(tmp_path, body, 40, flops={"state": "counted", "total": 1, "lines": LINES}))
    assert (found.state, found.at_most) == ("found", True)
    assert cure in found.advice[0]
    assert "make_graphed_callables" in found.advice[1]
    assert [(place.line, place.function) for place in found.where] == [(22, "Cell.forward")]
    assert f"{40 * len(body.split()):,} small operators" in found.summary


def test_few_turns_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, network(tmp_path, LSTM, 8)).state == "clear"
