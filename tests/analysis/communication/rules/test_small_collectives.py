"""Many small collectives: found with what their starts cost; large, few and hidden ones left alone."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.rules.small_collectives import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import sharded
from tests.fixtures.runs import MS


def starting(n: int, elements: int, hidden: bool = False, told: bool = True) -> list[dict[str, Any]]:
    """Make two ranks with steps of 4 ms, 1 ms of which goes to n all-reduces that are, or are not, hidden."""
    made = []
    for rank in range(2):
        events: list[Any] = []
        for step in range(3):
            t = step * 4 * MS
            events += [traces.step(step, t, 4 * MS), traces.kernel("gemm", t, (4 if hidden else 3) * MS)]
            for i in range(n):
                event = traces.collective(t + 3 * MS + i * (MS // n), MS // n, elements)
                if not told:
                    event["args"] = {"stream": 21, "device": 0}
                events.append(event)
        made.append(traces.trace(*events, rank=rank))
    return made


def test_found_with_what_fewer_starts_save(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *starting(50, 1_000)))
    assert found.state == "found"
    assert found.share == pytest.approx(0.25 * 49 / 50, rel=1e-3)
    assert "50 collectives of 4 kB a step" in found.summary
    assert [cost.rank for cost in found.by_rank] == [0, 1]
    assert [cost.ns for cost in found.by_rank] == pytest.approx([found.saving_ns] * 2)


def test_large_ones_few_ones_and_hidden_ones_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, runs.foreign(tmp_path / "large", *starting(50, 1_000_000))).state == "clear"
    assert ask(RULE, runs.foreign(tmp_path / "few", *starting(4, 1_000))).state == "clear"
    hidden = ask(RULE, runs.foreign(tmp_path / "hidden", *starting(50, 1_000, hidden=True)))
    assert (hidden.state, hidden.share) == ("clear", 0)


def test_the_size_of_buckets_follows_from_the_model(tmp_path: Path) -> None:
    model = {"parameters": 25_000, "parameter_bytes": 100_000, "ddp": {"bucket_cap_mb": 0.001}}
    facts = {"device": {"type": "cuda"}, "models": [model]}
    made = starting(50, 1_000, told=False)
    found = ask(RULE, runs.recorded(tmp_path / "run", *((m, [], facts) for m in made)))
    assert found.state == "found"
    assert found.changes[0].settings == (Setting("bucket_cap_mb", 0.001, 25),)
    assert "1 exchange a step" in found.advice[0]
    # The first bucket is of 1 MB, to be ready early.
    model["parameter_bytes"] = 3_000_000
    found = ask(RULE, runs.recorded(tmp_path / "larger", *((m, [], facts) for m in made)))
    assert "2 exchanges a step, not 50" in found.advice[0]


def test_the_size_of_sharded_units_follows_from_the_model(tmp_path: Path) -> None:
    model = {"parameters": 25_000, "parameter_bytes": 100_000, "fsdp": True}
    facts = {"device": {"type": "cuda"}, "models": [model]}
    made = starting(50, 1_000, told=False)
    found = ask(RULE, runs.recorded(tmp_path / "run", *((m, [], facts) for m in made)))
    assert found.state == "found"
    assert "50 collectives of 2 kB a step" in found.summary
    assert "fully_shard" in found.advice[0]
    model["parameter_bytes"] = 100_000_000
    assert ask(RULE, runs.recorded(tmp_path / "large", *((m, [], facts) for m in made))).state == "clear"


def test_sizes_that_nobody_told_abstain(tmp_path: Path) -> None:
    answer = ask(RULE, runs.foreign(tmp_path, *starting(50, 1_000, told=False)))
    assert (answer.state, "how large" in answer.why) == ("not_measured", True)


def test_on_a_cpu_what_fsdp_works_on_each_unit_counts_too(tmp_path: Path) -> None:
    model = {"parameters": 25_000, "parameter_bytes": 100_000, "fsdp": True}
    found = ask(RULE, sharded(tmp_path, models=[model], backend="gloo"))
    # Five units become the three modules above them: of 4 ms of exchanges and 3 of copying two fifths go.
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(2 / 5 * 7 * MS)
    assert "FSDP2 works for 3.00 ms on its units" in found.summary
    assert "6 starts a step in place of 10" in found.sure


def crowded(folder: Path, others: int, delay: int, loader: int = 0) -> Path:
    """Record two CPU ranks with 20 all-reduces of 0.1 ms in steps of 20 ms, whose threads take so much of a core."""
    facts = {**runs.CPU, "backend": "gloo", "cpu": {"torch_threads": 1}}
    model = {"parameters": 25_000, "parameter_bytes": 100_000, "ddp": {"bucket_cap_mb": 0.001}}
    ranks = []
    for rank in range(2):
        events: list[Any] = []
        for n in range(20, 23):
            t = (n - 20) * 20 * MS
            events += [traces.step(n, t, 20 * MS), traces.op("aten::mm", t, 18 * MS)]
            events += [traces.annotation("gloo:all_reduce", t + 18 * MS + k * 100_000, 100_000) for k in range(20)]
        steps = [runs.light(n, 20 * MS, profiled=int(n >= 20)) for n in range(23)]
        made = traces.trace(*events, rank=rank, backend="gloo", device="")
        ranks.append((made, steps, {**facts, "models": [model]}))
    path = runs.recorded(folder / "run", *ranks)
    for rank in range(2):
        mine = 18 * MS - delay
        used: dict[str, Any] = {"thread": mine, "delay": delay, "cores": (mine + others) / (20 * MS)}
        runs.loading(path, rank, step=20 * MS, wait=0, fetch=loader, cpu=loader, n=23, workers=int(loader > 0), **used)
    return path


def test_threads_that_exchange_less_leave_the_cores_to_those_that_compute(tmp_path: Path) -> None:
    # 19 of 20 exchanges go, and with them 3.8 ms of the 4 that their threads compute. Of 3 ms without a core the other
    # 0.2 may have caused as many; where nobody lacked a core, nothing comes back.
    found = ask(RULE, crowded(tmp_path / "crowded", others=4 * MS, delay=3 * MS))
    assert found.saving_ns == pytest.approx((1.9 + 2.8) * MS, rel=0.01)
    assert "leave a core free for 2.80 ms more" in found.sure
    assert "for 2.80 ms they leave no core to compute with" in found.summary
    # Nor does what a loader's worker computes meanwhile.
    loads = ask(RULE, crowded(tmp_path / "loads", others=4 * MS, delay=3 * MS, loader=MS))
    assert loads.saving_ns == pytest.approx((1.9 + 1.8) * MS, rel=0.01)
    free = ask(RULE, crowded(tmp_path / "free", others=4 * MS, delay=0))
    assert free.saving_ns == pytest.approx(1.9 * MS, rel=0.01)
    assert "core" not in free.sure


def test_several_at_once_are_exposed_only_withce(tmp_path: Path) -> None:
    """Of 16 all-reduces on two streams two run at any time: of the 0.8 ms that they take, 0.4 lie open."""
    made = []
    for rank in range(2):
        events: list[Any] = []
        for step in range(3):
            t = step * 4 * MS
            events += [traces.step(step, t, 4 * MS), traces.kernel("gemm", t, MS)]
            for i in range(16):
                event = traces.collective(t + MS + i // 2 * 50_000, 50_000, 1_000, stream=21 + i % 2)
                events.append(event)
        made.append(traces.trace(*events, rank=rank))
    found = ask(RULE, runs.foreign(tmp_path, *made))
    # All that is left is one of 50 µs.
    assert found.saving_ns == pytest.approx(350_000, rel=0.01)
    assert "for 400.0 µs of a step" in found.summary
    assert found.evidence is not None
    assert [row[-1] for row in found.evidence.rows] == [pytest.approx(400_000)]


@pytest.mark.parametrize(("in_turn", "met"), [(True, 300_000), (False, 0)])
def test_ranks_that_are_late_in_turn_wait_less_where_they_meet_less(tmp_path: Path, in_turn: bool, met: int) -> None:
    """Of 16 all-reduces of 100 µs each rank begins 8 by 50 µs before the other, or one rank all of them."""
    made = []
    for rank in range(2):
        events: list[Any] = []
        for step in range(3):
            t = step * 5 * MS
            events += [traces.step(step, t, 5 * MS), traces.kernel("gemm", t, MS)]
            for i in range(16):
                late = 50_000 * (i % 2 == rank if in_turn else rank == 1)
                events.append(traces.collective(t + MS + i * 200_000 + late, 150_000 - late, 1_000))
        made.append(traces.trace(*events, rank=rank))
    found = ask(RULE, runs.foreign(tmp_path, *made))
    # 15 starts of 16 go, and with a sixteenth of the meetings three quarters of the 0.4 ms that each waits.
    assert found.saving_ns == pytest.approx(1.5 * MS + met, rel=0.01)
    assert ("wait 300.0 µs less" in found.sure) == in_turn
