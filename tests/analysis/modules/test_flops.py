"""The FLOPs of each module, by the shapes in a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.modules.flops import module_flops
from dlprof.analysis.modules.work import module_work
from dlprof.errors import NotMeasured
from tests.fixtures import layers, runs, traces

SHAPES = {"Input Dims": [[8, 4], [4, 16]], "Input type": ["float", "float"]}


def test_products_count_to_the_module_that_multiplies(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.step(0, 0, 500),
        layers.called("", "Net", 0, 400),
        layers.called("a", "Linear", 10, 100),
        layers.forward("matmul", 15, 80, 1),
        layers.forward("mm", 20, 50, 2, **SHAPES),
        layers.called("b", "Tanh", 200, 50),
        layers.forward("tanh", 210, 20, 3),
    )
    rows = runs.rank_of(tmp_path, made).once(module_work).set_index("path")["flops"]
    assert rows.to_dict() == {"": 0.0, "a": 2 * 8 * 4 * 16, "b": 0.0, "(outside of modules)": 0.0}


def test_without_shapes_they_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="shapes"):
        runs.rank_of(tmp_path, layers.on_cpu(layers.two_layers())).once(module_flops)
