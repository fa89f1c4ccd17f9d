"""Recurrent networks that are written out: found by the body that repeats, told from deep networks by their weights."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.chains.recurrent import recurrent_loops
from dlprof.errors import NotMeasured
from tests.fixtures import recurrent, runs
from tests.fixtures.recurrent import GRU, LSTM, RNN

US = 1_000
DEEP = "addmm mul tanh add"  # a layer with a residual


def network(folder: Path, body: str, turns: int, parameters: int | None = 8) -> pd.DataFrame:
    return runs.measured(recurrent.network(folder, body, turns, parameters), recurrent_loops).frame(recurrent_loops)


@pytest.mark.parametrize(
    ("body", "form"), [(LSTM, "LSTM"), (GRU, "GRU"), (RNN, "RNN"), ("lstm_cell", "cells in a loop")]
)
def test_a_cell_in_a_loop_is_found(tmp_path: Path, body: str, form: str) -> None:
    (row,) = network(tmp_path, body, 40).to_dict("records")
    operators = 40 * len(body.split())
    assert (row["form"], row["calls"], row["operators"]) == (form, 1, operators)
    # The host launches an operator in 10 µs; what is left is the device's: two kernels of 3 µs a turn, or one.
    left = 40 * min(2, len(body.split())) * 3 * US
    assert row["gain_ns"] == pytest.approx(operators * 10 * US - left, rel=0.15)


def test_a_deep_network_has_weights_for_each_layer(tmp_path: Path) -> None:
    assert network(tmp_path, DEEP, 40, parameters=80).empty


@pytest.mark.parametrize("body", [LSTM, DEEP])
def test_few_turns_are_no_loop(tmp_path: Path, body: str) -> None:
    assert network(tmp_path, body, 8).empty


def test_without_the_number_of_parameters_it_abstains(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="parameters"):
        network(tmp_path, LSTM, 40, parameters=None)


def test_a_transformer_is_no_recurrence(tmp_path: Path) -> None:
    layer = "layer_norm addmm bmm softmax bmm addmm add layer_norm addmm gelu addmm add"
    assert network(tmp_path, layer, 24).empty
    assert len(network(tmp_path / "more", "addmm relu", 100)) == 0
