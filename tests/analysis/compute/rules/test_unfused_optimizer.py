"""An optimizer that is not fused: found with a prediction, silent on a fused one, abstaining where nobody saw it."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules.unfused_optimizer import RULE
from dlprof.result import Change, Outcome, Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def trained(folder: Path, **told: Any) -> Outcome:
    """Ask of a CPU run whose optimizer takes 4 of 10 ms."""
    settings = {"class": "AdamW", "fused": None, "foreach": False, "parameters": 50} | told
    steps = [runs.light(n, 10 * MS, optimizer_ns=4 * MS) for n in range(30)]
    return ask(RULE, runs.recorded(folder / "run", (None, steps, {**runs.CPU, "optimizers": [settings]})))


def test_found_with_what_fusing_would_leave(tmp_path: Path) -> None:
    found = trained(tmp_path)
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(3 * MS)
    assert found.share == pytest.approx(0.3)
    assert (found.ranks, found.verdict) == ((0,), "30 % of each step would be saved by a fused AdamW.")
    assert "50 parameter tensors" in found.summary
    assert found.changes == (
        Change("`AdamW(..., fused=True)` (is not set; foreach is False)", (Setting("fused", None, True),)),
    )
    assert found.evidence is not None
    assert found.evidence.rows == (("now", 4.0 * MS), ("fused, as predicted", 1.0 * MS))


def test_a_fused_one_is_left_alone(tmp_path: Path) -> None:
    clear = trained(tmp_path, fused=True)
    assert (clear.state, clear.share, clear.summary) == ("clear", 0, "AdamW is fused")


def test_a_class_without_a_fused_kernel_is_not_judged(tmp_path: Path) -> None:
    answer = trained(tmp_path, **{"class": "Lion"})
    assert (answer.state, "no fused Lion" in answer.why) == ("does_not_apply", True)


def test_what_a_class_takes_goes_by_the_recording_before_its_name(tmp_path: Path) -> None:
    mine = trained(tmp_path / "mine", takes=["foreach"])  # an AdamW of the script's own
    assert (mine.state, "no fused AdamW" in mine.why) == ("does_not_apply", True)
    torchs = trained(tmp_path / "torchs", takes=["fused", "foreach"])
    assert torchs.state == "found"


def test_one_whose_fused_kernel_nobody_has_timed_abstains(tmp_path: Path) -> None:
    answer = trained(tmp_path, **{"class": "Adagrad"})
    assert (answer.state, "--set optimizer.fused=True" in answer.why) == ("not_measured", True)


def test_a_short_one_is_left_alone(tmp_path: Path) -> None:
    steps = [runs.light(n, 10 * MS, optimizer_ns=MS // 10) for n in range(30)]
    facts = {**runs.CPU, "optimizers": [{"class": "SGD", "fused": None, "foreach": None, "parameters": 9}]}
    clear = ask(RULE, runs.recorded(tmp_path / "run", (None, steps, facts)))
    assert clear.state == "clear"
    # 0.3 of the 0.1 ms of 10 ms remain.
    assert clear.share == pytest.approx(0.007)


def test_without_its_settings_it_abstains(tmp_path: Path) -> None:
    assert ask(RULE, runs.foreign(tmp_path, traces.training(3))).state == "not_measured"


def test_on_a_gpu_its_host_takes_what_a_fused_one_was_measured_to_take(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(3):
        t, c = 5 * n * MS, 1 + 10 * n
        events += [
            traces.step(n, t, 5 * MS),
            traces.launched("gemm", t, t + 5_000, 595_000, c),
            traces.annotation("Optimizer.step#SGD.step", t + 600_000, 4_400_000),
            traces.launched("multi_tensor_apply", t + 4_695_000, t + 4_700_000, 100_000, c + 1),
            traces.launched("multi_tensor_apply", t + 4_710_000, t + 4_800_000, 195_000, c + 2),
        ]
    facts = {
        "device": {"type": "cuda", "name": "NVIDIA A100"},
        "optimizers": [{"class": "SGD", "fused": None, "foreach": None, "parameters": 60}],
    }
    made = traces.trace(*events, world_size=1)
    found = ask(RULE, runs.recorded(tmp_path / "run", (made, [], facts)))
    assert found.state == "found"
    # 0.6 ms before it, and 0.45 ms and 1.6 µs for each of 60 tensors: its kernels end before.
    assert found.saving_ns == pytest.approx(5 * MS - (600_000 + 450_000 + 60 * 1_600), rel=0.02)
