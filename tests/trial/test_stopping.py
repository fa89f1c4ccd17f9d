"""A signal that asks for the end is noted, and everything is as before afterwards."""

from __future__ import annotations

import os
import signal

import pytest

from dlprof.trial.running import stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_ends_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stopping() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
        assert asked.by == number
    assert signal.getsignal(number) is before


def test_one_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
