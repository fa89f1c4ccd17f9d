"""A slow link: found against the peak and against groups like it; small, hidden and waiting left alone."""

from pathlib import Path

import pytest

from dlprof.analysis.communication.rules.slow_link import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import grouped
from tests.fixtures.runs import MS

PAIRS = ((0, 1), (2, 3), (4, 5))


def test_far_below_nvlink_is_found_and_its_setting_named(tmp_path: Path) -> None:
    # 40 MB in 10 ms are 4 GB/s; at 75 % of 450 GB/s they take 0.12 ms.
    facts = {"device": {"type": "cuda"}, "env": {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}}
    made = grouped([(0, 1)], [10 * MS])
    found = ask(RULE, runs.recorded(tmp_path / "run", *((m, [], facts) for m in made)))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(10 * MS * (1 - 4 / 0.75 / 450), rel=1e-3)
    assert found.ranks == (0, 1)
    assert "40 MB between ranks 0 and 1 takes 10.0 ms, 4 GB/s on the bus: 0.9 %" in found.summary
    assert "unset `NCCL_P2P_DISABLE` (is 1)" in found.advice[0]
    assert not any("NCCL_IB_DISABLE" in a for a in found.advice)
    assert [c.settings for c in found.changes] == [
        (Setting("NCCL_P2P_DISABLE", "1"),),
        (Setting("NCCL_DEBUG", None, "INFO"),),
        (),
    ]


def test_groups_that_are_slow_alike_are_held_against_the_peak(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *grouped(PAIRS, [10 * MS] * 3)))
    assert (found.title, found.ranks) == ("The link of all ranks is slow", (0, 1, 2, 3, 4, 5))
    assert found.saving_ns == pytest.approx(10 * MS * (1 - 4 / 0.75 / 450), rel=1e-3)


def test_near_the_peak_hidden_or_small_is_left_alone(tmp_path: Path) -> None:
    near = ask(RULE, runs.foreign(tmp_path / "near", *grouped([(0, 1)], [10 * MS], elements=400_000_000)))
    assert (near.state, near.share, "36 % of the link's peak" in near.summary) == ("clear", 0.0, True)
    hidden = ask(RULE, runs.foreign(tmp_path / "hidden", *grouped([(0, 1)], [10 * MS], hidden=True)))
    assert (hidden.state, hidden.share, hidden.ranks) == ("clear", 0.0, ())
    small = ask(RULE, runs.foreign(tmp_path / "small", *grouped([(0, 1)], [10 * MS], elements=100_000)))
    assert (small.state, "1.05 MB or more" in small.why) == ("not_measured", True)


def test_waiting_for_a_late_rank_is_no_slow_link(tmp_path: Path) -> None:
    made = grouped([(0, 1)], [MS // 4], late=10 * MS)
    clear = ask(RULE, runs.foreign(tmp_path, *made))
    assert (clear.state, clear.share, "36 % of the link's peak" in clear.summary) == ("clear", 0.0, True)


def test_one_group_slower_than_those_like_it(tmp_path: Path) -> None:
    made = grouped(PAIRS, [4 * MS, 4 * MS, 10 * MS], device="Something else")
    found = ask(RULE, runs.foreign(tmp_path, *made))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(6 * MS, rel=1e-3)
    assert (found.ranks, found.title) == ((4, 5), "The link of ranks 4 and 5 is slow")
    assert "others like it take 4.00 ms" in found.summary
    assert found.evidence is not None
    assert found.evidence.rows[0][:3] == ("all_reduce", "4, 5", 40e6)
    assert [cost.rank for cost in found.by_rank] == [4, 5]
    assert [cost.ns for cost in found.by_rank] == pytest.approx([6 * MS] * 2, rel=1e-3)


def test_a_slow_host_is_named(tmp_path: Path) -> None:
    hosts = {r: f"node-{r // 2}" for r in range(6)}
    found = ask(RULE, runs.foreign(tmp_path, *grouped(PAIRS, [4 * MS, 4 * MS, 10 * MS], hosts=hosts, device="")))
    assert found.title == "The link of host node-2 is slow"


def test_only_a_setting_of_the_slow_ranks_is_told_as_theirs(tmp_path: Path) -> None:
    made = grouped(PAIRS, [4 * MS, 4 * MS, 10 * MS], device="Something else")
    facts = [{"device": {"type": "cuda"}, "env": {"NCCL_PROTO": "LL"} if r > 3 else {}} for r in range(6)]
    found = ask(RULE, runs.recorded(tmp_path / "run", *((m, [], f) for m, f in zip(made, facts, strict=True))))
    assert "`NCCL_PROTO` (is LL, only on these ranks)" in found.advice[0]
    assert found.changes[0].settings == (Setting("NCCL_PROTO", "LL"),)


def test_more_bytes_may_take_longer(tmp_path: Path) -> None:
    made = grouped(PAIRS, [4 * MS, 4 * MS, 7 * MS], elements=[10_000_000, 10_000_000, 18_000_000], device="")
    clear = ask(RULE, runs.foreign(tmp_path, *made))
    assert (clear.state, clear.share) == ("clear", 0.0)


def test_what_a_slow_link_costs_is_told_where_it_is_little(tmp_path: Path) -> None:
    made = grouped(PAIRS, [MS // 2, MS // 2, MS * 4 // 5], device="Something else")
    clear = ask(RULE, runs.foreign(tmp_path, *made))
    assert (clear.state, clear.ranks) == ("clear", (4, 5))
    assert clear.share == pytest.approx(0.3 / 20, rel=1e-3)
    assert "is lost on the slow link of ranks 4 and 5" in clear.summary


def test_without_all_of_a_group_waiting_may_be_what_takes_long(tmp_path: Path) -> None:
    answer = ask(RULE, runs.foreign(tmp_path, grouped([(0, 1)], [10 * MS])[0]))
    assert (answer.state, "every rank's trace" in answer.why) == ("not_measured", True)


def test_an_unknown_peak_and_one_group_abstain(tmp_path: Path) -> None:
    answer = ask(RULE, runs.foreign(tmp_path, *grouped([(0, 1)], [10 * MS], device="Something else")))
    assert (answer.state, "no similar group" in answer.why) == ("not_measured", True)


@pytest.mark.parametrize("sized", [False, True])
def test_gloo_on_gpus_is_told(tmp_path: Path, sized: bool) -> None:
    made = [
        traces.trace(
            traces.step(0, 0, 20 * MS),
            traces.kernel("gemm", 0, 4 * MS),
            traces.annotation(
                "gloo:all_reduce",
                4 * MS,
                10 * MS,
                tid=9,
                **({"In msg nelems": 1 << 26, "dtype": "Float"} if sized else {}),
            ),
            rank=rank,
            backend="gloo",
        )
        for rank in range(2)
    ]
    facts = {"device": {"type": "cuda"}, "backend": "gloo"}
    answer = ask(RULE, runs.recorded(tmp_path / "run", *((m, [], facts) for m in made)))
    assert (answer.state, "gloo sends" in answer.why) == ("not_measured", True)
