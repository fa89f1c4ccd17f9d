"""How much a rank has to do: kernels on a device, operators on a CPU, and what tells more work from slower work."""

from pathlib import Path
from typing import Any

import numpy as np

from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.stragglers.late_ranks import Reason, longer_because, workload
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import held_up
from tests.fixtures.runs import MS, asked


def test_kernels_and_copied_bytes_of_a_step(tmp_path: Path) -> None:
    made = held_up({}, {"computation": MS})
    frame = runs.measured(runs.foreign(tmp_path, *made), workload).frame(workload).set_index("rank")
    assert frame["pieces"].to_dict() == {0: 2, 1: 2}
    assert frame["piece_ns"].to_dict() == {0: 875_000, 1: 1_375_000}
    assert frame["copied_bytes"].to_dict() == {0: 1_000_000, 1: 1_000_000}


def test_a_cpu_has_operators(tmp_path: Path) -> None:
    run = runs.measured(runs.cpu_run(tmp_path, 1 * MS, 3 * MS), workload, sample_means)
    frame = run.frame(workload).set_index("rank")
    assert frame["pieces"].to_dict() == {0: 2, 1: 2}
    assert np.isnan(frame["copied_bytes"]).all()
    assert asked(run, longer_because, 1).words.startswith("as many operators, each 1.67 ×")


def test_waiting_within_an_operator_is_no_work(tmp_path: Path) -> None:
    """A function of the backward pass that waits for an all-to-all is an operator to the profiler."""
    made = []
    for rank, alone in enumerate((3 * MS, MS)):
        events: list[Any] = []
        for n in range(3):
            t = 10 * n * MS
            events += [traces.step(n, t, 10 * MS), traces.op("aten::mm", t, alone)]
            events += [traces.op("ToOwnersBackward", t + alone, 4 * MS - alone)]
            events += [traces.annotation("gloo:all_to_all", t + alone, 4 * MS - alone, tid=2)]
        made.append(traces.trace(*events, rank=rank, backend="gloo", device=""))
    frame = runs.measured(runs.foreign(tmp_path, *made), workload).frame(workload).set_index("rank")
    assert (frame["pieces"] * frame["piece_ns"]).to_dict() == {0: 3 * MS, 1: MS}


def test_ranks_alike_give_no_reason(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, traces.training(), traces.training(rank=1)), workload, sample_means)
    assert asked(run, longer_because, 0) == Reason()
