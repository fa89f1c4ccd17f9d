"""Copies from pageable memory: found, silent on pinned or hidden or tiny ones, abstaining without a device."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.rules.pageable_copy import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.allocator import copied_batches
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def test_found_with_bytes_and_rate(tmp_path: Path) -> None:
    found = ask(RULE, copied_batches(tmp_path))
    assert found.state == "found"
    # An H100 takes 10 MB from pinned memory in 0.2 ms; and the kernel is launched meanwhile.
    assert found.saving_ns == pytest.approx(200_000, rel=0.05)
    assert "25 GB/s" in found.summary
    assert found.ranks == (0,)
    settings = [change.settings for change in found.changes]
    assert settings == [(Setting("pin_memory", None, True),), (Setting("non_blocking", None, True),)]
    assert found.evidence is not None
    assert found.evidence.columns[3:] == ("size_bytes", "time_ns", "exposed_ns", "rate per second_bytes")
    (row,) = found.evidence.rows
    assert row == ("HtoD", "pageable", 1, 10_000_000, 400_000, 400_000, pytest.approx(25e9))


def test_pinned_copies_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, copied_batches(tmp_path, "HtoD (Pinned -> Device)")).state == "clear"


def test_hidden_copies_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, copied_batches(tmp_path, beside=True))
    assert (clear.state, clear.share) == ("clear", 0)


def test_copies_of_a_few_bytes_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, copied_batches(tmp_path, size=8)).state == "clear"


def test_what_comes_back_is_another_rules_business(tmp_path: Path) -> None:
    assert ask(RULE, copied_batches(tmp_path, "DtoH (Device -> Pageable)")).state == "clear"


def test_pinned_copies_of_the_trace_tell_how_fast_the_link_is(tmp_path: Path) -> None:
    found = ask(RULE, copied_batches(tmp_path / "told", pinned=True, device="An unknown GPU"))
    assert found.saving_ns == pytest.approx(300_000, rel=0.05)
    # Where nothing tells, they are taken to be as slow as now, and only waiting for them is gained.
    clear = ask(RULE, copied_batches(tmp_path / "untold", device="An unknown GPU"))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.0065)  # of the 8 µs until the kernel runs


@pytest.mark.parametrize(
    ("takes", "loader", "saving"),
    [
        # 10 MB that take 0.4 ms of a step of 1 ms are pinned in 0.5 ms, beside the step; or by whoever trains.
        (400_000, {"num_workers": 4}, 208_000),
        (400_000, {"num_workers": 0}, 208_000),
        # 0.75 ms, known to a tenth, bound a step from which 0.4 ms would go.
        (600_000, {"num_workers": 4}, 175_000),
        (600_000, {"num_workers": 0}, 151_000),  # beside 22 µs of launching
        (800_000, {"num_workers": 4}, None),
        # Memory of its own that the script pins once costs nothing in a step, nor is it known of a job without facts.
        (800_000, {"num_workers": 4, "pin_memory": True}, 608_000),
        (800_000, None, 608_000),
    ],
)
def test_a_step_takes_no_less_than_pinning_its_batches(
    tmp_path: Path, takes: int, loader: dict[str, Any] | None, saving: float | None
) -> None:
    told = [] if loader is None else [{"role": "train", "pin_memory": False, **loader}]
    facts = {"device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}, "loaders": told}
    answer = ask(RULE, copied_batches(tmp_path, takes=takes, facts=facts))
    assert answer.state == ("clear" if saving is None else "found")
    if saving is None:
        assert answer.lost_share == pytest.approx(0.8, rel=0.02)
        assert "pinning would not help: one thread takes about 1.00 ms for it, and a step 1.00 ms" in answer.summary
    else:
        assert answer.saving_ns == pytest.approx(saving, rel=0.01)


def test_without_a_device_it_abstains(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="gloo", world_size=1)
    assert ask(RULE, runs.foreign(tmp_path, made)).state == "does_not_apply"


def test_the_setting_of_the_run_is_cited(tmp_path: Path) -> None:
    facts = {
        "device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"},
        "loaders": [{"role": "train", "pin_memory": False}],
    }
    pinned = ask(RULE, copied_batches(tmp_path, facts=facts)).changes[0]
    assert "(is False)" in pinned.text
    assert pinned.settings == (Setting("pin_memory", False, True),)


def test_a_trace_that_links_nothing_abstains(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.copy(0, 400_000, 10_000_000),
        traces.kernel("gemm", 400_000, 600_000),
        world_size=1,
    )
    abstains = ask(RULE, runs.foreign(tmp_path, made))
    assert (abstains.state, "does not link" in abstains.why) == ("not_measured", True)
