"""The structs of a scaling study."""

from __future__ import annotations

import msgspec
import pytest

from dlprof.result.scale import Scaling, Size, Study, Transfers, to_json


def test_work_is_samples_where_they_are_known() -> None:
    assert Size(4, ("a",), 2e9, samples=128.0).work_per_s == pytest.approx(64.0)
    assert Size(4, ("a",), 2e9).work_per_s == pytest.approx(2.0)


def test_there_and_back() -> None:
    study = Study("job", "weak", (Size(1, ("a",), 1e6), Size(2, ("b", "c"), 1.1e6, parts={"computation": 1e6})))
    data = to_json(study)
    assert data.pop("format") == 1
    assert msgspec.convert(data, Study) == study
    known = Scaling((Transfers("all_reduce", 2, 1, 1.0, 5e4, None),), 1e5, None, (-1.0, 1.0))
    assert msgspec.convert(msgspec.to_builtins(known), Scaling) == known
