"""The expected failures are no special case of each other: what is caught as one is not the other."""

from __future__ import annotations

import pytest

from dlprof.errors import DlprofError, DoesNotApply, NotMeasured


@pytest.mark.parametrize(("raised", "other"), [(DlprofError, NotMeasured), (NotMeasured, DlprofError)])
def test_each_is_caught_alone_and_keeps_its_words(raised: type[Exception], other: type[Exception]) -> None:
    assert not issubclass(raised, other)
    with pytest.raises(raised, match="no such file"):
        raise raised("x.json: no such file")


def test_what_does_not_apply_is_not_measured_either() -> None:
    with pytest.raises(NotMeasured, match="one rank"):
        raise DoesNotApply("one rank")
