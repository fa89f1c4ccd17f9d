"""What files of other tools say survives the way to result.json and back."""

from __future__ import annotations

import json

from dlprof.result import Result, RunInfo
from dlprof.result.figures import GpuLog, Profile
from dlprof.result.stored import from_json, to_json


def test_there_and_back() -> None:
    profile = Profile("p.json", "py-spy", "samples", 400.0, "decode", "/me/data.py", 41, 0.5, own=True)
    log = GpuLog("nvidia-smi 3", 100, 99.0, busy_share=0.63, held_by="heat")
    result = Result(RunInfo("x"), None, profiles=(profile,), gpu_logs=(log,))
    assert from_json(json.loads(json.dumps(to_json(result)))) == result
