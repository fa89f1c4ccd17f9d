"""The pipeline workload: one model whatever the schedule, which learns; a fault costs time, not accuracy."""

from __future__ import annotations

import pytest
import torch
from parts.language import Counting

from tests.workloads.scripts import load, losses, refusal, train

TINY = ("--device=cpu", "--width=32", "--length=16", "--batch-size=16", "--layers=4", "--log-every=10", "--lr=0.01")

workload = load("pipeline_transformer")


def found(*options: str) -> list[float]:
    """Return the losses of a run on two CPU ranks."""
    return losses(train("pipeline_transformer", *TINY, *options))


@pytest.mark.long
def test_it_learns_and_the_fault_changes_nothing_but_the_time() -> None:
    healthy = found("--steps=60")
    assert len(healthy) == 6
    assert healthy[-1] < 0.7 * healthy[0]
    assert found("--steps=10", "--fault=few_microbatches") == pytest.approx(healthy[:1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--schedule", name] for name in workload.SCHEDULES if name != "1F1B"] + [["--schedule=GPipe", "--split=3,1"]],
    ids=lambda o: "-".join(o[-2:]),
)
def test_other_schedules_train(options: list[str]) -> None:
    assert len(found("--steps=10", *options)) == 1


@pytest.mark.slow
def test_two_pipelines_beside_each_other_train_one_model() -> None:
    done = losses(train("pipeline_transformer", *TINY, "--steps=40", "--replicas=2", ranks=4))
    assert done[-1] < done[0]


@pytest.mark.parametrize("schedule", workload.SCHEDULES)
def test_every_stage_and_layer_is_on_one_rank(schedule: str) -> None:
    stages = [s for rank in range(3) for s in workload.stages_of(rank, 3, schedule)]
    assert sorted(stages) == list(range(len(stages)))
    assert sum(workload.share_out(8, len(stages))) == 8


def test_the_uneven_split_burdens_the_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert workload.parse([*TINY, "--layers=8"]).split == [2, 2, 2, 2]
    assert workload.parse([*TINY, "--layers=8", "--fault=uneven_split"]).split == [1, 1, 1, 5]
    assert workload.parse([*TINY, "--layers=8", "--split=1,2,3,2"]).split == [1, 2, 3, 2]
    assert workload.parse([*TINY, "--layers=8", "--schedule=Naive"]).microbatches == 1


def test_the_text_is_the_same_for_every_rank_and_can_be_predicted() -> None:
    a, b = (iter(Counting(100, 12, seed=3)) for _ in range(2))
    for _ in range(20):
        sequence = next(a)
        torch.testing.assert_close(sequence, next(b))
        assert ((sequence[1:] - sequence[:-1]) % 100).unique().numel() == 1  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [
        ((), 1, "a pipeline needs two ranks"),
        (("--microbatches=5",), 2, "cannot be cut into 5"),
        (("--split=3,2",), 2, "2 stages of 4 layers"),
        (("--replicas=2",), 2, "for each of 2 pipelines"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    options: tuple[str, ...],
    ranks: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert said in refusal(workload, (*TINY, *options), capsys)
