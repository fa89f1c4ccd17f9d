"""Communication that nothing hides: transfer counts, hidden transfer and waiting for a late rank do not."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import NO_COLLECTIVES
from dlprof.analysis.communication.rules.exposed_communication import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import DDP, accumulating, in_both_passes, late_by
from tests.fixtures.runs import MS


def reducing(hidden: int = 0, many: int = 1, takes: int = 400_000, **keys: Any) -> list[dict[str, Any]]:
    """Make two ranks of two steps of 1 ms that end in all-reduces, the first `hidden` ns of them behind computation."""
    made = []
    for rank in range(2):
        events: list[Any] = []
        for n in range(2):
            t = n * MS
            events += [traces.step(n, t, MS), traces.kernel("gemm", t, MS - takes + hidden)]
            each = takes // many
            events += [traces.collective(t + MS - takes + i * each, each, 100_000) for i in range(many)]
        made.append(traces.trace(*events, rank=rank, **keys))
    return made


def test_found_with_what_transfer_costs(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *reducing()))
    assert found.state == "found"
    # A quarter of it, the last bucket, has nothing to hide behind.
    assert found.share == pytest.approx(0.3)
    assert found.verdict == "40 % of each step is communication that nothing hides; computation could hide 30 %."
    assert found.evidence is not None
    rows = found.evidence.rows[:3]
    assert [row[0] for row in rows] == ["as it is", "hidden behind computation", "exchange every 2 batches"]
    assert [row[1] for row in rows] == pytest.approx([MS, 0.7 * MS, 0.8 * MS])
    assert [row[2] for row in rows] == pytest.approx([1, 1 / 0.7, 1 / 0.8])
    assert [cost.rank for cost in found.by_rank] == [0, 1]
    assert [cost.ns for cost in found.by_rank] == pytest.approx([0.4 * MS] * 2)


@pytest.mark.parametrize("late", [0, 400_000])
def test_ranks_that_were_asked_for_no_trace_are_like_those_that_were(late: int, tmp_path: Path) -> None:
    """A rank that is not known to communicate must not make it all clear; that it may be late is said."""
    steps = [runs.light(n, 4 * MS + late, profiled=int(n < 3)) for n in range(40)]
    facts = {"device": runs.A100, "host": "node-1", "models": [{"parameters": 1, "ddp": DDP}]}
    run = runs.recorded(tmp_path / "run", *((made, steps, facts) for made in late_by(0, late, 0, 0)))
    for rank in (1, 2):
        runs.asked_for_none(run / f"ranks/{rank:05d}", "0,last")
    found = ask(RULE, run)
    assert found.state == "found"
    assert found.lost_share == pytest.approx((MS + late) / (4 * MS + late), rel=0.01)
    assert "or waiting for late ranks" in found.verdict
    assert "of rank 1: this rank was asked for no trace (--ranks 0,last)" in found.summary


def test_what_is_exposed_and_what_of_it_a_change_gives_are_told_apart(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path / "both", *reducing(takes=800_000)))
    assert [found.share, found.lost_share] == pytest.approx([0.2, 0.8])
    exposed = "80 % of each step is communication that nothing hides"
    assert found.verdict == f"{exposed}; computation could hide 20 %."
    assert not found.training
    alone = ask(RULE, runs.foreign(tmp_path / "one", reducing(takes=800_000)[0]))
    assert alone.verdict == f"{exposed}, or waiting for ranks that are not here; computation could hide 20 %."


def test_to_exchange_half_as_often_is_said_only_where_nothing_else_is_notable(tmp_path: Path) -> None:
    # The other steps of the optimizer are another training, and nothing hides more than 0.02 of the 0.98 ms. How long
    # half the bytes take is not known, and not more than half as long; gradients in 16 bits have no such half.
    made = reducing(takes=980_000)
    bound = ask(RULE, runs.foreign(tmp_path / "wide", *made))
    assert bound.share == pytest.approx(0.49)
    assert (bound.training, bound.at_most) == (False, True)
    assert bound.verdict.endswith("half as many bytes would save at most 49 %.")
    for event in (e for trace in made for e in trace["traceEvents"] if "dtype" in e.get("args", {})):
        event["args"]["dtype"] = "BFloat16"
    found = ask(RULE, runs.foreign(tmp_path / "narrow", *made))
    assert found.share == pytest.approx(0.49)
    assert found.training
    assert [(c.text[:22], c.numerics, c.training) for c in found.changes] == [("exchange half as often", True, True)]


def test_of_one_rank_all_that_is_exposed_may_be_waiting(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, reducing(takes=980_000)[0]))
    assert found.share == pytest.approx(0.98)
    assert (found.training, found.at_most) == (False, True)
    assert found.verdict.endswith("communication that nothing hides, or waiting for ranks that are not here.")
    assert found.advice[0].startswith("record the traces of all ranks")


def test_of_a_replicated_model_fewer_exchanges_are_the_last_advice(tmp_path: Path) -> None:
    facts = {"device": {"type": "cuda"}, "models": [{"parameters": 1, "ddp": {"bucket_cap_mb": 25.0}}]}
    found = ask(RULE, runs.recorded(tmp_path / "run", *((m, [], facts) for m in reducing(many=4))))
    assert [c.training for c in found.changes] == [False] * (len(found.changes) - 1) + [True]
    assert found.advice[-1].startswith("exchange half as often")
    assert not found.training


def test_what_is_not_known_of_a_change_is_no_figure(tmp_path: Path) -> None:
    facts = {"device": {"type": "cuda"}, "models": [{"parameters": 1, "ddp": {"bucket_cap_mb": 25.0}}]}
    found = ask(RULE, runs.recorded(tmp_path / "run", *((m, [], facts) for m in reducing())))
    assert found.evidence is not None
    unknown = {str(row[0]): row[3] for row in found.evidence.rows if row[1:3] == (None, None)}
    assert set(unknown) == {
        "other buckets than `bucket_cap_mb=25`",
        "gradients in 16 bits",
        "gradients of low rank (`powerSGD_hook`)",
    }
    assert all(unknown.values())


def test_hidden_communication_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, runs.foreign(tmp_path, *reducing(hidden=390_000)))
    assert clear.state == "clear"
    assert [clear.share, clear.lost_share] == pytest.approx([0.0075, 0.01])  # but for the last bucket


def test_waiting_for_a_late_rank_is_another_rules_business(tmp_path: Path) -> None:
    made = late_by(0, 9 * MS)
    for rank in made:
        for event in rank["traceEvents"]:
            if event["name"].startswith("nccl"):
                event["dur"] -= 900  # 0.1 ms of transfer is left
    clear = ask(RULE, runs.foreign(tmp_path, *made))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.75 * 0.1 / 13)  # but for the last bucket
    assert "waits for other ranks" in clear.summary


def test_with_a_rank_missing_it_says_that_it_may_be_waiting(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, reducing()[0]))
    assert found.state == "found"
    assert "not every rank's trace is here" in found.summary


def test_where_all_ranks_are_here_it_says_why_waiting_is_not_known(tmp_path: Path) -> None:
    one, other = reducing(takes=200_000)
    for event in other["traceEvents"]:
        if event["name"].startswith("nccl"):
            event["ts"] -= 500  # while the other computes: no two of a pair overlap
        elif event["name"] == "gemm":
            event["dur"] = 200
    found = ask(RULE, runs.foreign(tmp_path, one, other))
    assert found.state == "found"
    assert "of them do not overlap in time" in found.summary
    assert "not here" not in found.summary + found.verdict


def test_many_small_collectives_want_larger_buckets(tmp_path: Path) -> None:
    ddp = {"bucket_cap_mb": 1, "find_unused_parameters": True}
    facts = {"device": {"type": "cuda"}, "models": [{"parameters": 1, "ddp": ddp}]}
    folder = runs.recorded(tmp_path / "run", *((m, [], facts) for m in reducing(many=20)))
    found = ask(RULE, folder)
    assert found.changes[0].settings == (Setting("bucket_cap_mb", 1, 25),)
    # The search for unused parameters is another finding's, and gives what that one says.
    assert not any(s.name == "find_unused_parameters" for c in found.changes for s in c.settings)


def test_one_rank_has_nothing_to_exchange(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.kernel("gemm", 0, MS), world_size=1)
    assert "one rank" in ask(RULE, runs.foreign(tmp_path, made)).why


def test_several_ranks_without_collectives_abstain(tmp_path: Path) -> None:
    made = [traces.trace(traces.step(1, 0, MS), traces.kernel("gemm", 0, MS), rank=r) for r in range(2)]
    answer = ask(RULE, runs.foreign(tmp_path, *made))
    assert (answer.state, answer.why) == ("not_measured", NO_COLLECTIVES)


def test_a_sharded_model_gets_the_advice_for_one(tmp_path: Path) -> None:
    facts = {"device": {"type": "cuda"}, "models": [{"parameters": 1, "fsdp": True}]}
    found = ask(RULE, runs.recorded(tmp_path / "run", *((m, [], facts) for m in reducing(many=20))))
    assert "`fully_shard` whole blocks" in found.advice[0]
    assert found.changes[1].settings == (Setting("reshard_after_forward", None, False),)
    assert {setting.name for setting in found.changes[2].settings} == {"param_dtype", "reduce_dtype"}
    assert found.changes[2].numerics
    assert not any("DistributedDataParallel" in a for a in found.advice)


def test_what_computation_cannot_hide_half_the_bytes_halve(tmp_path: Path) -> None:
    """Of each ms 0.3 are computing and 0.7 are transfer: 0.3 could be hidden, and 0.35 need not be sent."""
    made = []
    for rank in range(2):
        events: list[Any] = []
        for n in range(2):
            t = n * MS
            events += [traces.step(n, t, MS), traces.kernel("gemm", t, 300_000)]
            events += [traces.collective(t + 300_000, 700_000, 10_000_000)]
        made.append(traces.trace(*events, rank=rank))
    found = ask(RULE, runs.foreign(tmp_path, *made))
    assert found.saving_ns == pytest.approx(350_000)
    assert "half as many bytes" in found.sure
    assert found.advice == ("exchange gradients in 16 bits: half as many bytes",)
    assert found.evidence is not None
    last = (25 << 20) / 40e6  # of 40 MB the last bucket, which nothing hides
    assert found.evidence.rows[1][1] == pytest.approx(MS - 0.7 * MS * (1 - last))


def jittering(transfer: tuple[int, ...]) -> list[dict[str, Any]]:
    """Make two ranks of steps of 4 ms that are late in turn, and exchange for so many ns once both have come."""
    late = ((0, 1_500_000, 0, 1_400_000, 0), (1_200_000, 0, 0, 0, 1_600_000))
    made = []
    for rank in range(2):
        events: list[Any] = []
        for n, took in enumerate(transfer):
            t, mine, last = 4 * n * MS, late[rank][n], max(late[0][n], late[1][n])
            events += [traces.step(n, t, 4 * MS), traces.kernel("gemm", t, MS + mine)]
            events += [traces.collective(t + MS + mine, last - mine + took, 100_000)]
        made.append(traces.trace(*events, rank=rank))
    return made


def test_ranks_that_wait_in_turn_leave_the_transfer_sure(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *jittering((800_000, 810_000, 790_000, 800_000, 800_000))))
    assert found.state == "found"
    assert found.share == pytest.approx(0.75 * 0.2, rel=0.01)  # but for the last bucket


def test_a_transfer_that_comes_and_goes_is_not_told(tmp_path: Path) -> None:
    answer = ask(RULE, runs.foreign(tmp_path, *jittering((10_000, 10_000, 10_000, 2_400_000, 10_000))))
    assert answer.state == "not_measured"
    assert "varies too much" in answer.why


def test_exchanges_made_for_nothing_are_the_finding_though_hiding_might_give_more(tmp_path: Path) -> None:
    found = ask(RULE, accumulating(tmp_path, 4 * MS))
    assert found.saving_ns == pytest.approx(3 * MS)
    assert found.advice[0].startswith("`with model.no_sync():` around all batches but the last")
    assert found.verdict == "30 % of each step is communication that the optimizer does not need."
    assert found.evidence is not None
    # One bucket has nothing to hide behind.
    assert [row[1] for row in found.evidence.rows[:2]] == pytest.approx([10 * MS, 10 * MS])


def test_buffers_that_ddp_broadcasts_are_told_as_such(tmp_path: Path) -> None:
    found = ask(RULE, in_both_passes(tmp_path, False, name="broadcast", ddp=DDP))
    assert found.state == "found"
    # Both broadcasts of 1 ms lie open, and go.
    assert found.saving_ns == pytest.approx(2 * MS)
    assert found.changes[0].settings == (Setting("broadcast_buffers", True, False),)
    assert not any("wiseParallel" in line for line in found.advice)
    off = ask(RULE, in_both_passes(tmp_path / "off", False, name="broadcast", ddp=DDP | {"broadcast_buffers": False}))
    assert not any(s.name == "broadcast_buffers" for c in off.changes for s in c.settings)


def test_a_replicated_models_forward_pass_gets_no_advice_for_layers_that_ranks_share(tmp_path: Path) -> None:
    found = ask(RULE, in_both_passes(tmp_path, True, ddp=DDP))
    assert not any("wiseParallel" in line for line in found.advice)


def test_a_forward_pass_that_exchanges_gets_the_advice_for_one(tmp_path: Path) -> None:
    found = ask(RULE, in_both_passes(tmp_path, False))
    assert found.state == "found"
    assert "RowwiseParallel" in found.advice[0]
    assert not any("DistributedDataParallel" in line for line in found.advice)
    rows = ask(RULE, in_both_passes(tmp_path / "rows", False, name="all_to_all"))
    assert "all-to-all" in rows.advice[0]
