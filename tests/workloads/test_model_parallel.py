"""The workload of layers on several devices: it learns, and says what it needs. On two GPUs it waits for a machine."""

from __future__ import annotations

import pytest

from tests.workloads.scripts import load, losses, refusal, train

workload = load("model_parallel")


@pytest.mark.long
def test_it_learns_in_micro_batches_what_it_learns_whole() -> None:
    whole = losses(train("model_parallel", "--device=cpu", "--steps=40", "--microbatches=1", ranks=1))
    pieces = losses(train("model_parallel", "--device=cpu", "--steps=40", "--microbatches=4", ranks=1))
    assert whole[-1] < whole[0]
    assert pieces == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fault", "whole_batch"), "needs a GPU"),
        (("--devices=2",), "no more than 1"),
        (("--microbatches=5",), "cannot be cut into 5"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(workload, ("--device=cpu", *options), capsys)
