"""What the rules of a step's parts say of stalls, forward passes for nothing, periodic work and validation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.estimate import Rule
from dlprof.analysis.step.rules import (
    checkpoint_stall,
    gc_pauses,
    periodic_work,
    recompilation,
    stalled_steps,
    unused_forward,
    validation_share,
)
from tests.fixtures import runs, traces
from tests.fixtures.claims import Make, case, claims, sample
from tests.fixtures.jobs import record, tiny
from tests.fixtures.runs import MS, light
from tests.fixtures.sampled_stacks import MAIN

GC, COMPILES, SAVES = gc_pauses.RULE, recompilation.RULE, checkpoint_stall.RULE
UNUSED, PERIODIC, VALIDATES = unused_forward.RULE, periodic_work.RULE, validation_share.RULE
STANDS = stalled_steps.RULE

KINDS = {"gc": "garbage_collection", "compiles": "compilation", "saves": "checkpoint"}


def stalling(
    kind: str,
    *stalled: range,
    dur: int = 20,
    took: dict[int, int] | None = None,
    told: dict[str, Any] | None = None,
    epochs: range = range(0),
    **facts: Any,
) -> Make:
    """Return what makes ranks of 63 steps of 100 ms, 60 of them steady, that stand still in the steps that are told.

    Those of `epochs` begin one, and are not steady.
    """
    steps = [light(n, (took or {}).get(n, 100) * MS, first=int(n in epochs)) for n in range(63)]
    stalls = [[runs.stall(KINDS[kind], n, dur * MS, **told or {}) for n in which] for which in stalled]
    ranks = [(None, steps, {**runs.CPU, **facts})] * len(stalled)
    return lambda folder: runs.recorded(folder / "run", *ranks, stalls=stalls)


def lasting(*steps: dict[str, Any], stacks: str = "", **facts: Any) -> Make:
    """Return what makes a rank of these steps, of which stacks may have been seen."""
    rank = (None, steps, {**runs.CPU, "pid": 10, **facts})
    return lambda folder: sample(runs.recorded(folder / "run", rank), stacks)


def plain(n: int = 60, **said: Any) -> list[dict[str, Any]]:
    return [light(k, 100 * MS, **said) for k in range(n)]


def a_trace(folder: Path) -> Path:
    return runs.foreign(folder, traces.training())


SIZE = {"path": "/x/model.py:12 forward", "reason": "tensor 'x' size mismatch at index 0. expected 4, actual 5"}
FLAG = {"path": "/x/model.py:12 forward", "reason": "L['self'].scale == 2"}
LOGS = ("TORCH_LOGS", None, "recompiles")
COMPILED: dict[str, Any] = {"models": [{"class": "Net", "parameters": 1, "compiled": True}]}
OTHER, FIFTH = range(3, 63, 2), range(5, 63, 5)
compiling = partial(stalling, "compiles", **COMPILED)

# Saving takes 50 ms, and the state is gathered for 30 ms before; the step after is 10 ms shorter.
GATHERED = dict.fromkeys(FIFTH, 180) | {n + 1: 90 for n in FIFTH}

CALL = "_wrapped_call_impl (/lib/python3.11/site-packages/torch/nn/modules/module.py:1500)"
STACKS = "".join(f"{MAIN};main (/me/train.py:{n});{CALL};forward (/me/net.py:5) {k}\n" for n, k in ((61, 55), (69, 45)))


def compressing(make: Make) -> Make:
    """Let stacks have been seen in which saving compresses what it writes."""
    stack = (
        f"{MAIN};main (/me/train.py:30);save (/lib/torch/serialization.py:1);GzipFile.write (/lib/python3/gzip.py:9)"
    )
    return lambda folder: sample(make(folder), f"{stack} 80\n")


def unused(ms: int) -> list[dict[str, Any]]:
    """Return 50 steps of 20 ms, of which so many ms are in forward passes for nothing."""
    return [light(n, 20 * MS, forward_ns=8 * MS, unused_forward_ns=ms * MS, forwards=2) for n in range(50)]


ROLL_OUT = f"{MAIN};main (/me/rl.py:30);roll_out (/me/rl.py:20);simulate (/me/rl.py:12) 80\n"


# What is known of the line that a step is mostly seen in.
KNOWN = '#{"start_ns": 1, "end_ns": 2, "lines": [["/me/rl.py", 12, "time.sleep(0.1)"]]}\n'


PLAYED = f"{MAIN};main (/me/rl.py:33);SyncVectorEnv.step (/v/site-packages/gymnasium/vector/sync_vector_env.py:9) 2\n"
SCORED = (
    f"{MAIN};main (/me/rl.py:30);score (/me/rl.py:25);_call_impl (/v/site-packages/torch/nn/modules/module.py:9) 60\n"
)
SCORED += f"{MAIN};main (/me/rl.py:29);_call_impl (/v/site-packages/torch/nn/modules/module.py:9) 40\n"
SCORED += f"{MAIN};main (/me/rl.py:31);backward (/v/site-packages/torch/_tensor.py:6) 40\n"


def rolling(
    every: int, *extra: int, first: int = 10, stacks: str = "", forwards: int = 0, phase: str = "", **facts: object
) -> Make:
    """Return what makes ranks of 203 steps of 10 ms, or the first of other steps, that are longer every so often.

    They then have so many forward passes more. `phase`: in which they are longer, "": in none.
    """
    ranks: list[Any] = []
    for rank, ms in enumerate(extra):
        longer = [n % every == 0 for n in range(203)]
        steps = [
            light(n, ((10 if rank else first) + ms * more) * MS, forwards=1 + forwards * more)
            | ({f"{phase}_ns": ms * more * MS} if phase else {})
            for n, more in enumerate(longer)
        ]
        ranks.append((None, steps, {**runs.CPU, "pid": 10, **facts}))
    return lambda folder: sample(runs.recorded(folder / "run", *ranks), stacks)


LOADERS = [
    {"role": "train", "num_workers": 4, "batch_size": 32},
    {"role": "validation", "num_workers": 1, "batch_size": 50, "dataset_length": 250},
]


def graded(steps: int) -> dict[str, Any]:
    """Return the facts of a rank that has gradients on in so many of 30 steps of validation."""
    return {"evaluation": {"steps": 30, "with_graph": steps}}


def validating(*ranks: int, every: int = 10, fetch: int = 5, dur: int = 60, batch: int = 50, **said: Any) -> Make:
    """Return what makes ranks of 60 training steps of 100 ms; after each tenth so many batches are validated."""
    loaders = [LOADERS[0], LOADERS[1] | {"batch_size": batch}]
    facts = {**runs.CPU, "loaders": loaders, "autocast": {"enabled": True, "dtype": "bfloat16"}, **said}
    kind: dict[str, Any] = {"kind": "validation", "backwards": 0, "optimizer_steps": 0, "fetch_ns": fetch * MS}
    kind["forward_ns"] = (dur - fetch) * MS * 4 // 5
    made = []
    for batches in ranks:
        steps: list[Any] = []
        for n in range(60):
            steps.append(light(len(steps), 100 * MS))
            for _ in range(batches if n % every == every - 1 else 0):
                steps.append(light(len(steps), dur * MS, **kind))
        made.append((None, steps, facts))
    return lambda folder: runs.recorded(folder, *made)


def keeping(folder: Path) -> Path:
    """Let stacks of a validation like that have been seen in which the scores of all classes are put together."""
    concat = "nested_concat (/v/site-packages/transformers/trainer_pt_utils.py:9)"
    return sample(validating(5, dur=200, pid=10)(folder), f"{MAIN};main (/me/t.py:30);{concat} 60\n")


def drawing(rest: int, drawn: int = 60) -> Make:
    """Return what makes such a rank that was seen drawing figures, with so many ms of a step in none of its phases."""

    def make(folder: Path) -> Path:
        at = validating(5, dur=200, pid=10)(folder) / "ranks/00000/steps.jsonl"
        steps = [json.loads(line) for line in at.read_text().splitlines()]
        passes = {"forward_ns": (100 - rest) * MS, "backward_ns": 0, "optimizer_ns": 0, "fetch_ns": 0}
        steps = [step | (passes if step["kind"] == "train" else {}) for step in steps]
        at.write_text("".join(json.dumps(step) + "\n" for step in steps))
        drawing = "draw (/v/site-packages/matplotlib/artist.py:71)"
        return sample(folder, f"{MAIN};main (/me/t.py:30);{drawing} {drawn}\n{MAIN};main (/me/t.py:9) {60 - drawn}\n")

    return make


def scoring(trained_on: int, *, loader: int = 0, **shuffle: Any) -> Make:
    """Return what makes such a rank, with batches: so many of each five validated are of what is trained on.

    They come from that loader: of the third, `shuffle` says what the samplers of all do.
    """
    third = {"role": "validation", "batch_size": 50, "data_of": 0}
    validate = validating(5, loaders=[{**one, "data_of": None, **shuffle} for one in LOADERS] + [third | shuffle])

    def make(folder: Path) -> Path:
        rank = validate(folder) / "ranks/00000"
        rows, validated = [], 0
        for step in map(json.loads, (rank / "steps.jsonl").read_text().splitlines()):
            validates = step["kind"] == "validation"
            validated = validated + 1 if validates else 0
            of = 0 if not validates else loader if validated <= trained_on else 1
            row = {"kind": "batch", "start_ns": step["start_ns"], "dur_ns": 1, "count": 1, "step": step["step"]}
            rows.append(json.dumps({**row, "loader": of}) + "\n")
        (rank / "loading.jsonl").write_text("".join(rows))
        return folder

    return make


def standing(longer: Mapping[int, int], stalls: Sequence[dict[str, Any]] = (), n: int = 100) -> Make:
    """Return what makes a rank of steps of 100 ms, one a second, of which some wait so many ms more for data."""
    steps = [light(k, (100 + longer.get(k, 0)) * MS, fetch_ns=longer.get(k, 0) * MS) for k in range(n)]
    facts = {**runs.CPU, "clock": {"unix_ns": traces.BASE_NS}}
    end_ns = steps[-1]["start_ns"] + 200 * MS
    return lambda folder: runs.recorded(
        folder / "run", (None, steps, facts), stalls=[list(stalls)], start_ns=traces.BASE_NS, end_ns=end_ns
    )


def giving_up(took: int, reason: str = "self.param_groups[0]['lr'] == 0.1", n: int = 40) -> Make:
    """Return what makes steps of 10 ms on a CPU, 2 ms of them Python, before which one function is compiled 9 times."""
    events: list[Any] = []
    for k in range(3):
        t = (20 + k) * 1_000 * MS  # where `light` has these steps
        events += [
            traces.step(20 + k, t, 10 * MS),
            traces.annotation("dlprof::forward", t, 6 * MS),
            traces.op("aten::conv2d", t, 4 * MS),
            traces.annotation("dlprof::backward", t + 6 * MS, 4 * MS),
            traces.op("aten::conv_backward", t + 6 * MS, 4 * MS),
        ]
    trace = traces.trace(*events, device="")
    both = {"forward_ns": 6 * MS, "backward_ns": 4 * MS}
    longer = {0: 5 * took, 1: 4 * took}
    steps = [light(k, (10 + longer.get(k, 0)) * MS, profiled=int(20 <= k < 23), **both) for k in range(n)]
    why = ["", *[reason] * 8]
    stalls = [runs.stall("compilation", k // 5, took * MS, path="sgd.py:105 step", reason=why[k]) for k in range(9)]
    facts, end_ns = {**runs.CPU, "clock": {"unix_ns": traces.BASE_NS}}, steps[-1]["start_ns"] + 20 * MS
    return lambda folder: runs.recorded(
        folder / "run", (trace, steps, facts), stalls=[stalls], start_ns=traces.BASE_NS, end_ns=end_ns
    )


CASES = [
    # 20 ms every 40 steps of 100 ms is half a per cent.
    case("pauses of every other step", GC, stalling("gc", OTHER), saving=10.0, share=0.1,
         column=[f"step {n}" for n in OTHER], verdict="10 % of each step is Python's garbage collection.",
         says=("30 pauses in 60 steady steps of rank 0, one in every 2nd step", "30 steps searched all objects",
               "every 40 steps", "0.5 % of the step")),
    case("ranks that pause in turn", GC, stalling("gc", range(3, 63, 4), range(5, 63, 4)), saving=10.0, ranks=(0, 1)),
    case("ranks that pause together", GC, stalling("gc", range(3, 63, 4), range(3, 63, 4)), saving=5.0),
    case("short pauses", GC, stalling("gc", OTHER, dur=2), state="clear", share=0.01, costs={0: 1.0}),
    case("a single long pause", GC, stalling("gc", range(30, 31), dur=300, took={30: 400}), state="not_measured",
         says="varies too much"),
    case("no pause", GC, stalling("gc", range(0)), state="clear"),
    case("pauses not recorded", GC, lasting(*plain()), state="not_measured", says="no record of garbage"),
    case("pauses on a GPU without a trace", GC, stalling("gc", OTHER, device={"type": "cuda"}), state="not_measured"),
    case("sizes that compile", COMPILES, compiling(range(0, 63, 2), told=SIZE), saving=10.0, share=0.1, lost_share=0.1,
         sets=[("drop_last", None, True), ("dynamic", None, True), LOGS],
         rows=((SIZE["path"], SIZE["reason"], 30, 600.0 * MS),),
         says=("30 compilations in 60 steady steps of rank 0", "expected 4, actual 5")),
    case("flags that compile", COMPILES, compiling(range(0, 63, 2), told=FLAG), changes=2, sets=[LOGS]),
    case("a last batch that is dropped", COMPILES,
         compiling(OTHER, told=SIZE, loaders=[{"role": "train", "drop_last": True}]), numerics=[True, False, False],
         sets=[("dynamic", None, True), LOGS]),
    # 8 times 100 ms are more than 40 times 2 ms.
    case("compiled until it gave up", COMPILES, giving_up(100), scope="run", saving=2 + 8 * 100 / 40, at_most=True,
         advice=("pass the learning rate as a tensor, which is changed in place: `lr=torch.tensor(0.1)`",
                 "`TORCH_LOGS=recompiles` prints every reason in full")),
    case("compiled quickly until it gave up", COMPILES, giving_up(5, "self.scale == 2"), scope="step", saving=2.0,
         at_most=True, advice=("keep `self.scale` the same at every call, or pass it as a tensor",
                               "`TORCH_LOGS=recompiles` prints every reason in full")),
    case("ranks that compile together", COMPILES, compiling(OTHER, OTHER, told=SIZE), saving=10.0,
         costs={0: 10.0, 1: 10.0}),
    case("little compiling", COMPILES, compiling(range(3, 63, 20), told=SIZE), state="clear", share=0.01),
    case("compiling in the first steps", COMPILES, compiling(range(3), told=SIZE), state="clear", share=0.0,
         summary="no steady step compiled anything"),
    case("nothing compiled", COMPILES, stalling("compiles", range(0), models=[{"compiled": False}]), state="clear"),
    case("compiling that nobody saw", COMPILES, compiling(range(0)), state="not_measured", says="does not tell when"),
    # 10 of 90 ms: six times rarer leaves 1.67 of 91.67 ms.
    case("saving every fifth step", SAVES, stalling("saves", FIFTH, dur=50, told={"path": "/data/model.pt"}),
         share=0.1, saving=10.0, of_training=[False, True], training=False, column=[f"step {n}" for n in FIFTH],
         verdict="10 % of each step waits for checkpoints.",
         says=("every 5th steady step and stands still for 50.0 ms then (/data/model.pt)", "async_save",
               "save every 30 steps (now every 5th one)")),
    case("a saving step takes longer besides", SAVES, stalling("saves", FIFTH, dur=50, took=GATHERED),
         saving=(80 - 10) / 5, lost_share=14 / 114, says="50.0 ms then; such a step takes 20.0 ms longer besides"),
    # A stall of 5 ms in each fifth step is 1 % of them; that such a step is 30 ms longer as well tells of no stall.
    case("short saves in longer steps", SAVES, stalling("saves", FIFTH, dur=5, took=dict.fromkeys(FIFTH, 135)),
         state="clear", saving=7.0),
    # Six epochs' first steps save for 300 of 400 ms: 1.8 s over 63 steps, of a loop of 57 × 100 + 6 × 400 ms.
    case("saving between epochs", SAVES,
         stalling("saves", range(5, 60, 10), dur=300, took=dict.fromkeys(range(5, 60, 10), 400),
                  epochs=range(5, 60, 10)),
         saving=1800 / 63, share=pytest.approx(1800 / 8100, rel=0.01), of_training=[False, True],
         says=("saved 6 times", "300.0 ms each time")),
    case("saves that compress", SAVES, compressing(stalling("saves", FIFTH, dur=50)), share=0.1,
         of_training=[False, False, True], says="write it uncompressed"),
    # A state that is kept in most steps is the best so far, and a copy in memory does as well.
    case("the best so far", SAVES, stalling("saves", OTHER, dur=50), of_training=[False, False, True],
         says="a copy of the state in memory"),
    case("one rank saves", SAVES, stalling("saves", FIFTH, range(0), dur=50), saving=10.0, ranks=(0,), costs={0: 10.0},
         says="is assumed"),
    case("short saves", SAVES, stalling("saves", FIFTH, dur=5), state="clear", share=0.01),
    case("no save", SAVES, stalling("saves", range(0)), state="clear", share=0.0),
    case("one save", SAVES, stalling("saves", range(30, 31), dur=300, took={30: 400}), state="not_measured",
         says="varies too much"),
    case("saves not recorded", SAVES, lasting(*plain()), state="not_measured", says="checkpoints"),
    case("a second forward pass", UNUSED, lasting(*unused(3), stacks=STACKS), saving=3.0, sets=[],
         rows=(("main (train.py:61)", 0.55), ("main (train.py:69)", 0.45))),
    case("a second forward pass, no stacks", UNUSED, lasting(*unused(3)), saving=3.0, rows=None),
    case("forward passes are used", UNUSED, lasting(*unused(0)), state="clear"),
    case("forward passes on a device", UNUSED, lasting(*unused(3), device={"type": "cuda"}), state="not_measured"),
    case("forward passes not recorded", UNUSED, lasting(*plain()), state="not_measured"),
    # To do it more rarely changes the training: it is the last of the changes, and all of it gone is a bound.
    case("roll-outs", PERIODIC, rolling(16, 160, stacks=ROLL_OUT), saving=160 * 12 / 200, share=9.6 / 19.6,
         of_training=[False, False, True], at_most=True, column=[16],
         verdict="49 % of the mean step goes to what the script does every 16th step.",
         says=("One step in 16 takes 160.0 ms longer", "simulate (rl.py:12)",
               "do it every 32 steps: 24 % of the step is saved", "Done 32 × as rarely, it would be 1.5 %")),
    case("an evaluation", PERIODIC, rolling(16, 160, stacks=SCORED, forwards=9, phase="forward"), lines=[25, 30]),
    case("one pass of a validation", PERIODIC, rolling(16, 160, stacks=SCORED, forwards=1, phase="forward"),
         says=("with 1 forward pass more", "the training set needs no pass of its own")),
    case("passes that choose actions", PERIODIC,
         rolling(16, 160, stacks=SCORED + PLAYED, forwards=9, phase="forward", models=[{"reads_sequences": False}]),
         says="choose actions under `torch.inference_mode()`"),
    case("one rank does more of it", PERIODIC, rolling(10, 0, 100), ranks=(1,), saving=pytest.approx(10, rel=0.06)),
    # Without it the first rank sets the pace; what is lost is all of it.
    case("beside a slower rank", PERIODIC, rolling(10, 0, 100, first=15), ranks=(1,), saving=5.0, lost_share=10 / 17.5,
         verdict="57 % of the mean step goes to what the script does every 10th step."),
    case("one that writes token after token", PERIODIC, rolling(16, 160, forwards=80),
         says=("with 80 forward passes more", "past_key_values")),
    case("one whose line is known", PERIODIC, rolling(16, 160, stacks=KNOWN + ROLL_OUT, forwards=80),
         lines=[12, 20, 30], says="take the `sleep` out"),
    case("one that evaluates", PERIODIC, rolling(16, 160, forwards=80, models=[{"reads_sequences": False}]),
         says=("with 80 forward passes more", "the training set needs no pass of its own")),
    case("steps alike", PERIODIC, rolling(16, 0), state="clear"),
    case("a little every few steps", PERIODIC, rolling(50, 5), state="clear"),
    case("steps of a trace", PERIODIC, a_trace, state="not_measured"),
    # Five batches of 60 ms after each ten steps of 100: 300 of 1,300 ms; a half of it, over ten steps.
    case("a quarter of the loop", VALIDATES, validating(5), scope="job", training=True, saving=15.0, share=150 / 1_300,
         speedup=1_300 / 1_150, lost_share=300 / 1_300, costs={0: 30.0},
         advice=("validate every 20 steps (is 10), or on part of the data",),
         says=("Every 10 training steps rank 0 validates for 300.0 ms, in 5 batches; 8.3 %",
               "What `torch.inference_mode()` and larger batches in validation gain is not known.")),
    # Of 200 ms of a batch, 5 are a wait and 156 a forward pass.
    case("scores are kept for a metric", VALIDATES, keeping, saving=100 * 39 / 200, at_most=True, training=False,
         of_training=[False, True], lines=[30], says="preprocess_logits_for_metrics"),
    case("figures are drawn in it", VALIDATES, drawing(5), saving=100 * 39 / 200, at_most=True, training=False,
         of_training=[False, True], lines=[30], says="draw them every k-th step"),
    case("figures are drawn in each step", VALIDATES, drawing(30), training=True),
    case("figures are drawn now and then", VALIDATES, drawing(5, drawn=30), training=True),
    # Of 300 ms after each ten steps half are waits for data.
    # Seven of eight batches of 4 would be gone with batches of 32.
    case("batches of validation are small", VALIDATES, validating(5, batch=4), at_most=True, saving=30 * 7 / 8,
         training=False, of_training=[False, True], says="`batch_size=32` as in training (is 4)"),
    case("batches of validation are a third", VALIDATES, validating(5, batch=11), saving=15.0, training=True),
    case("validation waits for its loader", VALIDATES, validating(5, fetch=30), saving=15.0, at_most=True,
         training=False, numerics=[False, True, False], of_training=[False, False, True],
         sets=[("persistent_workers", None, True)],
         says=("more `num_workers` (is 1)", "50 % of validation", "autocast (bfloat16, as training)",
               "a larger batch (is 50)")),
    # 44 of the 60 ms of a batch are a forward pass.
    case("gradients are on", VALIDATES, validating(5, **graded(28)), saving=22.0, at_most=True, training=False,
         of_training=[False, True], says=("`with torch.no_grad():` around", "on in 93 % of its steps")),
    case("gradients are on, on a GPU", VALIDATES, validating(5, **graded(28), **runs.GPU), saving=15.0, training=True,
         of_training=[True], says=("on in 93 % of its steps", "What `torch.inference_mode()` and")),
    case("gradients are on, in small batches", VALIDATES, validating(5, batch=4, **graded(30)), saving=30 * 7 / 8,
         of_training=[False, False, True], at_most=True),
    case("gradients are on, and it waits", VALIDATES, validating(5, fetch=30, **graded(30)), saving=15.0, changes=3,
         says=("its waits for data gone", "`torch.inference_mode()` and autocast")),
    # Three of five batches: 180 ms of 300 after each ten steps of 100.
    case("the training set is scored again", VALIDATES, scoring(3), saving=18.0, at_most=True, training=False,
         of_training=[False, True], says=("60 % of it goes through what is trained on", "sum up the loss and hits")),
    case("by another loader of it", VALIDATES, scoring(3, loader=2, shuffle=False), saving=18.0),
    case("other parts of one data set", VALIDATES, scoring(3, loader=2), saving=15.0),
    case("a batch of it", VALIDATES, scoring(1), saving=15.0, of_training=[True]),
    case("gradients are on on one rank", VALIDATES, validating(5, 0, **graded(30)), saving=15.0, at_most=False,
         sets=[("shuffle", None, False)]),
    case("gradients are on at times", VALIDATES, validating(5, **graded(20)), saving=15.0,
         of_training=[True], says="What larger batches in validation gain is not known."),
    case("gradients are off, and it waits", VALIDATES, validating(5, fetch=30, **graded(0)), saving=15.0,
         advice=("more `num_workers` (is 1) and `persistent_workers=True` on validation's loader: 50 % of validation"
                 " waits for it", "autocast (bfloat16, as training); a larger batch (is 50), since nothing is kept for"
                 " a backward pass", "validate every 20 steps (is 10), or on part of the data")),
    # 150 of 1,150 ms are validation, and a quarter of it waits: 3.3 % of the loop.
    # A step begins each second, and the last ends 99.2 s after the command's start.
    case("a step that stands still", STANDS, standing({50: 8_000}), scope="run", share=8 / 99.2, at_most=True,
         saving=80.0, costs={0: 8_000.0}, says=("8.00 s", "step 50", "8.00 s of it in next()", "timeout=")),
    case("three of them", STANDS, standing({50: 6_000, 60: 6_000, 70: 6_000}), share=18 / 99.2,
         says="step 50 and 2 more"),
    case("four: how its steps are", STANDS, standing(dict.fromkeys((50, 60, 70, 80), 6_000)), state="clear"),
    case("too short", STANDS, standing({50: 4_000}), state="clear"),
    case("a checkpoint", STANDS, standing({50: 8_000}, [runs.stall("checkpoint", 50, 7_000 * MS)]), state="clear"),
    case("little of the job", STANDS, standing({50: 8_000}, n=2_000), state="clear"),
    case("waits not notable alone", VALIDATES, validating(5, fetch=8, dur=30), saving=7.5, training=True),
    case("one rank validates for all", VALIDATES, validating(5, 0, 0, 0), saving=0.75 * 30, ranks=(0,), training=False,
         of_training=[False, False, True], sets=[("shuffle", None, False)],
         says=("The other ranks wait for it.", "DistributedSampler")),
    case("all validate everything", VALIDATES, validating(5, 5), saving=0.5 * 30, says="all of its 250 samples"),
    case("each validates its share", VALIDATES, validating(3, 3, dur=100), saving=15.0, training=True),
    # 60 of each 1,060 ms, of which half would be saved.
    case("short validation", VALIDATES, validating(1), state="clear", share=30 / 1_060, lost_share=60 / 1_060),
    case("no validation", VALIDATES, validating(0), state="clear", share=0.0, summary="nothing was validated"),
    case("one phase", VALIDATES, validating(50, every=40), state="not_measured", says="how often"),
    case("validation in a trace", VALIDATES, a_trace, state="not_measured"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "make", "told"), CASES)
def test_rule(tmp_path: Path, rule: Rule, make: Make, told: dict[str, Any]) -> None:
    claims(rule, make(tmp_path), told)


@pytest.mark.parametrize(
    ("make", "row"),
    [
        (validating(5), (1, "half as often", 150 / 1_300, 150 / 1_300, 1_300 / 1_150)),
        (validating(5, fetch=30), (-1, "with no waiting for data", 150 / 1_300, 150 / 1_300, 1_300 / 1_150)),
    ],
)
def test_what_less_validation_gives_is_a_table(tmp_path: Path, make: Make, row: Sequence[Any]) -> None:
    found = claims(VALIDATES, make(tmp_path), {})
    assert found.evidence is not None
    at, name, *figures = row
    assert found.evidence.rows[at] == (name, *(pytest.approx(figure) for figure in figures))


@pytest.mark.long
def test_a_real_script_that_judges_each_batch_again_and_rolls_out(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    body = """
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(4)], nn.Linear(400, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    batch = torch.randn(256, 400), torch.randn(256, 1)
    for n in range(96):
        if n % 8 == 0:
            time.sleep(0.3)
        train(batch)
        with torch.no_grad():
            model(batch[0])
    """
    record(tiny(tmp_path, body), folder=tmp_path / "run", options=["--no-trace", "--flops", "off"])
    again = claims(UNUSED, tmp_path / "run", {})
    assert 0.03 < again.share < 0.5
    rolls = claims(PERIODIC, tmp_path / "run", {"column": [8]})
    assert rolls.saving_ns == pytest.approx(300 * MS / 8, rel=0.3)


@pytest.mark.parametrize(
    ("times", "reason", "given_up"),
    [(7, "lr == 0.1", True), (6, "lr == 0.1", False), (9, "", False)],
    ids=["at Dynamo's limit", "below it", "compiled for the first time"],
)
def test_a_function_that_is_compiled_anew_eight_times_runs_uncompiled(times: int, reason: str, given_up: bool) -> None:
    rows = [(0, "sgd.py:105 step", reason, times - 2), (0, "sgd.py:105 step", reason, 2), (0, "other", "x", 1)]
    frame = pd.DataFrame(rows, columns=["rank", "path", "reason", "count"])
    assert recompilation._given_up(frame).tolist() == [given_up, given_up, False]
