"""The FLOPs of each module, by the shapes in a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.modules.work import module_flops, module_work
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


def test_a_module_with_a_product_whose_flops_no_shape_shows_has_none(tmp_path: Path) -> None:
    told = {"Input Dims": [[2, 3, 8, 8], [4, 3, 3, 3], [4]], "Input type": ["float"] * 3}
    made = layers.on_cpu(
        traces.step(0, 0, 500),
        layers.called("a", "Conv2d", 10, 100),
        layers.forward("mkldnn_convolution", 20, 50, 1, **told),
        layers.called("b", "Linear", 200, 100),
        layers.forward("mm", 210, 20, 2, **SHAPES),
    )
    rows = runs.rank_of(tmp_path, made).once(module_work).set_index("path")["flops"]
    assert rows.isna().to_dict() == {"a": True, "b": False, "(outside of modules)": False}
    assert rows["b"] == 2 * 8 * 4 * 16


def test_without_shapes_they_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="shapes"):
        runs.rank_of(tmp_path, layers.on_cpu(layers.two_layers())).once(module_flops)


def test_what_the_recorder_counted_is_of_each_step(tmp_path: Path) -> None:
    events = [traces.step(0, 0, 500), traces.step(1, 500, 500), layers.called("", "Net", 0, 400)]
    events += [layers.called("a", "Linear", 10, 100), layers.called("a", "Linear", 510, 100)]
    run = runs.recorded(tmp_path, (layers.on_cpu(events), [], {}))
    row = {"kind": "Linear", "parameters": 1, "parameter_bytes": 4, "bucket": -1, "sharded": 0}
    counted = [
        row | {"path": "a", "forward_flops": 100, "recompute_flops": 0, "backward_flops": 200},
        row | {"path": "a.inner", "forward_flops": 7, "recompute_flops": 0, "backward_flops": 0},  # not in the trace
    ]
    (run / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(one) + "\n" for one in counted))
    frame = runs.measured(run, module_work).frame(module_work)
    flops = frame[frame["flops"] > 0].set_index(["path", "part"])["flops"].to_dict()
    assert flops == {("a", "forward"): 107, ("a", "backward"): 200}
