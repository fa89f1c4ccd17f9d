"""What handing a batch over costs: by its tensors and bytes, within bounds, and as it was measured; and pinning it."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.engine import RankFacts
from dlprof.analysis.input.fetch_replay import HOSTS_DIFFER, handover, told
from dlprof.analysis.input.loader import pinning
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import DoesNotApply
from tests.fixtures.runs import MS


def test_both_sides_pay_by_the_tensor_and_by_the_byte() -> None:
    few, many, large = handover(2, 0), handover(32, 0), handover(2, 10e6)
    # Of 30 tensors more, each takes a connection; of 10 MB more, each page a fault.
    assert many.taking_ns - few.taking_ns == pytest.approx(4.5 * MS)
    assert many.sending_ns - few.sending_ns == pytest.approx(4.8 * MS)
    assert large.taking_ns - few.taking_ns == pytest.approx(3 * MS)
    assert large.sending_ns - few.sending_ns == pytest.approx(9 * MS)


def test_it_is_known_within_what_hosts_differ_by() -> None:
    of = told(10, 1e6, np.nan)
    assert of.usual == handover(10, 1e6)
    assert of.least.taking_ns * HOSTS_DIFFER == of.usual.taking_ns == of.most.taking_ns / HOSTS_DIFFER


def test_of_batches_that_were_not_looked_at_it_may_be_nothing_or_much() -> None:
    of = told(-1.0, -1.0, np.nan)
    assert of.usual == handover(2, 0)
    assert of.least.taking_ns == 0
    assert of.most.taking_ns > 4 * of.usual.taking_ns


def test_what_was_measured_is_not_guessed() -> None:
    of = told(10, 1e6, 3 * MS)
    assert {one.taking_ns for one in (of.usual, of.least, of.most)} == {3 * MS}
    assert of.least.sending_ns < of.usual.sending_ns < of.most.sending_ns


PINNED = {"role": "train", "num_workers": 4, "pin_memory": True}


def asked(
    *,
    step: int = 50,
    wait: int = 40,
    fetch: int = 100,
    size: float = 200e6,
    timed: tuple[int, ...] = (),
    device: str = "cuda",
    batches: float = 1.0,
    loaders: int = 1,
    **loader: Any,
) -> tuple[float, int]:
    """Return pin_ns in ms, and whether it is known, of a job of 20 steady steps that wait for `wait` of `step` ms."""
    begins = [k * step * MS for k in range(20)]
    lengths = np.full(20, step * MS, dtype=float)
    none = np.zeros(0, dtype=np.int64)
    timing = Timing(lengths, "steps", "step", None, none.reshape(0, 2), none.reshape(0, 2), none, none,
                    {"fetch": wait * MS}, lengths, none.astype(bool))  # fmt: skip
    # Of each 100 ms the thread was on a core; one row before the steps are steady, and one where that is not known.
    rows = [(0, -1), (-9 * MS, 90 * MS), *((k * step * MS + 1, ns * MS) for k, ns in enumerate(timed))]
    usage = pd.DataFrame(rows, columns=["start_ns", "pin_ns"]).assign(kind="usage", dur_ns=100 * MS)
    found = pinning(
        usage,
        pd.DataFrame({"step_batches": [batches], "loaders": [loaders]}),
        pd.DataFrame({"worker": [0, 1], "dur_ns": [fetch * MS, fetch * MS / 2]}),
        pd.DataFrame({"tensors": [2.0], "tensor_bytes": [size]}),
        pd.DataFrame({"start_ns": begins, "dur_ns": step * MS, "steady": True}),
        timing,
        RankFacts(0, {"loaders": [PINNED | loader], "device": {"type": device}}, none, {}),
    ).iloc[0]
    return round(found["pin_ns"] / MS, 2), int(found["known"])


@pytest.mark.parametrize(
    ("run", "pin", "known"),
    [
        # By the kernel's count, a fifth and two fifths of the time.
        ({"timed": (20, 40), "wait": 1}, 15, 1),
        ({"timed": (20, 40), "wait": 1, "batches": 2.0}, 7.5, 1),
        # It is what the loop waits for, and had a core for three quarters of the time; or for too little to be that.
        ({"timed": (70, 80)}, 50, 1),
        ({"timed": (20, 40)}, 15, 1),
        # The loop waits, its workers make a batch every 25 ms, and one comes every 50.
        ({}, 50, 1),
        ({"batches": 2.0}, 25, 0),  # that the workers take as long for
        ({"batches": 2.0, "fetch": 20}, 25, 1),
        ({"batches": 2.0, "loaders": 2}, 50, 1),  # each loader has a thread of its own
        # Workers that need 75 ms explain more than all of it, and a loop that does not wait explains itself.
        ({"fetch": 300}, 50, 0),
        ({"wait": 1}, 50, 0),
        # The usual time: 0.2 ms, 0.15 for a tensor, 0.3 for a MB. So small a batch is not what a loop waits 50 ms for.
        ({"size": 10e6}, 3.5, 0),
        ({"wait": 1, "step": 100}, 60.5, 0),
    ],
)
def test_a_batch_takes_what_was_timed_else_what_is_waited_for_else_the_usual(
    run: dict[str, Any], pin: float, known: int
) -> None:
    took, sure = asked(**run)
    assert took == pytest.approx(pin)
    assert sure == known


@pytest.mark.parametrize("run", [{"pin_memory": False}, {"num_workers": 0}, {"device": "cpu"}])
def test_without_a_device_workers_and_the_setting_no_thread_pins(run: dict[str, Any]) -> None:
    with pytest.raises(DoesNotApply, match="no thread"):
        asked(**run)
