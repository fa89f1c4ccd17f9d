"""Steps of an export: named, or between runs of an optimizer; and none where only a part of a step recurs."""

from __future__ import annotations

import numpy as np
import pytest

from dlprof.read.columnar import recurring as steps
from dlprof.read.columnar.rows import Ranges


def ranged(*rows: tuple[str, int, int], thread: int = 1, operator: bool = False) -> Ranges:
    """Return ranges of a name, a start and an end."""
    names = list(dict.fromkeys(name for name, _, _ in rows))
    ordered = sorted(rows, key=lambda row: (row[1], -row[2]))
    return Ranges(
        names,
        [operator] * len(names),
        np.array([names.index(name) for name, _, _ in ordered], dtype=np.int64),
        np.array([start for _, start, _ in ordered], dtype=np.int64),
        np.array([end for _, _, end in ordered], dtype=np.int64),
        np.full(len(rows), thread),
    )


def launched(*names: str, apart: int = 10) -> steps.Launched:
    """Return kernels that were launched one after the other."""
    known = list(dict.fromkeys(names))
    return steps.Launched(
        known, np.array([known.index(n) for n in names], dtype=np.int64), np.arange(len(names)) * apart
    )


NONE = launched()


@pytest.mark.parametrize(
    "name",
    [
        "train_step",
        "[pl][profile]run_training_batch",
        "iteration {}",
        "Step: {}",
        "global_step={}",
        "train/iter",
        "batch",
    ],
)
def test_ranges_that_are_called_a_step_are_steps(name: str) -> None:
    rows = [(name.format(n), n * 100, n * 100 + 95 + 5 * (n < 3)) for n in range(4)]
    inner = [("forward", n * 100 + 1, n * 100 + 50) for n in range(4)]
    found = steps.find(ranged(*rows, *inner), NONE)
    assert found is not None
    assert (found.number.tolist(), found.start.tolist(), found.dur.tolist()) == (
        [0, 1, 2, 3],
        [0, 100, 200, 300],
        [100, 100, 100, 95],
    )
    assert found.sure == steps.CERTAIN


def test_dlprofs_own_steps_keep_their_numbers_and_come_before_others() -> None:
    rows = [(f"dlprof::step {n}", n * 100, n * 100 + 100) for n in (7, 8, 9)]
    found = steps.find(ranged(*rows, *[("train_step", n * 200, n * 200 + 200) for n in (3, 4)]), NONE)
    assert found is not None
    assert (found.number.tolist(), found.dur.tolist()) == ([7, 8, 9], [100, 100, 100])
    single = steps.find(ranged(("ProfilerStep#4", 5, 25)), NONE)
    assert single is not None
    assert (single.number.tolist(), single.dur.tolist()) == ([4], [20])


def test_what_stands_between_the_ranges_belongs_to_a_step_and_a_validation_does_not() -> None:
    rows = [("train_step", start, start + 80) for start in (0, 100, 200, 900, 1000)]
    found = steps.find(ranged(*rows), NONE)
    assert found is None  # half of the time is outside
    rows = [("train_step", start, start + 80) for start in (0, 100, 200, 340, 440)]
    found = steps.find(ranged(*rows), NONE)
    assert found is not None
    # The third is followed by 60 of something else; what follows the last one is not there.
    assert (found.start.tolist(), found.dur.tolist()) == ([0, 100, 200, 340], [100, 100, 80, 100])


@pytest.mark.parametrize("name", ["optimizer_step", "lr_scheduler.step", "stepper", "valid_step", "collate_batch"])
def test_what_only_sounds_like_a_step_is_none(name: str) -> None:
    assert steps.find(ranged(*[(name, n * 100, n * 100 + 95) for n in range(2)]), NONE) is None


def test_a_short_range_named_step_is_the_optimizers() -> None:
    assert steps.find(ranged(*[("DeepSpeedEngine.step", n * 100, n * 100 + 10) for n in range(4)]), NONE) is None


STEP = ["embed", *["gemm", "norm"] * 4, *["gemm_grad", "norm_grad"] * 4, "multi_tensor_apply_kernel<adam>"]


def test_without_names_a_step_is_from_one_run_of_the_optimizer_to_the_next() -> None:
    found = steps.find(ranged(), launched(*STEP * 5))
    assert found is not None
    assert found.dur.tolist() == [180] * 4
    assert found.start.tolist() == [170, 350, 530, 710]
    assert found.sure == steps.LIKELY
    marked = [("Optimizer.step#AdamW.step", n * 180 + 165, n * 180 + 172) for n in range(5)]
    by_range = steps.find(ranged(*marked), launched(*STEP * 5))
    assert by_range is not None
    assert (by_range.start.tolist(), by_range.dur.tolist()) == ([172, 352, 532, 712], [180] * 4)


def test_several_kernels_of_one_optimizer_are_one_run_of_it() -> None:
    found = steps.find(ranged(), launched(*[*STEP, "multi_tensor_apply_kernel<clip>", "fused_adam"] * 4))
    assert found is not None
    assert found.dur.tolist() == [200] * 3


def test_what_differs_from_time_to_time_is_no_loop() -> None:
    other = ["a", "b", "c", "d", "e", "f", "multi_tensor_apply_kernel<adam>"]
    assert steps.find(ranged(), launched(*STEP, *other, *STEP, *other, *STEP)) is None
    assert steps.find(ranged(), launched(*STEP, *STEP)) is None  # one step: nothing shows that it recurs


def test_layers_recur_and_are_no_steps() -> None:
    layers = launched(*["gemm", "norm", "flash", "gelu"] * 12)
    assert steps.find(ranged(), layers) is None
    assert steps.loop(layers) == (4, 12, 40.0)
    named = ranged(*[(f"FSDP::forward (blocks.{n})", n * 40, n * 40 + 39) for n in range(12)])
    assert steps.find(named, layers) is None
    assert steps.loop(launched("a", "b", "c", "d", "e", "f")) is None
    assert steps.loop(NONE) is None
