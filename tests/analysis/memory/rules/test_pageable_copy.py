"""Copies from pageable memory: found, silent on pinned or hidden or tiny ones, abstaining without a device."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.rules.pageable_copy import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def batches(
    folder: Path,
    kinds: str = "HtoD (Pageable -> Device)",
    size: int = 10_000_000,
    takes: int = 400_000,
    *,
    beside: bool = False,
    pinned: bool = False,
    facts: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """Write four steps of 1 ms: a copy that takes so many ns, computing until 0.99 ms, and a wait for both.

    `beside`: it computes all the time, on a stream of its own. `pinned`: meanwhile 10 MB come from pinned memory in
    0.1 ms. A copy from pageable memory holds the host.
    """
    events: list[Any] = []
    for n in range(4):
        t, c = n * MS, 10 * n + 1
        holds = kinds == "HtoD (Pageable -> Device)"
        done = t + 10_000 + takes
        begin = t + 12_000 if beside else done + 8_000 if holds else done + 1_000
        asked = t + 2_000 if beside else done + 2_000 if holds else t + 20_000
        events += [
            traces.step(n, t, MS),
            traces.call("cudaMemcpyAsync", t + 5_000, takes + 6_000 if holds else 3_000, c),
            traces.copy(t + 10_000, takes, size, kinds, correlation=c),
            traces.launched("gemm", asked, begin, t + 990_000 - begin, c + 1, stream=9 if beside else 7),
            traces.call("cudaDeviceSynchronize", max(asked, t + 10_000) + 8_000, 0, c + 2),
        ]
        events[-1]["dur"] = (t + 992_000) / 1000 - events[-1]["ts"]
        if pinned:
            events.append(traces.call("cudaMemcpyAsync", t + 1_000, 2_000, c + 3))
            events.append(traces.copy(t + 20_000, 100_000, 10_000_000, "HtoD (Pinned -> Device)", c + 3, stream=21))
    made = traces.trace(*events, world_size=1, **keys)
    return runs.foreign(folder, made) if facts is None else runs.recorded(folder / "run", (made, [], facts))


def test_found_with_bytes_and_rate(tmp_path: Path) -> None:
    found = ask(RULE, batches(tmp_path))
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
    assert ask(RULE, batches(tmp_path, "HtoD (Pinned -> Device)")).state == "clear"


def test_hidden_copies_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, batches(tmp_path, beside=True))
    assert (clear.state, clear.share) == ("clear", 0)


def test_copies_of_a_few_bytes_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, batches(tmp_path, size=8)).state == "clear"


def test_what_comes_back_is_another_rules_business(tmp_path: Path) -> None:
    assert ask(RULE, batches(tmp_path, "DtoH (Device -> Pageable)")).state == "clear"


def test_pinned_copies_of_the_trace_tell_how_fast_the_link_is(tmp_path: Path) -> None:
    found = ask(RULE, batches(tmp_path / "told", pinned=True, device="An unknown GPU"))
    assert found.saving_ns == pytest.approx(300_000, rel=0.05)
    # Where nothing tells, they are taken to be as slow as now, and only waiting for them is gained.
    clear = ask(RULE, batches(tmp_path / "untold", device="An unknown GPU"))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.0065)  # of the 8 µs until the kernel runs


def test_without_a_device_it_abstains(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="gloo", world_size=1)
    assert ask(RULE, runs.foreign(tmp_path, made)).state == "not_measured"


def test_the_setting_of_the_run_is_cited(tmp_path: Path) -> None:
    facts = {
        "device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"},
        "loaders": [{"role": "train", "pin_memory": False}],
    }
    pinned = ask(RULE, batches(tmp_path, facts=facts)).changes[0]
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
    assert (abstains.state, "links no launch" in abstains.why) == ("not_measured", True)
