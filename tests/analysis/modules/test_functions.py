"""Which operator made a function of the backward pass, on hand-made traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dlprof.analysis.modules.frames import forward_rows
from dlprof.analysis.timeline.host import is_on_device
from tests.fixtures import layers, runs, traces

OTHER = 4200  # another thread


def makers(tmp_path: Path, *events: Any) -> dict[str, str]:
    """Return for each function by name the start of its maker and its name; "": none is known."""
    model = layers.called("", "Model", 1_000, 10)  # without one autograd's numbers are not read
    data = runs.rank_of(tmp_path, layers.on_cpu(*events, model))
    spans = data.table("spans")
    names = spans["name"].astype(str)
    rows = np.flatnonzero(names.str.startswith(layers.ENGINE))
    found = forward_rows(spans, data.once(is_on_device), rows)
    return {
        names.iloc[row].removeprefix(layers.ENGINE): names.iloc[maker] if maker >= 0 else ""
        for row, maker in zip(rows.tolist(), found.tolist(), strict=True)
    }


def test_the_last_operator_with_its_number_made_a_function(tmp_path: Path) -> None:
    assert makers(
        tmp_path,
        layers.forward("linear", 0, 100, 3),
        layers.forward("t", 10, 20, 3),
        layers.forward("addmm", 40, 50, 4),
        layers.forward("relu", 120, 10, 5),
        layers.function("ReluBackward0", 200, 10, 5),
        layers.function("AddmmBackward0", 220, 10, 4),
        layers.function("TBackward0", 240, 10, 3),
    ) == {"ReluBackward0": "aten::relu", "AddmmBackward0": "aten::addmm", "TBackward0": "aten::t"}


def test_threads_that_count_by_themselves_are_told_apart(tmp_path: Path) -> None:
    """As a block that is computed again in the autograd thread, whose numbers begin anew."""
    assert makers(
        tmp_path,
        layers.forward("mul", 0, 10, 1),
        layers.forward("add", 20, 10, 2),
        layers.forward("div", 40, 10, 3),
        layers.function("CheckpointFunctionBackward", 100, 200, 3),
        layers.forward("tanh", 110, 10, 1, OTHER),
        layers.forward("exp", 130, 10, 2, OTHER),
        layers.function("ExpBackward0", 150, 10, 2, OTHER, thread=7),
        layers.function("TanhBackward0", 170, 10, 1, OTHER, thread=7),
        layers.function("AddBackward0", 320, 10, 2),
        layers.function("MulBackward0", 340, 10, 1),
    ) == {
        "CheckpointFunctionBackward": "aten::div",
        "ExpBackward0": "aten::exp",
        "TanhBackward0": "aten::tanh",
        "AddBackward0": "aten::add",
        "MulBackward0": "aten::mul",
    }


def test_a_range_without_a_number_has_that_of_the_function_behind_the_hooks(tmp_path: Path) -> None:
    def unnumbered(start: int) -> Any:
        return traces.op(f"{layers.ENGINE}AddmmBackward0", start, 50)

    def runs_at(start: int, number: int) -> Any:
        return traces.op("AddmmBackward0", start, 10, **traces.made_by(number, 1))

    forward = [layers.forward("addmm", 0, 10, 3), layers.forward("relu", 20, 10, 4)]
    hook = traces.op("aten::mul", 110, 10)
    made = makers(tmp_path / "within", *forward, unnumbered(100), hook, runs_at(130, 3))
    assert made == {"AddmmBackward0": "aten::addmm"}
    made = makers(tmp_path / "behind", *forward, unnumbered(100), hook, runs_at(160, 3))
    assert made == {"AddmmBackward0": ""}


def test_a_thread_that_begins_anew_has_the_later_operators(tmp_path: Path) -> None:
    assert makers(
        tmp_path,
        layers.forward("mul", 0, 10, 1),
        layers.function("First", 20, 10, 1),
        layers.forward("add", 40, 10, 1),
        layers.function("Second", 60, 10, 1),
    ) == {"First": "aten::mul", "Second": "aten::add"}


def test_a_function_of_an_operator_without_a_number_counts_to_the_one_before(tmp_path: Path) -> None:
    assert makers(
        tmp_path,
        layers.forward("mul", 0, 10, 1),
        layers.forward("as_strided", 20, 10, 2),  # not looked at
        layers.forward("add", 40, 10, 3),
        layers.function("AsStridedBackward0", 60, 10, 2),
    ) == {"AsStridedBackward0": "aten::mul"}


def test_what_was_made_before_the_trace_has_no_maker(tmp_path: Path) -> None:
    assert makers(
        tmp_path,
        layers.function("Early", 0, 10, 90),
        layers.forward("mul", 20, 10, 100),
        layers.function("Earlier", 40, 10, 99),
        layers.function("Much later", 60, 10, 10_000),
    ) == {"Early": "", "Earlier": "", "Much later": ""}


def test_a_trace_without_numbers_has_no_makers(tmp_path: Path) -> None:
    assert makers(tmp_path, traces.op("aten::mul", 0, 10), traces.op(f"{layers.ENGINE}X", 20, 10)) == {"X": ""}
