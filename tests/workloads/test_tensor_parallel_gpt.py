"""The tensor-parallel workload: the same model learns alike however it is cut up; a fault costs time, not accuracy."""

from __future__ import annotations

import pytest

from tests.workloads.scripts import load, losses, refusal, train

TINY = [
    "--device=cpu",
    "--width=32",
    "--heads=8",
    "--length=16",
    "--batch-size=8",
    "--layers=2",
    "--log-every=10",
    "--lr=0.01",
]

workload = load("tensor_parallel_gpt")


@pytest.mark.long
def test_it_learns() -> None:
    found = losses(train("tensor_parallel_gpt", *TINY, "--steps=40"))
    assert len(found) == 4
    assert found[-1] < 0.9 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["--fault=column_only", "--fault=loop_optimizer", "--no-sequence-parallel", "--precision=bf16"]
)
def test_other_ways_to_cut_it_up_learn_the_same(option: str) -> None:
    plain = losses(train("tensor_parallel_gpt", *TINY, "--steps=20"))
    assert losses(train("tensor_parallel_gpt", *TINY, "--steps=20", option)) == pytest.approx(plain, rel=1e-2)


@pytest.mark.slow
def test_two_models_of_two_ranks_each_train() -> None:
    assert len(losses(train("tensor_parallel_gpt", *TINY, "--steps=20", "--tensor-parallel=2", ranks=4))) == 2


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [
        ((), 1, "needs two ranks"),
        (("--fault=read_every_step",), 2, "needs a GPU"),
        (("--fault=tiny_batch",), 2, "needs a GPU"),
        (("--tensor-parallel=3",), 4, "does not divide 4 ranks"),
        (("--heads=5",), 2, "cannot be shared out among 2 ranks"),
        (("--width=30",), 2, "cannot be shared out among 16 heads"),
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
    assert said in refusal(workload, ("--device=cpu", *options), capsys)
