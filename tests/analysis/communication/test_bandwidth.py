"""Bandwidth of collectives, the links that it shows, and the rule that finds a slow one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.communication.bandwidth import (
    bandwidth,
    bus_factor,
    exchanged,
    links,
    size_class,
    slowing_settings,
)
from dlprof.analysis.communication.rules.slow_link import RULE
from dlprof.analysis.compute.peaks import nvlink
from dlprof.errors import NotMeasured
from dlprof.result import Outcome, Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import exchanging, grouped
from tests.fixtures.runs import MS

PAIRS = ((0, 1), (2, 3), (4, 5))
FAST, SLOW = 4 * MS, 10 * MS
NVLINK_NS = SLOW * 4 / 450 / 0.75  # 40 MB in 10 ms are 4 GB/s; so long they take at 75 % of 450 GB/s


def test_waiting_is_no_transfer(tmp_path: Path) -> None:
    frame = runs.measured(runs.foreign(tmp_path, *exchanging((0, 1, 2, 3))), bandwidth).frame(bandwidth)
    (row,) = frame.to_dict("records")
    assert (row["collective"], row["ranks"], row["count"], row["bytes"]) == ("all_reduce", 4, 1.0, 40_000_000)
    assert (row["transfer_ns"], row["wait_ns"]) == (MS, 3 / 4 * MS / 2)
    assert [row["algbw"], row["busbw"], row["exposed_ns"]] == pytest.approx([40e9, 60e9, MS])
    assert (row["peak"], row["culprit"], row["late"], row["matched"]) == (450e9, 3, 1, 1)


def test_with_ranks_missing_waiting_is_not_known(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path, *exchanging((0, 1, 2))[:2])
    (row,) = runs.measured(path, bandwidth).frame(bandwidth).to_dict("records")
    assert (np.isnan(row["wait_ns"]), row["culprit"], row["transfer_ns"]) == (True, -1, 1.5 * MS)


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("broadcast", 8, 1),
        ("send_recv", 8, 1),
    ],
)
def test_the_factors_are_those_of_nccl_tests(collective: str, ranks: int, factor: float) -> None:
    assert bus_factor(collective, ranks) == factor


PEAKS = {
    "NVIDIA GB200": 900e9,
    "NVIDIA B300 SXM6 AC": 900e9,
    "NVIDIA A800-SXM4-80GB": 200e9,
    "NVIDIA H800": 200e9,
    "NVIDIA H800 PCIe": None,
    "Tesla V100-SXM2-32GB": 150e9,
    "NVIDIA H100 80GB HBM3": 450e9,
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,
    "NVIDIA GH200 480GB": None,
    "NVIDIA H100 PCIe": None,
    "Something else": None,
}


def test_a_link_has_the_peak_of_its_part() -> None:
    assert {device: nvlink(device) for device in PEAKS} == PEAKS


def test_groups_are_told_apart_and_those_of_as_many_ranks_are_one_kind_of_exchange(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, *exchanging((0, 1), (2, 3), (4, 5, 6))), bandwidth, exchanged)
    frame = run.frame(bandwidth)
    assert dict(zip(frame["members"], frame["culprit"], strict=True)) == {"0,1": 1, "2,3": 3, "4,5,6": 6}
    frame = run.frame(exchanged).set_index("ranks")
    assert list(frame.index) == [3, 2]
    assert frame["groups"].to_dict() == {2: 2, 3: 1}
    assert frame["count"].to_dict() == {2: 1.0, 3: 1.0}
    assert frame["wait_ns"].to_dict() == pytest.approx({2: MS / 4, 3: MS / 3})
    assert frame["busbw"].to_dict() == pytest.approx({2: 40e9, 3: 40e9 * 4 / 3})
    assert frame["of_peak"].to_dict() == pytest.approx({2: 40 / 450, 3: 40 / 450 * 4 / 3})


def test_classes_are_named_by_their_bounds() -> None:
    assert [size_class(n) for n in (-1, 0, 2, 5)] == ["unknown size", "below 4 KiB", "below 1 MiB", "256 MiB or more"]


@pytest.mark.parametrize(
    ("groups", "took", "keys", "members", "expected"),
    [
        # Below an eighth of the peak three quarters of it are better.
        ([(0, 1)], [SLOW], {}, "0,1", {"of_peak": 4 / 450, "busbw": 4e9, "better_ns": NVLINK_NS, "each": 40e6}),
        ([(0, 1)], [SLOW], {"elements": 400_000_000}, "0,1", {"of_peak": 160 / 450, "better_ns": None}),
        # Groups alike are compared by their bytes.
        (
            PAIRS,
            [FAST, FAST, 13 * MS],
            {"elements": [10_000_000, 10_000_000, 18_000_000], "device": "?"},
            "4,5",
            {"alike_ns": FAST * 1.8, "better_ns": FAST * 1.8, "took_ns": 13 * MS},
        ),
        (PAIRS, [FAST, FAST, SLOW], {"device": "?"}, "0,1", {"alike_ns": (FAST + SLOW) / 2, "better_ns": None}),
    ],
)
def test_links_are_held_against_their_peak_and_those_like_them(
    groups: Any, took: list[int], keys: Any, members: str, expected: dict[str, float | None], tmp_path: Path
) -> None:
    frame = runs.measured(runs.foreign(tmp_path, *grouped(groups, took, **keys)), links).frame(links)
    row = frame.set_index("members").loc[members]
    assert row["on"] == tuple(map(int, members.split(",")))
    for name, value in expected.items():
        assert row[name] == pytest.approx(value) if value else np.isnan(row[name]), name


@pytest.mark.parametrize(
    ("groups", "keys"),
    [
        ([(0, 1), (2, 3)], {"hosts": {3: "node-2"}}),  # one within a host, one between two
        ([(0, 3), (1, 2)], {}),  # of other strides
        ([(0, 1), (2, 3)], {"elements": [10_000_000, 25_000_000]}),
    ],
)
def test_groups_that_differ_are_not_compared(tmp_path: Path, groups: Any, keys: dict[str, Any]) -> None:
    run = runs.measured(runs.foreign(tmp_path, *grouped(groups, [FAST, SLOW], device="", **keys)), links)
    with pytest.raises(NotMeasured, match="no similar group"):
        run.frame(links)


def test_only_settings_on_the_way_between_those_ranks_are_named(tmp_path: Path) -> None:
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "0", "NCCL_MAX_CTAS": "2"}
    made: list[Any] = [(m, [], {"env": env}) for m in grouped([(0, 1)], [MS])]
    job = runs.measured(runs.recorded(tmp_path / "run", *made), links).job
    for across, name in ((False, "NCCL_P2P_DISABLE"), (True, "NCCL_IB_DISABLE")):
        named = [change.settings for change in slowing_settings(job, (0, 1), across)]
        assert named == [(Setting(name, "1"),), (Setting("NCCL_MAX_CTAS", "2"),)]


def judged(folder: Path, *args: Any, facts: Any = None, **keys: Any) -> Outcome:
    """Ask the rule of groups; `facts`: of each rank, where the run is recorded."""
    made = grouped(*args, **keys)
    if facts is None:
        return ask(RULE, runs.foreign(folder, *made))
    return ask(RULE, runs.recorded(folder / "run", *((m, [], facts(n)) for n, m in enumerate(made))))


ODD = {"device": "Something else"}


@pytest.mark.parametrize(
    ("args", "keys", "ranks", "saving", "title"),
    [
        (([(0, 1)], [SLOW]), {}, (0, 1), SLOW - NVLINK_NS, ""),
        # Groups that are slow alike are held against the peak.
        ((PAIRS, [SLOW] * 3), {}, (0, 1, 2, 3, 4, 5), SLOW - NVLINK_NS, "The link of all ranks is slow"),
        ((PAIRS, [FAST, FAST, SLOW]), ODD, (4, 5), 6 * MS, "The link of ranks 4 and 5 is slow"),
        (
            (PAIRS, [FAST, FAST, SLOW]),
            {"device": "", "hosts": {r: f"node-{r // 2}" for r in range(6)}},
            (4, 5),
            6 * MS,
            "The link of host node-2 is slow",
        ),
    ],
)
def test_a_slow_link_is_found(
    args: Any, keys: Any, ranks: tuple[int, ...], saving: float, title: str, tmp_path: Path
) -> None:
    found = judged(tmp_path, *args, **keys)
    assert (found.state, found.ranks) == ("found", ranks)
    assert found.saving_ns == pytest.approx(saving, rel=1e-3)
    assert title in found.title
    assert found.evidence is not None
    assert (found.evidence.rows[0][0], found.evidence.rows[0][2]) == ("all_reduce", 40e6)
    assert {cost.rank: cost.ns for cost in found.by_rank} == pytest.approx(dict.fromkeys(ranks, saving), rel=1e-3)


@pytest.mark.parametrize(
    ("args", "keys", "state", "share", "told"),
    [
        (([(0, 1)], [SLOW]), {"elements": 400_000_000}, "clear", 0, "36 % of the link's peak"),
        (([(0, 1)], [SLOW]), {"hidden": True}, "clear", 0, ""),
        (([(0, 1)], [MS // 4]), {"late": SLOW}, "clear", 0, "36 % of the link's peak"),  # waiting is no slow link
        (([(0, 1)], [SLOW]), {"elements": 100_000}, "not_measured", 0, "1.05 MB or more"),
        # More bytes may take longer.
        (
            (PAIRS, [FAST, FAST, 7 * MS]),
            {"elements": [10_000_000, 10_000_000, 18_000_000], "device": ""},
            "clear",
            0,
            "",
        ),
        ((PAIRS, [MS // 2, MS // 2, MS * 4 // 5]), ODD, "clear", 0.3 / 20, "the slow link of ranks 4 and 5"),
        (([(0, 1)], [SLOW]), ODD, "not_measured", 0, "no similar group"),
    ],
)
def test_what_is_near_the_peak_hidden_small_or_unknown_is_left_alone(
    args: Any, keys: Any, state: str, share: float, told: str, tmp_path: Path
) -> None:
    answer = judged(tmp_path, *args, **keys)
    assert answer.state == state
    assert answer.share == pytest.approx(share, rel=1e-3)
    assert told in answer.summary + answer.why


def test_the_setting_that_makes_it_slow_is_named(tmp_path: Path) -> None:
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    found = judged(tmp_path / "all", [(0, 1)], [SLOW], facts=lambda _: {"device": {"type": "cuda"}, "env": env})
    assert "40 MB between ranks 0 and 1 takes 10.0 ms, 4 GB/s on the bus: 0.9 %" in found.summary
    debug = (Setting("NCCL_DEBUG", None, "INFO"),)
    assert [c.settings for c in found.changes] == [(Setting("NCCL_P2P_DISABLE", "1"),), debug, ()]

    def some(rank: int) -> dict[str, Any]:
        return {"device": {"type": "cuda"}, "env": {"NCCL_PROTO": "LL"} if rank > 3 else {}}

    found = judged(tmp_path / "some", PAIRS, [FAST, FAST, SLOW], facts=some, **ODD)
    assert "`NCCL_PROTO` (is LL, only on these ranks)" in found.advice[0]
    assert found.changes[0].settings == (Setting("NCCL_PROTO", "LL"),)
    assert "others like it take 4.00 ms" in found.summary


def test_without_all_of_a_group_waiting_may_be_what_takes_long(tmp_path: Path) -> None:
    answer = ask(RULE, runs.foreign(tmp_path, grouped([(0, 1)], [SLOW])[0]))
    assert (answer.state, "every rank's trace" in answer.why) == ("not_measured", True)


@pytest.mark.parametrize("sized", [{}, {"In msg nelems": 1 << 26, "dtype": "Float"}])
def test_gloo_on_gpus_is_told(tmp_path: Path, sized: dict[str, Any]) -> None:
    events = [traces.step(0, 0, 20 * MS), traces.kernel("gemm", 0, 4 * MS)]
    events.append(traces.annotation("gloo:all_reduce", 4 * MS, SLOW, tid=9, **sized))
    facts = {"device": {"type": "cuda"}, "backend": "gloo"}
    made: list[Any] = [(traces.trace(*events, rank=rank, backend="gloo"), [], facts) for rank in range(2)]
    answer = ask(RULE, runs.recorded(tmp_path / "run", *made))
    assert (answer.state, "gloo sends" in answer.why) == ("not_measured", True)
