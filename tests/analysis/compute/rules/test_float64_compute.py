"""Products in float64: found by a GPU's peaks, on a CPU by what others gained, silent in float32, abstaining."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules.float64_compute import RULE
from dlprof.result import Setting
from tests.fixtures import processors, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

V100, A100, RTX = "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"
SQUARE = [1024, 1024], [1024, 1024]
CONVOLUTION = "aten::_slow_conv2d_forward"
FLAT = [8192, 8192], [8192, 1]  # as many bytes as numbers that it multiplies


def trained(folder: Path, device: str, dtype: str = "double", shapes: Any = SQUARE, waits: bool = True) -> Path:
    """Write three steps of 10 ms, of which 6 ms are one product; the host waits for it, or launches too late."""
    events: list[Any] = []
    for n in range(3):
        t = n * 10 * MS
        events += [traces.step(n, t, 10 * MS)]
        events += traces.product("aten::mm", t, "gemm", t + 10_000, 6 * MS, 3 * n + 1, *shapes, dtype=dtype)
        after = t + 50_000 if waits else t + 6 * MS
        events += traces.launched("elementwise", after, t + 6 * MS + 10_000, 3 * MS, 3 * n + 2)
        events += [traces.call("cudaStreamSynchronize", t + 100_000, 9 * MS, 3 * n + 3)] if waits else []
    return runs.foreign(folder, traces.trace(*events, world_size=1, device=device))


def counted(*dtypes: str, operator: str = "aten::addmm") -> dict[str, Any]:
    """Return the facts of a step whose products were counted, as many FLOPs in each type."""
    shape = {"operator": operator, "shape": "64 64x64 64x64", "calls": 1, "flops": 524_288, "bytes": 98_304}
    line = {"phase": "forward", "after": "forward", "file": "train.py", "line": 7, "function": "forward"}
    line |= {"source": "return x @ w", "operators": {operator: 1}}
    return {"flops": {"state": "counted", "shapes": [{**shape, "dtype": d} for d in dtypes], "lines": [line]}}


@pytest.mark.parametrize(
    ("device", "shapes", "left"),
    [
        (V100, SQUARE, 7.8 / 15.7),
        (V100, FLAT, 0.5),
        (A100, FLAT, 0.5),
        # No sheet has its peak in float64: at half of that in float32, 2 × 1024³ FLOPs of 6 ms.
        (RTX, SQUARE, 2 * 1024**3 / (128 * 2.52e9 * 256 / 2) / 6e-3),
    ],
)
def test_found_on_a_gpu_with_what_its_peaks_leave(tmp_path: Path, device: str, shapes: Any, left: float) -> None:
    found = ask(RULE, trained(tmp_path, device, shapes=shapes))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(6 * MS * (1 - left), rel=1e-3)
    assert [change.settings for change in found.changes] == [(Setting("dtype", "float64", "float32"),)]
    assert found.changes[0].numerics
    assert "`mm`" in found.advice[0]
    assert found.evidence is not None
    assert [row[0] for row in found.evidence.rows] == ["aten::mm"]


def test_tensor_cores_that_multiply_float64_as_fast_leave_nothing_to_gain(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path, A100))
    assert (clear.state, clear.saving_ns, clear.summary) == ("clear", 0, "products in float64 take 60 % of the step")


def test_a_late_host_would_gain_nothing(tmp_path: Path) -> None:
    assert ask(RULE, trained(tmp_path, V100, waits=False)).state == "clear"


def test_float32_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path / "gpu", V100, "float"))
    assert (clear.state, clear.summary) == ("clear", "no product is in float64")
    clear = ask(RULE, processors.computing(tmp_path / "cpu", **counted("float32")))
    assert (clear.state, clear.summary) == ("clear", "no product is in float64")


def test_an_unknown_device_abstains(tmp_path: Path) -> None:
    answer = ask(RULE, trained(tmp_path, "Some GPU 9"))
    assert (answer.state, "peaks of Some GPU 9" in answer.why) == ("not_measured", True)


@pytest.mark.parametrize(
    ("facts", "gone"),
    [
        # Half of the products, and half of what else works on large tensors.
        (counted("float64"), (processors.PRODUCTS + processors.SPLIT) / 2),
        # In part of the job: its products alone.
        (counted("float64", "float32"), processors.PRODUCTS / 4),
    ],
)
def test_found_on_a_cpu_with_what_others_gained(tmp_path: Path, facts: dict[str, Any], gone: float) -> None:
    found = ask(RULE, processors.computing(tmp_path, **facts))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(gone, rel=0.01)
    assert [(place.file, place.line) for place in found.where] == [("train.py", 7)]


def test_a_cpu_gains_more_by_convolutions(tmp_path: Path) -> None:
    events = [(traces.step(n, n * 100 * MS, 99 * MS), traces.op(CONVOLUTION, n * 100 * MS, 90 * MS)) for n in range(3)]
    made = traces.trace(*(e for both in events for e in both), world_size=1, backend="gloo", device="")
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    facts = {**runs.CPU, **counted("float64", operator="aten::convolution")}
    found = ask(RULE, runs.recorded(tmp_path / "run", (made, steps, facts)))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(0.8 * 90 / 99 * 100 * MS, rel=0.02)


def test_without_the_types_of_its_products_it_abstains(tmp_path: Path) -> None:
    answer = ask(RULE, processors.computing(tmp_path / "types"))
    assert (answer.state, "neither traced" in answer.why) == ("not_measured", True)
    assert ask(RULE, processors.computing(tmp_path / "trace", traced=False)).state == "not_measured"


def test_a_gpu_whose_work_was_not_traced_is_not_judged_by_its_host(tmp_path: Path) -> None:
    facts = {**counted("float64"), "device": {"type": "cuda", "name": V100}}
    answer = ask(RULE, processors.computing(tmp_path, **facts))
    assert (answer.state, answer.why) == ("not_measured", "the trace holds no work of a device")
