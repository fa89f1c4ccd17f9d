"""What handing a batch over costs: by its tensors and bytes, within bounds, and as it was measured."""

import numpy as np
import pytest

from dlprof.analysis.input.handover import HOSTS_DIFFER, handover, told

MS = 1e6


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
