"""Work and time by the step that launched them are those that an independent program made of real asynchronous jobs.

The traces were recorded by others and are not part of this project: without them these tests skip.
"""

from __future__ import annotations

import numpy as np
import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.steps import timing
from dlprof.analysis.timeline.traced import trace_window
from dlprof.read.run import open_run
from tests.fixtures.places import TRACES

ASYNC = TRACES / "gpu_async"

pytestmark = pytest.mark.skipif(not ASYNC.is_dir(), reason="the reference traces are not here (../shared/traces)")

# Kernels and copies a step, and of them NCCL's or RCCL's.
COUNTS = {
    "v100_ns": (1_219, 0),
    "mi300_resnet": (895, 4),
    "v100_rank1_of_2": (2_503, 10),
    "queued_graph": (1_375, 15),
}

# Of each steady step, ms, from the least to the most: its length, computation, communication and what of it is exposed.
TIMES = {
    "v100_ns": ((95.6, 95.6), (93.7, 93.7), (0, 0), (0, 0)),
    "mi300_resnet": ((18.6, 19.0), (6.4, 6.4), (15.4, 15.9), (11.4, 12.0)),
    "v100_rank1_of_2": ((114.8, 123.1), (85.2, 87.5), (36.4, 39.5), (10.5, 13.5)),
    "queued_graph": ((215, 216), (35.7, 36.3), (26.7, 37.8), (26, 37)),
}


@pytest.fixture(scope="module", params=COUNTS)
def traced(request: pytest.FixtureRequest) -> tuple[str, RankData]:
    return request.param, RankData(open_run(ASYNC / f"{request.param}.json.gz").ranks[0])


def test_every_step_launched_as_much_as_any_other(traced: tuple[str, RankData]) -> None:
    name, rank = traced
    work, found = rank.once(device.device_work), rank.once(trace_window)
    inside = (found.launched_in >= 0) & (found.launched_in < len(found.windows))
    of = found.launched_in[inside]
    exchanges = host.is_kind(work, "communication")[inside]
    pieces, exchanged = COUNTS[name]
    assert np.bincount(of).tolist() == [pieces] * len(found.windows)
    assert np.bincount(of[exchanges], minlength=len(found.windows)).tolist() == [exchanged] * len(found.windows)


def test_the_mean_step_and_its_parts_are_within_a_hundredth(traced: tuple[str, RankData]) -> None:
    name, rank = traced
    t, sets = rank.once(timing), rank.once(device.device_sets)
    within = iv.merge(t.windows)
    n = len(t.windows)
    parts = (sets.computation, sets.communication, sets.exposed_communication)
    means = [t.step_ns, *(iv.total(iv.intersect(within, part)) / n for part in parts)]
    for mean, (least, most) in zip(means, TIMES[name], strict=True):
        assert 0.99 * least <= mean / 1e6 <= 1.01 * most


def test_the_step_in_which_the_host_runs_ahead_is_left_out() -> None:
    rank = RankData(open_run(ASYNC / "v100_ns.json.gz").ranks[0])
    host_ms = np.diff(rank.once(trace_window).host)[:, 0] / 1e6
    assert host_ms.round().tolist() == [35, 72, 96, 96, 96]
    assert rank.once(timing).chosen.tolist() == [1, 2, 3, 4]
