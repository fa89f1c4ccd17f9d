"""What the host does while its device waits, from traces and stacks: waits, loops, gaps, queues, functions, tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankData
from dlprof.analysis.host import gaps, parts
from dlprof.analysis.host import stacks as seen
from dlprof.analysis.host import waiting as lagging
from dlprof.analysis.host.gaps import PYTHON, check_launches, host_work, launch_means
from dlprof.analysis.host.host_tables import host_tables
from dlprof.analysis.host.parts import ON_CPU, ON_DEVICE, host_gains, host_parts
from dlprof.analysis.host.rules.anomaly_mode import anomaly_on_cpu
from dlprof.analysis.host.waiting import grad_scaler_reads, syncs
from dlprof.analysis.timeline import host
from dlprof.errors import NotMeasured
from dlprof.read.run import TRACE, Rank, open_run
from simulator import folder as simulated
from simulator import play
from simulator.faults import FAULTS
from simulator.faults.fault import recording
from tests.fixtures import operators, runs, traces
from tests.fixtures.hosts import LIB, MAIN, SEEN, US, WORKER, ahead, call, graph, item, piece, waiting, with_lines
from tests.fixtures.hosts import with_stacks as stacks
from tests.fixtures.logged import GOLDEN
from tests.fixtures.phases import STEPS, called_again, loop, one_by_one, trained
from tests.fixtures.places import TRACES
from tests.fixtures.runs import CPU, MS, asked, foreign, light, measured, recorded

GEMM = traces.launched("gemm", 0, 10 * US, 5 * MS, 1)
AGAIN = traces.launched("gemm", 7 * MS, 7 * MS + 10 * US, 2 * MS, 5)
ON_A_CPU: dict[str, Any] = {"device": "", "backend": ""}


@pytest.mark.parametrize(
    ("events", "keys", "rows"),
    [
        # A kernel of 5 ms; .item() asks at 1 ms; the next kernel is launched at 7 ms.
        ([GEMM, *item(MS, 5 * MS + 12 * US, 2), AGAIN], {}, [("aten::item", "cudaMemcpyAsync", 1, 4.02, 2)]),
        # Waits of one kind are added up and the longest come first.
        ([traces.launched("gemm", 0, 10 * US, MS, 1), traces.call("cudaDeviceSynchronize", 2 * MS, MS, 2),
          traces.call("cudaStreamSynchronize", 4 * MS, 2 * MS, 3), traces.call("cudaDeviceSynchronize", 7 * MS, MS, 4),
          traces.call("cudaEventSynchronize", 8 * MS, MS, 5)], {},
         [("", "cudaDeviceSynchronize", 2, 2, 0), ("", "cudaStreamSynchronize", 1, 2, 0),
          ("", "cudaEventSynchronize", 1, 1, 0)]),
        # A wait for a device that is idle anyway is not why, and what does not block is no wait.
        ([traces.launched("gemm", 0, 10 * US, MS, 1), traces.call("cudaEventSynchronize", 3 * MS, 5 * US, 2), AGAIN],
         {}, [("", "cudaEventSynchronize", 1, 0.005, 0)]),
        ([GEMM, traces.call("cudaMemcpyAsync", MS, 5 * US, 2),
          traces.copy(6 * MS, MS, 1 << 20, "DtoH (Device -> Pinned)", 2)], {}, []),
        # On the CPU reads are counted and cost is not known.
        ([*(traces.op("aten::item", n * MS, 10 * US) for n in (1, 2, 4)), traces.op("aten::mm", 5 * MS, MS),
          *(traces.op("aten::_local_scalar_dense", n * MS + US, 5 * US) for n in (1, 2, 4))], ON_A_CPU,
         [("aten::item", "", 3, None, None)]),
    ],
    ids=["item", "kinds", "idle anyway", "does not block", "on the CPU"],
)  # fmt: skip
def test_waits_for_the_device(
    tmp_path: Path, events: list[Any], keys: dict[str, Any], rows: list[tuple[Any, ...]]
) -> None:
    made = traces.trace(traces.step(1, 0, 10 * MS), *events, world_size=1, **keys)
    frame = measured(foreign(tmp_path / "traces", made), syncs).frame(syncs)
    assert frame[["caller", "call", "calls"]].to_numpy().tolist() == [list(row[:3]) for row in rows]
    for column, n in (("ns", 3), ("idle_ns", 4)):
        found = [None if pd.isna(ns) else ns / MS for ns in frame[column]]
        assert found == [row[n] if row[n] is None else pytest.approx(row[n], rel=0.01) for row in rows]


@pytest.mark.skipif(not TRACES.is_dir(), reason="the reference traces are not here (../shared/traces)")
@pytest.mark.parametrize(
    ("name", "caller", "calls"),
    [
        ("dlrm_a100_rank3_of_8", "aten::item", 3.0),
        ("resnet50_v100_workers0", "aten::to", 2.0),  # pictures and labels, from pageable memory
    ],
)
def test_reference_traces_wait_where_their_scripts_do(name: str, caller: str, calls: float) -> None:
    frame = measured(TRACES / name, syncs).frame(syncs).set_index("caller")
    assert frame.loc[caller, "calls"] == pytest.approx(calls)


@pytest.mark.parametrize(
    ("fused", "asks", "scales", "own"),
    [
        (False, "nothing", True, 3),
        (False, "loss", True, 3),
        (False, "norm", True, 3),
        (True, "loss", True, 0),
        (True, "norm", True, 0),
        (False, "loss", False, 0),  # without a scale what stands before the optimizer is the script's
    ],
)
def test_only_what_gradscaler_reads_is_its_own(tmp_path: Path, fused: bool, asks: str, scales: bool, own: int) -> None:
    """Trace three steps of torch's own; the script reads nothing, its loss, or the norm of unscaled gradients."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            scaler.scale(loss).backward()
            if asks == "norm":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            elif asks == "loss":
                loss.item()
            scaler.step(optimizer)
            scaler.update()
            profile.step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    thread = RankData(Rank(0, {TRACE: tmp_path / "trace.json"})).once(host.on_training_thread)
    ops = host.outermost(thread[["name", "start_ns", "dur_ns"]][host.is_kind(thread, "op")])
    assert len(grad_scaler_reads(thread, ops)) == own
    # A fused AdamW reads its own step counters on the CPU: at least the script's and GradScaler's are there.
    assert host.is_named(ops, "aten::item").sum() >= own + (3 if asks != "nothing" else 0)


FOLDED = "main (t.py:1);f (t.py:5);dumps (json/__init__.py:9) 30\nmain (t.py:1);f (t.py:6) 50\nmain (t.py:2) 20\n"


def test_a_profile_of_folded_stacks_and_one_of_counts(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(FOLDED)
    made = measured(tmp_path / "x.txt", seen.profile_functions, seen.profile_flame, seen.profile_summaries)
    # What a library does for f counts as f's.
    rows: Any = made.frame(seen.profile_functions).set_index("function")
    assert rows.loc["f", ["own", "alone", "total", "of", "line"]].tolist() == [True, 80, 80, 100, 6]
    assert rows.loc["main", ["alone", "total"]].tolist() == [20, 100]
    assert rows.loc["dumps", ["own", "alone"]].tolist() == [False, 30]
    tree = made.frame(seen.profile_flame)
    assert tree.loc[tree["name"] == "f (t.py)", "samples"].tolist() == [80]
    summary = made.frame(seen.profile_summaries).iloc[0]
    assert summary[["function", "share", "total", "tool"]].tolist() == ["f", 0.8, 100, "py-spy"]
    made = measured(GOLDEN / "calc.prof", seen.counted_functions, seen.profile_summaries)
    first = made.frame(seen.counted_functions).iloc[0]
    assert (first["function"], first["calls"]) == ("decode", 300)
    assert first["own_ns"] / first["of_ns"] > 0.85
    summary = made.frame(seen.profile_summaries).iloc[0]
    assert (bool(summary["counted"]), summary["total"]) == (True, first["of_ns"])
    with pytest.raises(NotMeasured, match="dlprof saw no"):
        measured(tmp_path / "x.txt", seen.flame).frame(seen.flame)
    # What dlprof saw itself is no profile.
    with pytest.raises(NotMeasured):
        measured(stacks(tmp_path / "run", SEEN), seen.profile_functions).frame(seen.profile_functions)


@pytest.mark.parametrize("profile", ["pyspy.raw.txt", "pyspy.speedscope.json.gz", ""])
def test_a_profile_beside_a_trace_serves_the_rules_where_it_knows_the_phases(tmp_path: Path, profile: str) -> None:
    folder = foreign(tmp_path / "a", traces.training())
    if profile:
        (folder / f"spy.{profile.partition('.')[2]}").write_bytes((GOLDEN / profile).read_bytes())
        frame = measured(folder, seen.hottest).frame(seen.hottest)
        fetch = frame[frame["doing"] == "fetch"].iloc[0]
        assert (fetch["function"], fetch["samples"] <= 242) == ("decode", True)  # time is no number of samples
        assert "rest" not in set(frame["doing"])  # starting up is no part of a step
    else:
        (folder / "plain.txt").write_text(FOLDED)
        with pytest.raises(NotMeasured):
            measured(folder, seen.hottest).frame(seen.hottest)


TREE = pd.DataFrame(
    [("", -1, "main (t.py)", 9, True), ("", 0, "f (t.py)", 3, True), ("", 0, "g (t.py)", 5, True)],
    columns=["doing", "parent", "name", "samples", "own"],
).assign(rank=0)


def test_rows_of_flame_graphs_stand_under_their_caller_the_widest_first() -> None:
    assert seen.flame_rows(TREE, {"": "all"}, {"": "host"}) == (
        (0, 0, 9, "all", "host"),
        (1, 0, 9, "main (t.py)", "own"),
        (2, 0, 5, "g (t.py)", "own"),
        (2, 5, 3, "f (t.py)", "own"),
    )
    assert [row[0] for row in seen.flame_rows(TREE, {"": "all"}, {"": "host"}, rooted=False)] == [0, 1, 1]
    both = pd.concat([TREE, TREE.assign(rank=1)])
    assert [row[2] for row in seen.flame_rows(both, {"": "all"}, {"": "host"})] == [18, 18, 10, 6]


def test_the_hosts_time_is_split_by_what_ran(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(1, 0, MS),
        traces.annotation("dlprof::forward", 0, 400_000),
        traces.op("aten::conv2d", 100_000, 200_000),
        traces.op("aten::convolution", 110_000, 100_000),
        traces.call("cudaLaunchKernel", 280_000, 10_000, 1),
        traces.kernel("gemm", 500_000, 300_000, 1),
    )
    # The kernel was launched until 290 µs, and waited until 500 µs for something that is not the host's.
    rank = runs.rank_of(tmp_path, made)
    found = {(n, p): ns / US for n, p, ns in rank.once(host_work).itertuples(index=False)}
    assert found == {(PYTHON, ""): 200, (PYTHON, "forward"): 100, ("aten::conv2d", "forward"): 190}
    assert rank.once(launch_means)["kernels"][0] == 1


@pytest.mark.parametrize(("kernels", "why"), [(0, "no kernels"), (1, "1 kernel a step"), (7, "7 kernels a step")])
def test_a_device_with_next_to_nothing_to_do_does_not_train(tmp_path: Path, kernels: int, why: str) -> None:
    events = [traces.launched("gemm", i * 9_000, i * 9_000 + 6_000, 2_000, 1 + i) for i in range(kernels)]
    run = foreign(tmp_path, traces.trace(traces.step(0, 0, MS), *events, world_size=1))
    with pytest.raises(NotMeasured, match=why):
        asked(measured(run, launch_means), check_launches)


def test_a_faster_host_gains_what_its_launches_cost(tmp_path: Path) -> None:
    # Each of ten kernels is launched 40 µs after the one before had ended.
    late = [traces.launched("small", i * 100_000 + 35_000, i * 100_000 + 40_000, 60_000, 1 + i) for i in range(10)]
    gpu = traces.trace(traces.step(0, 0, MS), *late, world_size=1)
    cpu = traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, 600_000), **ON_A_CPU, world_size=1)
    for made, gains in ((gpu, {ON_DEVICE: 400_000.0}), (cpu, {ON_CPU: 400_000.0})):
        run = foreign(tmp_path / next(iter(gains)), made)
        assert measured(run, host_gains).frame(host_gains) == pytest.approx(gains, rel=0.05)


def norms(turns: int, reads: bool = False, name: str = "linalg_vector_norm", launches: bool = True) -> Any:
    return lambda at, ids: loop(at, ids, turns, name, reads=reads, launches=launches)


def waits(at: int, ids: int) -> list[Any]:
    """Queue 1 ms of work, wait for it in three places, and compute in Python for 0.5 ms."""
    return [
        *traces.launched("long", at - 20 * US, at, MS, ids),
        traces.call("cudaDeviceSynchronize", at + 10 * US, 995 * US, ids + 1),
        traces.call("cudaDeviceSynchronize", at + 1_010 * US, 6 * US, ids + 2),
        traces.call("cudaDeviceSynchronize", at + 1_020 * US, 6 * US, ids + 3),
    ]


LEFT = 1 - parts.LOOP_LEFT
NORMED = {"after": "backward", "turns": 40}


@pytest.mark.parametrize(
    ("made", "part", "gain", "rel", "told"),
    [
        # The loop is 2 ms of the 4.1; the device computes for 0.5 ms of the step. Its waits are told by it alone.
        (trained(norms(40), length=4_100 * US), parts.LOOP, LEFT * 2, 0.06, NORMED | {"waits": 0}),
        (trained(norms(40, reads=True), length=4_100 * US), parts.LOOP, LEFT * 2, 0.06, NORMED | {"waits": 40}),
        (trained(norms(40, reads=True), length=4_100 * US), parts.WAITS, 0, 0, {}),
        # Launches are those of forward and backward: their 2 ms are gone, but for 0.3 that calling graphs takes, and
        # the host goes on with the loop meanwhile.
        (trained(norms(40), length=4_100 * US), parts.LAUNCHES, 1.7, 0.05, {}),
        # A few operators are no loop, nor such that launch nothing: the host holds the device up all the same.
        (trained(norms(10), length=2_600 * US), parts.BETWEEN, 0.5, 0.2, {}),
        (trained(norms(40, name="detach", launches=False), length=4_100 * US), parts.BETWEEN, 2, 0.06, {}),
        (trained(length=3_100 * US), parts.BETWEEN, 1, 0.05, {}),
        # What the backward pass does for a loop is part of it: 1 ms of the loss, and 20 × 80 µs.
        (one_by_one(), parts.LOOP, LEFT * 2.6, 0.1, {"after": "forward", "turns": 20, "in_graph": 1}),
        # Of 2 ms a fifth is left of the calls of one model; of those of several 0.3 ms for calling graphs.
        (called_again(5), parts.LAUNCHES, 1.6, 0.02, {}),
        (called_again(5, same=False), parts.LAUNCHES, 1.7, 0.02, {}),
        (called_again(3), parts.LAUNCHES, 1.7, 0.02, {}),
        # Without one wait alone the host waits in the next; without all three it launches for the 1 ms that the device
        # computes.
        (trained(waits, length=3_600 * US), parts.WAITS, 1, 0.1, {"waits": 3}),
    ],
)
def test_each_part_of_the_host_gains_what_the_device_waits_for_it(
    tmp_path: Path, made: dict[str, Any], part: str, gain: float, rel: float, told: dict[str, Any]
) -> None:
    frame = measured(foreign(tmp_path / "traces", made), host_parts).frame(host_parts).set_index("part")
    assert frame.loc[part, "gain_ns"] == pytest.approx(gain * MS, rel=rel)
    assert {name: frame.loc[part, name] for name in told} == told
    assert frame.loc[parts.ALL, "gain_ns"] >= frame["gain_ns"].drop(parts.ALL).max()
    assert part != parts.BETWEEN or parts.LOOP not in frame.index
    if "in_graph" in told:
        assert frame.loc[part, "host_ns"] == pytest.approx(2.6 * MS, rel=0.05)


def test_a_trace_of_others_has_launches_and_no_loops(tmp_path: Path) -> None:
    events = [
        e for n in range(STEPS) for e in (traces.step(n, n * 4 * MS, 4 * MS), *norms(40)(n * 4 * MS, 999 * n + 9))
    ]
    run = foreign(tmp_path / "traces", traces.trace(*events, world_size=1))
    frame = measured(run, host_parts).frame(host_parts).set_index("part")
    # Nothing marks the phases: these may be the layers of a model.
    assert parts.LOOP not in frame.index
    assert frame["gain_ns"][parts.LAUNCHES] > MS


@pytest.mark.parametrize(("workers", "gain"), [(0, 1.0 * MS), (4, 0.03 * MS)])
def test_freeing_the_memory_of_batches_is_not_the_scripts_python(tmp_path: Path, workers: int, gain: float) -> None:
    events: list[Any] = []
    for n in range(3):
        t, c = n * 2 * MS, 10 * n + 1
        # For the first half of a step nothing is called; of 10 MB from workers, 0.97 ms of that is freeing them.
        events += [
            traces.step(n, t, 2 * MS),
            traces.call("cudaMemcpyAsync", t + MS, 406_000, c),
            traces.copy(t + MS + 5_000, 400_000, 10_000_000, correlation=c),
            traces.launched("gemm", t + MS + 410_000, t + MS + 416_000, 500_000, c + 1),
            traces.call("cudaDeviceSynchronize", t + MS + 416_000, 502_000, c + 2),
            traces.op("aten::mm", t + MS + 920_000, 80_000),
        ]
    facts = {"device": {"type": "cuda", "name": "NVIDIA H100"}, "loaders": [{"role": "train", "num_workers": workers}]}
    path = recorded(tmp_path / "run", (traces.trace(*events, world_size=1), [], facts))
    frame = measured(path, host_parts).frame(host_parts).set_index("part")
    assert frame.loc[parts.BETWEEN, "gain_ns"] == pytest.approx(gain, rel=0.1)


@pytest.mark.parametrize("after", ["backward", "optimizer"])
def test_a_loop_stands_after_the_phase_that_ended_last(tmp_path: Path, after: str) -> None:
    made = trained(lambda at, ids: loop(at, ids, 40, "mul_", "add_"), length=4_200 * US, after=after)
    found = runs.rank_of(tmp_path, made).once(gaps.segments)
    (one,) = found.loops
    assert (one.after, set(one.names), one.turns) == (after, {"aten::mul_", "aten::add_"}, 40)
    assert iv.total(one.times) == pytest.approx(STEPS * 39.5 * 50 * US, rel=0.03)
    assert not len(one.behind)
    assert iv.total(found.after[after]) >= iv.total(one.times)


def test_turns_are_those_of_most_operators_and_a_loop_has_its_part_of_the_backward_pass(tmp_path: Path) -> None:
    """One operator that is called twice a turn, and two that are called once."""
    made = trained(lambda at, ids: loop(at, ids, 20, "slice", "mul", "slice", "add"), length=3_200 * US)
    assert [one.turns for one in runs.rank_of(tmp_path / "a", made).once(gaps.segments).loops] == [20]
    (one,) = runs.rank_of(tmp_path / "b", one_by_one()).once(gaps.segments).loops
    assert iv.total(one.behind) == STEPS * 20 * 80 * US


@pytest.mark.parametrize(
    ("made", "calls"), [(called_again(5), 5), (called_again(5, same=False), 1), (trained(length=3_000 * US), 1)]
)
def test_calls_of_one_model_for_a_backward_pass(tmp_path: Path, made: dict[str, Any], calls: int) -> None:
    assert runs.rank_of(tmp_path, made).once(gaps.model_calls) == calls


LAYERS = 12


def reads(gradient: Any) -> None:
    gradient.norm().item()


def hooked(folder: Path, hook: Callable[[Any], Any] | None = None, on: int = 2 * LAYERS) -> list[gaps.Loop]:
    """Return the loops of torch's backward pass where a hook is on so many parameters, and a model is called twice."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(LAYERS)))
    for parameter in [*model.parameters()][:on] if hook else ():
        parameter.register_hook(hook)
    x = torch.randn(4, 16)
    return operators.profiled(torch, folder, lambda: (model(x).sum() + model(x).sum()).backward()).once(gaps.hook_loops)


def test_hooks_that_read_values(tmp_path: Path) -> None:
    (loop,) = hooked(tmp_path, reads)
    assert (loop.after, loop.turns, set(loop.names)) == (
        gaps.HOOK,
        2 * LAYERS,
        {"aten::linalg_vector_norm", "aten::item"},
    )
    # Hooks on modules do so too.
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(20)))
    for module in model:
        module.register_full_backward_hook(lambda _module, _inputs, outputs: reads(outputs[0]))
    x = torch.randn(4, 16, requires_grad=True)
    (loop,) = operators.profiled(torch, tmp_path, lambda: model(x).sum().backward()).once(gaps.hook_loops)
    assert loop.turns == 20


@pytest.mark.parametrize(("hook", "on"), [(None, 0), (reads, 15), (lambda gradient: gradient.clamp(-1, 1), 2 * LAYERS)])
def test_gradients_that_are_summed_a_few_hooks_and_such_that_wait_for_nothing_are_none(
    tmp_path: Path, hook: Callable[[Any], Any] | None, on: int
) -> None:
    assert hooked(tmp_path, hook, on) == []


def test_anomaly_mode_is_told_from_hooks(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with torch.autograd.set_detect_anomaly(True):
        (checks,) = hooked(tmp_path)
    assert {*gaps.ANOMALY, "aten::item"} <= checks.inner
    assert checks.turns > 2 * LAYERS


@pytest.mark.parametrize("on", [True, False])
def test_what_anomaly_mode_takes_on_a_cpu_is_the_time_of_its_checks(tmp_path: Path, on: bool) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(LAYERS)))
    x = torch.randn(4, 16)
    with torch.autograd.set_detect_anomaly(on):
        rank = operators.profiled(torch, tmp_path, lambda: model(x).sum().backward())
    found = rank.once(anomaly_on_cpu)
    assert len(found) == on
    if on:
        (row,) = found.to_dict("records")
        assert row["checks"] > LAYERS
        assert row["gain_ns"] == row["host_ns"] > 0  # no stacks were seen


FAULT = next(f for f in FAULTS if f.name == "host_tables")


def test_lookups_gradients_and_copies_of_embeddings_are_those_that_were_simulated(tmp_path: Path) -> None:
    job = FAULT.make(3)
    simulated.write(tmp_path / "run", job, recording(job, FAULT.name))
    (row,) = RankData(open_run(tmp_path / "run").ranks[0]).once(host_tables).to_dict("records")
    tables = job.tables
    assert (row["lookups"], row["copies"], row["optimizer_ns"]) == (tables.count, 2 * tables.count, 0)
    assert row["copy_bytes"] == pytest.approx(2 * tables.count * tables.size)
    assert row["lookup_ns"] == pytest.approx(tables.count * tables.lookup, rel=0.2)
    assert row["gradient_ns"] == pytest.approx(tables.count * tables.gradient, rel=0.2)
    gain = play.true(job).period_ns - play.true(FAULT.fix(job)).period_ns
    assert row["gain_ns"] == pytest.approx(gain, rel=0.1)


def looked_up(folder: Path, *, copied: bool = True, between: str = "", changes: int = 0) -> RankData:
    """Return steps of 20 ms that look up for 4 ms on the host; then a copy of 1 MB for 2 ms, and 8 ms of kernel."""
    events: list[Any] = []
    for n in range(3):
        t, number = n * 20 * MS, 10 * n
        events += [traces.step(n, t, 20 * MS), traces.op("aten::embedding", t, 4 * MS)]
        at = t + 4 * MS + 10 * US
        if between:
            events.append(traces.op(between, at, 100 * US))
        if copied:
            events += [
                traces.op("aten::to", at + 200 * US, 2 * MS),
                traces.call("cudaMemcpyAsync", at + 210 * US, 2 * MS - 20 * US, number + 1),
                traces.copy(at + 220 * US, 2 * MS - 40 * US, 1 << 20, correlation=number + 1),
            ]
        events += [traces.op("aten::mm", at + 3 * MS, 20 * US)]
        events += traces.launched("gemm", at + 3 * MS + 2 * US, at + 3 * MS + 10 * US, 8 * MS, number + 2)
        events += [traces.annotation("Optimizer.step#SGD.step", t + 16 * MS, 3 * MS)]
        if changes:
            events += [traces.op("aten::add_", t + 16 * MS + US, changes)]
        events += [traces.call("cudaStreamSynchronize", at + 3 * MS + 30 * US, 8 * MS, number + 3)]
    return runs.rank_of(folder, traces.trace(*events, world_size=1, device=runs.A100["name"]))


def test_a_lookup_has_what_works_for_it_on_the_host_and_is_none_without_a_copy(tmp_path: Path) -> None:
    (row,) = looked_up(tmp_path / "a", between="aten::sum", changes=2 * MS).once(host_tables).to_dict("records")
    columns = ("lookups", "lookup_ns", "copies", "copy_bytes", "optimizer_ns")
    assert [row[name] for name in columns] == [1, 4 * MS, 1, 1 << 20, 2 * MS]
    assert looked_up(tmp_path / "b", copied=False).once(host_tables).empty


def other_stream(at: int, number: int) -> list[Any]:
    return traces.launched("other", at, at + 292_000, 200_000, number, stream=9)


def gets_memory(at: int, number: int) -> list[Any]:
    return [traces.call("cudaMalloc", at + 340_000, 400_000, number, tid=traces.AUTOGRAD)]


@pytest.mark.parametrize(
    ("made", "reason", "us"),
    [
        (waiting(call("cudaStreamWaitEvent")), lagging.EVENT, 500),
        (waiting(call("cudaLaunchHostFunc")), lagging.FUNCTION, 500),
        (waiting(call("cudaEventRecord")), lagging.UNKNOWN, 500),
        (waiting(gets_memory), lagging.MEMORY, 500),  # the device's memory is got while it idles
        (waiting(other_stream), lagging.OTHER_STREAM, 300),  # from the end of the other one on
        (graph(node=True), lagging.GRAPH_NODE, 500),
        (graph(node=False), lagging.GRAPH_START, 500),
        (waiting(wait=0), None, 0),
    ],
)
def test_the_calls_before_its_launch_tell_what_work_waits_for(
    tmp_path: Path, made: dict[str, Any], reason: str | None, us: int
) -> None:
    rows = runs.rank_of(tmp_path, made).once(lagging.queued_waits).to_dict("records")
    assert len(rows) == (reason is not None)
    for row in rows:
        assert (row["waits_for"], row["times"], row["ns"]) == (reason, 1, pytest.approx(us * US, rel=0.01))
        if reason in (lagging.EVENT, lagging.FUNCTION):
            assert (row["ended_by"], row["stream"], row["launched_by"]) == ("second", "device:7", "cudaLaunchKernel")
            assert row["queued_ns"] == pytest.approx(312_000 + 500_000 - 60_000)
            assert row["gain_ns"] == pytest.approx(500_000, rel=0.02)


def test_the_lag_and_the_queue_grow_with_a_host_that_runs_ahead(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path / "a", ahead())
    (row,) = rank.once(lagging.device_lag).to_dict("records")
    # The first steps, in which the host gets its lead, do not count.
    assert row["lag_ns"] > 2 * MS
    queued = rank.once(lagging.queue_series)["queued"]
    assert queued.iloc[-1] < 1 < queued.max() <= 8
    unlinked = runs.rank_of(tmp_path / "b", traces.trace(traces.step(0, 0, MS), traces.kernel("gemm", 10, MS, 0)))
    for one in (lagging.device_lag, lagging.queue_series):
        with pytest.raises(NotMeasured, match="does not link"):
            unlinked.once(one)


def test_the_users_functions_have_what_libraries_do_for_them(tmp_path: Path) -> None:
    made = measured(stacks(tmp_path / "a", SEEN, SEEN), seen.hottest)
    frame = made.frame(seen.hottest)
    mine = frame[(frame["rank"] == 1) & frame["own"].astype(bool)]
    told = [tuple(row) for row in mine[["doing", "function", "line", "alone", "total", "samples"]].to_numpy()]
    assert told == [
        ("rest", "log", 9, 36, 36, 36),
        ("rest", "run", 0, 0, 36, 36),
        ("fetch", "run", 3, 40, 40, 40),
        ("worker", "decode", 4, 80, 80, 100),
        ("worker", "read", 2, 20, 100, 100),
    ]
    assert "80 % are in decode (data.py:4)" in asked(made, seen.hottest_own, 0, "worker")
    assert asked(made, seen.hottest_own, 0, "forward", "backward") == ""
    assert asked(made, seen.hottest_own, 2, "worker") == ""
    # A few samples and a thin spread are not cited.
    thin = "".join(f"{WORKER}decode{n} (/me/data.py:4) 10\n" for n in range(10))
    made = measured(stacks(tmp_path / "b", f"{WORKER}decode (/me/data.py:4) 20\n", thin), seen.hottest)
    assert asked(made, seen.hottest_own, 0, "worker") == asked(made, seen.hottest_own, 1, "worker") == ""
    # What travels is bounded.
    many = "".join(f"{MAIN}f{n} (/me/a.py:1);g{n} (/v/lib/python3.11/b.py:1) {n}\n" for n in range(1, 100))
    frame = measured(stacks(tmp_path / "c", many), seen.hottest).frame(seen.hottest)
    assert frame["own"].astype(bool).value_counts().to_dict() == {True: seen.MOST_OWN, False: seen.MOST_LIBRARY}
    assert frame["function"].iloc[0] == "f99"
    bare = measured(recorded(tmp_path / "d", (None, [light(n, 10 * MS) for n in range(5)], CPU)), seen.hottest)
    with pytest.raises(NotMeasured, match="py-spy"):
        bare.frame(seen.hottest)
    assert asked(bare, seen.hottest_own, 0, "worker") == ""


def test_a_phase_is_called_from_a_line_of_the_script_and_a_loss_is_training(tmp_path: Path) -> None:
    forward = f"_wrapped_call_impl ({LIB}/nn/modules/module.py:1);forward (/me/net.py:3)"
    rows = [(5, forward, "forward", False, 30), (9, forward, "forward", False, 10),
            (6, f"mse_loss ({LIB}/nn/functional.py:1)", "rest", True, 8),
            (8, f"all_reduce ({LIB}/distributed/distributed_c10d.py:1)", "rest", True, 6),
            (7, "dumps (/v/lib/python3.11/json/__init__.py:1)", "rest", False, 4)]  # fmt: skip
    top = MAIN.rpartition("run (")[0]
    text = "".join(f"{top}main (/me/train.py:{line});{frames} {n}\n" for line, frames, *_, n in rows)
    frame = measured(stacks(tmp_path, text), seen.own_lines).frame(seen.own_lines)
    assert [tuple(row) for row in frame[["doing", "line", "trains", "seen", "samples"]].to_numpy()] == [
        (doing, line, trains, n, 40 if doing == "forward" else 18) for line, _, doing, trains, n in rows
    ]


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/me/train.py", True),
        ("train.py", True),
        ("/me/python/lib/data.py", True),
        ("/usr/lib/python3.12/json/__init__.py", False),
        ("/usr/lib/python3/dist-packages/x.py", False),
        ("/me/venv/lib/python3.11/site-packages/torch/nn/functional.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
        ("/tmp/torchinductor_me/qn/cqniytj5.py", False),
        (f"/scratch/cache/qn/c{'qniytj5wpguedtxvs' * 3}.py", False),
        ("/me/qn/cqniytj5.py", True),
    ],
)
def test_whose_a_file_is(file: str, own: bool) -> None:
    assert seen.is_own(file) == own


def test_the_tree_of_calls_stands_on_what_the_thread_was_doing(tmp_path: Path) -> None:
    module = f"Module._call_impl ({LIB}/nn/modules/module.py:9)"
    frame = measured(
        stacks(tmp_path / "a", SEEN + f"{MAIN}{module};Net.forward (/me/net.py:5) 50\n"), seen.flame
    ).frame(seen.flame)
    told = {}
    for row in frame.to_dict("records"):
        above = frame["name"][row["parent"]].split(" ")[0] if row["parent"] >= 0 else ""
        told[row["doing"], above, row["name"].split(" ")[0]] = (row["samples"], bool(row["own"]))
    assert told == {
        ("rest", "", "run"): (36, True),
        ("rest", "run", "log"): (36, True),
        ("rest", "log", "dumps"): (6, False),
        ("forward", "", "run"): (50, True),
        ("forward", "run", "Net.forward"): (50, True),
        ("fetch", "", "run"): (40, True),
        ("fetch", "run", "_BaseDataLoaderIter.__next__"): (40, False),
        ("fetch", "_BaseDataLoaderIter.__next__", "wait"): (40, False),
        ("worker", "", "_worker_loop"): (100, False),
        ("worker", "_worker_loop", "read"): (100, True),
        ("worker", "read", "decode"): (80, True),
    }
    # It is no larger than a screen: of a wide one each was seen too seldom.
    deep = "".join(f"{MAIN}{';'.join(f'f{k} (/me/f.py:1)' for k in range(n))} 9\n" for n in range(1, 90))
    wide = "".join(f"{MAIN}g{n} (/me/g.py:1) 9\n" for n in range(2000))
    frame = measured(stacks(tmp_path / "b", deep, wide), seen.flame).frame(seen.flame)
    assert frame.groupby("rank").size().max() <= seen.MOST_FRAMES
    assert set(frame.loc[frame["rank"] == 1, "name"]) == {"run (/me/train.py)"}
    assert len(frame[frame["rank"] == 0]) == seen.MOST_DEPTH


def test_what_travels_of_lines_is_bounded_and_what_never_ran_is_left_out(tmp_path: Path) -> None:
    long = [piece(f"data:f{n}", [(k, 1, k + n) for k in range(1, 500)], file=f"{n}.py") for n in range(20)]
    frame = measured(with_lines(tmp_path / "a", long), seen.line_times).frame(seen.line_times)
    assert (frame["function"].nunique(), frame["function"].iloc[0]) == (seen.MOST_FUNCTIONS, "data:f19")
    assert set(frame.groupby("function")["line"].count()) == {seen.MOST_LINES}
    assert frame["line"].iloc[0] == 500 - seen.MOST_LINES
    idle = with_lines(tmp_path / "b", [piece("data:f", [(2, 0, 0)])])
    none = recorded(tmp_path / "c", (None, [light(n, 10 * MS) for n in range(5)], CPU))
    for path, why in ((idle, "no function that --lines names was called"), (none, "--lines")):
        with pytest.raises(NotMeasured, match=why):
            measured(path, seen.line_times).frame(seen.line_times)


@pytest.mark.parametrize(
    ("seen_in", "place"),
    [
        ({"<module>": 20, "log": 20}, "log"),  # on a tie the function
        ({"<module>": 21, "log": 20}, "<module>"),
        ({"<module>": 20, "log": 21}, "log"),
        ({"<module>": 16, "log": 16}, None),  # less than a third of all
    ],
)
def test_a_loop_of_no_recorded_line_is_where_most_stacks_are(seen_in: dict[str, int], place: str | None) -> None:
    rows = [("rest", True, name, "/me/train.py", 3, alone, alone, 49) for name, alone in seen_in.items()]
    hottest = pd.DataFrame(rows, columns=["doing", "own", "function", "file", "line", "alone", "total", "samples"])
    row = {"after": "backward", "inner": "", "waits": 0, "turns": 9}
    found = parts.places_of(row, {}, Maybe(list), hottest)
    assert [one.function for one in found] == ([place] if place else [])


@pytest.mark.parametrize(
    ("lines", "both", "first"),
    [
        ([20, 20], [5, 10], 0),  # notable lines of 20 ms; the host holds up 10 and 40 ms, half and a quarter outside
        ([0, 45], [0, 10], 1),
        ([0, 40], [0, 10], 1),
        ([2, 0], [0, 0], 0),  # not notable in a step of 1,000 ms
    ],
)
def test_lines_that_take_longer_than_all_that_the_host_holds_up_keep_the_time_that_both_see(
    lines: list[int], both: list[int], first: int
) -> None:
    between = pd.DataFrame({"rank": [0, 1], "ns": [ms * MS for ms in lines]})
    work = pd.DataFrame({"rank": [0, 0, 1, 1], "phase": ["", "forward"] * 2, "ns": [5, 5, 1, 3]})
    breakdown = pd.DataFrame({"rank": [0, 1], "category": "host", "ns": [10 * MS, 40 * MS]})
    job: Any = SimpleNamespace(ranks=(0, 1), facts={0: CPU, 1: CPU})
    frame = parts.between_twice.function(between, work, breakdown, 1_000 * MS, job)
    assert frame["both_ns"].to_list() == [ms * MS for ms in both]
    assert frame["lines_first"].to_list() == [first] * 2
