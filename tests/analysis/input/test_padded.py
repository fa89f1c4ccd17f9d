"""What less padding would make of a job's steps: by known answers, and of a recording whose gain was measured."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.input.padded import GROUPED, LONGEST, NOW, PACKED, ROUNDED, padding
from dlprof.analysis.input.rules.padding import RULE
from tests.fixtures.asking import ask
from tests.fixtures.padding import CUDNN, EAGER, FUSED, facts, trained, trained_on_cpu
from tests.fixtures.places import TRACES
from tests.fixtures.runs import MS, light, measured

US = 1_000


def ways(path: Path) -> dict[str, dict[str, Any]]:
    """Return the ways to pad, by name."""
    rows: list[dict[Any, Any]] = measured(path, padding).frame(padding).to_dict("records")
    return {str(row["way"]): row for row in rows}


def test_layers_shrink_with_the_places_attention_with_the_pairs_and_the_optimizer_not_at_all(tmp_path: Path) -> None:
    found = ways(trained(tmp_path, facts(100, [50, 20], [30, 30])))
    assert list(found) == [NOW, LONGEST, GROUPED, PACKED]
    assert {way: row["length"] for way, row in found.items()} == {NOW: 100, LONGEST: 40, GROUPED: 40, PACKED: 32.5}
    assert found[NOW]["share"] == pytest.approx(0.675)
    assert found[LONGEST]["share"] == pytest.approx(1 - 130 / 160)
    # 26 ms of layers, loss and backward pass, and 8 ms of attention.
    pairs = {LONGEST: (50**2 + 30**2) / 2, PACKED: (50**2 + 20**2 + 2 * 30**2) / 4}
    for way, places in ((LONGEST, 0.40), (PACKED, 0.325)):
        gain = 26 * MS * (1 - places) + 8 * MS * (1 - pairs[way] / 100**2)
        assert found[way]["gain_ns"] == pytest.approx(gain, rel=0.01)
        assert found[way]["step_ns"] == pytest.approx(found[NOW]["step_ns"] - gain, rel=0.01)
    assert found[NOW]["gain_ns"] == 0


def test_similar_rows_are_those_that_follow_each_other_by_length(tmp_path: Path) -> None:
    found = ways(trained(tmp_path, facts(100, [100, 10], [90, 20], [80, 30])))
    assert found[LONGEST]["length"] == 90
    assert found[GROUPED]["length"] == pytest.approx((20 + 80 + 100) / 3)


def test_a_step_is_no_shorter_than_its_host_takes(tmp_path: Path) -> None:
    # The optimizer is launched 10.5 ms after the step began, takes 3 ms, and is waited for; 0.5 ms later the step ends.
    found = ways(trained(tmp_path, facts(100, [10] * 4), launching=1_500 * US))
    assert found[LONGEST]["step_ns"] == pytest.approx(14 * MS, rel=0.01)


def test_eager_attention_is_known_by_its_products(tmp_path: Path) -> None:
    fused, eager = (
        ways(trained(tmp_path / str(len(a)), facts(100, [50] * 4), attention=a))[LONGEST] for a in (FUSED, EAGER)
    )
    assert fused["gain_ns"] == pytest.approx(26 * MS * 0.5 + 8 * MS * 0.75, rel=0.01)
    assert eager["gain_ns"] == pytest.approx(fused["gain_ns"], rel=0.01)


def test_on_a_cpu_it_is_the_time_of_operators_none_of_which_takes_less_than_the_least(tmp_path: Path) -> None:
    found = ways(trained_on_cpu(tmp_path, facts(100, [50, 20], [50, 10])))
    assert found[LONGEST]["gain_ns"] == pytest.approx(20 * MS * 0.5 + 8 * MS * 0.75, abs=1)


def test_plans_for_new_lengths_are_in_the_gain_of_cudnns_attention(tmp_path: Path) -> None:
    rng = random.Random(1)
    batches = [[rng.randint(8, 64) for _ in range(8)] for _ in range(30)]
    steps = [light(n, 40 * MS, forward_ns=(60 if n == 0 else 10) * MS, backward_ns=10 * MS) for n in range(60)]
    path = trained(tmp_path, facts(512, *batches), attention=CUDNN, steps=steps)
    found = ways(path)
    assert found[ROUNDED]["length"] == 64
    assert found[LONGEST]["plans_ns"] == 50 * MS
    # How many new lengths come up in the last 40 of 60 steps, by drawing batches of these rows.
    rows, drawn = np.concatenate(batches), np.random.default_rng(0)
    new = []
    for _ in range(400):
        longest = rows[drawn.integers(0, len(rows), (60, 8))].max(axis=1)
        _, first = np.unique(longest, return_index=True)
        new.append((first >= 20).sum() / 40)
    bare = ways(trained(tmp_path / "flash", facts(512, *batches), steps=steps))
    plans = bare[LONGEST]["gain_ns"] - found[LONGEST]["gain_ns"]
    assert plans == pytest.approx(float(np.mean(new)) * 50 * MS, rel=0.1)
    assert found[ROUNDED]["gain_ns"] > found[LONGEST]["gain_ns"]


def test_where_plans_cost_all_that_padding_does_few_lengths_are_the_change(tmp_path: Path) -> None:
    rng = random.Random(1)
    batches = [[rng.randint(8, 400) for _ in range(8)] for _ in range(30)]
    steps = [light(n, 40 * MS, forward_ns=(900 if n == 0 else 10) * MS, backward_ns=10 * MS) for n in range(60)]
    found = ask(RULE, trained(tmp_path, facts(512, *batches), attention=CUDNN, steps=steps))
    assert found.state == "found"
    assert "rounded up to a multiple of 64" in found.advice[0]
    assert not found.changes[0].numerics
    assert "Plans for new lengths are counted, 890.0 ms for each" in found.sure


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


@pytest.mark.skipif(not (TRACES / "h200").is_dir(), reason="needs ../shared/traces/h200")
def test_the_recording_of_a_padding_trainer(tmp_path: Path) -> None:
    """Measured on that H200: 43.75 ms a step, and 39.78 ms padded to the longest row of each batch."""
    found = ask(RULE, g10(tmp_path))
    assert found.state == "found"
    assert found.verdict == "93 % of the tokens are padding."
    assert "pad in `collate` (g10_hf_trainer_padding.py:17) to the longest row of each batch" in found.advice[0]
    assert not found.changes[0].numerics
    assert 44.3 * MS - found.saving_ns == pytest.approx(39.78 * MS, rel=0.15)
    assert "pad_to_multiple_of=64" in found.advice[1]
