"""The structs of modules survive the way to result.json and back."""

from __future__ import annotations

import json

from dlprof.result import Outcome, Result, RunInfo
from dlprof.result.figures import InModule
from dlprof.result.stored import from_json, to_json
from tests.fixtures import results


def test_there_and_back() -> None:
    found = Outcome("fp32_matmul", "found", "Found", modules=(InModule("head", "Linear", 0.5),))
    result = Result(RunInfo("x"), None, outcomes=(found,), modules=results.encoder())
    assert from_json(json.loads(json.dumps(to_json(result)))) == result


def test_a_result_of_before_there_were_modules_is_read() -> None:
    data = to_json(Result(RunInfo("x"), None, outcomes=(Outcome("a", "clear", "A"),)))
    del data["modules"], data["outcomes"][0]["modules"]
    result = from_json(data)
    assert result.modules is None
    assert result.outcomes[0].modules == ()
