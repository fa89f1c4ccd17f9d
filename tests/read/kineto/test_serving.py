"""Ranges of inference servers: what a step does, for how many requests and tokens; other ranges are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.read.kineto import torch_trace
from dlprof.read.kineto.serving import DECODE, MIXED, OTHER, PREFILL, SGLANG, VLLM, serving_step
from tests.fixtures import dialects, traces


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("execute_new_2_cached_0", (VLLM, PREFILL, 2, -1)),
        ("execute_new_0_cached_5", (VLLM, DECODE, 5, -1)),
        ("execute_context_2(512)_generation_3(3)", (VLLM, MIXED, 5, 515)),
        ("execute_context_1(128)_generation_0(0)", (VLLM, PREFILL, 1, 128)),
        ("execute_context_0(0)_generation_4(4)", (VLLM, DECODE, 4, 4)),
        ("execute_77_context_9(sq4sk4)", (VLLM, PREFILL, 9, -1)),
        ("step[EXTEND bs=17 toks=8192]", (SGLANG, PREFILL, 17, 8192)),
        ("step[DECODE bs=63]", (SGLANG, DECODE, 63, 63)),
        ("step[MIXED bs=2]", (SGLANG, MIXED, 2, -1)),
        ("step[NOVEL bs=2]", (SGLANG, OTHER, 2, -1)),
    ],
)
def test_names(name: str, said: tuple[object, ...]) -> None:
    assert serving_step(name) == said


@pytest.mark.parametrize(
    "name",
    [
        "execute_context_0(0)_generation_0(0)",
        "step[IDLE bs=0]",
        "execute_context_sql",
        "step[1]",
        "execute_new_x",
        "ProfilerStep#1",
    ],
)
def test_ranges_of_no_request_and_other_ranges_are_none(name: str) -> None:
    assert serving_step(name) is None


def test_steps_last_until_the_next_but_for_waiting_for_requests(tmp_path: Path) -> None:
    made = dialects.serving(["step[EXTEND bs=1 toks=9]", "step[DECODE bs=1]"], [4_000_000, 1_000_000])
    late = dialects.serving(["step[DECODE bs=1]"], [1_000_000])
    for event in late["traceEvents"]:
        made["traceEvents"].append({**event, "ts": event["ts"] + 100_000})
    reading = torch_trace.read(traces.write(tmp_path / "a.json", made))
    assert reading.facts["serving"] == SGLANG
    assert reading.tables["traced_steps"]["dur_ns"].tolist() == [4_050_000, 1_000_000, 1_000_000]


def test_a_training_job_serves_nothing(tmp_path: Path) -> None:
    assert "serving" not in torch_trace.read(traces.write(tmp_path / "a.json", traces.training())).facts
