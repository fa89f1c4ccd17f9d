"""What could hide communication, what exchanging differently gains, and the rules that propose it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from dlprof.analysis.communication.collectives import NO_COLLECTIVES
from dlprof.analysis.communication.exchange_plans import (
    _needless,
    _without_buffers,
    activations,
    exchange_plans,
    exposed_transfer,
    fitted,
    free_to_hide,
    gradients,
    idle_cores,
    overlap,
    unbroadcast,
)
from dlprof.analysis.communication.rules import exposed_communication, small_collectives
from dlprof.analysis.engine import Job, Maybe, Measured
from dlprof.analysis.source.patches import Call
from dlprof.result import Place, Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import (
    DDP,
    US,
    accumulating,
    gains,
    gpu_step,
    in_both_passes,
    late_by,
    planned,
    sharded,
    small_buckets,
)
from tests.fixtures.runs import MS

RULE = exposed_communication.RULE
Made = list[dict[str, Any]]


def modelled(folder: Path, made: Made, **model: Any) -> Path:
    """Record ranks on GPUs with one model; without facts of it the traces are foreign."""
    if not model:
        return runs.foreign(folder, *made)
    facts = {"device": {"type": "cuda"}, "models": [{"parameters": 1, **model}]}
    return runs.recorded(folder / "run", *((one, [], facts) for one in made))


def steps(of: Callable[[int, int], Iterable[Any]], many: int, length: int, **keys: Any) -> Made:
    """Make two ranks of so many steps, each of the events that `of` returns for a rank and a step."""
    made = []
    for rank in range(2):
        events: list[Any] = []
        for n in range(many):
            events += [traces.step(n, n * length, length), *of(rank, n)]
        made.append(traces.trace(*events, rank=rank, **keys))
    return made


def reducing(hidden: int = 0, many: int = 1, takes: int = 400_000, elements: int = 100_000, **args: Any) -> Made:
    """Make two ranks of two steps of 1 ms that end in all-reduces, the first `hidden` ns of them behind computation."""

    def of(_: int, n: int) -> list[Any]:
        begin, each = (n + 1) * MS - takes, takes // many
        reduced = [traces.collective(begin + i * each, each, elements) for i in range(many)]
        for event in reduced:
            event["args"] |= args
        return [traces.kernel("gemm", n * MS, MS - takes + hidden), *reduced]

    return steps(of, 2, MS)


def jittering(*transfer: int) -> Made:
    """Make two ranks of steps of 4 ms that are late in turn, and exchange for so many ns once both have come."""
    late = ((0, 1_500_000, 0, 1_400_000, 0), (1_200_000, 0, 0, 0, 1_600_000))

    def of(rank: int, n: int) -> list[Any]:
        t, mine, last = 4 * n * MS, late[rank][n], max(late[0][n], late[1][n])
        exchanged = traces.collective(t + MS + mine, last - mine + transfer[n], 100_000)
        return [traces.kernel("gemm", t, MS + mine), exchanged]

    return steps(of, len(transfer), 4 * MS)


def waiting() -> Made:
    """Make two ranks that wait for each other for 9 ms and transfer for 0.1."""
    made = late_by(0, 9 * MS)
    for event in (e for rank in made for e in rank["traceEvents"] if e["name"].startswith("nccl")):
        event["dur"] -= 900
    return made


def apart() -> Made:
    """Make two ranks of which one exchanges while the other computes: no two of a pair overlap."""
    one, other = reducing(takes=200_000)
    for event in other["traceEvents"]:
        if event["name"].startswith("nccl"):
            event["ts"] -= 500
        elif event["name"] == "gemm":
            event["dur"] = 200
    return [one, other]


def silent(**keys: Any) -> dict[str, Any]:
    return traces.trace(traces.step(1, 0, MS), traces.kernel("gemm", 0, MS), **keys)


# How long half the bytes take is not known, and not more than half as long; gradients in 16 bits have no such half.
# Of one rank all that is exposed may be waiting.
EXPOSED: dict[str, tuple[Made, str, float, float, str, str]] = {
    # A quarter of the transfer, the last bucket, has nothing to hide behind.
    "found": (reducing(), "found", 0.3, 0.4, "at most",
              "40 % of each step is communication that nothing hides; computation"),
    "hidden": (reducing(hidden=390_000), "clear", 0.0075, 0.01, "", ""),
    "more than computing": (reducing(takes=800_000), "found", 0.2, 0.8, "at most",
                            "nothing hides; computation could hide 20"),
    "one of two": (reducing(takes=800_000)[:1], "found", 0.2, 0.8, "at most",
                   "nothing hides, or waiting for ranks that are not here; computation could hide 20 %."),
    "nothing to hide behind": (reducing(takes=980_000), "found", 0.49, 0.98, "at most", "bytes would save at most 49"),
    "in 16 bits": (reducing(takes=980_000, dtype="BFloat16"), "found", 0.49, 0.98, "training", "would save 49 %."),
    "all may be waiting": (reducing(takes=980_000)[:1], "found", 0.98, 0.98, "at most", "ranks that are not here."),
    # Of each ms 0.3 are computing and 0.7 are transfer: 0.3 could be hidden, and 0.35 need not be sent.
    "half the bytes": (reducing(takes=700_000, elements=10_000_000), "found", 0.35, 0.7, "", "half as many bytes"),
    "late in turn": (jittering(800_000, 810_000, 790_000, 800_000, 800_000), "found", 0.15, 0.2, "at most", ""),
    "comes and goes": (jittering(10_000, 10_000, 10_000, 2_400_000, 10_000), "not_measured", 0, 0, "", "varies too"),
    "waiting": (waiting(), "clear", 0.75 * 0.1 / 13, 0.1 / 13, "", "waits for other ranks"),
    "apart": (apart(), "found", 0.15, 0.2, "at most", "of them do not overlap in time"),
    "one rank": ([silent(world_size=1)], "does_not_apply", 0, 0, "", "one rank"),
    "no collectives": ([silent(rank=0), silent(rank=1)], "not_measured", 0, 0, "", NO_COLLECTIVES),
}  # fmt: skip


@pytest.mark.parametrize(("made", "state", "share", "lost", "how", "told"), EXPOSED.values(), ids=EXPOSED)
def test_exposed_transfer_is_found_and_waiting_and_hidden_ones_are_not(
    made: Made, state: str, share: float, lost: float, how: str, told: str, tmp_path: Path
) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *made))
    assert found.state == state
    assert [found.share, found.lost_share or 0.0] == pytest.approx([share, lost], rel=0.02)
    assert (found.at_most, found.training) == (how == "at most", how == "training")
    said = found.verdict + found.summary + found.why
    assert told in said
    assert ("not here" in said) is (len(made) == 1 and state == "found")


def test_what_each_change_gives_is_a_table(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *reducing()))
    assert found.evidence is not None
    rows = found.evidence.rows[:3]
    assert [row[0] for row in rows] == ["as it is", "hidden behind computation", "exchange every 2 batches"]
    assert [row[1] for row in rows] == pytest.approx([MS, 0.7 * MS, 0.8 * MS])
    assert [row[2] for row in rows] == pytest.approx([1, 1 / 0.7, 1 / 0.8])
    assert {cost.rank: cost.ns for cost in found.by_rank} == pytest.approx({0: 0.4 * MS, 1: 0.4 * MS})
    # Of 40 MB the last bucket of 25 MB is what nothing hides.
    found = ask(RULE, runs.foreign(tmp_path / "large", *reducing(takes=700_000, elements=10_000_000)))
    assert found.advice == ("exchange gradients in 16 bits: half as many bytes",)
    assert found.evidence is not None
    assert found.evidence.rows[1][1] == pytest.approx(MS - 0.7 * MS * (1 - (25 << 20) / 40e6))


@pytest.mark.parametrize("late", [0, 400_000])
def test_ranks_that_were_asked_for_no_trace_are_like_those_that_were(late: int, tmp_path: Path) -> None:
    """A rank that is not known to communicate must not make it all clear; that it may be late is said."""
    log = [runs.light(n, 4 * MS + late, profiled=int(n < 3)) for n in range(40)]
    facts = {"device": runs.A100, "host": "node-1", "models": [{"parameters": 1, "ddp": DDP}]}
    run = runs.recorded(tmp_path / "run", *((made, log, facts) for made in late_by(0, late, 0, 0)))
    for rank in (1, 2):
        runs.asked_for_none(run / f"ranks/{rank:05d}", "0,last")
    found = ask(RULE, run)
    assert found.state == "found"
    assert found.lost_share == pytest.approx((MS + late) / (4 * MS + late), rel=0.01)
    assert "or waiting for late ranks" in found.verdict
    assert "of rank 1: this rank was asked for no trace (--ranks 0,last)" in found.summary


def test_a_wrapped_model_gets_its_wrappers_settings(tmp_path: Path) -> None:
    found = ask(RULE, modelled(tmp_path / "ddp", reducing(many=4), ddp={"bucket_cap_mb": 25.0}))
    assert [c.training for c in found.changes] == [False] * (len(found.changes) - 1) + [True]
    assert not found.training
    assert found.evidence is not None
    unknown = {str(row[0]) for row in found.evidence.rows if row[1:3] == (None, None) and row[3]}
    assert unknown == {
        "other buckets than `bucket_cap_mb=25`",
        "gradients in 16 bits",
        "gradients of low rank (`powerSGD_hook`)",
    }
    small = {"bucket_cap_mb": 1, "find_unused_parameters": True}
    found = ask(RULE, modelled(tmp_path / "small", reducing(many=20), ddp=small))
    assert found.changes[0].settings == (Setting("bucket_cap_mb", 1, 25),)
    # The search for unused parameters is another finding's, and gives what that one says.
    assert not any(s.name == "find_unused_parameters" for c in found.changes for s in c.settings)
    found = ask(RULE, modelled(tmp_path / "fsdp", reducing(many=20), fsdp=True))
    assert "`fully_shard` whole blocks" in found.advice[0]
    assert found.changes[1].settings == (Setting("reshard_after_forward", None, False),)
    assert {setting.name for setting in found.changes[2].settings} == {"param_dtype", "reduce_dtype"}
    assert found.changes[2].numerics
    assert not any("DistributedDataParallel" in a for a in found.advice)


def test_what_a_forward_pass_exchanges_is_told_as_such(tmp_path: Path) -> None:
    found = ask(RULE, in_both_passes(tmp_path / "plain", False))
    assert "RowwiseParallel" in found.advice[0]
    assert not any("DistributedDataParallel" in line for line in found.advice)
    assert "all-to-all" in ask(RULE, in_both_passes(tmp_path / "rows", False, name="all_to_all")).advice[0]
    replicated = ask(RULE, in_both_passes(tmp_path / "ddp", True, ddp=DDP))
    found = ask(RULE, in_both_passes(tmp_path / "buffers", False, name="broadcast", ddp=DDP))
    assert not any("wiseParallel" in line for line in replicated.advice + found.advice)
    # Both broadcasts of 1 ms lie open, and go.
    assert found.saving_ns == pytest.approx(2 * MS)
    assert found.changes[0].settings == (Setting("broadcast_buffers", True, False),)
    off = ask(RULE, in_both_passes(tmp_path / "off", False, name="broadcast", ddp=DDP | {"broadcast_buffers": False}))
    assert not any(s.name == "broadcast_buffers" for c in off.changes for s in c.settings)


@pytest.mark.parametrize(
    ("torch", "name", "still"),
    [("2.12.1", "broadcast_buffers", False), ("2.13.0+cu130", "forward_sync_buffers", True)],
)
def test_the_buffers_of_ddp_are_named_as_the_jobs_torch_has_them(torch: str, name: str, still: bool) -> None:
    made = unbroadcast(cast(Job, SimpleNamespace(ranks=[0], facts={0: {"versions": {"torch": torch}}})))
    assert f"`DistributedDataParallel(..., {name}=False)`" in made.text
    assert ("as the model is wrapped they are sent all the same" in made.text) is still
    assert made.settings == (Setting("broadcast_buffers", True, False),)  # as the override and the facts call it


def test_only_what_the_backward_pass_computes_beside_nothing_can_hide_more(tmp_path: Path) -> None:
    # Of 3 ms of backward 1 ms is beside the first exchange, and 4 ms of the others lie open.
    events = gpu_step((4_010 * US, 2 * MS, 1_000), (6_010 * US, 3 * MS, 1_000))
    run = planned(tmp_path, events, ddp=DDP)
    assert run.frame(free_to_hide) == pytest.approx({0: 2 * MS, 1: 2 * MS})
    assert run.frame(exposed_transfer).tolist() == [4 * MS, 4 * MS]
    assert gains(run)["hidden"] == pytest.approx(2 * MS)
    # A sharded model's forward pass hides too; and where nothing tells the backward pass, all computation counts.
    assert gains(planned(tmp_path / "fsdp", events, fsdp=True))["hidden"] == pytest.approx(4 * MS)
    events = [e for e in gpu_step((5_010 * US, 4 * MS, 1_000)) if e["cat"] != "cuda_runtime"]
    assert planned(tmp_path / "any", events).frame(free_to_hide) == pytest.approx({0: 5 * MS, 1: 5 * MS})


def on_cores(folder: Path, *cpu: int, cores: int = 2) -> Measured:
    """Record ranks on a CPU that compute 6 ms and reduce for 4 ms after it, and use so many ns of CPU time a step."""
    facts = {**runs.CPU, "backend": "gloo", "cpu": {"affinity": cores}, "models": [{"parameters": 1, "ddp": DDP}]}
    events: list[Any] = []
    for zero in range(0, 3_000 * MS, 1_000 * MS):
        events += [traces.step(zero // 1_000 // MS, zero, 10 * MS), traces.op("aten::mm", zero, 6 * MS)]
        events.append(traces.annotation("gloo:all_reduce", zero + 6 * MS, 4 * MS))
    log = [runs.light(n, 10 * MS, profiled=int(n < 3)) for n in range(40)]
    where: dict[str, Any] = {"world_size": len(cpu), "device": "", "backend": "gloo"}
    made = [(traces.trace(*events, rank=rank, **where), log, facts) for rank in range(len(cpu))]
    path = runs.recorded(folder / "run", *made)
    for rank, used in enumerate(cpu):
        rows = [
            {"kind": "usage", "start_ns": s["start_ns"], "dur_ns": s["dur_ns"], "count": 1, "step": s["step"]}
            | {"cpu_ns": used, "delay_ns": 0, "thread_ns": used}
            for s in log
        ]
        (path / f"ranks/{rank:05d}/loading.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return runs.measured(path, exchange_plans, overlap)


@pytest.mark.parametrize(
    ("pieces", "sized", "model", "hidden"),
    [
        (20, False, {}, 20 * 100 * US),
        (20, True, {}, 0),  # what starting one takes is known by their sizes: small_collectives says it
        (20, False, {"ddp": DDP}, 0),  # its buckets are few already
        (4, False, {}, 0),
    ],
)
def test_many_pieces_of_unknown_sizes_may_all_be_gone_in_buckets(
    tmp_path: Path, pieces: int, sized: bool, model: dict[str, Any], hidden: float
) -> None:
    reduced = [(5_010 * US + n * 100 * US, 100 * US, 1_000) for n in range(pieces)]
    events = gpu_step(*reduced)
    for event in events if not sized else ():
        if event["name"].startswith("nccl"):
            event["args"] = {"stream": 21, "device": 0}
    plans = planned(tmp_path, events, **model).frame(exchange_plans).set_index("key")
    assert ("in buckets" in plans["change"]["hidden"]) == (hidden > 0)
    assert not hidden or plans["gain_ns"]["hidden"] == pytest.approx(hidden)


@pytest.mark.parametrize(
    ("cores", "idle", "hidden"),
    [
        (2, 1.5 * MS, 1.5 * MS),  # two ranks use 1.7 of two cores: computing and sending take 8.5 ms of 10
        (8, None, 4 * MS),
        (1, 1 * MS, None),  # with a core each, each has its own
    ],
)
def test_on_a_cpu_no_more_is_hidden_than_its_cores_stand_idle(
    cores: int, idle: float | None, hidden: float | None, tmp_path: Path
) -> None:
    run = on_cores(tmp_path, 9 * MS, 8 * MS, cores=cores)
    assert idle is None or run.frame(idle_cores) == pytest.approx(idle)
    assert hidden is None or gains(run)["hidden"] == pytest.approx(hidden)
    told = run.frame(exchange_plans).set_index("key")["why"]["hidden"]
    assert ("they stand idle for 1.50 ms" in told) is (cores == 2)


@pytest.mark.parametrize(
    ("fetch", "used", "transfer"),
    [
        (0, None, 4 * MS),  # as the traced ranks have
        (9 * MS, None, MS),
        (0, 10 * MS, 0),  # its thread never stands still: the others wait for it
        (0, 7 * MS, 3 * MS),
        (2 * MS, 7 * MS, MS),
    ],
)
def test_a_rank_without_a_trace_exchanges_for_no_longer_than_it_may(
    fetch: int, used: int | None, transfer: int, tmp_path: Path
) -> None:
    run = on_cores(tmp_path, 6 * MS, used or 6 * MS, 6 * MS).job.run.path
    of_log = [runs.light(n, 10 * MS, fetch_ns=fetch, profiled=int(n < 3)) for n in range(40)]
    (run / "ranks/00001/steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in of_log))
    if used is None:
        (run / "ranks/00001/loading.jsonl").unlink()
    told = json.loads((run / "ranks/00001/facts.json").read_text())
    for rank in range(3):
        one_thread = told | {"rank": rank, "cpu": {"affinity": 2, "torch_threads": 1}}
        (run / f"ranks/{rank:05d}/facts.json").write_text(json.dumps(one_thread))
    runs.asked_for_none(run / "ranks/00001", "0,last")
    found = runs.measured(run, exposed_transfer).frame(exposed_transfer)
    assert found.tolist() == pytest.approx([transfer] * 3, abs=MS / 100)


@pytest.mark.parametrize(
    ("gpu", "how", "kind", "plans"),
    [
        *((gpu, {"name": name}, name, {"hidden"}) for gpu in (True, False) for name in ("all_reduce", "all_to_all")),
        # Gradients are told by their size: of 4 ms that lie open 2 ms are gradients, and half as many save 1 ms.
        (True, {"gradients": 2 * MS}, "", {"half": 1 * MS}),
        # Without sizes what DDP exchanges is gradients.
        (False, {"ddp": DDP}, "", {"half"}),
        # What the backward pass reduces for what was gathered is none: layers that are parallel by columns do that.
        (False, {"name": "all_gather", "back": "all_reduce"}, "all_gather", {"hidden"}),
        (False, {"name": "all_gather", "back": "all_reduce", "ddp": DDP}, None, {"half"}),
        (False, {"name": "all_gather", "back": "all_reduce", "fsdp": True}, None, {"half"}),
    ],
)
def test_what_the_forward_pass_exchanges_is_no_gradient(
    gpu: bool, how: dict[str, Any], kind: str | None, plans: Any, tmp_path: Path
) -> None:
    run = runs.measured(in_both_passes(tmp_path, gpu, **how), exchange_plans)
    found = gains(run)
    assert kind is None or run.frame(activations) == kind
    if plans == {"hidden"}:
        assert set(found) == plans
        assert run.frame(gradients).empty
    else:
        assert set(plans) <= set(found)
    assert found.get("half") == pytest.approx(plans["half"]) if isinstance(plans, dict) else True


def sizes(*, small: int, large: int) -> list[tuple[int, int, int]]:
    """Return three small and three large all-reduces after backward pass: 100 µs to start, 1 µs for 10,000 bytes."""
    found, at = [], 5_010 * US
    for elements in (small, large) * 3:
        dur = 100 * US + elements * 4 // 10
        found.append((at, dur, elements))
        at += dur
    return found


def test_two_classes_of_size_tell_starting_from_moving(tmp_path: Path) -> None:
    run = planned(tmp_path / "apart", gpu_step(*sizes(small=25_000, large=2_500_000)), ddp=DDP)
    fit = run.frame(fitted)
    assert fit is not None
    assert (fit.start_ns, fit.byte_ns) == pytest.approx((100 * US, 0.1))
    # 30.3 MB move in 3.03 ms and six exchanges start in 0.6 ms. Half the bytes take 1.515 ms less.
    assert run.frame(exposed_transfer).tolist() == pytest.approx([3.63 * MS] * 2)
    assert gains(run)["bytes"] == pytest.approx(1.515 * MS)
    assert gains(run)["half"] == pytest.approx(1.815 * MS)
    # In 5 MB six remain. In 10 MB it is three: 3.33 ms, of which 1.33 do not fit beside 2 of 3 ms of backward;
    # with six 3.63 ms, 1.13 of them beyond 2.5 ms. 1 MB makes 29, and starting them costs more than they hide.
    assert gains(run)["bucket"] == pytest.approx(0.0, abs=1)
    run = planned(tmp_path / "alike", gpu_step(*sizes(small=25_000, large=25_000)), ddp=DDP)
    assert run.frame(fitted) is None
    plans = run.frame(exchange_plans).set_index("key")
    assert plans["gain_ns"][["bucket", "bytes", "powersgd"]].isna().all()
    assert "alike" in plans["why"]["bucket"]
    assert plans["gain_ns"]["half"] == pytest.approx(run.frame(exposed_transfer)[0] / 2)


def test_large_exchanges_take_half_as_long_for_half_the_bytes(tmp_path: Path) -> None:
    events = gpu_step((5_010 * US, 4 * MS, 10_000_000))
    assert gains(planned(tmp_path / "32", events, ddp=DDP))["bytes"] == pytest.approx(2 * MS)
    events[-1]["args"]["dtype"] = "BFloat16"
    found = gains(planned(tmp_path / "16", events, ddp=DDP))
    assert set(found) == {"hidden", "bucket", "half", "quarter", "powersgd"}
    gathers = [traces.collective(5_010 * US + n, 4 * MS, 1_000, "all_gather", ranks=(0, 1)) for n in range(2)]
    assert set(gains(planned(tmp_path / "no gradients", gpu_step() + gathers, fsdp=True))) == {"hidden"}


def test_small_buckets_that_mostly_start_become_few(tmp_path: Path) -> None:
    plans = planned(tmp_path, small_buckets(), ddp=DDP).frame(exchange_plans).set_index("key")
    assert plans["bucket_cap_mb"].dropna().to_dict() == {"bucket": 1.0}
    # Forty exchanges of 2.02 MB take 4.202 ms: 1.277 ms more than 39/40 of 3 ms. Two take 0.402 ms, half of it open.
    assert plans.loc["bucket", "change"] == "`bucket_cap_mb=1` (is 1)"
    assert plans.loc["bucket", "gain_ns"] == pytest.approx(1.277 * MS - 0.201 * MS, rel=1e-3)


@pytest.mark.parametrize("now", [0.01, 1.0])
def test_the_buckets_of_the_best_plan_are_named_unless_they_are_there(tmp_path: Path, now: float) -> None:
    run = planned(tmp_path, small_buckets(100), ddp=DDP | {"bucket_cap_mb": now})
    found = ask(RULE, tmp_path / "run")
    assert gains(run)["bucket"] == pytest.approx(found.saving_ns)
    named = [s for c in found.changes for s in c.settings if s.name == "bucket_cap_mb"]
    assert named[0] == Setting("bucket_cap_mb", now, 25.0 if now == 1.0 else 1.0)
    assert [f.value for f in found.forecasts] == ([] if now == 1.0 else ["1.0"])


@pytest.mark.parametrize("lag", [0, 210 * MS])  # a device is steps behind where nothing waits for it
def test_exchanges_before_the_optimizer_steps_are_needed_once(tmp_path: Path, lag: int) -> None:
    """Of four exchanges of 4 ms three are made for nothing: that is the finding, though hiding might give more."""
    path = accumulating(tmp_path, 4 * MS, lag=lag)
    plans = runs.measured(path, exchange_plans, overlap).frame(exchange_plans).set_index("key")
    assert plans["gain_ns"]["once"] == pytest.approx(12 * MS)
    assert "once for 4 batches" in plans["why"]["once"]
    assert not {"half", "quarter"} & set(plans.index)
    found = ask(RULE, path)
    assert found.saving_ns == pytest.approx(12 * MS)
    assert found.advice[0].startswith("`with model.no_sync():` around all batches but the last")
    assert found.verdict == "30 % of each step is communication that the optimizer does not need."
    assert found.evidence is not None
    # One bucket has nothing to hide behind.
    assert [row[1] for row in found.evidence.rows[:2]] == pytest.approx([40 * MS, 28 * MS])


def test_the_batches_that_are_exchanged_are_where_the_most_forward_passes_are() -> None:
    calls = [Call("forward", "train.py", n, "main", f"y{n}", count=count) for n, count in ((3, 2), (7, 30), (9, 1))]
    calls.append(Call("backward", "train.py", 8, "main", "loss.backward()", count=64))
    assert exposed_communication._batch(calls) == (Place("train.py", 7, "main", what="y7"),)
    assert exposed_communication._batch(calls[3:]) == ()


@pytest.mark.parametrize(
    ("text", "model", "named"),
    [
        ("dist.all_reduce(p.grad)", {}, True),
        ("dist.all_reduce(p.grad)", {"ddp": DDP}, False),  # most of what it exchanges is DDP's
        ("p.grad.div_(size)", {}, False),
    ],
)
def test_the_line_in_which_the_script_exchanges(text: str, model: dict[str, Any], named: bool) -> None:
    line = {"doing": "rest", "function": "average", "file": "t.py", "line": 5, "text": text, "idiom": "", "callers": ()}
    lines = pd.DataFrame([line | {"samples": 40, "of": 50, "rank": 0}])
    job = SimpleNamespace(ranks=(0,), facts={0: {"models": [{"parameters": 1, **model}]}})
    found = exposed_communication._by_script(Maybe(lambda: lines), 0, cast(Job, job))
    assert [place.line for place in found] == [5] * named


@pytest.mark.parametrize(("share", "needless"), [(None, [9.0 + 6.0, 12.0]), (0.5, [6.0 + 6.0, 8.0])])
def test_one_exchange_for_four_batches_saves_the_work_around_three(share: float | None, needless: list[float]) -> None:
    assert _needless(pd.Series({0: 12.0, 1: 16.0}), {0: 8.0}, 4.0, share).tolist() == needless


def test_without_buffers_their_copies_are_saved_too() -> None:
    sent = pd.DataFrame({"collective": ["broadcast", "all_reduce"], "exposed_ns": [3.0, 1.0], "ranks": [2, 2]})
    transfer, model = pd.Series({0: 4.0, 1: 8.0}), {"ddp": DDP}
    (plan,) = _without_buffers(sent, "broadcast", model, transfer, {0: 10.0}, lambda gone: float(gone.max()))
    assert plan.gain_ns == 0.75 * 4 + 10


def test_a_sharded_model_that_accumulates_stays_whole_between_its_batches(tmp_path: Path) -> None:
    found = ask(RULE, accumulating(tmp_path, 4 * MS, model={"fsdp": True}))
    assert found.saving_ns == pytest.approx(12 * MS)
    assert found.advice[0].startswith("`set_requires_gradient_sync(False)` and `set_reshard_after_backward(False)`")


@pytest.mark.parametrize(("between", "how"), [(0, {}), (100 * US, {}), (4 * MS, {"last": 0}), (0, {"batches": 1})])
def test_what_little_is_exchanged_between_is_no_gradient(tmp_path: Path, between: int, how: dict[str, Any]) -> None:
    # Nothing, a metric; all before the last batch, as gradients of several losses; one batch a step.
    run = runs.measured(accumulating(tmp_path, between, **how), exchange_plans, overlap)
    assert "once" not in set(run.frame(exchange_plans)["key"])


def starting(
    many: int, elements: int = 1_000, hidden: bool = False, told: bool = True, name: str = "all_reduce"
) -> Made:
    """Make two ranks with steps of 4 ms, 1 ms of which goes to collectives that are, or are not, hidden."""

    def of(_: int, n: int) -> list[Any]:
        t = n * 4 * MS
        events = [traces.collective(t + 3 * MS + i * (MS // many), MS // many, elements, name) for i in range(many)]
        for event in events if not told else ():
            event["args"] = {"stream": 21, "device": 0}
        return [traces.kernel("gemm", t, (4 if hidden else 3) * MS), *events]

    return steps(of, 3, 4 * MS)


MODEL = {"parameters": 25_000, "parameter_bytes": 100_000}
SMALL, FULL, KEPT = ({"bucket_cap_mb": 0.001}, {"bucket_cap_mb": 25}, {"bucket_cap_mb": 25, "broadcast_buffers": False})
UNTOLD = starting(50, told=False)
SHARE = 0.25 * 49 / 50


@pytest.mark.parametrize(
    ("made", "model", "share", "told", "settings"),
    [
        (starting(50), {}, SHARE, "50 collectives of 4 kB a step", ()),
        (starting(50, 1_000_000), {}, 0, "", None),
        (starting(8), {}, 0, "", None),
        (starting(50, hidden=True), {}, 0, "", None),
        (UNTOLD, {}, None, "how large", None),
        # Sizes follow from the model; DDP's first bucket is of 1 MB, to be ready early.
        (UNTOLD, MODEL | {"ddp": SMALL}, SHARE, "1 exchange a step", (Setting("bucket_cap_mb", 0.001, 25),)),
        (
            UNTOLD,
            MODEL | {"ddp": SMALL, "parameter_bytes": 3_000_000},
            0.24,
            "2 exchanges a step, not 50",
            (Setting("bucket_cap_mb", 0.001, 25),),
        ),
        (UNTOLD, MODEL | {"fsdp": True}, SHARE, "`fully_shard` whole blocks", ()),
        (UNTOLD, MODEL | {"fsdp": True, "parameter_bytes": 100_000_000}, 0, "", None),
        # What does not come of small buckets is the script's own, or DDP's buffers.
        (starting(50), MODEL | {"ddp": FULL}, SHARE, "reduce metrics", ()),
        (starting(50, name="broadcast"), {"ddp": FULL}, SHARE, "buffers", (Setting("broadcast_buffers", True, False),)),
        (starting(50, name="broadcast"), {"ddp": KEPT}, SHARE, "reduce metrics", ()),
    ],
)
def test_many_small_collectives_cost_their_starts(
    made: Made, model: dict[str, Any], share: float | None, told: str, settings: Any, tmp_path: Path
) -> None:
    found = ask(small_collectives.RULE, modelled(tmp_path, made, **model))
    assert found.state == ("not_measured" if share is None else "found" if share else "clear")
    assert found.share == pytest.approx(share or 0, rel=1e-3)
    assert told in "\n".join((found.summary, found.why, *found.advice))
    if settings is not None:
        assert {cost.rank: cost.ns for cost in found.by_rank} == pytest.approx(dict.fromkeys((0, 1), found.saving_ns))
        assert found.changes[0].settings == settings
        assert found.changes[0].numerics is any(s.name == "broadcast_buffers" for s in settings)


def test_on_a_cpu_what_fsdp_works_on_each_unit_counts_too(tmp_path: Path) -> None:
    found = ask(small_collectives.RULE, sharded(tmp_path, models=[MODEL | {"fsdp": True}], backend="gloo"))
    # Five units become the three modules above them: of 4 ms of exchanges and 3 of copying two fifths go.
    assert found.saving_ns == pytest.approx(2 / 5 * 7 * MS)
    assert "FSDP2 works for 3.00 ms on its units" in found.summary
    assert "6 starts a step in place of 10" in found.sure


# 19 of 20 exchanges go, and with them 3.8 ms of the 4 that their threads compute. Of 3 ms without a core the other 0.2
# may have caused as many; nor does what a loader's worker computes meanwhile come back.
@pytest.mark.parametrize(
    ("delay", "loader", "freed", "told"),
    [(3 * MS, 0, 2.8, "leave a core free for 2.80 ms more"), (3 * MS, MS, 1.8, "for 1.80 ms more"), (0, 0, 0, "")],
)
def test_threads_that_exchange_less_leave_the_cores_to_those_that_compute(
    delay: int, loader: int, freed: float, told: str, tmp_path: Path
) -> None:
    facts = {**runs.CPU, "backend": "gloo", "cpu": {"torch_threads": 1}}
    facts["models"] = [MODEL | {"ddp": {"bucket_cap_mb": 0.001}}]
    length, mine = 20 * MS, 18 * MS - delay

    def of(_: int, n: int) -> list[Any]:
        events = [traces.annotation("gloo:all_reduce", n * length + 18 * MS + k * 100_000, 100_000) for k in range(20)]
        return [traces.op("aten::mm", n * length, 18 * MS), *events]

    log = [runs.light(n, length, profiled=int(n < 3)) for n in range(23)]
    made = steps(of, 3, length, backend="gloo", device="")
    path = runs.recorded(tmp_path / "run", *((one, log, facts) for one in made))
    used: dict[str, Any] = {"thread": mine, "delay": delay, "cores": (mine + 4 * MS) / length}
    for rank in range(2):
        runs.loading(path, rank, step=length, wait=0, fetch=loader, cpu=loader, n=23, workers=int(loader > 0), **used)
    found = ask(small_collectives.RULE, path)
    assert found.saving_ns == pytest.approx((1.9 + freed) * MS, rel=0.01)
    assert told in found.sure
    assert ("core" in found.sure) is bool(freed)


def test_several_at_once_are_exposed_only_once(tmp_path: Path) -> None:
    """Of 16 all-reduces on two streams two run at any time: of the 0.8 ms that they take, 0.4 lie open."""

    def of(_: int, n: int) -> list[Any]:
        t = n * 4 * MS + MS
        several = (traces.collective(t + i // 2 * 50_000, 50_000, 1_000, stream=21 + i % 2) for i in range(16))
        return [traces.kernel("gemm", t - MS, MS), *several]

    found = ask(small_collectives.RULE, runs.foreign(tmp_path, *steps(of, 3, 4 * MS)))
    # All that is left is one of 50 µs.
    assert found.saving_ns == pytest.approx(350_000, rel=0.01)
    assert found.evidence is not None
    assert [row[-1] for row in found.evidence.rows] == [pytest.approx(400_000)]


@pytest.mark.parametrize(("in_turn", "met"), [(True, 300_000), (False, 0)])
def test_ranks_that_are_late_in_turn_wait_less_where_they_meet_less(tmp_path: Path, in_turn: bool, met: int) -> None:
    """Of 16 all-reduces of 100 µs each rank begins 8 by 50 µs before the other, or one rank all of them."""

    def of(rank: int, n: int) -> list[Any]:
        events: list[Any] = [traces.kernel("gemm", n * 5 * MS, MS)]
        for i in range(16):
            late = 50_000 * (i % 2 == rank if in_turn else rank == 1)
            events.append(traces.collective(n * 5 * MS + MS + i * 200_000 + late, 150_000 - late, 1_000))
        return events

    found = ask(small_collectives.RULE, runs.foreign(tmp_path, *steps(of, 3, 5 * MS)))
    # 15 starts of 16 go, and with a sixteenth of the meetings three quarters of the 0.4 ms that each waits.
    assert found.saving_ns == pytest.approx(1.5 * MS + met, rel=0.01)
    assert ("wait 300.0 µs less" in found.sure) == in_turn
