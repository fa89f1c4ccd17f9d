"""Padding: what less of it would make of steps, by known answers and a measured recording, and what its rule says."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.input.rules.padding import GROUPED, LONGEST, NOW, PACKED, ROUNDED, RULE, padding
from tests.fixtures import runs, traces
from tests.fixtures.claims import Make, case, claims
from tests.fixtures.places import TRACES
from tests.fixtures.runs import A100, MS, light

US = 1_000
GPU = A100["name"]


def facts(padded: int, *batches: Sequence[int], source: str = "attention_mask") -> list[dict[str, Any]]:
    """Return what is recorded of batches whose rows have these lengths."""
    return [{"step": n, "source": source, "padded": padded, "lengths": [*rows]} for n, rows in enumerate(batches)]


FUSED = (("aten::_flash_attention_forward", 8),)
CUDNN = (("aten::_cudnn_attention_forward", 8),)
EAGER = (("aten::bmm", 3), ("aten::_softmax", 2), ("aten::bmm", 3))


def trained(
    folder: Path,
    seen: list[dict[str, Any]] | None,
    *,
    attention: tuple[tuple[str, int], ...] = FUSED,
    launching: int = 100 * US,
    steps: Sequence[dict[str, Any]] = (),
    loaders: Sequence[dict[str, Any]] = (),
) -> Path:
    """Record three steps of 40 ms on a GPU, in which the host launches and then waits.

    The device computes 10 ms in layers and 8 ms in attention, 6 ms for the loss, 10 ms backward, of which 2 in another
    thread, 1 ms of norms behind it and 3 ms in the optimizer. `launching`: from one launch of the host to the next.
    """
    work = (
        *(("aten::mm", 10), *attention, ("aten::nll_loss", 6), ("aten::mm", 8), ("aten::sum", 2)),
        *(("aten::_foreach_norm", 1), ("aten::_fused_adamw_", 3)),
    )
    events: list[Any] = []
    for n in range(3):
        t = done = n * 40 * MS
        at = [t + (k + 1) * launching for k in range(len(work) + 1)]
        events.append(traces.step(n, t, 40 * MS))
        m = len(attention)
        for name, first, last in (("forward", 0, m + 1), ("backward", m + 2, m + 4), ("optimizer", m + 5, m + 6)):
            begin = at[first] - 10 * US
            events.append(traces.annotation(f"dlprof::{name}", begin, at[last] - 15 * US - begin))
        for k, (name, ms) in enumerate(work):
            lane = traces.AUTOGRAD if name == "aten::sum" else traces.MAIN
            events.append(traces.op(name, at[k], 80 * US, tid=lane))
            done = max(done, at[k] + 10 * US)
            events += [
                traces.call("cudaLaunchKernel", at[k] + US, 5 * US, 100 * n + k + 1, tid=lane),
                traces.kernel(name, done, ms * MS, 100 * n + k + 1),
            ]
            done += ms * MS
        events.append(traces.call("cudaStreamSynchronize", at[-1], done - at[-1] + 10 * US, 100 * n + 99))
    made = traces.trace(*events, world_size=1, device=GPU)
    told: dict[str, Any] = {"device": {"type": "cuda", "name": GPU}, "loaders": [*loaders], "directory": "/job/"}
    return runs.recorded(folder / "run", (made, [*steps], told | ({} if seen is None else {"padding": seen})))


def trained_on_cpu(folder: Path, seen: list[dict[str, Any]]) -> Path:
    """Record three steps on a CPU: 20 ms in layers, 8 in attention, one operator of 2 µs, 10 ms in the optimizer."""
    events: list[Any] = []
    for n in range(3):
        t = n * 40 * MS
        events += [
            traces.step(n, t, 40 * MS),
            traces.annotation("dlprof::forward", t, 29 * MS),
            traces.op("aten::mm", t + US, 20 * MS),
            traces.op("aten::_scaled_dot_product_flash_attention_for_cpu", t + 20 * MS + 2 * US, 8 * MS),
            traces.annotation("dlprof::backward", t + 29 * MS, MS),
            traces.op("aten::sum", t + 29 * MS + US, 2 * US),
            traces.op("aten::_fused_adamw_", t + 30 * MS, 10 * MS),
        ]
    made = traces.trace(*events, world_size=1, device="", backend="gloo")
    return runs.recorded(folder / "run", (made, [], {**runs.CPU, "padding": seen}))


def ways(path: Path) -> dict[str, dict[str, Any]]:
    """Return the ways to pad, by name."""
    rows: list[dict[Any, Any]] = runs.measured(path, padding).frame(padding).to_dict("records")
    return {str(row["way"]): row for row in rows}


# Each step has 26 ms of layers, loss and backward pass, and 8 ms of attention, whose work is that of pairs.
FOUR = facts(100, [50, 20], [30, 30])
LONG_STEPS = [light(n, 40 * MS, forward_ns=(60 if n == 0 else 10) * MS, backward_ns=10 * MS) for n in range(60)]


@pytest.mark.parametrize(
    ("make", "lengths", "gains"),
    [
        # Layers shrink with the places, attention with the pairs, and the optimizer not at all.
        (partial(trained, seen=FOUR), {NOW: 100, LONGEST: 40, GROUPED: 40, PACKED: 32.5},
         {NOW: 0, LONGEST: 26 * 0.6 + 8 * (1 - (50**2 + 30**2) / 2 / 100**2),
          PACKED: 26 * 0.675 + 8 * (1 - (50**2 + 20**2 + 2 * 30**2) / 4 / 100**2)}),
        # Similar rows are those that follow each other by length.
        (partial(trained, seen=facts(100, [100, 10], [90, 20], [80, 30])), {LONGEST: 90, GROUPED: 200 / 3}, {}),
        # Eager attention is known by its products.
        *((partial(trained, seen=facts(100, [50] * 4), attention=a), {}, {LONGEST: 26 * 0.5 + 8 * 0.75})
          for a in (FUSED, EAGER)),
        # On a CPU it is the time of operators, none of which takes less than the least.
        (partial(trained_on_cpu, seen=facts(100, [50, 20], [50, 10])), {}, {LONGEST: 20 * 0.5 + 8 * 0.75}),
        # The optimizer is launched 10.5 ms after the step began, takes 3 ms, and is waited for; 0.5 ms later the step
        # of 40 ms ends.
        (partial(trained, seen=facts(100, [10] * 4), launching=1_500 * US), {}, {LONGEST: 40 - 14}),
    ],
    ids=["places and pairs", "similar rows", "fused attention", "eager attention", "on a CPU", "the host's time"],
)  # fmt: skip
def test_what_ways_to_pad_gain(
    tmp_path: Path, make: Callable[[Path], Path], lengths: dict[str, float], gains: dict[str, float]
) -> None:
    found = ways(make(tmp_path))
    assert list(found)[:4] == [NOW, LONGEST, GROUPED, PACKED]
    assert {way: found[way]["length"] for way in lengths} == pytest.approx(lengths)
    assert {way: found[way]["gain_ns"] / MS for way in gains} == pytest.approx(gains, rel=0.01)
    for way, gain in gains.items():
        assert found[way]["step_ns"] == pytest.approx(found[NOW]["step_ns"] - gain * MS, rel=0.01)


def test_shares_of_padding(tmp_path: Path) -> None:
    found = ways(trained(tmp_path, FOUR))
    assert (found[NOW]["share"], found[LONGEST]["share"]) == pytest.approx((0.675, 1 - 130 / 160))


def test_plans_for_new_lengths_are_in_the_gain_of_cudnns_attention(tmp_path: Path) -> None:
    rng = random.Random(1)
    batches = [[rng.randint(8, 64) for _ in range(8)] for _ in range(30)]
    found = ways(trained(tmp_path, facts(512, *batches), attention=CUDNN, steps=LONG_STEPS))
    assert (found[ROUNDED]["length"], found[LONGEST]["plans_ns"]) == (64, 50 * MS)
    # How many new lengths come up in the last 40 of 60 steps, by drawing batches of these rows.
    rows, drawn = np.concatenate(batches), np.random.default_rng(0)
    new = []
    for _ in range(400):
        longest = rows[drawn.integers(0, len(rows), (60, 8))].max(axis=1)
        _, first = np.unique(longest, return_index=True)
        new.append((first >= 20).sum() / 40)
    bare = ways(trained(tmp_path / "flash", facts(512, *batches), steps=LONG_STEPS))
    plans = bare[LONGEST]["gain_ns"] - found[LONGEST]["gain_ns"]
    assert plans == pytest.approx(float(np.mean(new)) * 50 * MS, rel=0.1)
    assert found[ROUNDED]["gain_ns"] > found[LONGEST]["gain_ns"]


def g10(folder: Path) -> Path:
    """Copy the recording of a Trainer that pads texts to 512 tokens, with the facts that were not recorded yet.

    The lengths are those of the script's data set, which it makes with this generator, in batches of 32.
    """
    shutil.copytree(TRACES / "h200/g10_hf_trainer_padding", folder / "run", copy_function=shutil.copyfile)
    rng, lengths = random.Random(0), []
    for _ in range(640):
        lengths.append(rng.randint(8, 64))
        for _ in range(lengths[-1]):
            rng.randrange(5, 30_000)
    path = folder / "run/ranks/00000/facts.json"
    told = json.loads(path.read_text())
    told["padding"] = facts(512, *(lengths[n : n + 32] for n in range(0, 640, 32)))
    told["loaders"][0]["collate"] = {"name": "collate", "file": "/home/user/g10_hf_trainer_padding.py", "line": 17}
    path.chmod(0o644)
    path.write_text(json.dumps(told))
    return folder / "run"


def collated(name: str, file: str) -> Make:
    """Return what makes a job of mostly padding whose loader collates with this."""
    loader = {"role": "train", "collate": {"name": name, "file": file, "line": 17}}
    return partial(trained, seen=facts(512, [40, 20, 30, 64], [30, 60, 11, 64]), loaders=[loader])


def planned(folder: Path) -> Path:
    """Record steps where plans for new lengths cost all that padding does."""
    rng = random.Random(1)
    steps = [step | {"forward_ns": 900 * MS} if n == 0 else step for n, step in enumerate(LONG_STEPS)]
    return trained(folder, facts(512, *([rng.randint(8, 400) for _ in range(8)] for _ in range(30))),
                   attention=CUDNN, steps=steps)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "told"),
    [
        # Similar rows in a batch, and rows one behind the other, train differently.
        case("mostly padding", collated("collate", "/job/train.py"), verdict="92 % of the tokens are padding.",
             saving=26 * (1 - 1 / 8) + 8 * (1 - 1 / 64),
             sets=[("padding", None, "longest"), ("train_sampling_strategy", None, "group_by_length"),
                   ("packing", None, True)],
             numerics=[False, True, True], says="pad in `collate` (train.py:17) to the longest row of each batch"),
        case("a library's loader", collated("Padder", "/lib/site-packages/x.py"), says="pad in the loader to the long"),
        case("rows that differ much", partial(trained, seen=facts(100, *([100, 20, 10, 90] for _ in range(8)))),
             says="group_by_length", numerics=[True]),
        case("few lengths", planned, numerics=[False, True, True], says="rounded up to a multiple of 64"),
        case("no padding", partial(trained, seen=facts(100, [100] * 4, [100] * 4)), state="clear"),
        # 9 % of padding, of which grouping leaves a part.
        case("little padding", partial(trained, seen=facts(100, [100, 90, 80, 92], [100, 85, 88, 95])), state="clear"),
        case("not recorded", partial(trained, seen=None), state="not_measured", says="were not recorded"),
        case("images", partial(trained, seen=[]), state="does_not_apply"),
    ],
)  # fmt: skip
def test_the_rule(tmp_path: Path, make: Make, told: dict[str, Any]) -> None:
    claims(RULE, make(tmp_path), told)


@pytest.mark.skipif(not (TRACES / "h200").is_dir(), reason="needs ../shared/traces/h200")
def test_the_recording_of_a_padding_trainer(tmp_path: Path) -> None:
    """Measured on that H200: 43.75 ms a step, and 39.78 ms padded to the longest row of each batch."""
    says = ("`collate` (g10_hf_trainer_padding.py:17)", "pad_to_multiple_of=64")
    found = claims(RULE, g10(tmp_path), {"verdict": "93 % of the tokens are padding.", "says": says})
    assert 44.3 * MS - found.saving_ns == pytest.approx(39.78 * MS, rel=0.15)
    assert not found.changes[0].numerics
