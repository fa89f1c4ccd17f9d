"""What runs only because algorithms are deterministic: in what torch itself traces, and in steps of known lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.estimate import Rule
from dlprof.analysis.host.rules import deterministic
from dlprof.analysis.host.rules.deterministic import FILLS, INTERPOLATION, SUMS
from tests.fixtures import operators, runs, traces
from tests.fixtures.ruled import Case, check, clear, found, jobs, table, unmeasured
from tests.fixtures.runs import GPU, MS

US = 1_000
ENGINE = "autograd::engine::evaluate_function: "
SCRIPT = "def seed():\n    torch.use_deterministic_algorithms(not args.fast, warn_only=True)\n"

# Operators around each kernel, the outer first, and its length in ms.
Work = tuple[tuple[str, ...], float]
NEEDED: list[Work] = [
    (("aten::conv2d", "aten::cudnn_convolution"), 10),
    # What a script's own indexing and filling needs in any mode.
    (("aten::mul",), 1),
    (("aten::full", "aten::fill_"), 2),
    ((f"{ENGINE}IndexBackward0", "aten::index_put_", "aten::_index_put_impl_"), 3),
    (("aten::index_add_", "aten::index_add_kernel"), 1),
]
INTERPOLATED: list[Work] = [
    (("aten::conv2d", "aten::cudnn_convolution"), 1),
    (("aten::arange",), 0.5),
    (("aten::_unsafe_index",), 2),
    (("aten::mul",), 1),
    (("aten::cross_entropy_loss",), 1),
    ((f"{ENGINE}MulBackward0", "aten::mul"), 1),
    ((f"{ENGINE}UnsafeIndexBackward0", "aten::_unsafe_index_put", "aten::_index_put_impl_"), 9.5),
    ((f"{ENGINE}ConvolutionBackward0", "aten::convolution_backward"), 1),
]
FILLED: list[Work] = [(("aten::empty_like", "aten::empty", "aten::fill_"), 4), (("aten::new_empty", "aten::fill_"), 1)]
SUMMED: list[Work] = [((f"{ENGINE}IndexSelectBackward0", "aten::index_add_", "aten::_index_put_impl_"), 6)]


def recorded(folder: Path, *work: Work, mode: bool | None = True, source: str = SCRIPT) -> Path:
    """Record three steps in which each of these launches a kernel, and the host waits for the last."""
    events: list[Any] = []
    each = [*NEEDED, *work]
    length = int(sum(ms for _, ms in each) * MS) + MS
    for step in range(3):
        at, begin = step * length, step * length
        events.append(traces.step(step, at, length))
        done = at + 200 * US
        for place, (names, ms) in enumerate(each):
            number = 100 * step + place + 1
            tid = traces.AUTOGRAD if names[0].startswith(ENGINE) else traces.MAIN
            for depth, name in enumerate(names):
                events.append(traces.op(name, at + depth * US, (10 - 2 * depth) * US, tid=tid))
            events.append(traces.call("cudaLaunchKernel", at + 4 * US, US, number, tid=tid))
            events.append(traces.kernel("kernel", done, int(ms * MS), number))
            done, at = done + int(ms * MS), at + 12 * US
        events.append(traces.call("cudaDeviceSynchronize", at, done - at, 100 * step + 99))
        assert done < begin + length
    trace = traces.trace(*events, world_size=1, device="NVIDIA A100-SXM4-80GB")
    run = runs.recorded(folder / "run", (trace, [], {**GPU, "matmul": {"deterministic": mode}}))
    kept = {"format": 1, "files": {"train.py": {"sha256": "", "text": source}}}
    (run / "ranks/00000/sources.json").write_text(json.dumps(kept))
    return run


job = jobs(recorded)
OFF, FILL_OFF = "use_deterministic_algorithms(False)", "fill_uninitialized_memory = False"
CASES = {
    "interpolation": found(
        job(*INTERPOLATED),
        14 * MS,
        OFF,
        rows=[(INTERPOLATION, 5, 14 * MS)],
        numerics=[True],
        training=[False],
        at_most=True,
        where=[("train.py", 2)],
        never=[FILL_OFF],
    ),
    "fills of new tensors": found(
        job(*FILLED), 5 * MS, OFF, FILL_OFF, rows=[(FILLS, 2, 5 * MS)], numerics=[True, False]
    ),
    "sorted sums": found(job(*SUMMED), 6 * MS, rows=[(SUMS, 1, 6 * MS)]),
    "all of it": found(
        job(*INTERPOLATED, *FILLED, *SUMMED), 25 * MS, rows=[(INTERPOLATION,), (SUMS,), (FILLS,)], sharp=0.02
    ),
    "no copy of the script": found(job(*SUMMED, source="x ="), 6 * MS),
    "it costs nothing": clear(job()),
    "the mode is off": clear(job(*INTERPOLATED, *FILLED, *SUMMED, mode=False)),
    "the mode is not known": unmeasured(job(*SUMMED, mode=None), "was not recorded"),
}


@table({deterministic: CASES})
def test_what_the_mode_costs(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)


def test_interpolation_as_torch_puts_it_together(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    decompositions = pytest.importorskip("torch._decomp.decompositions")
    convolution, x = torch.nn.Conv2d(2, 2, 3, padding=1), torch.randn(1, 2, 8, 8)

    def run() -> None:
        large = decompositions._upsample_linear_vec(convolution(x), [16, 16], False, None)
        torch.nn.functional.cross_entropy(large, torch.zeros(1, 16, 16, dtype=torch.long)).backward()

    spans = operators.profiled(torch, tmp_path, run).table(schema.SPANS.name)
    ops = (spans["kind"] == "op").to_numpy()
    times, start = deterministic.interpolation(spans, ops), spans["start_ns"].to_numpy()

    def inside(name: str) -> set[bool]:
        return set(iv.holds(times, start[ops & (spans["name"] == name).to_numpy()]).tolist())

    assert inside("aten::_unsafe_index") == inside("aten::_index_put_impl_") == inside("aten::arange") == {True}
    assert (
        inside("aten::convolution") == inside("aten::convolution_backward") == inside("aten::_log_softmax") == {False}
    )
