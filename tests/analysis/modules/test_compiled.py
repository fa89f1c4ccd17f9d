"""Compiled graphs divided by module, on traces made by hand with known times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.sums import OUTSIDE
from dlprof.analysis.modules.work import module_work
from dlprof.read.run import open_run
from tests.fixtures import layers, runs, traces
from tests.fixtures.traces import Event

Call = tuple[str, str, str]  # operator, module, what comes before it

KINDS = {"": "Net", "a": "Linear", "b": "Linear", "h": "ModuleList"} | {f"h.{n}": "Block" for n in range(2)}
KINDS |= {f"h.{n}.up": "Linear" for n in range(2)}


def graph(key: str, start: int, dur: int) -> Event:
    return traces.op(f"## Call CompiledFxGraph {key} ##", start, dur)


def shares(
    folder: Path, events: Sequence[Event | list[Event]], graphs: dict[str, list[Call]], *, gpu: bool = False
) -> dict[tuple[str, str], float]:
    """Return the time of the step by module and part, in a run that noted these graphs."""
    made = traces.trace(*events, world_size=1) if gpu else layers.on_cpu(*events)
    runs.recorded(folder, (made, (), runs.GPU if gpu else runs.CPU))
    rank = folder / "ranks" / "00000"
    tree = [{"path": p, "kind": k, "parameters": 1, "parameter_bytes": 4} for p, k in KINDS.items()]
    rows = [
        {"graph": key, "operator": operator, "module": module, "before": before}
        for key, calls in graphs.items()
        for operator, module, before in calls
    ]
    for name, lines in (("modules", tree), ("compiled", rows)):
        (rank / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    work = RankData(open_run(folder).ranks[0]).once(module_work)
    return {(path, part): ns for path, part, ns in zip(work["path"], work["part"], work["exposed_ns"], strict=True)}


def flags(folder: Path) -> dict[str, list[float]]:
    """Return how often each module is called, whether it is one compiled piece, and whether its kernels are known."""
    work = RankData(open_run(folder).ranks[0]).once(module_work)
    forward = work[work["part"] == "forward"]
    rows = forward[["path", "calls", "compiled", "fused"]].to_dict("split")["data"]
    return {path: said for path, *said in rows}


def whole(*inside: Event) -> list[Event | list[Event]]:
    """Return a step of 1,000 ns in which a model runs from 100 on for 400, compiled, and back from 600 on for 300."""
    return [
        traces.step(0, 0, 1_000),
        layers.called("", "Net", 100, 400),
        traces.op("Torch-Compiled Region: 0/0", 110, 380),
        traces.op("Torch-Compiled Region: 1/0", 112, 5),  # without a graph
        layers.forward("CompiledFunction", 120, 360, 3),
        layers.function("CompiledFunctionBackward", 600, 300, 3),
        *inside,
    ]


FORWARD = [("aten::addmm", "a", "a"), ("aten::addmm", "b", "b"), ("", "b", "b")]
BACKWARD = [("aten::mm", "b", ""), ("aten::mm", "a", "b")]


def test_operators_and_the_kernels_between_them_go_to_their_modules(tmp_path: Path) -> None:
    events = whole(
        graph("one", 150, 300),
        traces.op("aten::addmm", 160, 40),  # until 200
        traces.op("aten::addmm", 300, 100),
        graph("two", 620, 200),
        traces.op("aten::mm", 650, 50),
        traces.op("aten::mm", 750, 20),
    )
    assert shares(tmp_path, events, {"one": FORWARD, "two": BACKWARD}) == {
        ("", "forward"): 100.0,  # around the graph
        ("a", "forward"): 50.0,
        ("b", "forward"): 250.0,
        ("", "backward"): 130.0,  # around the graph, and before its first call
        ("b", "backward"): 100.0,
        ("a", "backward"): 70.0,
        (OUTSIDE, "other"): 300.0,
    }


def test_a_graph_that_is_divided_is_no_region(tmp_path: Path) -> None:
    shares(tmp_path, whole(graph("one", 150, 300), traces.op("aten::addmm", 160, 40)), {"one": FORWARD[:1]})
    assert flags(tmp_path)[""] == [1, 0, 1]


def test_a_graph_whose_calls_are_not_those_that_were_noted_is_one_piece(tmp_path: Path) -> None:
    events = whole(graph("one", 150, 300), traces.op("aten::addmm", 160, 40), graph("other", 620, 200))
    assert shares(tmp_path, events, {"one": FORWARD}) == {
        ("", "forward"): 400.0,
        ("", "backward"): 300.0,
        (OUTSIDE, "other"): 300.0,
    }
    assert flags(tmp_path)[""] == [1, 1, 0]


def test_layers_that_share_a_graph_have_their_own_names(tmp_path: Path) -> None:
    events: list[Event | list[Event]] = [traces.step(0, 0, 1_000)]
    for n in range(2):
        at = 400 * n
        events += [
            layers.called(f"h.{n}", "Block", at, 300),
            traces.op("Torch-Compiled Region: 0/0", at + 10, 280),
            graph("one", at + 20, 200),
            traces.op("aten::addmm", at + 20, 150),
        ]
    calls = [("aten::addmm", "h.0.up", "h.0"), ("", "h.0", "h.0")]
    found = shares(tmp_path, events, {"one": calls})
    assert found == {
        **{(f"h.{n}", "forward"): 150.0 for n in range(2)},
        **{(f"h.{n}.up", "forward"): 150.0 for n in range(2)},
        (OUTSIDE, "other"): 400.0,
    }
    assert flags(tmp_path)["h.0"] == [1, 0, 1]
    assert flags(tmp_path)["h.0.up"] == [0, 0, 0]


def test_a_models_graph_of_one_layer_is_called_by_the_model(tmp_path: Path) -> None:
    events = whole(graph("one", 150, 300), traces.op("aten::addmm", 150, 300))
    found = shares(tmp_path, events, {"one": [("aten::addmm", "h.1.up", "h.1.up")]})
    assert found["h.1.up", "forward"] == 300.0


def test_kernels_on_a_device_go_to_what_launched_them(tmp_path: Path) -> None:
    fused = "triton_poi_fused_gelu_0"
    events = whole(
        graph("one", 150, 300),
        traces.op("aten::addmm", 160, 40),
        *traces.launched("gemm", 170, 200, 100, 1),
        traces.op(fused, 210, 20),
        *traces.launched(fused, 215, 300, 30, 2),
        traces.op(fused, 240, 20),
        *traces.launched(fused, 245, 330, 70, 3),
    )
    calls = [("aten::addmm", "a", "a"), (fused, "", ""), (fused, "b", "b")]
    found = shares(tmp_path, events, {"one": calls}, gpu=True)
    assert {path: found[path, "forward"] for path in ("a", "", "b")} == {"a": 100.0, "": 30.0, "b": 70.0}


@pytest.mark.parametrize("line", ["{", '{"graph": 3}', '{"graph": "x", "operator": "y", "module": "nowhere"}'])
def test_a_log_that_is_cut_or_of_another_model_costs_its_graphs_alone(tmp_path: Path, line: str) -> None:
    events = whole(graph("one", 150, 300), traces.op("aten::addmm", 150, 300))
    runs.recorded(tmp_path, (layers.on_cpu(*events), (), runs.CPU))
    (tmp_path / "ranks" / "00000" / "compiled.jsonl").write_text(f"{line}\n")
    work = RankData(open_run(tmp_path).ranks[0]).once(module_work)
    assert work["exposed_ns"].sum() == 1_000
