"""How long bubbles are and what they are made of, by recorded and hand-made calls, and the rules that find them.

`../shared/traces/pipeline_llm_pp4dp2` is a real job whose published root cause is a last stage that is too long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.pipeline import pipes as subject
from dlprof.analysis.pipeline.chunks import pipeline, pipeline_chunks
from dlprof.analysis.pipeline.pipes import Pipe, bubbles, pipes, stage_lengths
from dlprof.analysis.pipeline.rules import devices_in_turn, pipeline_bubble, stage_imbalance
from dlprof.analysis.pipeline.rules.devices_in_turn import device_turns, overlapped_ns
from dlprof.analysis.pipeline.schedules import Action
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.read.run import open_run
from dlprof.result import Setting
from tests.fixtures import pipelines, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.pipelines import FIRST, SECOND, alike
from tests.fixtures.places import TRACES
from tests.fixtures.runs import MS, asked

PARQUET = TRACES / "pipeline_llm_pp4dp2/trace-ST.parquet"
PARTS = ["schedule_ns", "imbalance_ns", "launch_ns", "communication_ns"]


def bubbles_of(path: Path) -> pd.DataFrame:
    return runs.measured(path, bubbles).frame(bubbles)


def pipe_of(path: Path) -> Pipe:
    (pipe,) = runs.measured(path, pipes).frame(pipes)
    return pipe


def again(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], ranks: int = 2) -> None:
    """Write the chunks of each rank anew."""
    for rank in range(ranks):
        log = path / f"ranks/{rank:05d}/chunks.jsonl"
        lines = change([json.loads(line) for line in log.read_text().splitlines()])
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))


# The second stage takes twice as long; 30 ms of the step are lost between the stages. 10 forward, then twice 60 on the
# second stage, 20 backward: 150 ms, of which the stages work 60 and 120. Even stages take 15 and 30: 135 ms, 90 of them
# work. The last stage goes from forward to backward at once, and the call ends 10 ms after the last chunk.
UNEVEN = (
    [("forward", 0, 0, 0, 10), ("forward", 0, 1, 10, 10), ("backward", 0, 0, 85, 20), ("backward", 0, 1, 150, 20)],
    [("forward", 1, 0, 20, 20), ("backward", 1, 0, 40, 40), ("forward", 1, 1, 90, 20), ("backward", 1, 1, 110, 40)],
)
# Of two stages, 1 ms before every chunk that waits for nobody, and 3 ms for handing over; 2 ms before all of it: six
# actions follow each other, each launched for 1 ms, and 2 ms before the first.
LAUNCHED = (
    [("forward", 0, 0, 2, 10), ("forward", 0, 1, 13, 10), ("backward", 0, 0, 50, 20), ("backward", 0, 1, 84, 20)],
    [("forward", 1, 0, 15, 10), ("backward", 1, 0, 26, 20), ("forward", 1, 1, 49, 10), ("backward", 1, 1, 60, 20)],
)


@pytest.mark.parametrize(
    ("chunks", "end", "parts", "bubble", "simulated", "stages"),
    [
        ((FIRST, SECOND), 90, [[30, 0, 0, 0]] * 2, [1 / 3] * 2, [1 / 3] * 2, [[10, 20, 30]] * 2),
        (
            UNEVEN,
            180,
            [[45, 45, 10, 20], [45, -15, 10, 20]],
            [2 / 3, 1 / 3],
            [0.6, 0.2],
            [[10, 20, 30], [20, 40, 60]],
        ),
        (LAUNCHED, 104, [[30, 0, 8, 6]] * 2, [44 / 104] * 2, [1 / 3] * 2, [[10, 20, 30]] * 2),
    ],
    ids=["as scheduled", "uneven and slow to hand over", "the host between chunks"],
)
def test_what_a_bubble_is_made_of(
    chunks: Any, end: int, parts: Any, bubble: list[float], simulated: list[float], stages: Any, tmp_path: Path
) -> None:
    path = pipelines.by_hand(tmp_path, *([(row, 0, end)] for row in chunks), step=200)
    run = runs.measured(path, bubbles, stage_lengths)
    frame = run.frame(bubbles)
    assert frame["step_ns"].to_list() == [end * MS] * 2  # that of the first stage
    assert (frame[PARTS].to_numpy() / MS).tolist() == [pytest.approx(row) for row in parts]
    assert frame[PARTS].sum(axis=1).to_list() == pytest.approx((frame["step_ns"] - frame["busy_ns"]).to_list())
    assert frame["bubble"].to_list() == pytest.approx(bubble)
    assert frame["simulated"].to_list() == pytest.approx(simulated)
    assert frame[["closed", "scheduled"]].to_numpy() == pytest.approx(1 / 3)
    found = run.frame(stage_lengths)[["forward_ns", "backward_ns", "stage_ns"]]
    assert (found.to_numpy() / MS).tolist() == stages


def test_without_one_of_its_ranks_a_pipeline_is_not_simulated(tmp_path: Path) -> None:
    run = runs.measured(pipelines.by_hand(tmp_path, [(FIRST, 0, 90)]), bubbles, stage_lengths)
    assert run.frame(bubbles)[["simulated", "schedule_ns", "communication_ns"]].isna().all(axis=None)
    assert run.frame(bubbles)["bubble"].to_list() == pytest.approx([1 / 3])
    with pytest.raises(NotMeasured, match="those of rank 1 are not here"):
        run.frame(stage_lengths)


def test_two_pipelines_side_by_side_have_a_step_each(tmp_path: Path) -> None:
    calls = [[([("forward", rank // 2, 0, 0, 30)], 0, end)] for rank, end in enumerate([90, 60, 71, 71])]
    path = pipelines.by_hand(tmp_path, *calls, facts_of=lambda r: pipelines.facts(r // 2, (r % 2, r % 2 + 2)))
    frame = bubbles_of(path).set_index("rank")
    assert frame["step_ns"].to_dict() == {0: 90 * MS, 1: 60 * MS, 2: 90 * MS, 3: 60 * MS}
    assert frame["bubble"][3] == pytest.approx(0.5)


def test_even_stages_hand_over_where_the_long_one_hid_it(tmp_path: Path) -> None:
    def uneven(action: Action) -> int:
        return alike(10, 20)(action) * (1 + action[0])

    before = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 8, uneven, hand_over=3)
    after = pipelines.recorded(tmp_path / "after", "Schedule1F1B", 2, 8, alike(15, 30), hand_over=3)
    run = runs.measured(before, bubbles, stage_lengths, pipes)
    saved = run.frame(bubbles)["step_ns"][0] - bubbles_of(after)["step_ns"][0]
    assert run.frame(stage_lengths)["saved_ns"].to_list() == pytest.approx([saved] * 2, rel=0.02)
    (pipe,) = run.frame(pipes)
    assert pipe.even == {(s, a): ns * MS for s in (0, 1) for a, ns in (("forward", 15), ("backward", 30))}
    assert pipe.hand_over_ns == pytest.approx(3 * MS, rel=0.01)
    # Without handing over more would be saved.
    now, even = (pipe.again(pipe.lengths(of)) for of in (pipe.mean, pipe.even))
    assert now - even > 1.1 * pipe.saved_by_even_ns > 0


def test_a_call_is_replayed_as_it_was(tmp_path: Path) -> None:
    path = pipelines.two_stages(tmp_path)
    pipe = pipe_of(path)
    assert (pipe.ranks, pipe.stages, pipe.rank_of, pipe.is_known) == ((0, 1), 2, {0: 0, 1: 1}, True)
    assert (pipe.step_ns, pipe.busy_ns) == (90 * MS, {0: 60 * MS, 1: 60 * MS})
    assert {pipe.again(took) for took in pipe.took} == {90 * MS}
    assert pipe.again(pipe.lengths(pipe.mean), launch=MS, hand_over=2 * MS) == (90 + 6 + 4) * MS
    assert (pipe.edge_ns, pipe.launch_ns, pipe.hand_over_ns) == (0, 0, 0)
    # Steps that did something else are left out: in step 20 the second micro-batch never came, on either rank.
    again(path, lambda lines: [c for c in lines if (c["step"], c.get("microbatch")) != (20, 1)])
    after = pipe_of(path)
    assert (after.rows, after.mean, len(after.took)) == (pipe.rows, pipe.mean, len(pipe.took) - 1)


def test_a_loss_belongs_to_its_forward_and_calls_within_a_step_are_told_apart(tmp_path: Path) -> None:
    # The last stage computes a loss of 5 ms; every step has two calls, one after the other.
    second = [("forward", 1, 0, 10, 5), ("loss", 1, 0, 15, 5), *SECOND[1:]]
    calls = [
        [([(a, s, m, at + t, d) for a, s, m, t, d in chunks], at, at + 90) for at in (0, 100)]
        for chunks in (FIRST, second)
    ]
    run = runs.measured(pipelines.by_hand(tmp_path, *calls, step=200), pipes, pipeline, pipeline_chunks)
    (pipe,) = run.frame(pipes)
    assert (pipe.calls_a_step, pipe.step_ns, pipe.busy_ns) == (2, 90 * MS, {0: 60 * MS, 1: 60 * MS})
    assert pipe.mean == {(s, a): ns * MS for s in (0, 1) for a, ns in (("forward", 10), ("backward", 20))}
    row = run.frame(pipeline).to_dict("records")[0]
    assert (row["calls_a_step"], row["dur_ns"], row["busy_ns"]) == (2, 90 * MS, 60 * MS)
    assert sorted(run.frame(pipeline_chunks)["call"].unique()) == [0, 1]


def test_a_backward_in_halves_is_their_sum(tmp_path: Path) -> None:
    pipe = pipe_of(pipelines.recorded(tmp_path, "ScheduleInterleavedZeroBubble", 2, 4, alike(10, 20), chunks=2))
    assert [pipe.backward_ns(stage) for stage in range(4)] == [20 * MS] * 4


def test_of_many_pipelines_some_are_replayed_from_the_fastest_to_the_slowest() -> None:
    count = 3 * subject.MOST_PIPES
    rows = [
        {"rank": 2 * n + stage, "ranks": f"{2 * n}, {2 * n + 1}", "size": 2, "dur_ns": float(1_000 * n)}
        for n in range(count)
        for stage in (0, 1)
    ]
    frame = pd.DataFrame(rows)
    chosen = subject._replayed(frame)
    assert len(set(chosen)) == subject.MOST_PIPES
    assert (chosen[0], chosen[-1]) == ("0, 1", f"{2 * count - 2}, {2 * count - 1}")
    assert subject._replayed(frame[frame["rank"] < 8]) == ["0, 1", "2, 3", "4, 5", "6, 7"]


def test_ranks_choose_the_same_steps_however_many_there_are(tmp_path: Path) -> None:
    path = pipelines.two_stages(tmp_path, steps=500)
    log = path / "ranks/00001/steps.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    frame = runs.measured(path, pipeline_chunks).frame(pipeline_chunks)
    assert frame.groupby(["rank", "step"]).size().unique().tolist() == [5]  # with the call that they belong to
    chunks_of = frame.groupby("rank")["step"].unique()
    assert 15 <= len(chunks_of[0]) <= 40
    assert set(chunks_of[0]) == set(chunks_of[1])


# In a traced step on the CPU, all chunks are operators; the rest of the call is two receives; 10 ms of Python follow.
# On a GPU sending and receiving are the bubble, and other collectives are not.
AT = 10 * 1_000 * MS
ON_CPU = traces.trace(
    traces.step(10, AT, 100 * MS),
    *(traces.op("aten::mm", AT + c[3] * MS, c[4] * MS) for c in FIRST),
    traces.annotation("gloo:recv", AT + 20 * MS, 20 * MS),
    traces.annotation("gloo:recv", AT + 60 * MS, 10 * MS),
    device="",
    backend="",
    world_size=1,
)
ON_GPU = traces.trace(
    traces.step(10, 0, 100 * MS),
    traces.launched("gemm", 0, 1 * MS, 60 * MS, 1),
    traces.collective(61 * MS, 20 * MS, 1000, name="recv", kernel_name="ncclDevKernel_SendRecv(x)"),
    traces.collective(81 * MS, 9 * MS, 1000),
    world_size=2,
)


@pytest.mark.parametrize(
    ("made", "device", "parts"),
    [
        (None, "cpu", {"pipeline_bubble": 30, "other": 70}),
        (ON_CPU, "cpu", {"pipeline_bubble": 30, "communication": 0, "computation": 60, "host": 10}),
        (ON_GPU, "cuda", {"pipeline_bubble": 20, "communication": 9, "computation": 60}),
    ],
    ids=["untraced", "CPU", "GPU"],
)
def test_the_bubbles_place_in_the_step(made: Any, device: str, parts: dict[str, int], tmp_path: Path) -> None:
    path = pipelines.two_stages(
        tmp_path, traced=made, facts_of=lambda r: {**pipelines.facts(r), "device": {"type": device}}
    )
    run = runs.measured(path, breakdown)
    assert {name: asked(run, part, name)[0] / MS for name in parts} == pytest.approx(parts)
    if device == "cpu":
        assert run.frame(breakdown).groupby("rank")["ns"].sum()[0] == pytest.approx(100 * MS)
        assert asked(run, part, "pipeline_bubble")[1] == pytest.approx(6 * MS)


def test_as_few_microbatches_as_ranks_are_found(tmp_path: Path) -> None:
    # Four ranks, four micro-batches of 60 ms: 7 of them take 420 ms; 16 of a quarter, 19 of 15 ms.
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 4, 4, alike(20, 40), step=900)
    found = ask(pipeline_bubble.RULE, path)
    assert found.saving_ns == pytest.approx((420 - 19 * 15) * MS)
    assert found.verdict == "15 % of each step is a bubble that 16 micro-batches would fill."
    assert found.summary.startswith("43 % of a pipeline's step of 420.0 ms is idle on its 4 ranks (1F1B, 4 micro-batc")
    assert "43 % by the schedule, 0 % by uneven" in found.summary
    assert found.ranks == (0, 1, 2, 3)
    assert [change.settings for change in found.changes[:2]] == [
        (Setting("microbatches", 4, 16),),
        (Setting("schedule", "Schedule1F1B", "ScheduleInterleavedZeroBubble"),),
    ]
    assert found.evidence is not None
    rows = {row[0]: row for row in found.evidence.rows}
    assert rows["as it is"][1:] == pytest.approx((420 * MS, 0, 1 - 4 / 7, False))
    assert rows["8 micro-batches"][1:] == pytest.approx((330 * MS, 90 * MS, 1 - 8 / 11, True))
    forecasts = {(f.setting, f.value): f.step_ns for f in found.forecasts}
    assert forecasts["microbatches", "16"] == pytest.approx(900 * MS - found.saving_ns)
    assert forecasts["microbatches", "8"] == pytest.approx((900 - 90) * MS)
    # Each call within a step counts.
    again(path, lambda lines: lines + [line | {"start_ns": line["start_ns"] + 450 * MS} for line in lines], 4)
    assert ask(pipeline_bubble.RULE, path).saving_ns == pytest.approx(2 * found.saving_ns)


def test_another_schedule_for_the_same_stages_may_be_the_best_line(tmp_path: Path) -> None:
    # The loader's batch cannot be cut further. 11 slots of 60 ms; four micro-batches in two chunks of 60 ms and three
    # forwards.
    more: dict[str, Any] = {"loaders": [{"role": "train", "batch_size": 4}], "step": 700}
    path = pipelines.recorded(tmp_path, "ScheduleInterleaved1F1B", 4, 4, alike(20, 40), chunks=2, **more)
    found = ask(pipeline_bubble.RULE, path)
    assert found.saving_ns == pytest.approx((660 - 540) * MS)
    assert found.verdict == "17 % of each step is a bubble that InterleavedZeroBubble would fill."


@pytest.mark.parametrize(
    ("shape", "said", "state", "share", "told"),
    [
        ((4, 32), {}, "clear", 0.064, "8.6 % of a pipeline's step is idle; 128 micro-batches would save 6.4 %"),
        ((1, 4), {}, "does_not_apply", 0, "the pipeline has one rank"),
        # What cannot be replayed abstains with what was measured.
        ((4, 4), {"name": "MySchedule"}, "not_measured", 0, "what MySchedule does"),
        ((4, 4), {"here": (0, 2, 3)}, "not_measured", 0, "those of rank 1 are not here"),
    ],
)
def test_enough_microbatches_and_what_cannot_be_replayed_are_left_alone(
    shape: tuple[int, int], said: Any, state: str, share: float, told: str, tmp_path: Path
) -> None:
    answer = ask(pipeline_bubble.RULE, pipelines.recorded(tmp_path, "Schedule1F1B", *shape, alike(4, 8), **said))
    assert answer.state == state
    assert answer.share == pytest.approx(share, rel=0.01)
    assert told in answer.summary + answer.why
    assert answer.why.startswith("43 % of a pipeline's step is idle") is (state == "not_measured")


def test_without_a_pipeline_they_abstain(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS) for n in range(33)], runs.CPU))
    with pytest.raises(DoesNotApply, match="no pipeline"):
        runs.measured(path, pipeline).frame(pipeline)
    for rule in (pipeline_bubble.RULE, stage_imbalance.RULE):
        assert ask(rule, path).state == "does_not_apply"


def last_is_long(action: Action) -> int:
    return alike(10, 20)(action) * (2 if action[0] == 3 else 1)


# Eight micro-batches of 60 ms on the last stage and 30 on the others: three forwards and three backwards beside. Even
# ones take 37.5 ms: 11 of them.
SAVED = (8 * 60 + 3 * 30 - 11 * 37.5) * MS


def test_a_long_last_stage_is_found(tmp_path: Path) -> None:
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 4, 8, last_is_long, step=600)
    found = ask(stage_imbalance.RULE, path)
    assert found.saving_ns == pytest.approx(SAVED)
    assert found.verdict == "26 % of each step is spent waiting for stage 3 of the pipeline."
    assert "60.0 ms a micro-batch, the mean stage 37.5 ms, the shortest, stage 0, 30.0 ms" in found.summary
    assert (found.ranks, [cost.ns for cost in found.by_rank]) == ((3,), [found.saving_ns])
    assert found.advice[0].startswith("move 38 % of stage 3's work")
    assert "stage 0 is the shortest, 7.50 ms" in found.advice[0]
    assert "the loss" in found.advice[1]
    assert found.evidence is not None
    assert {row[0] for row in found.evidence.rows} == {f"stage {s} · rank {s}" for s in range(4)}
    assert len([row for row in found.evidence.rows if row[4] != "pipeline_bubble"]) == 4 * 8 * 2


@pytest.mark.parametrize(
    ("args", "keys", "state", "ranks", "saving", "told"),
    [
        # A schedule of the user's own is replayed as it was.
        (("Schedule1F1B", 4, 8, last_is_long), {"name": "MySchedule"}, "found", (3,), SAVED, "stage 3"),
        (
            ("ScheduleInterleaved1F1B", 2, 8, lambda a: alike(10, 20)(a) * (2 if a[0] == 1 else 1)),
            {"chunks": 2},
            "found",
            (1,),
            None,
            "stage 1",
        ),
        (("Schedule1F1B", 4, 8, alike(10, 20)), {"hand_over": 5}, "clear", None, 0, ""),
        (("Schedule1F1B", 4, 8, last_is_long), {"here": (0, 1, 2)}, "not_measured", (), 0, "rank 3 are not here"),
    ],
)
def test_uneven_stages_are_found_in_any_schedule(
    args: Any, keys: Any, state: str, ranks: Any, saving: float | None, told: str, tmp_path: Path
) -> None:
    answer = ask(stage_imbalance.RULE, pipelines.recorded(tmp_path, *args, **keys))
    assert answer.state == state
    assert ranks is None or answer.ranks == ranks
    assert saving is None or answer.saving_ns == pytest.approx(saving, abs=1)
    assert told in answer.title + answer.why


@pytest.mark.parametrize(("chunk", "panels"), [(last_is_long, 0), (alike(10, 20), 1)])
def test_its_micro_batches_are_drawn_once(tmp_path: Path, chunk: Callable[[Action], int], panels: int) -> None:
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 4, 8, chunk, step=600)
    result = diagnose(open_run(path), (stage_imbalance.RULE,), jobs=1)
    drawn = [o.evidence for o in result.outcomes if o.evidence] + list(result.panels)
    assert [p.title for p in drawn].count("Pipeline, 1F1B: the micro-batches of step 3") == 1
    assert sum(p.title.startswith("Pipeline, 1F1B") for p in result.panels) == panels


@pytest.mark.skipif(not PARQUET.exists(), reason="../shared/traces is not here")
def test_a_real_job_with_a_last_stage_that_is_too_long(tmp_path: Path) -> None:
    fastparquet = pytest.importorskip("fastparquet", reason="reads the job's operations")
    frame = fastparquet.ParquetFile(PARQUET).to_pandas()
    frame["action"] = frame["optype"].astype(str).map({"forward-compute": "forward", "backward-compute": "backward"})
    frame = frame[frame["action"].notna()].sort_values(["step", "start_ts"])
    numbers = {step: n for n, step in enumerate(sorted(frame["step"].unique()))}
    steps = [runs.light(n, 2_000 * MS, traces.BASE_NS + n * 10_000 * MS) for n in range(len(numbers))]
    told: dict[str, Any] = {"schedule": "Schedule1F1B", "microbatches": 4, "num_stages": 4}
    ranks = []
    for rank in range(8):
        group = [rank // 4 * 4 + r for r in range(4)]
        ranks.append((None, steps, {**runs.CPU, "pipeline": told | {"stages": [rank % 4], "ranks": group}}))
    path = runs.recorded(tmp_path / "run", *ranks)
    for (dp, stage), mine in frame.groupby(["dp_rank", "stage"]):
        lines = []
        for step, one in mine.groupby("step"):
            zero = traces.BASE_NS + numbers[step] * 10_000 * MS
            start = [zero + int(at * 1e9) for at in one["start_ts"]]
            dur = [int(s * 1e9) for s in one["duration"]]
            call = {"start_ns": min(start), "dur_ns": start[-1] + dur[-1] - start[0], "busy_ns": sum(dur)}
            lines.append({"step": numbers[step], "action": "schedule", **call})
            lines += [
                {"step": numbers[step], "action": a, "stage": stage, "microbatch": m, "start_ns": s, "dur_ns": d}
                for a, m, s, d in zip(one["action"], one["mb_id"].tolist(), start, dur, strict=True)
            ]
        (path / f"ranks/{dp * 4 + stage:05d}/chunks.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = ask(stage_imbalance.RULE, path)
    assert (found.state, "stage 3" in found.title) == ("found", True)
    run = runs.measured(path, bubbles, pipes)
    fixed_s = []
    for pipe in run.frame(pipes):
        last = {k: pipe.even[k] if k[0] == 3 else ns for k, ns in pipe.mean.items()}
        now, ideal, fixed = (pipe.again(pipe.lengths(of)) for of in (pipe.mean, pipe.even, last))
        # Published: S = 1.179; and by stage some 0.62, 0.62, 0.61 and 0.37 of a step that has more than the pipeline's.
        assert now / ideal == pytest.approx(1.179, rel=0.05)
        # The last stage alone explains more than all of it, for the mean that it then takes is longer than the others.
        # Published: M = 1.22, of 2.1727 s 1.7710 with the last stage's operations at their mean, 1.8433 with all at
        # theirs. What the last stage gives is the same; but all operations of a step are also the optimizer's, the
        # gradients' and the embedding's exchange, whose means give 24 ms more, and here only the pipeline's are.
        assert (now - fixed) / (now - ideal) == pytest.approx(1.35, rel=0.02)
        fixed_s.append((now - fixed) / 1e9)
    assert sum(fixed_s) / len(fixed_s) == pytest.approx(2.1727 - 1.7710, rel=0.02)
    assert sum(fixed_s) / len(fixed_s) / (2.1727 - 1.8433) == pytest.approx(1.22, rel=0.02)
    frame = run.frame(bubbles)
    assert frame["closed"].to_list() == pytest.approx([3 / 7] * 8)
    assert frame["bubble"].to_list() == pytest.approx([0.61, 0.61, 0.61, 0.34] * 2, abs=0.05)


def test_each_device_of_a_process_and_all_together(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [traces.step(n, t, MS)]
        events += [traces.kernel("a", t, 500_000, device=0), traces.kernel("b", t + 400_000, 300_000, device=1)]
        events += [traces.kernel("tiny", t + 900_000, 1_000, device=2)]  # no part of the model
    run = runs.measured(runs.foreign(tmp_path, traces.trace(*events, world_size=1)), device_turns)
    rows = run.frame(device_turns)[["device", "busy_ns", "any_ns"]].to_numpy().tolist()
    assert rows == [["device", 500_000, 700_000], ["device1", 300_000, 700_000]]
    for p, m in ((2, 4), (4, 16)):  # stages alike take what GPipe takes
        assert overlapped_ns(pd.Series([100.0] * p), m) == pytest.approx(100 * (m + p - 1) / m)


@pytest.mark.parametrize(
    ("pieces", "devices", "state", "saving"),
    [(1, 2, "found", 400_000 - 400_000 / 8), (8, 2, "clear", None), (4, 1, "does_not_apply", 0)],
)
def test_devices_that_work_in_turn_are_found(
    pieces: int, devices: int, state: str, saving: float | None, tmp_path: Path
) -> None:
    """Each device computes 400 µs of each batch, in so many pieces."""
    events: list[Any] = []
    each, number = 400_000 // pieces, 0
    step = each * (pieces + devices - 1) + 50_000
    for n in range(5):
        t = n * step
        events += [traces.step(n, t, step)]
        for piece in range(pieces):
            for device in range(devices):
                number += 1
                at = t + 20_000 + (piece + device) * each
                events += [traces.call("cudaLaunchKernel", t + 100 * (number % 100), 90, number)]
                events += [traces.kernel("gemm", at, each - 1_000, number, device=device)]
    found = ask(devices_in_turn.RULE, runs.foreign(tmp_path, traces.trace(*events, world_size=1)))
    assert found.state == state
    assert found.share < 0.05 if saving is None else found.saving_ns == pytest.approx(saving, rel=0.02)
    assert ("8 micro-batches" in "".join(found.advice)) is found.at_most is (state == "found")


def test_replicas_are_another_rules(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(5):
        t = n * MS
        events += [traces.step(n, t, MS), traces.annotation("DataParallel.forward", t, 500_000)]
        events += [traces.op("Broadcast", t, 100_000), traces.call("cudaLaunchKernel", t, 900, n + 1)]
        events += [traces.kernel("gemm", t + 100_000 + d * 400_000, 390_000, n + 1, device=d) for d in (0, 1)]
    found = ask(devices_in_turn.RULE, runs.foreign(tmp_path, traces.trace(*events, world_size=1)))
    assert (found.state, "DataParallel" in found.why) == ("does_not_apply", True)
