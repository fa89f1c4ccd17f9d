"""The sharded workload: the same model learns alike however it is sharded; a fault costs time, not accuracy."""

from __future__ import annotations

import pytest

from tests.workloads.scripts import load, losses, refusal, train

TINY = ["--device=cpu", "--width=32", "--length=16", "--batch-size=8", "--layers=2", "--log-every=10", "--lr=0.01"]

workload = load("fsdp_gpt")


@pytest.mark.long
def test_it_learns() -> None:
    found = losses(train("fsdp_gpt", *TINY, "--steps=40", "--prefetch=1", "--checkpointing"))
    assert len(found) == 4
    assert found[-1] < 0.9 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--no-reshard"], ["--sharding=zero1"], ["--sharding=ddp"], ["--fault=each_layer"], ["--fault=loop_optimizer"]],
    ids=lambda o: o[0],
)
def test_other_ways_to_shard_learn_as_well(options: list[str]) -> None:
    plain = losses(train("fsdp_gpt", *TINY, "--steps=10"))
    assert losses(train("fsdp_gpt", *TINY, "--steps=10", *options)) == pytest.approx(plain, rel=2e-2)


@pytest.mark.slow
def test_one_process_trains_too() -> None:
    assert len(losses(train("fsdp_gpt", *TINY, "--steps=10", ranks=1))) == 1


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [
        (("--fault=no_p2p",), 2, "needs a GPU"),
        (("--fault=whole_model",), 2, "needs a GPU"),
        (("--fault=long_sequences",), 1, "needs two ranks"),
        (("--fault=each_layer", "--sharding=zero1"), 2, "needs --sharding fsdp"),
        (("--heads=5",), 2, "cannot be shared out among 5 heads"),
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


def test_only_the_last_rank_has_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    lengths = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        lengths.append(workload.parse([*TINY, "--fault=long_sequences"]).length)
    assert lengths == [16, 32]
