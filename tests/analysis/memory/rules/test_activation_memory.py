"""Activations that leave no room: found where a larger batch pays for what is computed again, else left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.rules.activation_memory import RULE
from dlprof.result import Setting
from tests.fixtures import holding, runs, traces
from tests.fixtures.allocator import GB, GPU, reading, write
from tests.fixtures.asking import ask
from tests.fixtures.holding import row
from tests.fixtures.runs import MS


def recorded(folder: Path, *, busy: int, activations: int = 60, states: int = 20, peak: int = 84) -> Path:
    """Record steps of 1 ms in which the GPU computes for `busy` µs, then waits for a late launch; sizes in GB.

    Ten layers have all activations, of which a tenth are their inputs, and all of the model and its optimizer.
    """
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [traces.step(n, t, MS)]
        events += [traces.op("aten::linear", t + 6_000, MS - 8_000)]
        events += traces.launched("gemm", t, t, busy * 500, 10 * n + 1)
        late = t + MS - busy * 500
        events += traces.launched("gemm", late, late, busy * 500, 10 * n + 2)
    facts = {**GPU, "loaders": [{"role": "train", "batch_size": 32}]}
    path = runs.recorded(folder, (traces.trace(*events, world_size=1), [], facts))
    rows = []
    for n in range(10):
        rows += [
            row("parameter", f"layers.{n}.up", states * GB // 30),
            row("gradient", f"layers.{n}.up", states * GB // 30),
        ]
        rows += [row("optimizer", f"layers.{n}.up", 2 * states * GB // 30)]
        rows += [row("activation", f"layers.{n}.norm", activations * GB // 100, "LayerNorm")]
        rows += [row("activation", f"layers.{n}.up", 9 * activations * GB // 100, dtype="bfloat16")]
    moments = [{"moment": "backward", "gradient_bytes": 0, "activation_bytes": activations * GB}]
    moments += [{"moment": "gradients", "gradient_bytes": states * GB // 3, "activation_bytes": 0}]
    holding.write(path, rows, moments)
    read = {"peak_allocated_bytes": peak * GB, "reserved_bytes": peak * GB, "peak_reserved_bytes": peak * GB}
    write(path, [reading(n, states * GB, **read) for n in range(9)])
    return path


def test_checkpoints_that_make_room_for_a_batch_are_found(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, busy=300))
    assert (found.state, found.scope, found.ranks) == ("found", "step", (0,))
    # With checkpoints 6 GB stay of 60, which grow with 4 of temporary memory; the layer that computes again has 5.4 and
    # what flows through it on top, when the temporary memory is gone.
    (setting,) = found.changes[0].settings
    assert isinstance(setting.to, int)
    # More of it would fit; three times the batch fill the GPU.
    times = setting.to / 32
    assert times == 3
    assert found.changes[0].text.startswith("`torch.utils.checkpoint` around `layers.*`, and `batch_size=")
    # The host launches a forward pass again: 1.33 ms for three batches of now. The device computes for 1.2 ms.
    assert found.saving_ns == pytest.approx((1 - 4 / 9) * MS, rel=0.01)
    assert setting == Setting("batch_size", 32, round(32 * times))
    assert (found.changes[0].numerics, found.training) == (True, True)


@pytest.mark.parametrize(("busy", "why"), [(980, "the GPU limits the step"), (100, "no batch is known to fill")])
def test_where_no_larger_batch_fills_the_device_any_better_none_is_advised(tmp_path: Path, busy: int, why: str) -> None:
    clear = ask(RULE, recorded(tmp_path, busy=busy))
    assert (clear.state, why in clear.summary) == ("clear", True)


def test_room_for_a_larger_batch_is_another_rules(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, busy=300, activations=20, states=15, peak=36))
    assert (clear.state, "memory_headroom" in clear.summary) == ("clear", True)


def test_a_model_that_fills_the_memory_itself_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, busy=300, activations=15, states=66, peak=84))
    assert (clear.state, "not its largest part" in clear.summary) == ("clear", True)


def test_without_a_count_of_memory_it_abstains(tmp_path: Path) -> None:
    path = recorded(tmp_path, busy=300)
    (path / "ranks/00000/held.json").unlink()
    assert ask(RULE, path).state == "not_measured"


def test_a_job_on_the_cpu_is_none_of_its(tmp_path: Path) -> None:
    assert ask(RULE, runs.cpu_run(tmp_path, 5 * MS, 5 * MS)).state == "does_not_apply"
