"""try.json is read as it was written, and what it does not hold is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.result.tried import FORMAT, Attempt, Gain, Tried, from_json, to_json

ONE = Attempt(
    {"loader.num_workers": 4, "loader.persistent_workers": True},
    "gain",
    findings=("input_wait",),
    predicted=1.44,
    measured=Gain(1.41, 1.38, 1.44, 3),
    before_ns=2e8,
    after_ns=1.4e8,
)
FOUND = Tried(
    "complete", (ONE, Attempt({"gc.freeze": True}, "not_tried", "the time was up")), best=ONE, runs=7, steps=30
)


def plain(tried: Tried) -> Any:
    return json.loads(json.dumps(to_json(tried), allow_nan=False))


def test_there_and_back() -> None:
    data = plain(FOUND)
    assert data["format"] == FORMAT == 1
    assert from_json(data) == FOUND
    assert from_json({"format": 1, "state": "interrupted"}) == Tried("interrupted")


def test_a_setting_keeps_its_type() -> None:
    assert list(from_json(plain(FOUND)).attempts[0].settings.values()) == [4, True]
    assert ONE.words == "loader.num_workers=4, loader.persistent_workers=True"


def test_what_is_not_clear_is_listed() -> None:
    odd = Attempt({"gc.freeze": True}, "unclear")
    assert Tried("out_of_time", (ONE, odd)).unclear == (odd,)


@pytest.mark.parametrize("data", [None, [], 5, "text"])
def test_what_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(DlprofError, match=r"try\.json"):
        from_json(data)


@pytest.mark.parametrize("newer", [2, "1", None])
def test_another_format_is_refused(newer: Any) -> None:
    with pytest.raises(DlprofError, match="format"):
        from_json(plain(FOUND) | {"format": newer})


@pytest.mark.parametrize(
    ("key", "value"), [("state", "odd"), ("attempts", 5), ("best", {"verdict": "gain"}), ("runs", "x")]
)
def test_wrong_data_are_refused(key: str, value: Any) -> None:
    with pytest.raises(DlprofError, match=r"try\.json"):
        from_json(plain(FOUND) | {key: value})
