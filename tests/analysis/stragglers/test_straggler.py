"""A late rank: named with what its lateness costs; silent on ranks that take turns; abstaining where one is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import Maybe, measure
from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.source.line_shares import costliest, costly_lines
from dlprof.analysis.stragglers import late_ranks
from dlprof.analysis.stragglers.late_ranks import sends_what_it_makes
from dlprof.analysis.stragglers.rules.straggler import RULE
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import held_up, late_by
from tests.fixtures.runs import MS, asked
from tests.fixtures.sampled_stacks import burst


def test_the_culprit_is_named_and_why(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *late_by(0, 200_000, 2 * MS, 100_000)))
    assert (found.state, found.ranks) == ("found", (2,))
    # A step of 6 ms; without rank 2, rank 1 sets the pace, 1.8 ms earlier.
    assert found.saving_ns == pytest.approx(1.8 * MS)
    assert found.share == pytest.approx(0.3)
    assert "computes longer" in found.summary
    assert [cost.rank for cost in found.by_rank] == [2]
    assert found.by_rank[0].ns == pytest.approx(1.8 * MS)
    assert found.evidence is not None
    assert found.evidence.columns[1] == "own time_ns"
    # Rank 2 waits for nobody.
    assert found.evidence.rows[0][:3] == (2, pytest.approx(6 * MS), pytest.approx(0, abs=1))


def test_where_some_ranks_were_asked_for_no_trace_that_is_why_it_is_not_measured(tmp_path: Path) -> None:
    run = runs.cpu_run(tmp_path, 10 * MS, 10 * MS, 30 * MS, 10 * MS)
    for rank in (1, 2):
        runs.asked_for_none(run / f"ranks/{rank:05d}", "0,last")
    outcome = ask(RULE, run)
    assert outcome.state == "not_measured"
    assert "of rank 1: this rank was asked for no trace (--ranks 0,last)" in str(outcome.why)


HOSTS = ["node-1"] * 4 + ["node-2"] * 4
OF_HOST = [{"host": int(MS * slow)} for slow in (0, 0.1, 0.05, 0, 1, 1.02, 1.05, 1)]

# Traces of ranks → the outcome, who is late, what is saved and what its lateness costs in all, ns, and words.
LATE: dict[str, tuple[list[dict[str, Any]], str, tuple[int, ...], float, float, str]] = {
    "the next slowest bounds the gain": (
        late_by(0, 2 * MS, 2 * MS), "clear", (), 0, 0, "no rank makes the others wait"),
    "ranks are alike": (late_by(10_000, 0, 20_000), "clear", (2,), 10_000, 10_000, ""),
    "a late loader is its rule's to find": (
        held_up({}, {"input_wait": 2 * MS}, {}), "clear", (1,), 0, 2 * MS,
        "rank 1 is 40 % of a step behind, as it waits longer for its data: see input_wait",
    ),
    "what another rule owns is not claimed twice": (
        held_up({}, {"input_wait": MS, "computation": MS}, {}), "found", (1,), MS, 2 * MS, "counted by input_wait",
    ),
    "all ranks of a host": (held_up(*OF_HOST, hosts=HOSTS), "found", (4, 5, 6, 7), 0.9 * MS, 0.9 * MS, "host node-2"),
    "a rank is missing": (late_by(0, 0, 2 * MS)[:2], "not_measured", (), 0, 0, "1 of 3 ranks missing"),
    "one rank": (late_by(0), "does_not_apply", (), 0, 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_who_is_late(name: str, tmp_path: Path) -> None:
    made, state, ranks, saved, costs, words = LATE[name]
    found = ask(RULE, runs.foreign(tmp_path, *made))
    assert (found.state, found.ranks) == (state, ranks)
    assert words in f"{found.summary} {found.verdict} {found.why}"
    assert found.saving_ns == pytest.approx(saved, abs=1)
    if costs:
        assert found.by_rank[0].ns == pytest.approx(costs)


def test_ranks_late_in_turn_are_no_straggler(tmp_path: Path) -> None:
    one, other = late_by(0, 2 * MS), late_by(2 * MS, 0)
    period = 6 * MS / 1000
    made = []
    for rank in range(2):
        events = []
        for block in range(3):
            source = (one, other)[block % 2][rank]["traceEvents"]
            for e in source:
                step = e["name"].startswith("ProfilerStep")
                number = int(e["name"][-1]) + 3 * block if step else 0
                events.append(
                    {**e, "ts": e["ts"] + block * 3 * period, **({"name": f"ProfilerStep#{number}"} if step else {})}
                )
        made.append({**one[rank], "traceEvents": events})
    assert ask(RULE, runs.foreign(tmp_path, *made)).state != "found"


def test_more_kernels_are_more_work_and_longer_ones_are_not(tmp_path: Path) -> None:
    made = held_up({}, {"computation": MS}, {})
    assert "as many kernels, each 1.57 × as long" in ask(RULE, runs.foreign(tmp_path / "longer", *made)).summary
    kernels = [e for e in made[1]["traceEvents"] if e["name"] == "gemm"]
    for e in kernels:
        made[1]["traceEvents"].append({**e, "ts": e["ts"] + e["dur"] / 2, "dur": e["dur"] / 2})
        e["dur"] /= 2
    found = ask(RULE, runs.foreign(tmp_path / "more", *made))
    assert "3 kernels a step, the others 2" in found.summary
    assert "same number of batches" in found.advice[0]


def test_more_data_is_told_from_slower_kernels(tmp_path: Path) -> None:
    made = held_up({}, {"computation": MS}, {})
    for e in made[1]["traceEvents"]:
        if "Memcpy" in e["name"]:
            e["args"]["bytes"] *= 2
    found = ask(RULE, runs.foreign(tmp_path, *made))
    assert "2.00 × the others' data" in found.summary


def test_where_ranks_are_missing_the_shortest_collectives_vote(tmp_path: Path) -> None:
    made = held_up({}, {"computation": 2 * MS}, {"copy": 10_000}, {}, {"copy": 20_000}, {})
    found = ask(RULE, runs.foreign(tmp_path / "here", *made[:5]))
    assert (found.state, found.ranks) == ("found", (1,))
    assert found.saving_ns == pytest.approx(2 * MS - 20_000)
    assert "1 of 6 ranks are not here" in found.sure
    assert found.by_rank[0].ns == found.saving_ns
    assert found.evidence is not None
    assert found.evidence.rows[0][0] == 1
    # Without the late rank, the others' collectives are all alike.
    for n, rank in enumerate(r for r in range(6) if r != 1):
        traces.write(tmp_path / "gone" / f"rank{n}.json.gz", made[rank])
    answer = ask(RULE, tmp_path / "gone")
    assert answer.state == "not_measured"
    assert "its trace is not here" in answer.why


def logged(folder: Path, *ranks: tuple[list[int], list[int]]) -> Path:
    """Record ranks of steps of 8 ms: how long each step's forward pass takes, untraced ones and then three traced."""
    of = []
    for rank, (usual, traced) in enumerate(ranks):
        events: list[Any] = []
        for n, forward in enumerate(traced, len(usual)):
            t = n * 8 * MS
            events += [
                traces.step(n, t, 8 * MS),
                traces.annotation("dlprof::forward", t, forward),
                traces.op("aten::conv2d", t, forward),
                traces.annotation("dlprof::backward", t + forward, 8 * MS - forward),
                traces.op("aten::conv_backward", t + forward, 2 * MS),
                traces.annotation("gloo:all_reduce", t + forward + 2 * MS, 6 * MS - forward),
            ]
        rows = [(n, ns, int(n >= len(usual))) for n, ns in enumerate([*usual, *traced])]
        log = [runs.light(n, 8 * MS, forward_ns=f, backward_ns=8 * MS - f, profiled=p) for n, f, p in rows]
        of.append((traces.trace(*events, rank=rank, backend="gloo", device=""), log, runs.CPU))
    return runs.recorded(folder / "run", *of)


def test_what_was_unusual_about_the_traced_steps_is_taken_off(tmp_path: Path) -> None:
    # Rank 1 needs 1 ms more forward in every step; in two of the three traced steps rank 0 was held up by 1 ms itself.
    found = ask(RULE, logged(tmp_path, ([2 * MS] * 20, [3 * MS, 2 * MS, 3 * MS]), ([3 * MS] * 20, [3 * MS] * 3)))
    assert (found.state, found.ranks) == ("found", (1,))
    assert found.saving_ns == pytest.approx(1 * MS, rel=0.01)


@pytest.mark.parametrize(("apart", "state"), [(0.5, "found"), (2.5, "not_measured")])
def test_what_all_steps_show_counts_before_a_few_that_were_traced(tmp_path: Path, apart: float, state: str) -> None:
    # Rank 0 is 1 ms behind in the mean of 100 steps, 8 or 1.6 times its standard error; in the traced ones, rank 1 is.
    # Disturbances last for ten steps.
    late = [round((3 + apart * (-1) ** (n // 10)) * MS) for n in range(100)]
    said = ask(RULE, logged(tmp_path, (late, [2 * MS] * 3), ([2 * MS] * 100, [5 * MS // 2] * 3)))
    assert said.state == state
    if state == "found":
        assert said.ranks == (0,)
        assert said.by_rank[0].ns > 0.05 * 8 * MS


# Six steps of a job on a CPU, and how busy its ranks are in all of them → what is saved, or lost and left alone, ms.
ONE = {"torch_threads": 1, "count": 8, "affinity": 8}
EVEN, UNEVEN = (MS, MS, MS), (MS * 4 // 5, MS, MS * 6 // 5)
BUSY: dict[str, tuple[dict[str, int], tuple[int, ...], float, tuple[float, ...], float, str]] = {
    # In the backward pass, where all wait, rank 1 takes 1 of 6 ms more; the step log cannot tell it.
    "who is late in the traced steps alone is not busy for longer": ({}, EVEN, 6, (0.8, 0.81), -0.0, ""),
    "who is late is busy for longer": ({}, EVEN, 6, (0.8, 0.97), 1.0, ""),
    "how busy it was is not known": ({}, EVEN, 6, (), 1.0, ""),
    # In three steps rank 1 takes 0.8 to 1.2 of 6.2 ms more; in all of them it is busy for a tenth more.
    "one thread is busy for longer": (ONE, UNEVEN, 6.2, (0.8, 0.9), 0.62, "how long each rank computes"),
    "one thread is hardly busy for longer": (ONE, UNEVEN, 6.2, (0.8, 0.84), -0.04 * 6.2, ""),
}


@pytest.mark.parametrize("name", BUSY)
def test_a_job_on_a_cpu_where(name: str, tmp_path: Path) -> None:
    cpu, more, step, cores, saved, sure = BUSY[name]
    folder = runs.cpu_run(tmp_path, MS, MS, extra_backward=more, **cpu)
    for rank, mine in enumerate(cores):
        runs.loading(folder, rank, step=int(step * MS), wait=0, fetch=MS, cpu=0, n=20, workers=1, cores=mine)
    said = ask(RULE, folder)
    assert said.state == ("found" if saved > 0 else "clear")
    if saved > 0:
        assert (said.ranks, sure in said.sure) == ((1,), True)
        assert said.saving_ns == pytest.approx(saved * MS, rel=0.05 if step == 6 else 0.01)
    else:
        assert said.share == pytest.approx(-saved / step)


def without_a_core(tmp_path: Path, waited: tuple[float, float], others: float = 0.0, affinity: int = 2) -> Path:
    """Write a run whose rank 1 takes 5 ms more of 10; each rank stands ready without a core for a share of the time."""
    folder = runs.cpu_run(tmp_path, MS, 6 * MS, torch_threads=1, count=2, affinity=affinity)
    at = [traces.BASE_NS + n * 1_000 * MS for n in range(20)]
    for rank, share in enumerate(waited):
        rows = [{"at_ns": t, "cpu_s": 0.6 * n, "main_thread_waited_ns": int(share * n * 1e9)} for n, t in enumerate(at)]
        (folder / f"ranks/{rank:05d}/processes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hosts/node-1").mkdir(parents=True)
    lines = [json.dumps({"at_ns": t, "core_percent": [round(60 + 50 * others)] * 2}) + "\n" for t in at]
    (folder / "hosts/node-1/host.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("waited", "others", "affinity", "device", "share"),
    [
        ((0.0, 0.5), 0.0, 2, "cpu", 0.5),
        ((0.1, 0.2), 0.0, 2, "cpu", 0.1),
        ((0.3, 0.2), 0.0, 2, "cpu", 0.0),
        ((0.0, 0.5), 0.0, 2, "cuda", 0.0),  # a device computes
        ((0.1, 0.5), 0.5, 2, "cpu", 0.0),  # a program of somebody else's takes cores
        ((0.1, 0.5), 0.0, 1, "cpu", 0.0),  # each rank has cores of its own
    ],
)
def test_what_a_late_rank_lacks_of_the_cores_that_the_others_have(
    tmp_path: Path, waited: tuple[float, float], others: float, affinity: int, device: str, share: float
) -> None:
    folder = without_a_core(tmp_path, waited, others, affinity)
    for file in folder.glob("ranks/*/facts.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"device": {"type": device}}))
    run = measure(open_run(folder), [sample_means], jobs=1)
    assert asked(run, late_ranks.without_core, (1,)) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("waited", "saved"), [((0.0, 0.5), 0.0), ((0.1, 0.2), 0.4)])
def test_a_core_that_the_jobs_other_ranks_have_is_not_saved(
    tmp_path: Path, waited: tuple[float, float], saved: float
) -> None:
    said = ask(RULE, without_a_core(tmp_path, waited))
    assert said.state == ("found" if saved else "clear")
    assert said.share == pytest.approx(saved, abs=5e-3)
    if not saved:
        assert said.by_rank[0].ns == pytest.approx(5 * MS, rel=0.01)
        assert "waits for a core for 50 % more of the time than the job's other ranks on its host" in said.summary


@pytest.mark.parametrize(("apart", "state"), [(0.15, "found"), (0.3, "clear")])
def test_a_few_steps_against_all_others_must_be_sure(tmp_path: Path, apart: float, state: str) -> None:
    # Three steps whose mean is 1 ms: 5.2 or 2.6 times as much as its standard error (Student's, of three).
    more = [round((1 + by) * MS) for by in (-apart, 0.0, apart)]
    said = ask(RULE, runs.cpu_run(tmp_path, 1 * MS, 1 * MS, extra_backward=more))
    assert said.state == state
    if state == "clear":
        assert said.share < 0.02


@pytest.mark.parametrize(
    ("parameters", "gained"),
    # Held and trained; the same held twice, as where a model is called without what wraps it; or not told.
    [((2_000, 8_000), 2), ((5_000, 5_000), 4), ((400, 900), 4), ((0, 8_000), 4)],
)
def test_work_on_what_others_do_not_hold_is_shared_out(
    tmp_path: Path, parameters: tuple[int, int], gained: int
) -> None:
    """Of 9 ms rank 1 computes 7 and rank 0 3: 5 each, where it is of parameters that only rank 1 holds."""
    folder = runs.cpu_run(tmp_path, 1 * MS, 5 * MS)
    for rank, n in enumerate(parameters):
        file = folder / f"ranks/{rank:05d}/facts.json"
        models = [{"class": "Net", "parameters": 100}, {"class": "Table", "parameters": n}] if n else []
        optimizers = [{"class": "SGD", "parameters": 1 if n < 1_000 else n // 1_000}]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"models": models, "optimizers": optimizers}))
    found = ask(RULE, folder)
    assert (found.state, found.ranks) == ("found", (1,))
    assert found.saving_ns == pytest.approx(gained * MS)
    shared = gained == 2
    assert ("it holds 8,100 parameters, the others 2,100" in found.summary) == shared
    assert ("shared out evenly" in found.sure) == shared
    assert ("none of its work is moved" in found.sure) != shared


@pytest.mark.parametrize(("inputs", "gained"), [((100, 350), 2), ((300, 350), 4), ((-1, -1), 4)])
def test_larger_inputs_are_dealt_out_evenly(tmp_path: Path, inputs: tuple[int, int], gained: int) -> None:
    """Of 9 ms rank 1 computes 7 and rank 0 3: 5 each, where rank 1 gets so much more."""
    folder = runs.cpu_run(tmp_path, 1 * MS, 5 * MS)
    for rank, n in enumerate(inputs):
        file = folder / f"ranks/{rank:05d}/steps.jsonl"
        rows = [json.loads(line) | {"inputs": n} for line in file.read_text().splitlines()]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = ask(RULE, folder)
    assert (found.state, found.ranks) == ("found", (1,))
    assert found.saving_ns == pytest.approx(gained * MS)
    assert ("3.50 ×" in found.verdict) == (gained == 2)


COLLECTIVES = [
    ("dist.broadcast_object_list(box, src=0)", True, True),
    ("torch.distributed.scatter(mine, parts, src=0)", True, True),
    ("dist.all_gather_object(found, mine)", True, False),
    ("distributed.barrier()", True, False),
    ("if dist.get_rank() == 0:", False, False),
    ("scores = dist.log_prob(actions)", False, False),
    ("picture = render_object(scene)", False, False),
    ("dist.reduce_scatter_tensor(out, given)", True, False),
    ("x = x.broadcast_to(y.shape)", False, False),
]


@pytest.mark.parametrize(("text", "meets", "sends"), COLLECTIVES, ids=[one[0] for one in COLLECTIVES])
def test_who_waits_for_what_one_rank_makes_and_sends(text: str, meets: bool, sends: bool, tmp_path: Path) -> None:
    folder = runs.cpu_run(tmp_path, 1 * MS, 5 * MS)
    main = 'process 10:"python train.py";thread (0x1): MainThread'
    burst(folder, {f"{main};<module> (/w/train.py:9);next (/w/train.py:5)": 60}, lines=[["/w/train.py", 5, text]])
    run = runs.measured(folder, costly_lines)
    line = costliest(Maybe(lambda: run.frame(costly_lines)), 0, "rest")
    assert line is not None
    assert (line.is_collective, line.is_from_one) == (meets, sends)
    because = sends_what_it_makes(Maybe(lambda: run.frame(costly_lines)), run.job, (1,))
    assert because.shared == sends
    assert ("its own share" in because.do) == sends
    assert not sends_what_it_makes(Maybe(lambda: run.frame(costly_lines)), run.job, (0,)).shared
